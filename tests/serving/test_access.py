"""Who is let in, what is too much, and whose cached prefixes are whose."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import CACHE
from tests.serving.running import RunningServer, running_server

PROMPT = "A prompt of some length, so that it fills more than one block of sixteen tokens. " * 2


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with three keys that do not share their prefixes, small limits and an administrator."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("# ours\nkey-b\nkey-c\n")
    arguments = ["--api-key-file", str(keys), "--isolate-keys", "--max-request-bytes", "20000"]
    limits = ["--max-n", "3", "--max-stop", "2", "--max-logprobs", "4", "--allowed-origins", "https://page.example"]
    secrets = {"PAGETABLE_API_KEY": "key-a", "PAGETABLE_ADMIN_API_KEY": "key-root"}
    with running_server(tiny_model, *arguments, *limits, *CACHE, env=secrets) as server:
        yield server
        assert not any("key-a" in line or "key-b" in line or "key-root" in line for line in server.lines)


@pytest.fixture
def http(locked: RunningServer) -> Iterator[httpx.Client]:
    with locked.client() as client:
        yield client


def ask(http: httpx.Client, key: str, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    request = {"prompt": PROMPT, "max_tokens": 2, **body}
    return http.post("/v1/completions", json=request, headers={**bearer(key), **(headers or {})})


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def error(response: httpx.Response) -> dict:
    detail = response.json()["error"]
    assert detail.keys() == {"message", "type", "param", "code"}
    return detail


def test_only_known_keys_are_let_in(http: httpx.Client):
    for key in ("key-a", "key-b", "key-c", "key-root"):
        assert ask(http, key).status_code == 200
    for headers in ({}, bearer("key-d"), bearer("key-"), {"Authorization": "key-a"}, bearer("key-a x")):
        refused = http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert (refused.status_code, error(refused)["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/docs", "/openapi.json", "/nothing"):
        assert http.get(path).status_code == 401
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert http.get(path).status_code == 200


def test_keys_do_not_share_prefixes(http: httpx.Client):
    assert cached(ask(http, "key-a")) >= 0
    assert cached(ask(http, "key-a")) >= 16
    salted = {"X-Cache-Salt": "fresh"}
    assert cached(ask(http, "key-b", salted)) == 0
    assert cached(ask(http, "key-b", salted)) >= 16
    assert cached(ask(http, "key-c", salted)) == 0  # the same salt, another key's namespace
    assert cached(ask(http, "key-c", cache_salt="fresh")) >= 16  # in the body it means the same
    assert cached(ask(http, "key-c", {"X-Cache-Salt": "other"}, cache_salt="fresh")) == 0  # the header goes first


def test_a_salt_that_is_none_is_refused(http: httpx.Client):
    for response in (
        ask(http, "key-a", {"X-Cache-Salt": ""}),
        ask(http, "key-a", {"X-Cache-Salt": "x" * 2000}),
        ask(http, "key-a", cache_salt=""),
        ask(http, "key-a", cache_salt=5),
    ):
        assert (response.status_code, error(response)["param"]) == (400, "cache_salt")


def test_only_an_administrator_resets_the_cache(http: httpx.Client):
    ask(http, "key-a")
    refused = http.post("/v1/cache/reset", headers=bearer("key-a"))
    assert (refused.status_code, error(refused)["code"]) == (403, "admin_only")
    assert http.post("/v1/cache/reset", headers=bearer("key-root")).status_code == 200
    assert cached(ask(http, "key-a")) == 0


def test_limits_are_named(http: httpx.Client):
    assert error(ask(http, "key-a", n=4))["message"] == "n=4: this server allows 1 to 3"
    assert error(ask(http, "key-a", stop=["a", "b", "c"]))["param"] == "stop"
    assert error(ask(http, "key-a", logprobs=5))["param"] == "logprobs"
    large = ask(http, "key-a", prompt="x" * 30_000)
    assert (large.status_code, error(large)["code"]) == (413, "too_large")


def test_a_body_that_does_not_say_how_large_it_is_is_counted(http: httpx.Client):
    pieces = (b" " * 1000 for _ in range(1000))
    headers = {**bearer("key-a"), "Content-Type": "application/json"}
    with contextlib.suppress(httpx.WriteError):  # the answer came, and the connection closed, before all was sent
        assert http.post("/v1/completions", content=pieces, headers=headers).status_code == 413


def test_only_named_origins_may_call_from_a_page(http: httpx.Client):
    def preflight(origin: str) -> httpx.Response:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return http.options("/v1/completions", headers=headers)

    assert preflight("https://page.example").headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in preflight("https://other.example").headers


def test_a_local_server_answers_to_local_names_only(server: RunningServer):
    for host, status in (("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200), ("evil.example", 403)):
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == status
    plain = httpx.post(f"{server.url}/v1/completions", content='{"prompt":"x"}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 400  # what a page of another origin can send without being asked


def test_a_key_on_a_public_address_or_a_warning(tiny_model: Path):
    with running_server(tiny_model, "--host", "0.0.0.0", *CACHE) as server:
        assert any("ANYONE WHO REACHES 0.0.0.0" in line for line in server.lines)
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": "some.example"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "foo": 1}, "foo"),
        ({"prompt": "x", "stream_options": {"include": True}, "stream": True}, "stream_options.include"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "x", "logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens"),
        ({"prompt": "x", "priority": 1}, "priority"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 2.5}, "n"),
        ({"prompt": ["x"] * 3000}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, -5]}, "prompt"),
        ({"prompt": [1, 99_999]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
        ),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: RunningServer, body: dict, param: str):
    path = "chat/completions" if "messages" in body else "completions"
    response = httpx.post(
        f"{server.url}/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    detail = error(response)
    assert (response.status_code, detail["param"], detail["type"]) == (400, param, "invalid_request_error")
    assert param.split(".")[-1] in detail["message"] or "token id" in detail["message"]


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": 1e999}']
)
def test_garbage_is_400(server: RunningServer, garbage: bytes):
    response = httpx.post(f"{server.url}/v1/completions", content=garbage, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error(response)["message"]


def test_unknown_paths_and_methods(http: httpx.Client):
    assert error(http.get("/v1/nothing", headers=bearer("key-a")))["message"] == "there is nothing at /v1/nothing"
    wrong = http.get("/v1/completions", headers=bearer("key-a"))
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert error(http.get("/v1/models/gpt-4", headers=bearer("key-a")))["code"] == "model_not_found"


def test_a_full_queue_is_429(tiny_model: Path):
    with (
        running_server(tiny_model, "--max-num-seqs", "1", "--max-queued-requests", "2", *CACHE) as server,
        server.client() as http,
    ):
        long = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}

        def read() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=long, timeout=60)

        threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        while server.metric("vllm:num_requests_waiting") < 2:
            time.sleep(0.01)
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, error(refused)["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        server.process.kill()


def test_a_huge_head_is_cut_off(server: RunningServer):
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        received = b""
        try:
            for _ in range(2000):
                connection.sendall(b"X-Filler: " + b"x" * 1000 + b"\r\n")
            received = connection.recv(1000)
        except OSError:
            return
        assert received.startswith(b"HTTP/1.1 400")


def send_raw(server: RunningServer, *pieces: bytes, wait: float = 20) -> bytes:
    """What comes back until the server closes the connection or is silent for so long."""
    address = httpx.URL(server.url)
    received = b""
    with (
        socket.create_connection((address.host, address.port), timeout=wait) as connection,
        contextlib.suppress(OSError),
    ):
        for piece in pieces:
            connection.sendall(piece)
        while data := connection.recv(65536):
            received += data
    return received


def test_trailers_without_end_are_cut_off(locked: RunningServer):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    before = locked.metric("process_resident_memory_bytes")
    send_raw(locked, head, *[b"x1: 1\r\n" * 10_000] * 300)
    assert locked.metric("process_resident_memory_bytes") < before + (20 << 20)


def test_who_goes_on_sending_what_is_answered_is_cut_off(locked: RunningServer):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n"
    began = time.monotonic()
    assert send_raw(locked, head, wait=30).startswith(b"HTTP/1.1 401")
    assert time.monotonic() - began < 15


def test_a_client_that_would_rather_speak_http2_is_answered(server: RunningServer):
    body = b'{"prompt": "x", "max_tokens": 1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    )
    rest = b"HTTP2-Settings: AAEA\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=20) as connection:
        connection.sendall(head + rest + body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_page_of_another_origin_may_not_call_a_server_without_keys(server: RunningServer):
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 200)):
        assert httpx.post(f"{server.url}/v1/cache/reset", headers={"Origin": origin}).status_code == status


def test_a_text_that_cannot_fit_is_not_even_tokenized(server: RunningServer):
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 4_000_000})
    assert error(response)["code"] == "context_length_exceeded"
    assert "4000000 characters" in error(response)["message"]


def test_lists_have_an_end(server: RunningServer):
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stop_token_ids": [5] * 300})
    assert (response.status_code, error(response)["param"]) == (400, "stop_token_ids")
