"""How much of the KV memory holds tokens? Contiguous reservation beside pages: figure 2 of PagedAttention (SOSP'23).

    python benchmarks/waste.py [--quick] [--json]

Requests wait without end; each step admits in order of arrival while memory lasts and every running request gains one
token. Reservations live in a real allocator, pages in the real `Scheduler` and `BlockManager`. Averages over time of
four shares, the paper's: slots that hold a token's K/V; slots that a running request will fill later; slots reserved
that it never fills; and all the rest (holes too small for the next request, rounding of the allocator).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np

from measure import Report, Spread, Table
from pagetable.engine import SamplingParams, Scheduler, Sequence
from pagetable.memory import BlockManager

POOL = 15_728  # slots: the paper's 12 GiB for OPT-13B at 800 KiB a token
MAX_LEN = 2_048
MEAN_PROMPT, MEAN_OUTPUT = 161.31, 337.99  # tokens, the paper's ShareGPT
SIGMA = 0.75  # of the logarithms; chosen so that the row `maximum` fits, all other rows follow

PAPER: dict[str, tuple[str, float | None, float | None, float | None, float | None]] = {  # figure 2, in this order
    "maximum": ("Orca (Max)", 20.4, 13.3, 57.3, 8.9),
    "power of two": ("Orca (Pow2)", 26.8, 17.9, 13.6, 41.6),
    "exact": ("Orca (Oracle)", 38.2, 25.2, 0.0, 36.6),
    "paged": ("vLLM", 96.3, None, None, None),
}


@dataclass
class Request:
    """How long it will get, and where it stands."""

    prompt: int
    output: int
    generated: int = 0
    offset: int = -1  # where its reservation begins
    reserved: int = 0


def requests(seed: int) -> Iterator[Request]:
    """An endless mix: log-normal lengths, prompt and output independent, cut at the model's length."""
    rng = np.random.default_rng(seed)

    def length(mean: float) -> int:
        return max(1, round(rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA)))

    while True:
        prompt = min(length(MEAN_PROMPT), MAX_LEN // 2)
        yield Request(prompt, min(length(MEAN_OUTPUT), MAX_LEN - prompt))


RESERVATIONS: dict[str, Callable[[Request], int]] = {
    "maximum": lambda request: MAX_LEN,
    "power of two": lambda request: (
        request.prompt + (1 << (request.output - 1).bit_length())
    ),  # at most twice the output
    "exact": lambda request: request.prompt + request.output,  # as if the output's length were known
}


class Allocator(Protocol):
    """Hands out contiguous ranges of slots."""

    def allocate(self, size: int) -> int | None:
        """Offset of `size` free slots, or None when no hole is large enough."""

    def free(self, offset: int, size: int) -> None:
        """Give back what `allocate(size)` returned."""


class FirstFit:
    """The lowest hole that is large enough; neighbouring holes are one."""

    def __init__(self, slots: int) -> None:
        self._holes = [(0, slots)]  # offset and size, ascending

    def allocate(self, size: int) -> int | None:
        """The front of the first hole that fits."""
        for i, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[i : i + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def free(self, offset: int, size: int) -> None:
        """Join with the holes on both sides."""
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._holes, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._holes = merged


class Buddy:
    """Powers of two only, split in halves and joined again with their buddy; what the paper assumes of Orca."""

    def __init__(self, slots: int) -> None:
        self._holes: dict[int, set[int]] = {1 << order: set() for order in range(slots.bit_length())}  # size to offsets
        offset = 0
        for size in sorted(self._holes, reverse=True):  # a pool that is no power of two is several trees
            if slots & size:
                self._holes[size].add(offset)
                offset += size

    def allocate(self, size: int) -> int | None:
        """The lowest of the smallest holes that fit, split down to the next power of two."""
        size = 1 << (size - 1).bit_length()
        room = next((room for room in sorted(self._holes) if room >= size and self._holes[room]), None)
        if room is None:
            return None
        offset = min(self._holes[room])
        self._holes[room].remove(offset)
        while room > size:
            room //= 2
            self._holes[room].add(offset + room)
        return offset

    def free(self, offset: int, size: int) -> None:
        """Join with the buddy as long as that is free too."""
        size = 1 << (size - 1).bit_length()
        while offset ^ size in self._holes.get(size, ()):
            self._holes[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._holes[size].add(offset)


@dataclass(frozen=True)
class Shares:
    """Percent of the pool, averaged over time, and what fits into it."""

    tokens: float
    reserved: float  # to be filled later
    internal: float  # never filled
    external: float  # all else
    running: float  # requests

    @classmethod
    def of(cls, samples: list[tuple[int, int, int, int]]) -> Shares:
        """Of samples of slots with tokens, slots to be filled, slots never filled, and requests."""
        tokens, reserved, internal, running = np.mean(samples, axis=0)
        tokens, reserved, internal = (100 * slots / POOL for slots in (tokens, reserved, internal))
        return cls(tokens, reserved, internal, 100 - tokens - reserved - internal, float(running))


def contiguous(
    reservation: Callable[[Request], int], allocator: Allocator, seed: int, steps: int, warm_up: int
) -> Shares:
    """Run requests whose memory is reserved at once, in one piece."""
    waiting = requests(seed)
    head = next(waiting)
    running: list[Request] = []
    samples = []
    for step in range(warm_up + steps):
        while (offset := allocator.allocate(reservation(head))) is not None:
            head.offset, head.reserved = offset, reservation(head)
            running.append(head)
            head = next(waiting)
        for request in running:
            request.generated += 1
        if step >= warm_up:
            tokens = sum(r.prompt + r.generated for r in running)
            used = sum(r.prompt + r.output for r in running)
            samples.append((tokens, used - tokens, sum(r.reserved for r in running) - used, len(running)))
        for request in running:
            if request.generated == request.output:
                allocator.free(request.offset, request.reserved)
        running = [r for r in running if r.generated < r.output]
    return Shares.of(samples)


def paged(block_size: int, seed: int, steps: int, warm_up: int) -> tuple[Shares, float]:
    """Run the same requests on the real page table. Also returns the share of tokens computed twice, in percent."""
    manager = BlockManager(POOL // block_size, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(manager, max_num_seqs=POOL, max_num_batched_tokens=POOL, max_model_len=MAX_LEN + 1)
    source = requests(seed)
    computed = 0
    samples = []
    for index in range(warm_up + steps):
        while len(scheduler.waiting) < 16:
            request = next(source)
            params = SamplingParams(max_tokens=request.output, ignore_eos=True)
            scheduler.add(Sequence(np.zeros(request.prompt, np.int32), params, block_size=block_size))
        step = scheduler.schedule()
        assert step is not None
        computed += step.num_tokens
        if index >= warm_up:
            tokens = sum(seq.num_cached_tokens + seq.num_scheduled_tokens for seq in scheduler.running)
            samples.append((tokens, 0, manager.stats().blocks_in_use * block_size - tokens, len(scheduler.running)))
        scheduler.commit(step, [0] * int(step.needs_logits.sum()))
    return Shares.of(samples), 100 * manager.stats().recomputed_tokens / computed


def figure_2(seeds: range, steps: int, warm_up: int) -> Table:
    """The schemes side by side, each under what the paper has."""
    table = Table(
        f"Share of {POOL:,} KV slots, percent; log-normal prompts (mean {MEAN_PROMPT:.0f}) and outputs "
        f"(mean {MEAN_OUTPUT:.0f}), sigma {SIGMA}, at most {MAX_LEN:,}",
        ["reservation", "by", "tokens", "to be filled", "never filled", "all else", "requests at once"],
        note="Spread over seeds. The paper (SOSP'23, figure 2) had a buddy allocator in all three.",
    )
    for name in PAPER:
        system, *in_paper = PAPER[name]
        table.rows.append([name, f"the paper, {system}", *in_paper, None])
        if name == "paged":
            table.rows.append([name, "pagetable, block 16", *_cells(paged(16, s, steps, warm_up)[0] for s in seeds)])
            continue
        for allocator in (Buddy, FirstFit):
            shares = (contiguous(RESERVATIONS[name], allocator(POOL), s, steps, warm_up) for s in seeds)
            table.rows.append([name, allocator.__name__, *_cells(shares)])
    return table


def _cells(shares: Iterable[Shares]) -> list[object]:
    tokens, *others = zip(*map(astuple, shares), strict=True)
    return [Spread.of(tokens), *(float(np.mean(values)) for values in others)]


def block_sizes(seeds: range, steps: int, warm_up: int, sizes: tuple[int, ...]) -> Table:
    """What the block size costs."""
    table = Table(
        "The same mix on pages of different sizes, percent",
        [
            "block",
            "tokens",
            "slots in use that no token fills",
            "blocks free",
            "requests at once",
            "tokens computed twice",
        ],
        note="Blocks free: the scheduler's head-room at admission. Computed twice: after preemption.",
    )
    for block_size in sizes:
        results = [paged(block_size, seed, steps, warm_up) for seed in seeds]
        shares = [s for s, _ in results]
        in_use = [100 * s.internal / (s.tokens + s.internal) for s in shares]
        means = [float(np.mean(values)) for values in zip(*((s.external, s.running) for s in shares), strict=True)]
        row = [block_size, Spread.of(s.tokens for s in shares), Spread.of(in_use), *means]
        table.rows.append([*row, Spread.of(again for _, again in results)])
    return table


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for CI; not to be quoted")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    seeds, steps, warm_up = (range(2), 300, 300) if options.quick else (range(5), 4_000, 1_000)
    sizes = (16, 256) if options.quick else (1, 4, 16, 64, 256)
    report = Report(options.json, ("pagetable", "numpy"), timed=False)
    report.add(figure_2(seeds, steps, warm_up))
    report.add(block_sizes(seeds, steps, warm_up, sizes))
    report.close()


if __name__ == "__main__":
    main()
