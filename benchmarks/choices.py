"""The figures behind docs/decisions, taken again: each option of a choice beside the one that was made.

    python benchmarks/choices.py [--json]

Needs the default model (`make venv` brings it). Two minutes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter, sleep

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader

from measure import Report, Spread, Table, seconds
from pagetable.checkpoint import open_checkpoint
from pagetable.engine import SamplingParams, Sequence
from pagetable.engine.step import SamplingBatch
from pagetable.llm import LLM
from pagetable.memory import BlockManager
from pagetable.model import load_model, sample
from pagetable.text import load_tokenizer, resolve_model

RUNS = 7
VOCABULARY = 49_152


def hashes() -> Table:
    """Decision 1: what the chain costs, and what the comparison adds."""
    table = Table("Identity: ns a block", ["block", "SHA-256", "XXH3-128", "compare content and parent"])
    for block_size in (16, 256):
        content, twin = bytes(4 * block_size), bytes(bytearray(4 * block_size))

        def sha256(prefix: bytes, content: bytes = content) -> bytes:
            return hashlib.sha256(prefix + content).digest()

        def xxh3(prefix: bytes, content: bytes = content) -> bytes:
            return BlockManager.compute_hash(content, prefix)

        def compare(prefix: bytes, content: bytes = content, twin: bytes = twin) -> bytes:
            return prefix if content == twin and len(prefix) == 16 else b""  # a second test, as for the parent

        table.rows.append([str(block_size), *(chain(step) for step in (sha256, xxh3, compare))])
    return table


def chain(step: Callable[[bytes], bytes], times: int = 20_000) -> Spread:
    """Nanoseconds of `step`, each fed with the result of the one before."""

    def run() -> None:
        value = bytes(16)
        for _ in range(times):
            value = step(value)

    return Spread.of(seconds(run) / times * 1e9 for _ in range(RUNS))


class LinkedList:
    """The other O(1) order: previous and next of each block in two lists, the end as a sentinel."""

    def __init__(self, num_blocks: int) -> None:
        self.previous, self.next, self.end = (
            [num_blocks] * (num_blocks + 1),
            [num_blocks] * (num_blocks + 1),
            num_blocks,
        )

    def add(self, block_id: int) -> None:
        last = self.previous[self.end]
        self.next[last], self.previous[block_id] = block_id, last
        self.next[block_id], self.previous[self.end] = self.end, block_id

    def remove(self, block_id: int) -> None:
        previous, following = self.previous[block_id], self.next[block_id]
        self.next[previous], self.previous[following] = following, previous

    def pop(self) -> int:
        first = self.next[self.end]
        self.remove(first)
        return first


class Ordered:
    """What `memory/free_queue.py` has."""

    def __init__(self, _: int) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int) -> None:
        self.order[block_id] = None

    def remove(self, block_id: int) -> None:
        del self.order[block_id]

    def pop(self) -> int:
        return self.order.popitem(last=False)[0]


def orders(num_blocks: int = 100_000) -> Table:
    """Decision 2: the eviction order of least recently released."""
    table = Table(f"LRU order of {num_blocks:,} blocks: ns an operation", ["kept in", "add", "remove", "pop"])
    ids = random.Random(0).sample(range(num_blocks), num_blocks)
    hit = ids[: num_blocks // 2]
    for kind in (LinkedList, Ordered):
        times: list[list[float]] = [[], [], []]
        for _ in range(RUNS):
            queue = kind(num_blocks)
            acts = ((queue.add, ids), (queue.remove, hit), (lambda _, pop=queue.pop: pop(), hit))
            for column, (act, given) in zip(times, acts, strict=True):
                column.append(seconds(lambda act=act, given=given: [act(i) for i in given]) / len(given) * 1e9)
        table.rows.append([kind.__name__, *map(Spread.of, times)])
    return table


def opening() -> Table:
    """Decision 4: from a GGUF file on disk to its header, its tokenizer, its weights."""
    path = resolve_model("smollm2")
    acts = {
        "gguf.GGUFReader": lambda: GGUFReader(path),
        "open_checkpoint": lambda: open_checkpoint(path),
        "the same and load_tokenizer": lambda: load_tokenizer(open_checkpoint(path)),
        "the same and load_model, float32": lambda: load_model(open_checkpoint(path)),
    }
    table = Table("Opening the default model: seconds", ["", "s"])
    for name, act in acts.items():
        act()
        table.rows.append([name, Spread.of(seconds(act) for _ in range(3))])
    return table


def sampling(rows: int) -> SamplingBatch:
    """Temperature 1, no filters, a seed a row."""
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.int32)
    seeds, none = np.arange(rows, dtype=np.uint64), np.empty(0, np.int32)
    return SamplingBatch(ones, zeros, ones, ones * 0, seeds, zeros.astype(np.int64), zeros - 1, none, none)


def cumulative(logits: torch.Tensor, batch: SamplingBatch) -> list[int]:
    """The other way to draw: one number a row, and a search in the cumulative sum of the weights."""
    sums = (logits - logits.max(dim=-1, keepdim=True).values).double().exp().cumsum(dim=-1)
    points = [np.random.default_rng(int(seed)).random() for seed in batch.seeds]
    return torch.searchsorted(sums, torch.tensor(points)[:, None] * sums[:, -1:]).squeeze(1).tolist()


def draws(rows: int = 400, rounds: int = 10) -> Table:
    """Decision 6: draws that rounding changes, and the price."""
    table = Table(
        f"A seeded draw of {VOCABULARY:,} tokens", ["by", f"changed by noise of 1e-5, of {rows * rounds:,}", "ms a row"]
    )
    for name, draw in (("cumulative sum", cumulative), ("race", lambda logits, batch: sample(logits, batch)[0])):
        changed, times = 0, []
        for round_ in range(rounds):
            noise = torch.Generator().manual_seed(round_)
            logits = (torch.randn(1, VOCABULARY, generator=noise) * 2).expand(rows, -1)
            other = logits + 1e-5 * torch.randn(rows, VOCABULARY, generator=noise)
            clean = draw(logits.clone(), sampling(rows))
            changed += sum(a != b for a, b in zip(clean, draw(other, sampling(rows)), strict=True))
            few, batch = logits[:16].clone(), sampling(16)
            times.append(seconds(lambda few=few, batch=batch, draw=draw: draw(few, batch)) / 16 * 1e3)
        table.rows.append([name, str(changed), Spread.of(times)])
    return table


def neighbours(num_tokens: int = 128) -> Table:
    """Decision 6: the same seeded request alone and in a batch of eight."""
    prompts = ["Once upon a time", "The meaning of life is", "In the year 2050, people", "My favourite recipe begins"]
    prompts += ["The old sailor said", "Dear diary, today", "Scientists discovered that", "Write a poem about autumn:"]
    table = Table(f"Prompts of 8 whose {num_tokens} tokens differ alone and in a batch of 8", ["temperature", "differ"])
    with LLM("smollm2", kv_cache_memory="128MiB", max_model_len=1024) as llm:
        for temperature in (1.0, 1.3):
            params = [
                SamplingParams(temperature=temperature, seed=100 + i, max_tokens=num_tokens, ignore_eos=True)
                for i in range(len(prompts))
            ]
            batch = llm.generate(prompts, params)
            alone = [llm.generate(*one)[0] for one in zip(prompts, params, strict=True)]
            pairs = zip(batch, alone, strict=True)
            differ = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in pairs)
            table.rows.append([f"{temperature}", str(differ)])
    return table


def collections(num_blocks: int = 1 << 20) -> Table:
    """What a full garbage collection costs beside a large pool, all of it cached."""
    manager = BlockManager(num_blocks, 16)
    for start in range(0, num_blocks * 16, 1 << 16):
        seq = Sequence(np.arange(start, start + (1 << 16)))
        manager.allocate(seq, 0)
        seq.num_scheduled_tokens = seq.num_tokens
        manager.hash_blocks(seq)
        manager.deallocate(seq)
    table = Table(f"A full garbage collection, {num_blocks:,} cached blocks: ms", ["", "ms"])
    gc.collect()
    table.rows.append(["as it is", Spread.of(seconds(gc.collect) * 1e3 for _ in range(RUNS))])
    gc.freeze()
    table.rows.append(["after gc.freeze()", Spread.of(seconds(gc.collect) * 1e3 for _ in range(RUNS))])
    gc.unfreeze()
    return table


def products() -> Table:
    """The default size of a step on a CPU: rows from which larger products are no faster."""
    weight = torch.randn(3072, 576)
    table = Table("gate and up of the default model, float32: GFLOP/s", ["rows", "GFLOP/s"])
    for rows in (64, 128, 256, 512, 1024, 2048):
        x, flop = torch.randn(rows, 576), 2 * rows * 576 * 3072
        times = [seconds(lambda x=x: F.linear(x, weight)) for _ in range(40)][10:]
        table.rows.append([f"{rows:,}", Spread.of(flop / time / 1e9 for time in times)])
    return table


def tokenizing(num_words: int = 200_000) -> Table:
    """Decision 9: how long an event loop stands still while another thread tokenizes a text of a megabyte."""
    backend = load_tokenizer(open_checkpoint(resolve_model("smollm2")))._backend
    rng = random.Random(1)
    text = " ".join(str(rng.randrange(100_000)) for _ in range(num_words))
    table = Table(f"A text of {len(text):,} characters in a thread: ms", ["", "tokenizing", "others stand still"])
    for name, act in (
        ("encode", backend.encode),
        ("encode_batch_fast", lambda text: backend.encode_batch_fast([text])),
    ):
        times, stalls = zip(*(beside(lambda act=act: act(text)) for _ in range(RUNS)), strict=True)
        table.rows.append([name, Spread.of(times), Spread.of(stalls)])
    return table


def beside(act: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of `act` in a thread, and the longest for which this one, napping 1 ms at a time, stood still."""
    with ThreadPoolExecutor(1) as pool:
        ticks = [perf_counter()]
        done = pool.submit(act)
        while not done.done():
            sleep(0.001)
            ticks.append(perf_counter())
    return (ticks[-1] - ticks[0]) * 1e3, max(b - a for a, b in pairwise(ticks)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    report = Report(parser.parse_args().json, ["torch", "gguf", "xxhash", "numpy"])
    for measure in (hashes, orders, opening, draws, products, collections, tokenizing, neighbours):
        report.add(measure())
    report.close()


if __name__ == "__main__":
    main()
