"""Traces as a collector gets them from a real server: OTLP over HTTP, read with OpenTelemetry's own messages."""

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagetable.engine import SamplingParams
from pagetable.serving.record import RequestRecord
from tests.serving.running import RunningServer, running_server

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from pagetable.serving.tracing import Tracer, _exporter

CACHE = ("--kv-cache-memory", "2MiB")
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
GRPC = "opentelemetry.exporter.otlp.proto.grpc"


class Collector:
    """Keeps what it is sent; answers with `status`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.path, self.rfile.read(int(self.headers["content-length"])))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def request(self, request_id: str, timeout: float = 10) -> tuple[Span, dict[str, Span]]:
        """The span of one request, and those of its phases by name, as soon as they are there."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for span in list(self.spans):
                if values(span.attributes).get("gen_ai.request.id") == request_id:
                    inside = [s for s in list(self.spans) if s.parent_span_id == span.span_id]
                    assert len(inside) == len({s.name for s in inside})
                    return span, {s.name: s for s in inside}
            time.sleep(0.02)
        raise AssertionError(f"no span of {request_id} among {len(self.spans)}")


def values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with collector.server:
        threading.Thread(target=collector.server.serve_forever, daemon=True).start()
        yield collector
        collector.server.shutdown()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tiny_model: Path, collector: Collector) -> Iterator[RunningServer]:
    arguments = ("--served-model-name", "tiny", "--otlp-traces-endpoint", collector.url, *CACHE)
    with running_server(tiny_model, *arguments, env=SOON) as server:
        yield server


@pytest.fixture
def http(traced: RunningServer) -> Iterator[httpx.Client]:
    with traced.client() as client:
        yield client


def complete(http: httpx.Client, headers: Any = None, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**GREEDY, "prompt": "def f(x):", **body}, headers=headers)
    return response.raise_for_status().json()


def ended(**given: Any) -> RequestRecord:
    """The record of a request that took half a second."""
    now = time.monotonic()
    record = RequestRecord("cmpl-1", "/v1/completions", "tiny", 7, arrival_time=now - 0.5)
    times = {"first_scheduled_time": now - 0.4, "first_token_time": now - 0.3, "last_token_time": now - 0.1}
    for name, value in {**times, "finished_time": now, "finish_reason": "stop", **given}.items():
        setattr(record, name, value)
    return record


# ------------------------------------------------------------------------------------------------ what a trace says


def test_a_request_is_a_part_of_its_clients_trace(http: httpx.Client, collector: Collector):
    answer = complete(http, {"traceparent": SAMPLED, "tracestate": "vendor=1"})
    span, phases = collector.request(answer["id"])
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert {phase.trace_id.hex() for phase in phases.values()} == {TRACE}
    assert {phase.kind for phase in phases.values()} == {Span.SPAN_KIND_INTERNAL}
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert collector.paths[-1] == "/v1/traces"
    assert collector.resources[-1]["service.name"] == "pagetable"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_names_and_numbers_are_those_of_vllm(http: httpx.Client, collector: Collector, path: str, streamed: bool):
    text = {"messages": [{"role": "user", "content": "xyzzy"}]} if "chat" in path else {"prompt": "xyzzy"}
    body = {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "max_tokens": 6, "n": 2, "ignore_eos": True, **text}
    before = time.time_ns()
    response = http.post(path, json={**body, "stream": streamed}).raise_for_status()
    after = time.time_ns()
    request_id = response.text.split('"id":"')[1].split('"')[0]
    span, phases = collector.request(request_id)
    found = values(span.attributes)
    latency = {name.removeprefix("gen_ai.latency."): found.pop(name) for name in list(found) if "latency" in name}
    assert found.pop("gen_ai.usage.prompt_tokens") > 0
    assert found == {
        "http.route": path,
        "gen_ai.request.id": request_id,
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.completion_tokens": 12,
        "pagetable.cached_tokens": found["pagetable.cached_tokens"],  # has a test of its own
        "pagetable.finish_reason": "length",
    }
    prefill, decode = latency["time_in_model_prefill"], latency["time_in_model_decode"]
    assert latency["time_in_queue"] + prefill == pytest.approx(latency["time_to_first_token"])
    assert prefill + decode == pytest.approx(latency["time_in_model_inference"])
    assert 0 < latency["time_to_first_token"] <= latency["e2e"]

    assert sorted(phases) == ["decode", "prefill", "queue"]
    queue, prefill, decode = phases["queue"], phases["prefill"], phases["decode"]
    assert before <= span.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= span.end_time_unix_nano <= after
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(latency["e2e"] * 1e9, abs=1000)
    assert not any(b"xyzzy" in body for body in collector.bodies)


def test_what_was_found_in_the_cache(http: httpx.Client, collector: Collector):
    prompt = "A prompt of its own for the traces, with more than a block of tokens: " * 2
    complete(http, prompt=prompt)
    answer = complete(http, prompt=prompt)
    found = values(collector.request(answer["id"])[0].attributes)
    assert found["pagetable.cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_an_aborted_request_ends_where_its_client_left(http: httpx.Client, collector: Collector):
    body = {**GREEDY, "prompt": "def f(x):", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"traceparent": SAMPLED}) as response:
        first = next(response.iter_lines())
    span, phases = collector.request(first.split('"id":"')[1].split('"')[0])
    found = values(span.attributes)
    assert found["pagetable.finish_reason"] == "abort"
    assert 0 < found["gen_ai.usage.completion_tokens"] < 1500
    assert span.status.code == Status.STATUS_CODE_UNSET  # nothing of ours went wrong
    assert "prefill" in phases
    assert span.parent_span_id.hex() == PARENT


def test_a_refused_request_tells_why(http: httpx.Client, collector: Collector):
    seen = len(collector.spans)
    response = http.post("/v1/completions", json={**GREEDY, "prompt": [5] * 3000}, headers={"traceparent": SAMPLED})
    assert response.status_code == 400
    end = time.monotonic() + 10
    while len(collector.spans) == seen and time.monotonic() < end:
        time.sleep(0.02)
    span, phases = collector.request(values(collector.spans[-1].attributes)["gen_ai.request.id"])
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert response.json()["error"]["message"].endswith(span.status.message)
    found = values(span.attributes)
    assert found["pagetable.finish_reason"] == "error"
    assert found["gen_ai.usage.prompt_tokens"] == 3000
    assert "gen_ai.latency.time_in_queue" not in found
    assert not phases  # it did not wait
    assert span.parent_span_id.hex() == PARENT


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", "nonsense")],
        [("traceparent", "00-" + "0" * 32 + f"-{PARENT}-01")],
        [("traceparent", "x" * 20_000)],
        [("traceparent", SAMPLED), ("traceparent", SAMPLED)],
        [("tracestate", "vendor=1")],
        [("traceparent", b"\xff\xfe")],
    ],
)
def test_without_a_valid_parent_a_trace_begins_here(http: httpx.Client, collector: Collector, headers: Any):
    span, _ = collector.request(complete(http, headers)["id"])
    assert not span.parent_span_id
    assert span.trace_id.hex() not in (TRACE, "0" * 32)


@pytest.mark.parametrize("state", ["=,=", "a=1," * 5000 + "b=2", "é=1"])
def test_a_wrong_tracestate_does_not_cost_the_parent(http: httpx.Client, collector: Collector, state: str):
    span, _ = collector.request(complete(http, {"traceparent": SAMPLED, "tracestate": state.encode()})["id"])
    assert span.parent_span_id.hex() == PARENT
    assert not span.trace_state


def test_tracestate_may_come_in_several_headers(http: httpx.Client, collector: Collector):
    headers = [("traceparent", SAMPLED), ("tracestate", "a=1"), ("tracestate", "b=2")]
    assert collector.request(complete(http, headers)["id"])[0].trace_state == "a=1,b=2"


def test_what_the_client_does_not_sample_is_not_sent(http: httpx.Client, collector: Collector):
    unwanted = complete(http, {"traceparent": UNSAMPLED})["id"]
    collector.request(complete(http)["id"])  # came later, and is there
    assert not any(values(span.attributes).get("gen_ai.request.id") == unwanted for span in collector.spans)


def test_clients_cannot_fill_the_log(traced: RunningServer, http: httpx.Client):
    for number in range(20):
        complete(http, {"traceparent": SAMPLED, "tracestate": f"wrong {number}"}, max_tokens=1)
    assert len([line for line in traced.lines if "tracing" in line]) <= 4  # a few kinds, each once


# ------------------------------------------------------------------------------------------------ a record by itself


def sent(*records: RequestRecord, params: SamplingParams | None = None) -> tuple[list[Span], Collector]:
    with collecting() as collector:
        tracer = Tracer(collector.url)
        for record in records:
            tracer.record(record, params)
        tracer.close()
    return collector.spans, collector


def test_who_left_before_the_first_step_was_in_the_queue():
    gone = {"first_scheduled_time": None, "first_token_time": None, "last_token_time": None, "finish_reason": "abort"}
    queue, span = sent(ended(**gone))[0]
    assert (queue.name, span.name) == ("queue", "llm_request")
    assert queue.start_time_unix_nano == span.start_time_unix_nano
    assert queue.end_time_unix_nano == span.end_time_unix_nano


def test_one_token_has_no_decode_phase():
    record = ended()
    record.last_token_time = record.first_token_time
    assert [span.name for span in sent(record)[0]] == ["queue", "prefill", "llm_request"]


def test_an_error_after_the_first_step_shows_how_far_it_came():
    spans, _ = sent(ended(first_token_time=None, last_token_time=None, finish_reason="error", error="out of luck"))
    assert [span.name for span in spans] == ["queue", "prefill", "llm_request"]
    assert spans[1].end_time_unix_nano == spans[2].end_time_unix_nano
    assert (spans[2].status.code, spans[2].status.message) == (Status.STATUS_CODE_ERROR, "out of luck")


def test_text_that_is_none_does_not_cost_the_batch():
    spans, _ = sent(ended(), ended(finish_reason="error", error="no such thing: \ud800"))
    assert [span.status.message for span in spans if span.name == "llm_request"] == ["", "no such thing: \\ud800"]


def test_parameters_are_left_out_if_there_are_none():
    found = values(sent(ended())[0][-1].attributes)
    assert not {"gen_ai.request.temperature", "gen_ai.request.top_p", "gen_ai.request.max_tokens"} & found.keys()
    greedy = values(sent(ended(), params=SamplingParams(temperature=0))[0][-1].attributes)
    assert greedy["gen_ai.request.temperature"] == 0


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    found = sent(ended())[1].resources[0]
    assert (found["service.name"], found["deployment.environment.name"]) == ("mine", "lab")


# ------------------------------------------------------------------------------------------------ where it goes


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("http://host:4318/", "http://host:4318/v1/traces"),
        ("https://host/otel/v1/traces?tenant=1", "https://host/otel/v1/traces?tenant=1"),
    ],
)
def test_http_is_taken_for_http_urls(endpoint: str, url: str):
    assert _exporter(endpoint)._endpoint == url


@pytest.mark.parametrize("endpoint", ["grpc://host", "grpcs://host:1", "http://host:4317"])
def test_grpc_is_taken_where_the_url_says_so(endpoint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, f"{GRPC}.trace_exporter", None)
    with pytest.raises(ValueError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        _exporter(endpoint)


def test_the_environment_chooses_the_protocol(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert _exporter("http://host:4317")._endpoint == "http://host:4317/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke signals")
    with pytest.raises(ValueError, match="choose grpc or http/protobuf"):
        _exporter("http://host:4318")


@pytest.mark.parametrize("endpoint", ["", "host:4318", "ftp://host", "http://", "http://host:x", "http://[::1"])
def test_what_is_no_collectors_url_is_refused(endpoint: str):
    with pytest.raises(ValueError, match="give the URL of a collector"):
        _exporter(endpoint)


@pytest.mark.parametrize("status", [401, 503])
def test_a_collector_that_refuses_does_no_harm(status: int, caplog: pytest.LogCaptureFixture):
    with collecting() as collector, caplog.at_level(logging.WARNING):
        collector.status = status
        tracer = Tracer(collector.url)
        tracer.record(ended())
        begin = time.monotonic()
        tracer.close(timeout=0.5)
        assert time.monotonic() - begin < 2
    assert 1 <= len(caplog.records) <= 3
    assert any(str(status) in message or "Unavailable" in message for message in caplog.messages)


def test_a_collector_that_does_not_answer_holds_nobody_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        for _ in range(1500):  # more spans than the queue holds
            tracer.record(ended())
        assert time.monotonic() - begin < 5  # half a second, on a quiet machine
        begin = time.monotonic()
        tracer.close(timeout=0.3)
        assert time.monotonic() - begin < 2


def test_an_unreachable_collector_is_told_of_and_then_forgotten(tiny_model: Path):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = f"http://127.0.0.1:{gone.getsockname()[1]}"
    arguments = ("--served-model-name", "tiny", "--otlp-traces-endpoint", endpoint, *CACHE)
    with running_server(tiny_model, *arguments, env={**SOON, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"}) as server:
        with server.client() as http:
            for _ in range(20):
                assert complete(http)["choices"][0]["finish_reason"] == "length"
                time.sleep(0.15)
        begin = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begin < 15
    told = [line for line in server.lines if "tracing" in line]
    assert 1 <= len(told) <= 4
    assert not any("Traceback" in line for line in server.lines)


def test_the_last_spans_are_sent_before_the_server_ends(tiny_model: Path, collector: Collector):
    arguments = ("--served-model-name", "tiny", "--otlp-traces-endpoint", collector.url, *CACHE)
    with running_server(tiny_model, *arguments, env={"OTEL_BSP_SCHEDULE_DELAY": "600000"}) as server:
        with server.client() as http:
            answer = complete(http)
        assert server.stop() == 0
    collector.request(answer["id"], timeout=1)


# ------------------------------------------------------------------------------------------------ an extra


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_server_without_traces_needs_no_package():
    code = "import sys, pagetable.serving.server; print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    assert python(code) == "[]"


def test_a_missing_package_is_named():
    code = """
import sys
sys.modules["opentelemetry.sdk"] = None  # the API alone may be there: FastAPI has come to need it
from pagetable.serving.server import serve
from pagetable.serving.settings import ServerSettings
try:
    serve(ServerSettings(model="nowhere", port=0, otlp_traces_endpoint="http://localhost:4318"))
except ValueError as error:
    print(error)
"""
    assert "pip install 'pagetable[otel]'" in python(code)
