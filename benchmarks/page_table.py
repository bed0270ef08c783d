"""What does the page table cost? Microseconds a request, nanoseconds a decoded token, bytes a block, and their growth.

    python benchmarks/page_table.py [--quick] [--json] [--peer-nano-vllm CHECKOUT]

No model. Prompts are int32 buffers; turning a Python list into one is reported apart. The peer, if a checkout is given,
is measured in the same process, in turns with ours. How well the memory is used: `waste.py`.
"""

from __future__ import annotations

import argparse
import random
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from contestants import (
    Contestant,
    Tokens,
    admit,
    decode,
    in_turns,
    live,
    nano_vllm,
    pagetable,
    publish,
    ratio,
    spread,
    unique_prompts,
)
from measure import Report, Spread, Table, seconds
from pagetable.engine import SamplingParams, Scheduler, Sequence
from pagetable.engine.batch import build_step
from pagetable.memory import BlockManager

POOL_TOKENS = 131_072
PROMPT = 4_096  # tokens of a request
SHARED = 3_072  # of these, one of the shared prefixes
NUM_PREFIXES = 20
BLOCK_SIZES = (16, 256)
GOALS = {  # name of the goal: below this
    "block 16, µs a request": 250.0,
    "block 256, µs a request": 100.0,
    "block 16, decode append at 256 running, ns a token": 1_000.0,
    "block 256, decode append at 256 running, ns a token": 1_000.0,
    "claim of a cached idle block, pool of 1M blocks over pool of 1k": 1.5,
}


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    requests: int
    slices: int  # the requests are timed in this many slices
    runs: int
    prompt_lengths: tuple[int, ...]
    pools: tuple[int, ...]
    running: tuple[int, ...]
    memory_pools: tuple[int, ...]


FULL = Scale(
    requests=2_000,
    slices=10,
    runs=5,
    prompt_lengths=tuple(1024 << i for i in range(7)),
    pools=(1_024, 10_240, 102_400, 1_048_576),
    running=(1, 4, 16, 64, 256, 1_024),
    memory_pools=(102_400, 1_048_576),
)
QUICK = Scale(
    requests=200,
    slices=4,
    runs=2,
    prompt_lengths=(1_024, 4_096),
    pools=(1_024, 10_240),
    running=(1, 256),
    memory_pools=(10_240,),
)
PEER_POOL_LIMIT = 102_400  # beyond, a peer that scans its free list takes minutes


def request_lives(contestants: list[Contestant], scale: Scale, goals: dict[str, float]) -> Table:
    """The workload of the head line, both block sizes."""
    table = Table(
        f"{scale.requests:,} requests of {PROMPT:,} tokens, {SHARED:,} of them one of {NUM_PREFIXES} prefixes, "
        f"pool of {POOL_TOKENS:,} tokens: µs a request",
        ["block", "ours, whole", "of that Sequence()", "if from a list, more", "nano-vllm", "nano-vllm / ours"],
        note="Spread over slices of the requests, in turns with the peer. Whole: Sequence() of an int32 buffer, "
        "can_allocate, allocate,\nhash_blocks, deallocate. nano-vllm: from its Python list, Sequence() not counted.",
    )
    rng = np.random.default_rng(0)
    prefixes = unique_prompts(rng, NUM_PREFIXES, SHARED)
    tails = unique_prompts(rng, scale.requests, PROMPT - SHARED)
    prompts = [np.concatenate((prefixes[rng.integers(NUM_PREFIXES)], tail)) for tail in tails]
    for block_size in BLOCK_SIZES:
        made, lived = time_slices(contestants, block_size, prompts, scale.slices)
        ours = [a + b for a, b in zip(made["pagetable"], lived["pagetable"], strict=True)]
        peer = lived.get("nano-vllm", [])
        lists = [prompt.tolist() for prompt in prompts[: scale.requests // scale.slices]]
        extra = [time_lists(lists) - Spread.of(made["pagetable"]).median for _ in range(scale.runs)]
        goals[f"block {block_size}, µs a request"] = Spread.of(ours).median
        table.rows.append(
            [block_size, spread(ours), spread(made["pagetable"]), spread(extra), spread(peer), ratio(peer, ours)]
        )
    return table


def time_slices(
    contestants: list[Contestant], block_size: int, prompts: list[Tokens], slices: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Microseconds a request to make its sequence, and for its life, by contestant and slice."""
    managers = {c.name: c.manager(POOL_TOKENS // block_size, block_size) for c in contestants}
    made: dict[str, list[float]] = {c.name: [] for c in contestants}
    lived: dict[str, list[float]] = {c.name: [] for c in contestants}
    size = len(prompts) // slices
    for turn, c in enumerate(in_turns(contestants, slices)):
        first = turn // len(contestants) * size
        making = living = 0.0
        for prompt in prompts[first : first + size]:
            start = perf_counter()
            seq = c.sequence(prompt, block_size)
            ready = perf_counter()
            live(managers[c.name], [seq])
            making += ready - start
            living += perf_counter() - ready
        made[c.name].append(making / size * 1e6)
        lived[c.name].append(living / size * 1e6)
    return made, lived


def time_lists(lists: list[list[int]]) -> float:
    """Microseconds to make a sequence of a Python list."""

    def act() -> None:
        for tokens in lists:
            Sequence(tokens)

    return seconds(act) / len(lists) * 1e6


def growth_with_length(scale: Scale) -> Table:
    """Prompts from short to long, with nothing and with everything cached."""
    table = Table(
        f"Growth with prompt length, pool of {POOL_TOKENS:,} tokens, full: µs a request",
        ["tokens", *(f"block {b}, {what}" for b in BLOCK_SIZES for what in ("none cached", "all cached"))],
    )
    rng = np.random.default_rng(1)
    for length in scale.prompt_lengths:
        row: list[Any] = [f"{length:,}"]
        for block_size in BLOCK_SIZES:
            manager = BlockManager(POOL_TOKENS // block_size, block_size)
            for prompt in unique_prompts(rng, POOL_TOKENS // length, length):
                live(manager, [Sequence(prompt, block_size=block_size)])
            count = 65_536 // length
            cold, warm = [], []
            for _ in range(scale.runs):
                prompts = unique_prompts(rng, count, length)
                for times in (cold, warm):
                    seqs = [Sequence(prompt, block_size=block_size) for prompt in prompts]
                    times.append(seconds(lambda seqs=seqs, m=manager: live(m, seqs)) / count * 1e6)
            row += [Spread.of(cold), Spread.of(warm)]
        table.rows.append(row)
    return table


def growth_with_cached_length(scale: Scale) -> Table:
    """One prompt length, more and more of it cached."""
    length = 4 * PROMPT
    table = Table(
        f"Growth with cached length, prompts of {length:,} tokens: µs a request",
        ["cached tokens", *(f"block {block_size}" for block_size in BLOCK_SIZES)],
    )
    rng = np.random.default_rng(2)
    (base,) = unique_prompts(rng, 1, length)
    for cached in range(0, length + 1, length // 4):
        row: list[Any] = [f"{min(cached, length - 1):,}"]
        for block_size in BLOCK_SIZES:
            manager = BlockManager(POOL_TOKENS // block_size, block_size)
            live(manager, [Sequence(base, block_size=block_size)])
            times = []
            for _ in range(scale.runs):
                tails = unique_prompts(rng, 4, length - cached)
                seqs = [Sequence(np.concatenate((base[:cached], tail)), block_size=block_size) for tail in tails]
                times.append(seconds(lambda seqs=seqs, m=manager: live(m, seqs)) / len(seqs) * 1e6)
            row.append(Spread.of(times))
        table.rows.append(row)
    return table


def growth_with_pool(contestants: list[Contestant], scale: Scale, goals: dict[str, float]) -> Table:
    """Pools from small to large, all blocks cached and idle."""
    table = Table(
        f"Growth with pool size, block 16, prompts of {PROMPT:,} tokens",
        [
            "blocks",
            "claim, ns a block",
            "take fresh, ns a block",
            "evict and take, ns a block",
            "uncached request, µs",
            "cached prompt, µs",
            "the same, nano-vllm",
            "nano-vllm / ours",
        ],
        note="Claim, take, evict: allocate() alone over its blocks. Cached prompt, all idle: can_allocate, allocate.",
    )
    claims = []
    for num_blocks in scale.pools:
        cost = pool_costs(contestants[0], num_blocks, scale.runs)
        peers = [c for c in contestants[1:] if num_blocks <= PEER_POOL_LIMIT]
        peer = [t for c in peers for t in pool_costs(c, num_blocks, 2)["prompt"]]
        claims.append(Spread.of(cost["claim"]).median)
        own = [spread(cost[name]) for name in ("claim", "fresh", "evict", "request", "prompt")]
        table.rows.append([f"{num_blocks:,}", *own, spread(peer), ratio(peer, cost["prompt"])])
    goals["claim of a cached idle block, pool of 1M blocks over pool of 1k"] = claims[-1] / claims[0]
    return table


def pool_costs(c: Contestant, num_blocks: int, runs: int) -> dict[str, list[float]]:
    """What taking, claiming and evicting cost in a pool of `num_blocks` blocks of 16 tokens."""
    rng = np.random.default_rng(3)
    manager = c.manager(num_blocks, 16)
    prompts = unique_prompts(rng, num_blocks * 16 // PROMPT, PROMPT)
    fresh = [time_life(c, manager, prompt) for prompt in prompts]  # fills the pool
    claims = [time_claim(c, manager, prompts[rng.integers(len(prompts))]) for _ in range(10 * runs)]
    evicting = [time_life(c, manager, prompt) for prompt in unique_prompts(rng, 10 * runs, PROMPT)]
    return {
        "fresh": [taking for taking, _ in fresh[-50:]],
        "claim": [claiming for claiming, _ in claims],
        "prompt": [whole for _, whole in claims],
        "evict": [taking for taking, _ in evicting],
        "request": [whole for _, whole in evicting],
    }


def time_life(c: Contestant, manager: Any, prompt: Tokens) -> tuple[float, float]:
    """An uncached request: nanoseconds that allocate() takes for each of its blocks, microseconds of its whole life."""
    seq = c.sequence(prompt, 16)
    taking, admitting = time_admission(manager, seq)
    publishing = seconds(lambda: (publish(manager, seq), manager.deallocate(seq)))
    return taking, admitting + publishing * 1e6


def time_claim(c: Contestant, manager: Any, prompt: Tokens) -> tuple[float, float]:
    """A cached idle prompt: nanoseconds that allocate() takes for each of its blocks, microseconds with the look-up."""
    seq = c.sequence(prompt, 16)
    times = time_admission(manager, seq)
    manager.deallocate(seq)
    return times


def time_admission(manager: Any, seq: Any) -> tuple[float, float]:
    """Nanoseconds that allocate() takes for each block, microseconds together with the look-up."""
    start = perf_counter()
    hits = manager.can_allocate(seq)
    found = perf_counter()
    manager.allocate(seq, hits)
    done = perf_counter()
    return (done - found) / seq.num_blocks * 1e9, (done - start) * 1e6


def growth_with_running(contestants: list[Contestant], scale: Scale, goals: dict[str, float]) -> Table:
    """Decode appends of more and more sequences."""
    names = [f"{c.name}, block {block_size}" for block_size in BLOCK_SIZES for c in contestants]
    table = Table(
        "Growth with running sequences, 256 tokens of prompt: decode append, ns a token",
        ["running", *names, *(f"block {block_size}: nano-vllm / ours" for block_size in BLOCK_SIZES)],
        note="The token appended to the sequence, can_append, may_append, hash_blocks, progress; 256 steps.",
    )
    for running in scale.running:
        row: list[Any] = [f"{running:,}"]
        ratios = []
        for block_size in BLOCK_SIZES:
            times: dict[str, list[float]] = {c.name: [] for c in contestants}
            for c in in_turns(contestants, scale.runs):
                times[c.name].append(time_decode(c, running, block_size))
            if running == 256:
                name = f"block {block_size}, decode append at 256 running, ns a token"
                goals[name] = Spread.of(times["pagetable"]).median
            row += [Spread.of(times[c.name]) for c in contestants]
            ratios.append(ratio(times.get("nano-vllm", []), times["pagetable"]))
        table.rows.append(row + ratios)
    return table


def time_decode(c: Contestant, running: int, block_size: int, steps: int = 256) -> float:
    """Nanoseconds a token."""
    prompts = unique_prompts(np.random.default_rng(4), running, 256)
    manager = c.manager(running * (2 + 512 // block_size), block_size)
    seqs = [c.sequence(prompt, block_size) for prompt in prompts]
    for seq in seqs:
        admit(manager, seq)
    return seconds(lambda: decode(manager, seqs, c.append, steps)) / (running * steps) * 1e9


def scheduler_steps(scale: Scale) -> Table:
    """Host time of whole decode steps, with a runner that costs nothing."""
    table = Table(
        "A decode step of the real scheduler, block 16, contexts of 1,024 tokens, no model: µs a step",
        ["running", "schedule", "of that build_step", "commit", "both", "both, ns a sequence"],
    )
    for running in scale.running:
        runs = [time_steps(running) for _ in range(scale.runs)]
        schedule, build, commit = ([run[i] for run in runs] for i in range(3))
        both = [a + b for a, b in zip(schedule, commit, strict=True)]
        per_seq = [t / running * 1e3 for t in both]
        table.rows.append([f"{running:,}", *map(Spread.of, (schedule, build, commit, both, per_seq))])
    return table


def time_steps(running: int, steps: int = 32) -> tuple[float, float, float]:
    """Mean microseconds of schedule (the batch included), of building the batch, and of commit."""
    scheduler = Scheduler(
        BlockManager(running * 80, 16), max_num_seqs=running, max_num_batched_tokens=2**21, max_model_len=8_192
    )
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for prompt in unique_prompts(np.random.default_rng(5), running, 1_024):
        scheduler.add(Sequence(prompt, params))
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, [0] * running)
    total = [0.0, 0.0, 0.0]
    for _ in range(steps):
        start = perf_counter()
        step = scheduler.schedule()
        scheduled = perf_counter()
        assert step is not None
        build_step(step.seqs, 16, frozenset())  # once more, alone
        built = perf_counter()
        scheduler.commit(step, [0] * running)
        end = perf_counter()
        total = [a + b for a, b in zip(total, (scheduled - start, built - scheduled, end - built), strict=True)]
    schedule, build, commit = (t / steps * 1e6 for t in total)
    return schedule, build, commit


def bookkeeping(scale: Scale) -> Table:
    """Memory of the page table itself."""
    table = Table(
        "Bookkeeping, by tracemalloc: bytes a block",
        ["blocks", "block", "nothing cached", "all cached, idle", "of that the tokens"],
    )
    for num_blocks in scale.memory_pools:
        for block_size in BLOCK_SIZES:
            empty, full = bytes_a_block(num_blocks, block_size)
            table.rows.append([f"{num_blocks:,}", block_size, empty, full, 4 * block_size])
    return table


def bytes_a_block(num_blocks: int, block_size: int) -> tuple[float, float]:
    """Bytes a block of a fresh manager, and of one whose blocks are all cached."""
    rng = np.random.default_rng(6)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    manager = BlockManager(num_blocks, block_size)
    empty = tracemalloc.get_traced_memory()[0] - before
    for _ in range(num_blocks // 256):
        live(manager, [Sequence(rng.integers(0, 50_000, 256 * block_size), block_size=block_size)])
    full = tracemalloc.get_traced_memory()[0] - before
    assert manager.stats().blocks_cached_idle == num_blocks
    tracemalloc.stop()
    return empty / num_blocks, full / num_blocks


def judged(measured: dict[str, float]) -> Table:
    """The goals of the project beside what was measured."""
    table = Table("Goals", ["goal", "below", "measured", "met"])
    for name, limit in GOALS.items():
        table.rows.append([name, limit, measured[name], "yes" if measured[name] < limit else "NO"])
    return table


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for CI; not to be quoted")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--peer-nano-vllm", type=Path, metavar="CHECKOUT", help="measure its block manager too")
    options = parser.parse_args()
    random.seed(0)
    scale = QUICK if options.quick else FULL
    contestants = [pagetable(), *([nano_vllm(options.peer_nano_vllm)] if options.peer_nano_vllm else [])]
    measured: dict[str, float] = {}
    report = Report(options.json, ("pagetable", "numpy", "xxhash"))
    report.add(request_lives(contestants, scale, measured))
    report.add(growth_with_length(scale))
    report.add(growth_with_cached_length(scale))
    report.add(growth_with_pool(contestants, scale, measured))
    report.add(growth_with_running(contestants, scale, measured))
    report.add(scheduler_steps(scale))
    report.add(bookkeeping(scale))
    report.add(judged(measured))
    report.close()


if __name__ == "__main__":
    main()
