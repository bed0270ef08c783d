"""OpenTelemetry: a span for each request, with vLLM's names. Needs the packages of `pagetable[otel]`.

Metrics tell how the server does. A trace tells where the time of one request went, as a part of what its client did.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagetable import __version__
from pagetable.engine import SamplingParams
from pagetable.serving.record import RequestRecord

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 3.0  # for the last spans to be sent
REPEAT_SECONDS = 300.0  # how often OpenTelemetry may say the same
GRPC_PORT = 4317  # as registered for OTLP; HTTP has 4318


class Tracer:
    """Sends spans to a collector in batches, from a thread of its own: no request waits for it.

    What cannot be sent is dropped. Everything else is set by OpenTelemetry's environment variables, such as
    OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and OTEL_BSP_SCHEDULE_DELAY.
    """

    def __init__(self, endpoint: str, service_name: str = "pagetable") -> None:
        """`endpoint` is the collector's URL: http://host:4318 or grpc://host:4317. ValueError for what is none."""
        exporter = _exporter(endpoint)
        _say_seldom()
        ours = Resource({SERVICE_NAME: service_name, SERVICE_VERSION: __version__})
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())  # the environment comes first
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pagetable", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord, params: SamplingParams | None = None) -> None:
        """A request has ended, however it did. Its phases become spans of their own below it."""
        clock = time.time_ns() - time.monotonic_ns()  # read each time: the wall clock is set now and then

        def wall(seconds: float) -> int:
            return clock + int(seconds * 1e9)

        finished = time.monotonic() if record.finished_time is None else record.finished_time
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(record.trace_headers or {}),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, params),
            start_time=wall(record.arrival_time),
        )
        if span.is_recording():  # the client, or the sampler, may not want it
            inside = set_span_in_context(span)
            for name, begin, end in _phases(record, finished):
                self._tracer.start_span(name, context=inside, start_time=wall(begin)).end(wall(end))
            if record.error is not None:
                # Half a surrogate pair out of a client's text would cost the whole batch.
                reason = record.error.encode(errors="backslashreplace").decode()
                span.set_status(Status(StatusCode.ERROR, reason))
        span.end(wall(finished))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Send what has not been sent yet, in `timeout` seconds if that can be done."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(timeout)
        if closing.is_alive():
            logger.warning("the last traces could not be sent within %g s", timeout)


def _attributes(record: RequestRecord, params: SamplingParams | None) -> dict[str, Any]:
    """What is known of the request; no text of it."""
    given = {
        "http.route": record.endpoint,
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.request.n": record.n,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": params and params.temperature,
        "gen_ai.request.top_p": params and params.top_p,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_output_tokens,
        "gen_ai.latency.time_in_queue": _seconds(record.arrival_time, record.first_scheduled_time),
        "gen_ai.latency.time_to_first_token": _seconds(record.arrival_time, record.first_token_time),
        "gen_ai.latency.e2e": _seconds(record.arrival_time, record.finished_time),
        "gen_ai.latency.time_in_model_prefill": _seconds(record.first_scheduled_time, record.first_token_time),
        "gen_ai.latency.time_in_model_decode": _seconds(record.first_token_time, record.last_token_time),
        "gen_ai.latency.time_in_model_inference": _seconds(record.first_scheduled_time, record.last_token_time),
        "pagetable.cached_tokens": record.num_cached_tokens,
        "pagetable.finish_reason": record.finish_reason,
    }
    return {name: value for name, value in given.items() if value is not None}


def _seconds(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _phases(record: RequestRecord, finished: float) -> list[tuple[str, float, float]]:
    """Name, begin and end of each phase that the request came to; the last may have been cut short."""
    scheduled, first, last = record.first_scheduled_time, record.first_token_time, record.last_token_time
    if scheduled is None:
        # What was refused has not waited.
        return [] if record.finish_reason == "error" else [("queue", record.arrival_time, finished)]
    phases = [("queue", record.arrival_time, scheduled), ("prefill", scheduled, finished if first is None else first)]
    if first is not None and last is not None and last > first:
        phases.append(("decode", first, last))
    return phases


def _exporter(endpoint: str) -> SpanExporter:
    """By OTLP over gRPC or HTTP: as the environment wants, else as the URL looks."""
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    if url.scheme not in ("http", "https", "grpc", "grpcs") or not url.hostname:
        raise ValueError(
            f"otlp_traces_endpoint={endpoint[:200]!r}: give the URL of a collector, "
            "such as http://localhost:4318/v1/traces or grpc://localhost:4317"
        )
    environment = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
    by_url = "grpc" if url.scheme.startswith("grpc") or port == GRPC_PORT else "http/protobuf"
    protocol = environment or by_url
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"{OTEL_EXPORTER_OTLP_TRACES_PROTOCOL}={protocol!r}: choose grpc or http/protobuf")
    package = protocol.removesuffix("/protobuf")
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
    except ImportError as error:
        extra = "'pagetable[otel]'" if package == "http" else "opentelemetry-exporter-otlp-proto-grpc"
        instead = "" if package == "http" else ", or use the collector's HTTP port: http://…:4318"
        raise ValueError(f"traces by OTLP over {protocol} need a package: pip install {extra}{instead}") from error
    path = url.path
    if package == "http" and path in ("", "/"):
        path = "/v1/traces"  # where every collector listens
    scheme = url.scheme.replace("grpc", "http")  # for gRPC it tells whether to encrypt
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=url._replace(scheme=scheme, path=path).geturl())
    return exporter


class _Seldom(logging.Handler):
    """Passes on what OpenTelemetry has to say, each kind of message once in a while.

    A collector that cannot be reached is complained of several times a batch, for as long as that lasts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[tuple[str, int], float] = {}  # by the line of code that it comes from

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a message on, or not."""
        now = time.monotonic()
        kind = (record.pathname, record.lineno)
        if now >= self._next.get(kind, now):
            self._next[kind] = now + REPEAT_SECONDS
            logger.log(record.levelno, "%s (said at most every %g s)", record.getMessage(), REPEAT_SECONDS)


def _say_seldom() -> None:
    spoken = logging.getLogger("opentelemetry")
    spoken.handlers = [_Seldom()]
    spoken.propagate = False
