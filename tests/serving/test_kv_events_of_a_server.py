"""KV events of a whole server: a subscriber follows what is cached, over resets and a restart of the engine."""

import json
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

from tests.serving.kv_events_client import Client
from tests.serving.running import running_server


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def follow(client: Client) -> None:
    while client.receive(timeout=0.5):
        pass


def test_a_subscriber_follows_a_server(tiny_model: Path):
    endpoint, replay_endpoint = free_endpoint(), free_endpoint()
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
    arguments = ["--kv-events-config", json.dumps(config), "--kv-cache-memory", "1MiB"]
    with (
        closing(Client(endpoint, replay_endpoint)) as client,
        running_server(tiny_model, *arguments) as server,
        server.client() as http,
    ):
        tokens = [*range(5, 5 + 16 * 3), 9]
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": tokens, "max_tokens": 1}).raise_for_status()
        client.take_snapshot()
        assert sorted(client.registered.values()) == [tokens[at : at + 16] for at in (0, 16, 32)]
        for i in range(40):  # more than the cache holds, so that some are evicted
            http.post("/v1/completions", json={"prompt": [i + 20, *tokens], "max_tokens": 40}).raise_for_status()
        server.wait_until_idle()
        time.sleep(1.1)  # an idle engine reports once a second
        follow(client)
        assert server.metric("pagetable:evictions_total") > 0
        assert len(client.registered) == server.metric("pagetable:kv_blocks", state="cached_idle")
        http.post("/v1/cache/reset").raise_for_status()
        follow(client)
        assert client.registered == {}
        http.post("/v1/completions", json={"prompt": tokens, "max_tokens": 1}).raise_for_status()
        follow(client)
        assert len(client.registered) == 3
        os.kill(server.engine_pid(), signal.SIGKILL)
        while server.metric("pagetable:engine_restarts_total") == 0:
            client.receive(timeout=0.1)  # a socket that nobody reads does not renew its subscription
        follow(client)
        assert client.registered == {}
