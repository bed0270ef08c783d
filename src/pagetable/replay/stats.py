"""What a trace is like, before any cache: its lengths, its sessions, and how much of it could be reused."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pagetable.replay.blocks import Workload
from pagetable.replay.reuse import Access, Reuse
from pagetable.replay.trace import Grown, IntArray, TraceRequest

Stats = dict[str, Any]
PERCENTS = (50, 90, 99)  # of values, and of the infinite cache's hits


def trace_stats(workload: Workload) -> Stats:
    """Figures of a trace, in one pass: plain data, with None where there is nothing to tell.

    Tokens and turns have `total`, `mean`, `p50`, `p90`, `p99` and `max`; a percentile is one of the values that occur.
    An access is one block of one prompt; `unique_blocks` also count what known answers fill. `infinite_block_hit_rate`
    and `infinite_token_hit_rate` are those of a cache that never evicts. `shared_blocks` are in prompts of more than
    one session, `shared_access_share` is their share of all accesses. `reuse_seconds` lie between two uses of a block,
    one for each hit. `lru_blocks` are the fewest blocks with which LRU has that share of the infinite cache's hits.
    """
    counts = _Counts()
    for request, access in workload:
        counts.add(request, access, workload)
    reuse, trace = counts.reuse, workload.trace
    seconds = max(0.0, counts.last - counts.first)
    prompt_tokens = _summary(counts.prompts)
    return {
        "path": str(trace.path),
        "format": trace.format.name,
        "skipped_lines": trace.num_skipped,
        "out_of_order": trace.num_out_of_order,
        "inconsistent_lengths": trace.num_inconsistent,
        "requests": reuse.num_requests,
        "seconds": seconds,
        "requests_per_second": _ratio(reuse.num_requests, seconds),
        "sessions": len(counts.sharing.num_turns),
        "turns": _summary(Counter(counts.sharing.num_turns)),
        "prompt_tokens": prompt_tokens,
        "output_tokens": _summary(counts.outputs),
        "block_size": workload.block_size,
        "accesses": reuse.num_accesses,
        "unique_blocks": reuse.num_nodes,
        "infinite_block_hit_rate": _ratio(reuse.num_hits, reuse.num_accesses),
        "infinite_token_hit_rate": _ratio(counts.num_hit_tokens, prompt_tokens["total"]),
        **counts.sharing.figures(),
        "reuse_seconds": _percentiles(*reuse.intervals()),
        "lru_blocks": _lru_blocks(reuse),
    }


class _Counts:
    """What is taken down of a trace, request by request."""

    def __init__(self) -> None:
        self.reuse, self.sharing = Reuse(), _Sharing()
        self.prompts: Counter[int] = Counter()  # requests by length
        self.outputs: Counter[int] = Counter()
        self.num_hit_tokens = 0
        self.first, self.last = math.inf, 0.0  # arrivals

    def add(self, request: TraceRequest, access: Access, workload: Workload) -> None:
        """Take down the next request."""
        hits = self.reuse.add(access, request.arrival)
        self.sharing.add(request.session, access.path[: access.num_accesses])
        self.prompts[request.num_prompt_tokens] += 1
        self.outputs[request.num_output_tokens] += 1
        self.num_hit_tokens += workload.hits_as_tokens(request, hits)
        self.first, self.last = min(self.first, request.arrival), request.arrival


class _Sharing:
    """Which blocks more than one session uses, and how many requests a session has."""

    def __init__(self) -> None:
        self.num_turns: list[int] = []  # by number of a session
        self._numbers: dict[Any, int] = {}
        self._first = Grown(-1)  # session that used a block first
        self._is_shared = Grown(0)
        self._num_uses = Grown(0)

    def add(self, session: Any, path: IntArray) -> None:
        """Take down a request by its session and the blocks of its prompt."""
        number = self._numbers.setdefault(session, len(self._numbers))
        if number == len(self.num_turns):
            self.num_turns.append(0)
        self.num_turns[number] += 1
        size = int(path.max(initial=-1)) + 1
        first, is_shared, num_uses = (each.fit(size) for each in (self._first, self._is_shared, self._num_uses))
        first[path] = np.where(first[path] < 0, number, first[path])
        is_shared[path] |= first[path] != number
        num_uses[path] += 1

    def figures(self) -> Stats:
        """How many blocks are shared, and their share of the accesses."""
        uses = self._num_uses.values
        shared = uses[self._is_shared.values > 0]
        num_accesses = int(uses.sum(dtype=np.int64))
        return {
            "shared_blocks": len(shared),
            "shared_access_share": _ratio(int(shared.sum(dtype=np.int64)), num_accesses),
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _summary(counts: Counter[int]) -> Stats:
    """Figures of values that occur so many times each."""
    total, num_values = sum(value * times for value, times in counts.items()), counts.total()
    percentiles = _percentiles(list(counts), list(counts.values()))
    return {"total": total, "mean": _ratio(total, num_values), **percentiles, "max": max(counts, default=None)}


def _percentiles(values: ArrayLike, counts: ArrayLike) -> Stats:
    """Of each percentage the least value that so many are not above."""
    values, counts = np.asarray(values), np.asarray(counts, np.int64)
    if not len(values):
        return {f"p{percent}": None for percent in PERCENTS}
    order = np.argsort(values)
    ends = np.cumsum(counts[order])
    places = {percent: np.searchsorted(ends * 100, percent * ends[-1]) for percent in PERCENTS}
    return {f"p{percent}": values[order[place]].item() for percent, place in places.items()}


def _lru_blocks(reuse: Reuse) -> dict[str, int | None]:
    if not reuse.num_hits:
        return {f"{percent}%": None for percent in PERCENTS}
    return {f"{percent}%": reuse.lru_blocks(Fraction(percent, 100)) for percent in PERCENTS}


# -------------------------------------------------------------------- for people


def describe_stats(stats: Stats) -> str:
    """The figures of `trace_stats` as a table."""
    columns = ("total", "mean", "p50", "p90", "p99", "max")
    return "\n".join(
        [
            f"{stats['path']}  ({stats['format']}, blocks of {stats['block_size']:,} tokens)",
            f"  {_shown(stats['requests'])} requests of {_shown(stats['sessions'])} sessions in "
            f"{_shown(stats['seconds'])} seconds, {_shown(stats['requests_per_second'])} a second",
            *_left_out(stats),
            "",
            _row("", *columns),
            _row("prompt tokens", *(stats["prompt_tokens"][name] for name in columns)),
            _row("output tokens", *(stats["output_tokens"][name] for name in columns)),
            _row("turns a session", *(stats["turns"][name] for name in columns)),
            "",
            _row("block accesses", stats["accesses"]),
            _row("unique blocks", stats["unique_blocks"]),
            _row("shared blocks", stats["shared_blocks"]) + "  in prompts of more than one session",
            _row("  accesses", _percent(stats["shared_access_share"])) + "  of all accesses",
            _row("infinite hit rate", _percent(stats["infinite_block_hit_rate"]))
            + "  of accesses, if nothing was evicted",
            _row("", _percent(stats["infinite_token_hit_rate"])) + "  of prompt tokens",
            "",
            _row("", *stats["reuse_seconds"]),
            _row("seconds to reuse", *stats["reuse_seconds"].values()),
            "",
            _row("", *stats["lru_blocks"]) + "  of the infinite hit rate",
            _row("blocks for LRU", *stats["lru_blocks"].values()),
        ]
    )


def _left_out(stats: Stats) -> list[str]:
    told = {
        "skipped_lines": "lines cannot be read",
        "out_of_order": "requests come before the one they stand behind",
        "inconsistent_lengths": "requests have a number of hashes that does not fit their length",
    }
    return [f"  {stats[name]:,} {words}" for name, words in told.items() if stats[name]]


def _row(name: str, *cells: float | str | None) -> str:
    return f"  {name:<18}" + "".join(f"{_shown(cell):>15}" for cell in cells)


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.2%}"
