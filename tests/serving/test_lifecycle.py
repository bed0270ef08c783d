"""From start to end: ready means ready, nobody waits for ever, nothing is left behind."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import CACHE
from tests.serving.running import RunningServer, run_serve, running_server

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


class OpenStream:
    """An answer that has begun."""

    def __init__(self, http: httpx.Client, body: dict):
        self._context = http.stream("POST", "/v1/completions", json={**body, "stream": True})
        self._lines = self._context.__enter__().iter_lines()
        for _ in range(2):
            next(line for line in self._lines if line.startswith("data: "))

    def close(self) -> None:
        """Go away in the middle of it."""
        self._context.__exit__(None, None, None)

    def last_events(self) -> list[str]:
        """The last two of what is still to come."""
        return [line.removeprefix("data: ") for line in self._lines if line.startswith("data: ")][-2:]


def test_a_client_that_goes_frees_its_blocks(server: RunningServer):
    with server.client() as http:
        stream = OpenStream(http, LONG)
        assert server.metric("vllm:num_requests_running") == 1
        stream.close()
        before = time.monotonic()
        server.wait_until_idle()
        assert time.monotonic() - before < 2


def test_a_client_that_goes_before_a_whole_answer_frees_its_blocks(server: RunningServer):
    with server.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=LONG, timeout=0.2)
    server.wait_until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") > 0


def test_what_runs_may_end_when_the_server_is_stopped(tiny_model: Path):
    with running_server(tiny_model, *CACHE) as server, server.client() as http:
        stream = OpenStream(http, {**LONG, "model": None, "max_tokens": 200})
        server.process.send_signal(signal.SIGTERM)
        last, done = stream.last_events()
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert server.process.wait(10) == 0


def test_what_does_not_end_in_time_is_told_so(tiny_model: Path):
    with running_server(tiny_model, "--shutdown-timeout", "0.2", *CACHE) as server, server.client() as http:
        stream = OpenStream(http, {**LONG, "model": None})
        server.process.send_signal(signal.SIGTERM)
        error, done = stream.last_events()
        assert "shutting down" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        assert server.process.wait(10) == 0


def test_a_second_signal_does_not_wait(tiny_model: Path):
    with running_server(tiny_model, *CACHE) as server, server.client() as http:
        stream = OpenStream(http, {**LONG, "model": None})
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        assert "shutting down" in stream.last_events()[0]
        assert server.process.wait(10) == 0


def test_an_idle_connection_does_not_hold_the_server_up(tiny_model: Path):
    with running_server(tiny_model, *CACHE) as server, server.client() as http:
        assert http.get("/health").status_code == 200
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 5


def test_when_the_engine_dies_every_client_hears_of_it_and_it_is_restarted(tiny_model: Path):
    with running_server(tiny_model, *CACHE) as server, server.client() as http:
        stream = OpenStream(http, {**LONG, "model": None})
        waiting: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: waiting.append(httpx.post(f"{server.url}/v1/completions", json={**LONG, "model": None}))
        )
        asking.start()
        time.sleep(0.3)
        os.kill(server.engine_pid(), signal.SIGKILL)
        error, done = stream.last_events()
        assert json.loads(error)["error"]["code"] == "engine_unavailable"
        assert done == "[DONE]"
        asking.join(5)
        assert waiting[0].status_code == 503
        assert waiting[0].headers["retry-after"]
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, http.get("/health").status_code) == (503, 503)
        assert server.metric("pagetable:engine_up") == 0
        server.wait_for("the engine has been restarted")
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert server.metric("pagetable:engine_restarts_total") == 1
        server.wait_until_idle()


def test_an_engine_that_hangs_is_restarted(tiny_model: Path):
    with running_server(tiny_model, "--engine-timeout", "1", *CACHE) as server, server.client() as http:
        stream = OpenStream(http, {**LONG, "model": None})
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert json.loads(stream.last_events()[0])["error"]["code"] == "engine_unavailable"
        server.wait_for("the engine has been restarted")
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_the_engine_does_not_outlive_a_server_that_is_killed(tiny_model: Path):
    with running_server(tiny_model, *CACHE) as server:
        engine = Path(f"/proc/{server.engine_pid()}")
        server.process.kill()
        server.process.wait()
        for _ in range(100):
            if not engine.exists() or "\nState:\tZ" in (engine / "status").read_text():
                return
            time.sleep(0.05)
        raise AssertionError("the engine still runs")


def test_what_keeps_a_server_from_starting_is_one_line(tiny_model: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = run_serve(str(tiny_model), "--port", port)
        assert run.returncode == 1
        assert run.stderr.strip().splitlines()[-1].startswith(f"Error: cannot listen at 127.0.0.1 port {port}")
    run = run_serve(str(tiny_model), "--port", "0", "--kv-cache-memory", "100")
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in run.stderr
    run = run_serve(str(tmp_path / "nothing"), "--port", "0")
    assert (run.returncode, "Traceback" in run.stderr) == (1, False)


def test_a_client_that_reads_nothing_is_dropped(tiny_model: Path):
    with running_server(tiny_model, "--stream-timeout", "1", "--kv-cache-memory", "8MiB") as server:
        address = httpx.URL(server.url)
        body = json.dumps({**LONG, "model": None, "stream": True, "n": 8, "logprobs": 20}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((address.host, address.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head.encode() + body)
            # It ends as an abort, or, if the engine was done by then, as if all had been read. Else it never ends.
            while server.metric("vllm:request_success_total") == 0:
                time.sleep(0.1)  # the test's own time limit ends this
            server.wait_until_idle()


def test_every_line_of_a_json_log_is_json(tiny_model: Path):
    arguments = ["--log-format", "json", "--root-path", "/llm", "--host", "0.0.0.0", *CACHE]
    with running_server(tiny_model, *arguments) as server, server.client() as http:
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine"})
        http.post("/v1/completions", json={"prompt": "x", "foo": 1})
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "model": "other"})
        assert http.get("/health").status_code == 200
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines]
    assert "ANYONE" in lines[0]["message"]
    requests = [line for line in lines if line.get("logger") == "pagetable.request"]
    assert [line.get("client_request_id") for line in requests] == ["mine", None, None]
    assert [line.get("status") for line in requests] == [None, 400, 404]
    assert requests[1]["error"] == "foo is not supported; leave it out"


def test_a_whole_answer_that_nobody_reads_is_dropped(tiny_model: Path):
    with running_server(tiny_model, "--stream-timeout", "1", "--kv-cache-memory", "8MiB") as server:
        address = httpx.URL(server.url)
        body = json.dumps({**LONG, "model": None, "n": 16, "max_tokens": 800, "logprobs": 20}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        idle = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        with socket.create_connection((address.host, address.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head.encode() + body)
            while server.metric("vllm:request_success_total", finished_reason="length") == 0:
                time.sleep(0.1)
            while len(os.listdir(f"/proc/{server.process.pid}/fd")) > idle:
                time.sleep(0.1)  # the test's own time limit ends this


def test_a_server_whose_terminal_is_closed_drains(tiny_model: Path):
    with running_server(tiny_model, *CACHE) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(10) == 0


def test_a_cleaned_up_folder_does_not_keep_the_engine_from_coming_back(tiny_model: Path, tmp_path: Path):
    with running_server(tiny_model, *CACHE, env={"TMPDIR": str(tmp_path)}) as server, server.client() as http:
        (folder,) = tmp_path.glob("pagetable-*")
        shutil.rmtree(folder)
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_for("the engine has been restarted")
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert len(list(folder.iterdir())) == 2


def test_a_log_that_nobody_reads_holds_nobody_up(tiny_model: Path):
    with running_server(tiny_model, *CACHE) as server, server.client() as http:
        os.kill(server.process.pid, 0)
        server.stop_reading()
        for _ in range(1500):
            assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400


def test_an_engine_that_hangs_is_found_out_by_clients_that_give_up_early(tiny_model: Path):
    with running_server(tiny_model, "--engine-timeout", "2", *CACHE) as server, server.client() as http:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        began = time.monotonic()
        while server.metric("pagetable:engine_restarts_total") == 0:
            assert time.monotonic() - began < 30, "nobody noticed"
            with suppress(httpx.TimeoutException):
                http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=0.3)
