"""One trace, several policies and capacities: the rates, what was possible, and why the rest was missed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.blocks import Workload
from pagetable.replay.cache_replay import CacheReplay, CacheResult
from pagetable.replay.cost import CostModel
from pagetable.replay.reuse import Reuse
from pagetable.replay.sizing import parse_capacity
from pagetable.replay.timed_replay import Limits, TimedReplay, TimedResult
from pagetable.replay.trace import TraceError

NUM_BUCKETS = 60  # of time, in the hit rate over time
NUM_POINTS = 24  # of the curves over capacity
GOAL = Fraction(9, 10)  # of what an infinite cache hits: how much memory does that take?

Progress = Callable[[str, int], None]  # what is going on, requests so far


@dataclass
class Analysis:
    """What one pass over a trace tells without any cache."""

    reuse: Reuse = field(default_factory=Reuse)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_hit_tokens: int = 0  # of an infinite cache
    num_slots: int = 0  # of the prompts' blocks, the last, partial ones too
    arrivals: list[float] = field(default_factory=list)
    accesses: list[int] = field(default_factory=list)  # by request, blocks
    hits: list[int] = field(default_factory=list)  # of an infinite cache
    sessions: set[Any] = field(default_factory=set)


def analyse(workload: Workload, progress: Progress = lambda what, count: None) -> Analysis:
    """Read a trace once."""
    analysis = Analysis()
    for request, access in workload:
        hits = analysis.reuse.add(access, request.arrival)
        analysis.num_prompt_tokens += request.num_prompt_tokens
        analysis.num_output_tokens += request.num_output_tokens
        analysis.num_hit_tokens += workload.hits_as_tokens(request, hits)
        analysis.num_slots += -(-request.num_prompt_tokens // workload.block_size) * workload.block_size
        analysis.arrivals.append(request.arrival)
        analysis.accesses.append(access.num_accesses)
        analysis.hits.append(hits)
        analysis.sessions.add(request.session)
        progress("reading", len(analysis.arrivals))
    if not analysis.arrivals:
        raise TraceError(f"{workload.trace.path}: no request is left of it, by time and by sample")
    if not analysis.reuse.num_accesses:
        raise TraceError(f"{workload.trace.path}: no request of it fills a block of {workload.block_size} tokens")
    return analysis


def replay_cache(
    workload: Workload,
    policies: Sequence[str],
    capacities: Sequence[str],
    *,
    block_bytes: int | None = None,
    check: bool = False,
    progress: Progress = lambda what, count: None,
) -> dict[str, Any]:
    """Each request whole, one after the other, with every policy at every capacity. The result as JSON has it.

    `capacities` are texts as for `parse_capacity`. The trace is read twice.
    """
    _check_policies(policies)
    state = workload.trace.state()
    analysis = analyse(workload, progress)
    sizes, most = _sizes(capacities, analysis, block_bytes), analysis.reuse.most_blocks
    replays = [CacheReplay(workload, policy, size, most=most, check=check) for size in sizes for policy in policies]
    for number, (request, access) in enumerate(workload, start=1):
        for replay in replays:
            replay.serve(request, access)
        progress("replaying", number)
    results = [replay.finish() for replay in replays]
    _check_unchanged(workload, state)
    return {"mode": "cache", **_result(workload, analysis, results, block_bytes)}


def replay_timed(
    workload: Workload,
    policies: Sequence[str],
    capacities: Sequence[str],
    cost: CostModel,
    limits: Limits,
    *,
    speed: float = 1.0,
    block_bytes: int | None = None,
    progress: Progress = lambda what, count: None,
) -> dict[str, Any]:
    """The trace in time, under the scheduler that serves. The result has what `replay_cache` has, and latencies.

    MIN and the curves are those of the trace with each request whole, for comparison.
    """
    _check_policies(policies)
    state = workload.trace.state()
    analysis = analyse(workload, progress)
    results = []
    for size in _sizes(capacities, analysis, block_bytes):
        for policy in policies:
            replay = TimedReplay(workload, policy, size, cost, limits, speed=speed)
            results.append(replay.run(functools.partial(progress, f"{policy}, {size} blocks")))
    _check_unchanged(workload, state)
    return {
        "mode": "timed",
        **_result(workload, analysis, results, block_bytes),
        "cost_model": asdict(cost),
        "limits": {**asdict(limits), "speed": speed},
    }


def _check_unchanged(workload: Workload, state: object) -> None:
    if workload.trace.state() != state:
        raise TraceError(f"{workload.trace.path} has changed while it was read: replay it when nobody writes to it")


def _check_policies(policies: Sequence[str]) -> None:
    unknown = [policy for policy in policies if policy not in EVICTION_POLICIES]
    if unknown or not policies:
        given = f"policy {', '.join(map(repr, unknown))}" if unknown else "no policy is given"
        raise TraceError(f"{given}: choose among {', '.join(EVICTION_POLICIES)}")


def _sizes(capacities: Sequence[str], analysis: Analysis, block_bytes: int | None) -> list[int]:
    sizes = [parse_capacity(text, analysis.reuse.num_nodes, block_bytes) for text in capacities]
    if not sizes:
        raise TraceError("no capacity is given: shares (5%), blocks (2000) or bytes (4GiB)")
    return sorted(set(sizes))


def _result(
    workload: Workload, analysis: Analysis, results: Sequence[CacheResult | TimedResult], block_bytes: int | None
) -> dict[str, Any]:
    min_hits = {size: analysis.reuse.min_hits(size) for size in {result.capacity for result in results}}
    return {
        "trace": _trace_facts(workload, analysis),
        "memory": _memory(analysis, workload, block_bytes),
        "rows": [_row(result, analysis, min_hits[result.capacity], block_bytes) for result in results],
        "curve": _curve(analysis),
        "reuse": _reuse_histograms(analysis),
        "over_time": _over_time(analysis, results),
    }


def _trace_facts(workload: Workload, analysis: Analysis) -> dict[str, Any]:
    reuse, trace = analysis.reuse, workload.trace
    return {
        "path": str(trace.path),
        "format": trace.format.name,
        "block_size": workload.block_size,
        "requests": reuse.num_requests,
        "sessions": len(analysis.sessions),
        "sessions_are_guessed": workload.guesses_sessions,
        "seconds": analysis.arrivals[-1] - analysis.arrivals[0],
        "prompt_tokens": analysis.num_prompt_tokens,
        "output_tokens": analysis.num_output_tokens,
        "accesses": reuse.num_accesses,
        "unique_blocks": reuse.num_nodes,
        "infinite_block_hit_rate": reuse.num_hits / reuse.num_accesses,
        "infinite_token_hit_rate": analysis.num_hit_tokens / analysis.num_prompt_tokens,
        "waste": 1 - analysis.num_prompt_tokens / analysis.num_slots,  # slots of partial blocks that no token fills
        "until_s": None if math.isinf(workload.until) else workload.until,
        "sample": workload.sample,
        "seed": workload.seed,
        "skipped_lines": trace.num_skipped,
        "out_of_order": trace.num_out_of_order,
        "inconsistent_lengths": trace.num_inconsistent,
    }


def _memory(analysis: Analysis, workload: Workload, block_bytes: int | None) -> dict[str, Any]:
    """How much of it LRU needs for most of what is possible."""
    hits, blocks = analysis.reuse.lru_hits(), analysis.reuse.lru_blocks(GOAL)
    return {
        "goal": float(GOAL),
        "block_hit_rate": float(hits[min(blocks, len(hits) - 1)]) / analysis.reuse.num_accesses,
        "blocks": blocks,
        "tokens": blocks * workload.block_size,
        "share": blocks / analysis.reuse.num_nodes,
        "bytes": None if block_bytes is None else blocks * block_bytes,
        "bytes_per_token": None if block_bytes is None else block_bytes // workload.block_size,
    }


def _row(
    result: CacheResult | TimedResult, analysis: Analysis, min_hits: int, block_bytes: int | None
) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "capacity_blocks": result.capacity,
        "capacity_share": result.capacity / analysis.reuse.num_nodes,
        "capacity_bytes": None if block_bytes is None else result.capacity * block_bytes,
        "block_hit_rate": result.num_hits / result.num_accesses,
        "token_hit_rate": result.num_hit_tokens / result.num_prompt_tokens,
        "min_block_hit_rate": min_hits / result.num_accesses,
        "share_of_min": result.num_hits / min_hits if min_hits else None,
        "prefill_amplification": _amplification(result.num_accesses - result.num_hits, result.num_accesses - min_hits),
        "evictions": result.evictions,
        "refused_requests": result.num_refused,
        "seconds": result.seconds,
        **(_cache_figures(result, analysis) if isinstance(result, CacheResult) else _timed_figures(result)),
    }


def _cache_figures(result: CacheResult, analysis: Analysis) -> dict[str, Any]:
    reuse = analysis.reuse
    lifetimes = np.concatenate(result.lifetimes) if result.lifetimes else np.empty(0)
    return {
        "misses": {  # blocks
            "never_seen": reuse.num_reusable - reuse.num_hits,
            "evicted": reuse.num_hits - result.num_hits,
            "partial_tail": reuse.num_accesses - reuse.num_reusable,
        },
        "block_lifetime_s": _percentiles(lifetimes, (10, 50, 90)),
    }


def _timed_figures(result: TimedResult) -> dict[str, Any]:
    latencies = {name: getattr(result, name) for name in ("queue", "ttft", "tpot", "itl", "e2e")}
    return {
        "misses": dict(result.misses),  # admissions, by why the first block that had to be computed was missed
        **{f"{name}_s": _percentiles(np.array(values), (50, 90, 99)) for name, values in latencies.items()},
        "output_tokens": result.num_output_tokens,
        "cut_off_answers": result.num_cut_off,
        "preemptions": result.preemptions,
        "recomputed_tokens": result.recomputed_tokens,
        "waste": result.waste,
        "steps": result.num_steps,
        "clock_s": result.clock,
        "busy_s": result.busy,
    }


def _amplification(computed: int, least: int) -> float:
    return computed / least if least else 1.0


def _percentiles(values: np.ndarray[Any, Any], percents: tuple[int, ...]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {f"p{p}": float(value) for p, value in zip(percents, np.percentile(values, percents), strict=True)}


def _curve(analysis: Analysis) -> list[dict[str, Any]]:
    """Hit rates of LRU and MIN, evenly on a logarithmic scale, at capacities from the least that refuses no request."""
    reuse = analysis.reuse
    hits = reuse.lru_hits()
    last = len(hits) - 1
    first = max(1, last // 1000, reuse.num_needed)
    last = max(first, last)
    sizes = np.unique(np.geomspace(first, last, NUM_POINTS).round().astype(int)).tolist()
    return [
        {
            "capacity_blocks": size,
            "capacity_share": size / reuse.num_nodes,
            "lru": int(hits[min(size, len(hits) - 1)]) / reuse.num_accesses,
            "min": reuse.min_hits(size) / reuse.num_accesses,
        }
        for size in sizes
    ]


def _reuse_histograms(analysis: Analysis) -> dict[str, Any]:
    """Block accesses by how many other blocks, and how many seconds, lie between them and the use before."""
    hits = analysis.reuse.lru_hits()
    distances = np.unique(np.geomspace(1, max(1, len(hits) - 1), 25).round().astype(int))
    seconds, counts = analysis.reuse.intervals()
    edges = np.concatenate([[0], np.geomspace(0.1, max(1.0, seconds.max(initial=0)) * 1.001, 24)])
    return {
        "distance_blocks": {
            "edges": [0, *distances.tolist()],
            "counts": np.diff(hits[np.concatenate([[0], distances])]).tolist(),
        },
        "interval_s": {
            "edges": edges.tolist(),
            "counts": np.histogram(seconds, edges, weights=counts)[0].astype(int).tolist(),
        },
    }


def _over_time(analysis: Analysis, results: Sequence[CacheResult | TimedResult]) -> dict[str, Any]:
    """Block hit rate in each of NUM_BUCKETS stretches of the trace; None where nothing was asked for."""
    arrivals = np.array(analysis.arrivals)
    edges = np.linspace(arrivals[0], max(arrivals[-1], arrivals[0] + 1e-3), NUM_BUCKETS + 1)
    asked = np.histogram(arrivals, edges, weights=analysis.accesses)[0]

    def rates(hits: list[int]) -> list[float | None]:
        found = np.histogram(arrivals, edges, weights=hits)[0]
        return [float(h / a) if a else None for h, a in zip(found, asked, strict=True)]

    return {"edges_s": edges.tolist(), "infinite": rates(analysis.hits), "rows": [rates(r.hits) for r in results]}
