"""What a replay costs: seconds for a whole trace, ns a block access, and how that grows.

    python benchmarks/replay.py                      # on made-up traffic
    python benchmarks/replay.py --trace FILE ...     # and on these traces: reading, one pass, each policy
    python benchmarks/replay.py --only growth        # --only policies, --only timed
    python benchmarks/replay.py --json

A block access is a block of a prompt that is looked up, and hit or stored. The floor beside it is what the page table
cannot do without: one 16-byte hash of the block, in the same process.

timed: the default model serves made-up traffic as it arrives, and the same traffic is replayed with the cost model that
`bench calibrate` fits to it in the same process: how well does the replay foretell?
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import deque
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from measure import Report, Spread, Table
from pagetable.engine import SamplingParams
from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.blocks import Workload
from pagetable.replay.cache_replay import CacheReplay
from pagetable.replay.readers import Trace
from pagetable.replay.replay import Analysis, analyse
from pagetable.replay.synth import TraceShape, synthesize
from pagetable.replay.timed_replay import Limits, TimedReplay

if TYPE_CHECKING:
    from pagetable import LLM
    from pagetable.request import Request

PACKAGES = ["pagetable", "numpy", "xxhash", "torch", "numba"]
SESSIONS = 2_000
SHARES = (0.001, 0.01, 0.1, 0.5)
LENGTHS = (500, 2_000, 8_000)  # sessions


def made_up(folder: str, num_sessions: int) -> Path:
    """A trace of so many sessions."""
    path = Path(folder) / f"{num_sessions}.jsonl"
    with path.open("w") as file:
        for record in synthesize(TraceShape(sessions=num_sessions), seed=1):
            file.write(json.dumps(record) + "\n")
    return path


def replayed(workload: Workload, policy: str, capacity: int) -> tuple[float, float]:
    """Seconds of a whole replay with its reading, and ns a block access in the page table."""
    began = perf_counter()
    replay = CacheReplay(workload, policy, capacity)
    for request, access in workload:
        replay.serve(request, access)
    result = replay.finish()
    return perf_counter() - began, result.seconds / result.num_accesses * 1e9


def analysed(workload: Workload) -> tuple[Analysis, float]:
    """One pass over the trace, and its seconds."""
    began = perf_counter()
    analysis = analyse(workload)
    analysis.reuse.lru_hits()
    return analysis, perf_counter() - began


def hash_ns() -> float:
    """One hash of a block in a chain."""
    prefix, block, count = bytes(16), bytes(4), 200_000
    began = perf_counter()
    for _ in range(count):
        prefix = xxhash.xxh3_128_digest(prefix + block)
    return (perf_counter() - began) / count * 1e9


def policies(report: Report, path: Path, rounds: int, capacity_share: float = 0.1) -> None:
    """Every policy on one trace."""
    workload = Workload(Trace(path))
    passes = [analysed(workload) for _ in range(rounds)]
    reuse = passes[0][0].reuse
    capacity = max(1, round(capacity_share * reuse.num_nodes))
    began = perf_counter()
    reuse.min_hits(capacity)
    optimum = perf_counter() - began
    runs: dict[str, list[tuple[float, float]]] = {policy: [] for policy in EVICTION_POLICIES}
    for number in range(rounds):
        for policy in runs if number % 2 else reversed(runs):
            runs[policy].append(replayed(workload, policy, capacity))
    table = Table(
        f"{path.name}: {reuse.num_requests:,} requests, {reuse.num_accesses:,} accesses, capacity {capacity_share:.0%}",
        ["", "whole trace, s", "ns an access"],
        note=f"A hash of a block takes {hash_ns():.0f} ns. MIN after the pass: {optimum * 1e3:.0f} ms a capacity.",
    )
    table.rows.append(["one pass: all of LRU's curve, reuse", Spread.of(seconds for _, seconds in passes), ""])
    for policy, results in runs.items():
        seconds, ns = zip(*results, strict=True)
        table.rows.append([policy, Spread.of(seconds), Spread.of(ns)])
    report.add(table)


def growth(report: Report, folder: str, rounds: int) -> None:
    """Over capacity, and over the length of the trace."""
    workload = Workload(Trace(made_up(folder, SESSIONS)))
    num_nodes = analyse(workload).reuse.num_nodes
    table = Table(f"{SESSIONS:,} sessions: ns an access by capacity", ["", *(f"{share:.1%}" for share in SHARES)])
    for policy in ("lru", "arc"):
        table.rows.append([policy, *(_ns(workload, policy, max(1, int(s * num_nodes)), rounds) for s in SHARES)])
    report.add(table)
    table = Table("capacity 10%: ns an access by length of the trace", ["", *(f"{n:,} sessions" for n in LENGTHS)])
    workloads = [Workload(Trace(made_up(folder, length))) for length in LENGTHS]
    sizes = [max(1, analyse(workload).reuse.num_nodes // 10) for workload in workloads]
    for policy in ("lru", "arc"):
        table.rows.append([policy, *(_ns(w, policy, c, rounds) for w, c in zip(workloads, sizes, strict=True))])
    report.add(table)


def _ns(workload: Workload, policy: str, capacity: int, rounds: int) -> Spread:
    return Spread.of(replayed(workload, policy, capacity)[1] for _ in range(rounds))


# ------------------------------------------------------------------------------------------------------------- timed


def timed(report: Report, folder: str, rounds: int) -> None:
    """The same requests at the same times, through the model and through the replay."""
    from pagetable import LLM
    from pagetable.calibrate import calibrate

    shape = TraceShape(
        sessions=24, session_rate=0.5, turns=3.0, think_time=2.0, prefixes=3, prefix_tokens=256, new_tokens=60.0,
        output_tokens=40.0, output_sigma=0.5, agents=0.0, max_length=1500, vocab_size=40_000,
    )  # fmt: skip
    path = Path(folder) / "tokens.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in synthesize(shape, seed=3, format="tokens")))
    workload = Workload(Trace(path), 16)
    with LLM("smollm2", kv_cache_memory="256MiB", progress=False) as llm:
        num_blocks, scheduler = len(llm.block_manager.blocks), llm.engine.scheduler
        cost = calibrate(llm, 1, say=lambda text: None)
        real = [_served(llm, workload) for _ in range(rounds)]
        limits = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, llm.max_model_len)
    foretold = TimedReplay(workload, "lru", num_blocks, cost, limits).run()
    table = Table(
        f"{len(foretold.hits)} requests as they arrive, default model: seconds",
        ["", "served", "foretold", "ratio"],
        note=f"Cost model: off by {cost.about['median_error']:.1%} at the median of {cost.about['samples']} steps.",
    )
    for name, percent in (("ttft", 50), ("ttft", 90), ("itl", 50), ("itl", 90), ("e2e", 50), ("e2e", 90)):
        told = float(np.percentile(getattr(foretold, name), percent))
        served = Spread.of(float(np.percentile(figures[name], percent)) for figures in real)
        table.rows.append([f"{name} p{percent}", served, told, told / served.median])
    table.rows.append(
        ["prompt tokens found", Spread.of(figures["hits"] for figures in real), foretold.num_hit_tokens, ""]
    )
    report.add(table)


def _served(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Latencies of the requests, each given to the engine at its time."""
    llm.reset_prefix_cache()
    engine, waiting = llm.llm_engine, deque(workload)
    figures: dict[str, Any] = {"ttft": [], "itl": [], "e2e": [], "hits": 0}
    running: dict[Request, tuple[float, float, int]] = {}  # arrival, time and number of the last token
    began = perf_counter()
    while waiting or running:
        now = perf_counter() - began
        while waiting and waiting[0][0].arrival <= now:
            request, _ = waiting.popleft()
            params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
            asked = engine.make_request({"prompt_token_ids": request.token_ids.tolist()}, params)
            engine.add_request(asked)
            running[asked] = request.arrival, 0.0, 0
        if not engine.step():
            sleep(max(0.0, waiting[0][0].arrival - now))
        now = perf_counter() - began
        for asked, (arrival, last, count) in list(running.items()):
            seq = asked.sequences[0]
            if seq.num_output_tokens > count:
                figures["itl" if count else "ttft"].append(now - (last if count else arrival))
                running[asked] = arrival, now, seq.num_output_tokens
            if asked.is_finished:
                figures["e2e"].append(now - arrival)
                figures["hits"] += asked.num_cached_tokens or 0
                del running[asked]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--only", choices=["policies", "growth", "timed"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = Report(options.json, PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "policies"):
            for path in [made_up(folder, SESSIONS), *options.trace]:
                policies(report, path, options.rounds)
        if options.only in (None, "growth"):
            growth(report, folder, options.rounds)
        if options.only in (None, "timed"):
            timed(report, folder, options.rounds)
    report.close()


if __name__ == "__main__":
    main()
