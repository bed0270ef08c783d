"""Which blocks stay? Hit rates of every policy beside the optimum, what hints are worth, and what LHC costs.

    python benchmarks/eviction.py                          # on made-up traffic
    python benchmarks/eviction.py --trace FILE ...         # on these traces
    python benchmarks/eviction.py --only rates             # hints, cost, blocks, timed; a minute or some each

rates   hits of each policy, cache only, as `pagetable replay` counts them, and MIN
hints   LHC and LRU when half of the sessions, all, or all with a fifth of lies declare their ends
cost    of the policy alone: microseconds a block access and a request, bytes of metadata a block
blocks  the same traffic and memory in blocks of 1/32 of the size, so that chains leave in part (traces of hashes)
timed   the scheduler in time with the built-in cost model: seconds to the first token, tokens a second
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from measure import Report, Spread, Table
from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.blocks import Workload
from pagetable.replay.cache_replay import CacheReplay, CacheResult
from pagetable.replay.cost import DEFAULT_COST
from pagetable.replay.hinting import with_ends, with_last_uses
from pagetable.replay.readers import Trace
from pagetable.replay.replay import analyse
from pagetable.replay.reuse import Access, Reuse
from pagetable.replay.synth import TraceShape, synthesize
from pagetable.replay.timed_replay import Limits, TimedReplay
from pagetable.replay.trace import TraceRequest

PACKAGES = ["pagetable", "numpy", "xxhash"]
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
CLASSICS = [name for name in EVICTION_POLICIES if name not in ("lru", "lhc")]
SPLIT = 32  # blocks of 16 tokens in one of 512

Requests = Iterable[tuple[TraceRequest, Access]]


def capacity_of(share: float, num_blocks: int) -> int:
    """A share of the unique blocks."""
    return max(1, round(share * num_blocks))


def sized(path: Path) -> tuple[Workload, Reuse, list[int]]:
    """A trace, what one pass over it tells, and the capacities that are looked at."""
    workload = Workload(Trace(path))
    reuse = analyse(workload).reuse
    return workload, reuse, [capacity_of(share, reuse.num_nodes) for share in SHARES]


def replayed(workload: Workload, policy: str, capacity: int, requests: Requests | None = None) -> CacheResult:
    """What a policy does with the requests, by default those of the trace."""
    replay = CacheReplay(workload, policy, capacity)
    for request, access in workload if requests is None else requests:
        replay.serve(request, access)
    return replay.finish()


def hit_rate(workload: Workload, policy: str, capacity: int, requests: Requests | None = None) -> float:
    """Per cent of the block accesses that hit."""
    result = replayed(workload, policy, capacity, requests)
    return 100 * result.num_hits / result.num_accesses


def by_capacity(title: str, note: str = "") -> Table:
    """A table with a column for each share."""
    return Table(title, ["", *(f"{share:.0%}" for share in SHARES)], note=note)


def rates(report: Report, path: Path) -> None:
    """Every policy at every capacity."""
    workload, reuse, sizes = sized(path)
    table = by_capacity(
        f"{path.name}: {reuse.num_requests:,} requests, {reuse.num_nodes:,} unique blocks; hits, % of block accesses",
        note="Best classic: the best of the others in that column, which nobody knows beforehand.",
    )
    rows = {policy: [hit_rate(workload, policy, size) for size in sizes] for policy in ("lru", *CLASSICS, "lhc")}
    best = [max(column) for column in zip(rows["lru"], *(rows[name] for name in CLASSICS), strict=True)]
    optimum = [100 * reuse.min_hits(size) / reuse.num_accesses for size in sizes]
    rows |= {"best classic": best, "MIN": optimum}
    table.rows += [[name, *(f"{value:.2f}" for value in row)] for name, row in rows.items()]
    table.rows.append(["lhc - best classic", *(f"{a - b:+.2f}" for a, b in zip(rows["lhc"], best, strict=True))])
    report.add(table)


def hints(report: Report, path: Path) -> None:
    """What declared ends are worth, honest and not."""
    workload, _, sizes = sized(path)
    table = by_capacity(
        f"{path.name}: ends of sessions declared; hits, % of block accesses",
        note="A lie: the session goes on. True for each request: an end on all that leave nothing of use.",
    )
    cases = {"nobody": (0.0, 0.0), "half": (0.5, 0.0), "all": (1.0, 0.0), "all, 20 % lies": (1.0, 0.2)}
    for policy in ("lru", "lhc"):
        for name, (share, lies) in cases.items():
            row = [hit_rate(workload, policy, size, with_ends(workload, share, lies)) for size in sizes]
            table.rows.append([f"{policy}, {name}", *(f"{value:.2f}" for value in row)])
        row = [hit_rate(workload, policy, size, with_last_uses(workload)) for size in sizes]
        table.rows.append([f"{policy}, true for each request", *(f"{value:.2f}" for value in row)])
    report.add(table)


# -------------------------------------------------------------------------------------------------------------- cost


class Metered:
    """A policy that is timed: every call of it, from outside."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.policy, name)

        def timed(*arguments: Any) -> Any:
            began = perf_counter()
            result = method(*arguments)
            self.seconds += perf_counter() - began
            return result

        if callable(method):
            setattr(self, name, timed)
            return timed
        return method

    def __len__(self) -> int:
        return len(self.policy)


def metered(workload: Workload, policy: str, capacity: int) -> tuple[float, list[float], Any]:
    """Microseconds in the policy a block access, seconds in it by request, and the policy as it stands at the end."""
    replay = CacheReplay(workload, policy, capacity)
    manager = replay._manager
    meter = Metered(manager.eviction_policy)
    manager.free_block_ids.cached = manager._feed.policy = meter  # type: ignore[assignment]
    by_request = []
    for request, access in workload:
        before = meter.seconds
        replay.serve(request, access)
        by_request.append(meter.seconds - before)
    return 1e6 * meter.seconds / replay.finish().num_accesses, by_request, meter.policy


def cost(report: Report, path: Path, rounds: int) -> None:
    """Of the policy alone, by capacity."""
    workload, _, sizes = sized(path)
    table = Table(
        f"{path.name}: time in the policy (about 0.1 us of each call is the clock's)",
        ["", "us an access", "us a request p50", "p99", "bytes a block"],
        note="bytes a block: all that the policy holds at the end, ghosts and tables too, over the capacity.",
    )
    for share, size in zip(SHARES, sizes, strict=True):
        runs: dict[str, list[tuple[float, list[float], Any]]] = {"lru": [], "lhc": []}
        for number in range(rounds):
            for policy in runs if number % 2 else reversed(runs):
                runs[policy].append(metered(workload, policy, size))
        for policy, results in runs.items():
            percentiles = [np.percentile(by_request, (50, 99)) * 1e6 for _, by_request, _ in results]
            table.rows.append([
                f"{policy}, {share:.0%}",
                Spread.of(us for us, _, _ in results),
                Spread.of(float(p50) for p50, _ in percentiles),
                Spread.of(float(p99) for _, p99 in percentiles),
                f"{size_of(results[0][2]) / size:,.0f}",
            ])  # fmt: skip
    report.add(table)


def size_of(root: object) -> int:
    """Bytes of an object and of all that hangs on it, each thing once; functions and classes do not count."""
    seen: set[int] = set()
    stack, total = [root], 0
    while stack:
        thing = stack.pop()
        if id(thing) in seen or callable(thing):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        if isinstance(thing, dict):
            stack += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            stack += thing
        elif not isinstance(thing, str | bytes | bytearray | int | float | np.ndarray):
            names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            stack += [getattr(thing, name) for name in names if hasattr(thing, name)]
            stack += vars(thing).values() if hasattr(thing, "__dict__") else ()
    return total


# ------------------------------------------------------------------------------------------------------------ blocks


def blocks(report: Report, path: Path, folder: str) -> None:
    """Small blocks against large ones, in the same memory."""
    large, _, sizes = sized(path)
    if not large.is_hashed:
        return
    small_path = Path(folder) / "small.jsonl"
    with small_path.open("w") as file:
        for request, _ in large:
            file.write(json.dumps(_split(request, large.block_size)) + "\n")
    small = Workload(Trace(small_path))
    table = by_capacity(
        f"{path.name}: the same memory in blocks of {large.block_size} and {small.block_size} tokens; % of tokens hit"
    )
    for policy in ("lru", "lhc"):
        for workload, factor in ((large, 1), (small, SPLIT)):
            row = [_token_rate(workload, policy, size * factor) for size in sizes]
            table.rows.append([f"{policy}, {workload.block_size}", *(f"{value:.2f}" for value in row)])
    report.add(table)


def _split(request: TraceRequest, block_size: int) -> dict[str, Any]:
    """A request with each block as SPLIT smaller ones; of the last block only those that its tokens fill or begin."""
    assert request.hash_ids is not None
    num_small = -(-request.num_prompt_tokens // (block_size // SPLIT))
    hash_ids = [f"{hash}.{i}" for hash in request.hash_ids for i in range(SPLIT)][:num_small]
    return {
        "timestamp": request.arrival * 1000,
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": hash_ids,
        "block_size": block_size // SPLIT,
    }


def _token_rate(workload: Workload, policy: str, capacity: int) -> float:
    result = replayed(workload, policy, capacity)
    return 100 * result.num_hit_tokens / result.num_prompt_tokens


# ------------------------------------------------------------------------------------------------------------- timed


def timed(report: Report, path: Path, slowdown: float) -> None:
    """Requests overlap, wait for each other and are preempted."""
    workload, _, sizes = sized(path)
    table = Table(
        f"{path.name}: in time, {slowdown:g} times as slow as it was, built-in cost model",
        ["", "hits, %", "TTFT p50, s", "p90", "mean", "busy, s"],
        note="busy: seconds of computing for the same answers, so that throughput is one over it.",
    )
    for share, size in list(zip(SHARES, sizes, strict=True))[:3]:
        for policy in ("lru", "lhc"):
            result = TimedReplay(workload, policy, size, DEFAULT_COST, Limits(), speed=1 / slowdown).run()
            p50, p90 = np.percentile(result.ttft, (50, 90)).tolist()
            rate = 100 * result.num_hits / result.num_accesses
            row = [f"{rate:.2f}", p50, p90, float(np.mean(result.ttft)), result.busy]
            table.rows.append([f"{policy}, {share:.0%}", *row])
    report.add(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--only", choices=["rates", "hints", "cost", "blocks", "timed"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.0, help="timed: stretch the trace, where it is too much work")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = Report(options.json, PACKAGES, timed=options.only in (None, "cost", "timed"))
    with tempfile.TemporaryDirectory() as folder:
        paths = options.trace
        if not paths:
            paths = [Path(folder) / "made-up.jsonl"]
            lines = [json.dumps(record) + "\n" for record in synthesize(TraceShape(sessions=3_000), seed=1)]
            paths[0].write_text("".join(lines))
        for path in paths:
            if options.only in (None, "rates"):
                rates(report, path)
            if options.only in (None, "hints"):
                hints(report, path)
            if options.only in (None, "cost"):
                cost(report, path, options.rounds)
            if options.only in (None, "blocks"):
                blocks(report, path, folder)
            if options.only in (None, "timed"):
                timed(report, path, options.slower)
    report.close()


if __name__ == "__main__":
    main()
