"""What a load run brought: a record of each request, and the figures and the table made of them.

What is measured, from the stream as its reader sees it:

* TTFT: from sending to the first delta with text. A chat's opening delta, which names a role only, is none.
* E2EL: from sending to the last delta with text or a finish reason, so without the usage and [DONE] behind it.
* ITL: the gaps between *arrivals*. An arrival is one read from the socket that brought text. Deltas that came in one
  read were seen in one moment: they are one arrival, and put no gaps of zero between the true ones. Where a server (or
  a late client) lumps tokens together, ITL is not the time of a token; `tokens_per_arrival` says so.
* TPOT: (E2EL - TTFT) / (completion tokens - 1), however the tokens were lumped.

The names of the figures are those of `vllm bench serve`. All times of a record are in seconds since the run began.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
FROM_SCHEDULE = "including_client_queue"  # of TTFT and E2EL, counted from when a request was due
LARGE_LAG = 0.02  # seconds of the client's own delay that are worth a warning
LUMPED = 1.25  # tokens per arrival from which ITL is worth a warning; below it are tokens without text


class RequestFailure(Exception):
    """Why a request failed: the kind, to count by, and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Measurement:
    """One request and what its stream brought."""

    scheduled: float  # when it was due
    ready: float  # when it could be sent: due, and a slot of --max-concurrency free
    sent: float = 0.0
    ended: float = 0.0  # when its answer was complete, or when it failed
    arrivals: list[float] = field(default_factory=list)  # reads that brought text
    text: str = ""
    prompt_tokens: int = 0  # as the server counted them
    completion_tokens: int = 0  # as the server counted them; deltas with text until it does
    cached_tokens: int | None = None  # of the prompt, found in the cache; None if the server does not say
    has_usage: bool = False
    finish_reason: str | None = None
    is_done: bool = False  # the stream has said so
    failure: RequestFailure | None = None

    def take(self, data: bytes, now: float) -> None:
        """Note one event of the stream; RequestFailure if it reports an error or is not understood."""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            self._take(json.loads(data), now)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RequestFailure("bad event", f"{error} in {data[:200]!r}") from None

    def _take(self, event: dict[str, Any], now: float) -> None:
        if error := event.get("error"):
            raise RequestFailure("error in stream", error_message(error))
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {}
            said = choice.get("text") or delta.get("content") or ""
            self.text += said
            if said or any(delta.get(kind) for kind in ("reasoning_content", "reasoning", "tool_calls")):
                self._arrived(now)
            if reason := choice.get("finish_reason"):
                self.finish_reason, self.is_done, self.ended = reason, True, now
        if usage := event.get("usage"):
            self._count(usage, event.get("timings") or {})

    def _arrived(self, now: float) -> None:
        self.completion_tokens += not self.has_usage
        self.ended = now
        if not self.arrivals or self.arrivals[-1] != now:
            self.arrivals.append(now)

    def _count(self, usage: dict[str, Any], timings: dict[str, Any]) -> None:
        """Take over the server's counts; `timings` are llama-server's, which names the cached tokens there."""
        self.has_usage = True
        self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.completion_tokens = int(usage.get("completion_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or timings).get("cached_tokens", timings.get("cache_n"))
        self.cached_tokens = None if cached is None else int(cached)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text, or to the end of an answer without any."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is none."""
        return (self.e2el - self.ttft) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between one arrival and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]


@dataclass
class Run:
    """What a run brought: the records in the order of their ends."""

    records: list[Measurement] = field(default_factory=list)
    num_unsent: int = 0  # turns of conversations that failed, or that the end of the run cut short
    loop_lags: list[float] = field(default_factory=list)  # how late the client's own timer was, in seconds


@dataclass(frozen=True)
class ReportOptions:
    """What to report."""

    metrics: Sequence[str] = tuple(METRICS)
    percentiles: Sequence[float] = (90, 99)
    goodput: dict[str, float] = field(default_factory=dict)  # the longest ttft, tpot and e2el of a good request, in ms
    is_open_loop: bool = False  # requests have times of their own (a finite rate), so waiting for their turn counts


def summarise(run: Run, options: ReportOptions) -> dict[str, Any]:
    """The figures of a run, ready for JSON; None where nothing was measured."""
    done = [record for record in run.records if record.failure is None]
    failures = Counter(record.failure.kind for record in run.records if record.failure)
    duration = max((record.ended for record in run.records), default=0.0)
    figures = {
        "duration": duration,
        "completed": len(done),
        "failed": failures.total(),
        "failed_by_kind": dict(failures.most_common()),
        "first_errors": _first_errors(run.records),
        "unsent": run.num_unsent,
        **_tokens(done, duration),
        "request_throughput": _ratio(len(done), duration),
        **_goodput(done, len(run.records), duration, options.goodput),
        "max_concurrent_requests": _peak_concurrency(run.records),
        **_client_lags(run),
        **_latencies(done, options),
    }
    return {**figures, "warnings": _warnings(figures, done)}


def detail(record: Measurement) -> dict[str, Any]:
    """One request for JSON; times in seconds."""
    return {
        "scheduled": record.scheduled,
        "sent": record.sent,
        "ttft": record.ttft,
        "e2el": record.e2el,
        "itls": record.itls,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "error": record.failure and f"{record.failure.kind}: {record.failure}",
    }


def _tokens(done: list[Measurement], duration: float) -> dict[str, Any]:
    prompt, completion = (sum(getattr(r, f"{kind}_tokens") for r in done) for kind in ("prompt", "completion"))
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    return {
        "total_input_tokens": prompt,
        "total_output_tokens": completion,
        "total_cached_tokens": sum(cached) if cached else None,
        "cached_share": _ratio(sum(cached), prompt) if cached else None,
        "output_throughput": _ratio(completion, duration),
        "total_token_throughput": _ratio(prompt + completion, duration),
        "tokens_counted_as": "usage" if all(record.has_usage for record in done) else "chunks",
        # The end token has no text, so it is never seen to arrive.
        "tokens_per_arrival": _ratio(
            completion - sum(record.finish_reason == "stop" for record in done),
            sum(len(record.arrivals) for record in done),
        ),
    }


def _goodput(done: list[Measurement], sent: int, duration: float, limits: dict[str, float]) -> dict[str, Any]:
    """Requests within all limits: a second, as vLLM has it, and as a share of all requests, failed ones included."""
    if not limits:
        return {"request_goodput": None, "goodput_share": None}
    good = sum(all(getattr(record, metric) * 1e3 <= most for metric, most in limits.items()) for record in done)
    return {"request_goodput": _ratio(good, duration), "goodput_share": _ratio(good, sent)}


def _peak_concurrency(records: list[Measurement]) -> int:
    """Most requests under way at once; one that ends as another starts makes room for it."""
    changes = sorted(change for record in records for change in ((record.sent, 1), (record.ended, -1)))
    return int(np.cumsum([0, *(change for _, change in changes)]).max())


def _client_lags(run: Run) -> dict[str, Any]:
    """What the client itself was late by: in sending, and in reading (its event loop)."""
    late = {"send": [record.sent - record.ready for record in run.records], "loop": run.loop_lags}
    return {f"p99_client_{kind}_lag_ms": _percentile(lags, 99) for kind, lags in late.items()}


def _latencies(done: list[Measurement], options: ReportOptions) -> dict[str, float | None]:
    values: dict[str, list[float]] = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.completion_tokens > 1],
        "itl": [gap for record in done for gap in record.itls],
        "e2el": [record.e2el for record in done],
    }
    values = {name: values[name] for name in METRICS if name in options.metrics}
    if options.is_open_loop:
        waits = [record.sent - record.scheduled for record in done]
        for name in {"ttft", "e2el"} & values.keys():
            values[f"{name}_{FROM_SCHEDULE}"] = [sum(pair) for pair in zip(values[name], waits, strict=True)]
    statistics: dict[str, Callable[[list[float]], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    figures: dict[str, float | None] = {}
    for name, seconds in values.items():
        for word, statistic in statistics.items():
            figures[f"{word}_{name}_ms"] = float(statistic(seconds)) * 1e3 if seconds else None
        for percent in options.percentiles:
            figures[f"p{percent:g}_{name}_ms"] = _percentile(seconds, percent)
    return figures


def _warnings(figures: dict[str, Any], done: list[Measurement]) -> list[str]:
    """What a reader of the figures must know to believe them."""
    found = []
    for kind, what in (("send", "sent requests"), ("loop", "read answers")):
        if (lag := figures[f"p99_client_{kind}_lag_ms"] or 0) > LARGE_LAG * 1e3:
            found.append(f"the client {what} up to {lag:.0f} ms late (p99): you may be measuring it, not the server")
    if done and figures["tokens_counted_as"] == "chunks":
        found.append("answers without usage: their tokens are counted as chunks, those of their prompts not at all")
    elif (tokens := figures["tokens_per_arrival"] or 0) > LUMPED:
        found.append(f"{tokens:.2f} tokens came at a time: ITL is the gap between arrivals, TPOT the time of a token")
    return found


def _first_errors(records: list[Measurement]) -> dict[str, str]:
    """The first message of each kind of failure."""
    first: dict[str, str] = {}
    for record in records:
        if record.failure:
            first.setdefault(record.failure.kind, str(record.failure))
    return first


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentile(seconds: list[float], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None


def error_message(error: Any) -> str:
    """The message in an error object, its JSON, or whatever text a server (or a proxy) sent instead of one."""
    with suppress(ValueError, TypeError):
        error = json.loads(error)
    while isinstance(error, dict) and (inner := error.get("error") or error.get("message") or error.get("detail")):
        error = inner
    return str(error).strip()[:500] or "no message"


# ------------------------------------------------------------------------------------------ table

_ROWS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Turns not sent:", "unsent"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Cached share of input tokens:", "cached_share"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Share of requests within limits:", "goodput_share"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Tokens per arrival:", "tokens_per_arrival"),
    ("P99 client lag, sending (ms):", "p99_client_send_lag_ms"),
    ("P99 client lag, event loop (ms):", "p99_client_loop_lag_ms"),
)
_ONLY_IF_GIVEN = {"max_concurrency", "request_rate", "request_goodput", "goodput_share"}


def table(figures: dict[str, Any]) -> str:
    """The figures for people, laid out as `vllm bench serve` does; after it the failures and the warnings."""
    lines = [f"{' Serving Benchmark Result ':=^58}"]
    for label, name in _ROWS:
        if not (name in _ONLY_IF_GIVEN and figures.get(name) is None) and not (name == "unsent" and not figures[name]):
            lines.append(_row(label, figures[name]))
    for metric, (short, long) in METRICS.items():
        lines += _latency_rows(figures, metric, short, long)
        lines += _latency_rows(figures, f"{metric}_{FROM_SCHEDULE}", short, f"{long}, from when it was due")
    lines.append("=" * 58)
    for kind, count in figures["failed_by_kind"].items():
        lines.append(f"{count} failed, {kind}: {figures['first_errors'][kind]}")
    return "\n".join([*lines, *(f"Warning: {text}" for text in figures["warnings"])])


def _latency_rows(figures: dict[str, Any], metric: str, short: str, long: str) -> list[str]:
    names = [name for name in figures if name.endswith(f"_{metric}_ms") and not name.startswith("std_")]
    rows = [_row(f"{name.partition('_')[0].capitalize()} {short} (ms):", figures[name]) for name in names]
    return [f"{long:-^58}", *rows] if rows else []


def _row(label: str, value: float | None) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"
    return f"{label:<46}{text:>12}"
