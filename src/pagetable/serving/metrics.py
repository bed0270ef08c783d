"""The server's numbers for Prometheus. docs/metrics.md lists them, and what a call costs.

Names, labels and buckets are vLLM's (vllm/v1/metrics/loggers.py) where the meaning is the same, so that its dashboards
and the routers that read it work here; what only this engine knows begins with `pagetable:`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from pagetable.engine import FinishReason
from pagetable.engine.engine import StepStats
from pagetable.memory.statistics import CacheStats, Counters
from pagetable.serving.messages import Delta, EngineStats, Report
from pagetable.serving.record import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4  # of what `ServerMetrics.render` returns

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its data-parallel engines; here there is one
OTHER = "other"  # stands for every path and status without a label of its own
ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/cache/reset",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/docs",
    "/openapi.json",
)

# vLLM's, all but the last: `sum by (le)` over a mixed fleet is right only if the buckets are the same.
ONE_TO_EIGHTY = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *ONE_TO_EIGHTY, 160, 640, 2560)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *ONE_TO_EIGHTY)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

COUNTED = tuple(field.name for field in fields(Counters))
Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class ServerMetrics:
    """All metrics of one server, in a registry of their own. Thread-safe as prometheus_client is; meant for one thread.

    `model_name` is the name it is served under; `max_model_len` bounds the buckets for tokens of a request. `endpoints`
    are the paths with a label of their own: all others share one, so that no client can make series.
    """

    def __init__(self, model_name: str, max_model_len: int = 131_072, endpoints: Collection[str] = ENDPOINTS) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # of this process; the engine's is another
        PlatformCollector(registry=self.registry)
        make = _Maker(self.registry, model_name)
        self._state = _EngineState(make)
        self._totals = _EngineTotals(make)
        self._steps = _Steps(make)
        self._requests = _Requests(make, max_model_len)
        self._http = _Http(make, endpoints)

    def observe_report(self, report: Report) -> None:
        """What the engine says once a step, or once a second when idle."""
        self._state.show(report.stats)
        self._totals.count(report.stats.cache, report.deltas)
        if report.step is not None:
            self._steps.observe(report.step, report.step_seconds)

    def set_engine_up(self, up: bool) -> None:
        """The engine became ready, or ended: then nothing runs, waits or is cached any more."""
        self._state.set_up(up)

    def engine_restarted(self) -> None:
        """A new process reports from now on, and its counters begin at 0. Ours go on."""
        self._totals.restart()

    def observe_first_token(self, seconds: float) -> None:
        """Seconds from the arrival of a request to the first token of an answer."""
        self._requests.first_token.observe(seconds)

    def observe_inter_token(self, seconds: float, count: int) -> None:
        """`count` tokens of an answer came together, `seconds` after the ones before them.

        That is `count` latencies of an equal share: so sum / count is seconds a token whatever came together, because
        text was held back or the reader was slow. (vLLM's engine delivers one token at a time, where it is the same.)
        """
        for _ in range(count):
            self._requests.inter_token.observe(seconds / count)

    def observe_request(self, record: RequestRecord) -> None:
        """A request has ended, however it did. Call it once."""
        self._requests.observe(record)

    def http_response(self, endpoint: str, status: int) -> None:
        """A response with this status has been sent to a request for this path."""
        self._http.count(endpoint, status)

    def event_loop_lag(self, seconds: float) -> None:
        """A timer of the event loop fired this much too late."""
        self._http.lag.observe(seconds)

    def render(self) -> bytes:
        """Everything as of now, in the text format whose content type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)


class _Maker:
    """Makes metrics whose labels are resolved already: looking them up costs more than counting."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self.labels = (model_name, ENGINE)

    def one(self, kind: type[Metric], name: str, text: str, **options: Any) -> Metric:
        return kind(name, text, LABELS, registry=self.registry, **options).labels(*self.labels)

    def each(
        self, kind: type[Metric], name: str, text: str, label: str, values: Sequence[str], **options: Any
    ) -> dict[str, Metric]:
        metric = kind(name, text, (*LABELS, label), registry=self.registry, **options)
        return {value: metric.labels(*self.labels, value) for value in values}


class _EngineState:
    """What is so now: gauges."""

    def __init__(self, make: _Maker) -> None:
        self.running = make.one(Gauge, "vllm:num_requests_running", "Answers being computed.")
        self.waiting = make.one(Gauge, "vllm:num_requests_waiting", "Answers waiting for a place in the batch.")
        self.usage = make.one(Gauge, "vllm:kv_cache_usage_perc", "Share of the blocks in use, 0 to 1.")
        states = ("in_use", "cached_idle", "empty")
        self.blocks = make.each(Gauge, "pagetable:kv_blocks", "Blocks of the KV cache.", "state", states)
        self.wasted = make.one(Gauge, "pagetable:wasted_slots", "Slots of blocks in use that no token fills.")
        self.up = make.one(Gauge, "pagetable:engine_up", "Whether the engine takes requests.")
        labels = (*LABELS, "block_size", "num_gpu_blocks")
        self.config = Gauge("vllm:cache_config_info", "Always 1; see its labels.", labels, registry=make.registry)
        self.labels, self.shape = make.labels, (0, 0)

    def show(self, stats: EngineStats) -> None:
        cache = stats.cache
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.usage.set(cache.blocks_in_use / cache.num_blocks)
        self.blocks["in_use"].set(cache.blocks_in_use)
        self.blocks["cached_idle"].set(cache.blocks_cached_idle)
        self.blocks["empty"].set(cache.blocks_empty)
        self.wasted.set(cache.wasted_slots)
        shape = (cache.block_size, cache.num_blocks)
        if shape != self.shape:  # at first, and when a new process found another amount of memory
            self.shape = shape
            self.config.clear()
            self.config.labels(*self.labels, *map(str, shape)).set(1)

    def set_up(self, up: bool) -> None:
        self.up.set(up)
        if not up:
            for gauge in (self.running, self.waiting, self.usage, self.wasted, *self.blocks.values()):
                gauge.set(0)


class _EngineTotals:
    """What the engine counts since its process began: here since the server began."""

    def __init__(self, make: _Maker) -> None:
        self.seen: Counters = Counters()
        self.queries = make.one(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = make.one(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = make.one(Counter, "vllm:num_preemptions", "Sequences that had to give their blocks back.")
        self.prompt = make.one(Counter, "vllm:prompt_tokens", "Prompt tokens of admitted answers.")
        self.cached = make.one(Counter, "vllm:prompt_tokens_cached", "Prompt tokens found in the cache, not computed.")
        self.generated = make.one(Counter, "vllm:generation_tokens", "Tokens delivered in answers.")
        self.evictions = make.one(Counter, "pagetable:evictions", "Cached blocks that were reused for others.")
        self.recomputed = make.one(Counter, "pagetable:recomputed_tokens", "Tokens computed again after a preemption.")
        self.restarts = make.one(Counter, "pagetable:engine_restarts", "Engine processes after the first.")

    def restart(self) -> None:
        self.seen = Counters()
        self.restarts.inc()

    def count(self, cache: CacheStats, deltas: list[Delta]) -> None:
        new = self._growth(cache)
        self.queries.inc(new.query_tokens)
        self.hits.inc(new.hit_tokens)
        self.preemptions.inc(new.preemptions)
        self.prompt.inc(new.query_tokens)
        self.cached.inc(new.hit_tokens)
        self.generated.inc(sum([len(delta.token_ids) for delta in deltas]))
        self.evictions.inc(new.evictions)
        self.recomputed.inc(new.recomputed_tokens)

    def _growth(self, cache: CacheStats) -> Counters:
        """What has come since the last report."""
        pairs = [(getattr(cache, name), getattr(self.seen, name)) for name in COUNTED]
        self.seen = cache
        if any(now < seen for now, seen in pairs):  # a restart that nobody told us of
            return cache
        return Counters(*[now - seen for now, seen in pairs])


class _Steps:
    """What was in the steps, and what took how long."""

    def __init__(self, make: _Maker) -> None:
        tokens, seconds = {"buckets": STEP_TOKENS}, {"buckets": STEP_SECONDS}
        self.tokens = make.one(Histogram, "vllm:iteration_tokens_total", "Tokens computed in a step.", **tokens)
        self.prefill = make.one(Histogram, "pagetable:step_prefill_tokens", "Prompt tokens of a step.", **tokens)
        self.decode = make.one(Histogram, "pagetable:step_decode_tokens", "Answer tokens of a step.", **tokens)
        self.seqs = make.one(Histogram, "pagetable:step_seqs", "Sequences in a step.", **tokens)
        self.total = make.one(Histogram, "pagetable:step_seconds", "Seconds a step took.", **seconds)
        parts = ("schedule", "execute", "commit", "rest")
        self.parts = make.each(Histogram, "pagetable:step_part_seconds", "Seconds of a part.", "part", parts, **seconds)

    def observe(self, step: StepStats, seconds: float) -> None:
        self.tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self.prefill.observe(step.num_prefill_tokens)
        self.decode.observe(step.num_decode_tokens)
        self.seqs.observe(step.num_seqs)
        self.total.observe(seconds)
        self.parts["schedule"].observe(step.schedule)
        self.parts["execute"].observe(step.execute)
        self.parts["commit"].observe(step.commit)
        self.parts["rest"].observe(max(0.0, seconds - step.schedule - step.execute - step.commit))


class _Requests:
    """Sizes and times of requests."""

    def __init__(self, make: _Maker, max_model_len: int) -> None:
        reasons = [reason.value for reason in FinishReason]
        self.ended = make.each(Counter, "vllm:request_success", "Requests that ended.", "finished_reason", reasons)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return make.one(Histogram, f"vllm:{name}", text, buckets=buckets)

        tokens = _one_two_five(max_model_len)
        self.prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", tokens)
        self.computed = histogram("request_prefill_kv_computed_tokens", "Prompt tokens computed.", tokens)
        self.generated = histogram("request_generation_tokens", "Tokens of a request's answers.", tokens)
        self.longest = histogram("request_max_num_generation_tokens", "Tokens of the longest answer.", tokens)
        self.max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", tokens)
        self.n = histogram("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "One token to the next.", TOKEN_SECONDS)
        self.per_token = histogram("request_time_per_output_token_seconds", "Mean over an answer.", TOKEN_SECONDS)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to the end.", REQUEST_SECONDS)
        self.queue = histogram("request_queue_time_seconds", "Arrival to first step.", REQUEST_SECONDS)
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token.", REQUEST_SECONDS)
        self.decode = histogram("request_decode_time_seconds", "First token to last.", REQUEST_SECONDS)
        self.inference = histogram("request_inference_time_seconds", "First step to last token.", REQUEST_SECONDS)

    def observe(self, record: RequestRecord) -> None:
        self.ended.get(record.finish_reason or "", self.ended["error"]).inc()
        has_run = record.first_scheduled_time is not None
        if has_run:
            self._observe_sizes(record)
        if has_run or record.finish_reason != "error":  # a refusal is no fast answer
            self._observe_times(record)

    def _observe_sizes(self, record: RequestRecord) -> None:
        self.prompt.observe(record.num_prompt_tokens)
        self.computed.observe(record.num_prompt_tokens - record.num_cached_tokens)
        self.generated.observe(record.num_output_tokens)
        self.n.observe(record.n)
        if record.num_answers == 1:  # the record does not know one answer from another
            self.longest.observe(record.num_output_tokens)
        if record.max_tokens is not None:
            self.max_tokens.observe(record.max_tokens)

    def _observe_times(self, record: RequestRecord) -> None:
        arrived, scheduled, finished = record.arrival_time, record.first_scheduled_time, record.finished_time
        first, last = record.first_token_time, record.last_token_time
        _observe_span(self.e2e, arrived, finished)
        _observe_span(self.queue, arrived, finished if scheduled is None else scheduled)
        _observe_span(self.prefill, scheduled, first)
        _observe_span(self.decode, first, last)
        _observe_span(self.inference, scheduled, last)
        intervals = record.num_output_tokens / record.num_answers - 1  # of an answer; they are computed side by side
        if first is not None and last is not None and intervals > 0:
            self.per_token.observe((last - first) / intervals)


class _Http:
    """The front: responses and the event loop."""

    def __init__(self, make: _Maker, endpoints: Collection[str]) -> None:
        self.endpoints = frozenset(endpoints)
        self.labels = make.labels
        labels, text = (*LABELS, "path", "status"), "How late a timer of the event loop fired."
        self.responses = Counter("pagetable:http_responses", "Responses sent.", labels, registry=make.registry)
        self.lag = make.one(Histogram, "pagetable:event_loop_lag_seconds", text, buckets=STEP_SECONDS)

    def count(self, endpoint: str, status: int) -> None:
        path = endpoint if endpoint in self.endpoints else OTHER
        self.responses.labels(*self.labels, path, str(status) if 100 <= status < 600 else OTHER).inc()


def _observe_span(histogram: Histogram, start: float | None, end: float | None) -> None:
    if start is not None and end is not None:
        histogram.observe(max(0.0, end - start))


def _one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `largest`, as in vLLM."""
    values = (digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5))
    return [value for value in values if value <= largest]
