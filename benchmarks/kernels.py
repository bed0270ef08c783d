"""The CPU's kernels beside what PyTorch offers for the same work, in one process and in turns.

    python benchmarks/kernels.py [--json]

Random weights of the default model's shapes, float32, all processor cores. About two minutes.

* Products: all linear layers of one step, the head among them. `F.linear`; PyTorch's private operators that pack
  weights for oneDNN and for MKL, where they are; ours. Beside them the floor: the larger of reading the weights once
  at the speed at which this machine sums a gigabyte, and of computing at our own speed at 512 rows.
* Attention: 30 layers of a decode step through the block table, ours and the PyTorch reference; the floor is reading
  K and V once.
* Draws: one token for each of 32 rows of logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from measure import Report, Spread, Table, seconds
from pagetable.engine.step import SamplingBatch, Step
from pagetable.model import KVCache, TorchAttention, load_config, open_checkpoint
from pagetable.model.kernels import sampling
from pagetable.model.kernels.backend import PagedAttention, attend_layer
from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.linear import PackedRows, empty, multiply, multiply_gated, padded
from pagetable.model.kernels.team import Team, barrier, default_threads
from pagetable.model.kernels.tiles import STORE
from pagetable.model.kernels.vectors import TILE_COLUMNS, TILE_ROWS
from pagetable.model.sampler import draw_rows
from pagetable.text import resolve_model

RUNS = 7
PAUSE = 0.2  # seconds in which one contestant's threads come to rest before the next one is measured
BLOCK_SIZE = 16

CONFIG = load_config(open_checkpoint(resolve_model("smollm2")))
TEAM = Team(default_threads())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    report = Report(parser.parse_args().json, ["torch", "numba", "numpy"])
    torch.set_num_threads(TEAM.threads)
    bandwidth = measure_bandwidth()
    report.add(Table("Reading memory, GB/s", ["", "GB/s"], [["sum of 1 GiB of float32", bandwidth]]))
    report.add(products(bandwidth.median))
    report.add(attention(bandwidth.median))
    report.add(draws())
    report.close()


def measure_bandwidth() -> Spread:
    """Bytes a second, in 10^9, at which PyTorch sums a gigabyte."""
    numbers = torch.ones(1 << 28)
    return Spread.of([numbers.nbytes / seconds(numbers.sum) / 1e9 for _ in range(RUNS + 1)][1:])


def take_turns(contestants: dict[str, Callable[[], object]], runs: int = RUNS) -> dict[str, Spread]:
    """Milliseconds of each, measured in turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(runs + 1):
        for name, run in contestants.items():
            time.sleep(PAUSE)
            run()  # its own caches and threads, not those of the one before
            times[name].append(seconds(run) * 1e3)
    return {name: Spread.of(values[1:]) for name, values in times.items()}


def shapes() -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer, the head last."""
    c = CONFIG
    heads = c.num_heads * c.head_dim
    layer = [
        (heads + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
        (c.hidden_size, heads),
        (2 * c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    ]
    return [*layer * c.num_layers, (c.vocab_size, c.hidden_size)]


def products(bandwidth: float) -> Table:
    """All linear layers of one step, for several numbers of rows."""
    weights = [torch.randn(shape) * 0.02 for shape in shapes()]
    flop_a_row = 2 * sum(weight.numel() for weight in weights)
    packed = [pack(weights[kind:-1:4]) for kind in range(4)] + [pack(weights[-1:])]
    libraries = {"F.linear": [lambda x, w=w: F.linear(x, w) for w in weights], **packed_by_libraries(weights)}
    columns = ["rows", *libraries, "ours", "floor", "best of the others / ours"]
    table = Table("All linear layers of one step: ms", columns)
    rows_of = (512, 1, 2, 4, 8, 16, 32, 64, 128)
    scratch = empty((TEAM.threads, 2 * TILE_ROWS * TILE_COLUMNS))
    speed = 1.0
    for rows in rows_of:
        inputs = {size: torch.randn(rows, size) for size in {inputs for _, inputs in shapes()}}
        flat = [inputs[depth].numpy().reshape(-1) for _, depth in (shapes()[0], shapes()[1], shapes()[3])]
        out = empty((rows * max(padded(outputs) for outputs, _ in shapes()),))
        contestants = {
            name: lambda linears=linears, inputs=inputs: run_all(linears, weights, inputs)
            for name, linears in libraries.items()
        }
        arguments = (np.zeros(len(weights), np.int64), rows, *flat, *packed, np.empty(0, np.float32), out, scratch)
        contestants["ours"] = lambda arguments=arguments: TEAM.run(our_products, *arguments)
        times = take_turns(contestants, 3 if rows > 64 else RUNS)
        if rows == rows_of[0]:
            speed = flop_a_row * rows / times["ours"].median
        floor = max(flop_a_row * 2 / bandwidth / 1e6, flop_a_row * rows / speed)
        best = min(spread.median for name, spread in times.items() if name != "ours")
        table.rows.append([f"{rows}", *times.values(), floor, best / times["ours"].median])
    table.rows = [*table.rows[1:], table.rows[0]]
    return table


def packed_by_libraries(weights: list[torch.Tensor]) -> dict[str, list[Callable[[torch.Tensor], torch.Tensor]]]:
    """PyTorch's private operators on weights that are packed once, where this build has them."""
    found: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {}
    try:
        ops = torch.ops.mkldnn
        packed = [ops._reorder_linear_weight(w, 32) for w in weights]
        found["oneDNN packed"] = [lambda x, p=p: ops._linear_pointwise(x, p, None, "none", [], "") for p in packed]
        found["oneDNN packed"][0](torch.randn(1, weights[0].shape[1]))
    except (RuntimeError, AttributeError, NotImplementedError):
        found.pop("oneDNN packed", None)
    try:
        mkl = torch.ops.mkl
        pairs = [(w, mkl._mkl_reorder_linear_weight(w, 32)) for w in weights]
        found["MKL packed"] = [lambda x, w=w, p=p: mkl._mkl_linear(x, p, w, None, len(x)) for w, p in pairs]
        found["MKL packed"][0](torch.randn(1, weights[0].shape[1]))
    except (RuntimeError, AttributeError, NotImplementedError):
        found.pop("MKL packed", None)
    return found


def run_all(
    linears: list[Callable[[torch.Tensor], torch.Tensor]], weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]
) -> None:
    for linear, weight in zip(linears, weights, strict=True):
        linear(inputs[weight.shape[1]])


def pack(weights: list[torch.Tensor]) -> np.ndarray:
    """Matrices of one shape, (layers, panels, inputs, TILE_COLUMNS)."""
    rows, depth = weights[0].shape
    panels = empty((len(weights), padded(rows) // TILE_COLUMNS, depth, TILE_COLUMNS))
    for layer, weight in enumerate(weights):
        PackedRows(panels[layer], 0, (rows, depth)).fill(0, weight)
    return panels


@compiled
def our_products(  # type: ignore[no-untyped-def]
    thread, threads, sync, counters, rows, x0, x1, x3, qkv, o, gate_up, down, head, no_bias, out, scratch
):
    """As the decoder does it, SiLU(gate) * up included: one start of the team for all, a barrier after each."""
    hidden, inner = qkv.shape[2], down.shape[2]
    vocabulary = head.shape[1] * TILE_COLUMNS
    for layer in range(qkv.shape[0]):
        at = 4 * layer
        multiply(counters, at, threads, rows, x0, hidden, qkv[layer], no_bias, out, qkv.shape[1] * TILE_COLUMNS, STORE)
        barrier(sync, threads)
        multiply(counters, at + 1, threads, rows, x1, o.shape[2], o[layer], no_bias, out, hidden, STORE)
        barrier(sync, threads)
        multiply_gated(
            counters, at + 2, threads, rows, x0, hidden, gate_up[layer], no_bias, out, inner, scratch[thread]
        )
        barrier(sync, threads)
        multiply(counters, at + 3, threads, rows, x3, inner, down[layer], no_bias, out, hidden, STORE)
        barrier(sync, threads)
    multiply(counters, 4 * qkv.shape[0], threads, rows, x0, hidden, head[0], no_bias, out, vocabulary, STORE)


def decode_step(batch: int, context: int) -> Step:
    """`batch` sequences of `context` tokens in shuffled blocks, each about to compute its last token."""
    blocks = -(-context // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    ones = np.ones(batch, np.int32)
    return Step(
        seqs=(),
        num_scheduled_tokens=ones,
        needs_logits=ones.astype(np.bool_),
        context_lens=ones * context,
        token_ids=ones,
        positions=ones * (context - 1),
        slot_mapping=tables[:, -1].astype(np.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE,
        block_tables=tables,
        query_start=np.arange(batch + 1, dtype=np.int32),
        sampling=SamplingBatch.greedy(batch),
    )


def attention(bandwidth: float) -> Table:
    """A decode step's attention in all layers."""
    title = "Attention of a decode step, all layers: ms"
    table = Table(title, ["sequences x context", "PyTorch reference", "ours", "floor", "PyTorch / ours"])
    for batch, context in ((1, 500), (1, 4000), (8, 400), (32, 400)):
        step = decode_step(batch, context)
        cache = KVCache(CONFIG, batch * step.block_tables.shape[1], BLOCK_SIZE)
        cache.data.normal_()
        q = torch.randn(batch, CONFIG.num_heads, CONFIG.head_dim)
        k, v = torch.randn(2, batch, CONFIG.num_kv_heads, CONFIG.head_dim)
        reference, ours = TorchAttention(cache), PagedAttention(cache, TEAM)
        reference.plan(step)
        ours.plan(step)
        contestants = {
            "PyTorch": lambda reference=reference, q=q, k=k, v=v: [
                reference.attend(layer, q, k, v) for layer in range(CONFIG.num_layers)
            ],
            "ours": lambda ours=ours, q=q, k=k, v=v: attend_all(ours, q, k, v),
        }
        times = take_turns(contestants)
        floor = batch * context * CONFIG.kv_bytes_per_token(torch.float32) / bandwidth / 1e6
        ratio = times["PyTorch"].median / times["ours"].median
        table.rows.append([f"{batch} x {context:,}", *times.values(), floor, ratio])
    return table


def attend_all(backend: PagedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """All layers with one start of the team, as in the decoder."""
    plan, out = backend.prepare(CONFIG.num_heads), np.empty(q.numel(), np.float32)
    flat = [x.numpy().reshape(-1) for x in (q, k, v)]
    TEAM.run(
        our_layers, np.zeros(4 * CONFIG.num_layers, np.int64), *flat, backend.layers, out,
        CONFIG.num_heads // CONFIG.num_kv_heads, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE,
        plan.positions, plan.slots, plan.tables, plan.members, plan.units, plan.partials, plan.split_tokens,
        backend.partial_results, backend.scratch,
    )  # fmt: skip


@compiled
def our_layers(  # type: ignore[no-untyped-def]
    thread, threads, sync, counters, q, k, v, layers, out, group, kv_heads, head_dim, block_size,
    positions, slots, tables, members, units, partials, split_tokens, partial_results, scratch,
):  # fmt: skip
    """`attend_layer` for all layers."""
    for layer in range(layers.shape[0]):
        attend_layer(
            thread, threads, sync, counters[4 * layer : 4 * layer + 4], q, k, v, layers[layer, 0], layers[layer, 1],
            out, group, kv_heads, head_dim, block_size, positions, slots, tables, members, units, partials,
            split_tokens, partial_results, scratch,
        )  # fmt: skip
        barrier(sync, threads)


def draws() -> Table:
    """Sampling one token for each of 32 rows."""
    table = Table(
        "Drawing a token for each of 32 rows of logits: ms", ["", "PyTorch reference", "ours", "PyTorch / ours"]
    )
    logits = torch.randn(32, CONFIG.vocab_size) * 3
    largest, rows = logits.max(dim=-1).values, np.arange(32)
    plain = replace(SamplingBatch.greedy(32), temperature=np.full(32, 0.8, np.float32))
    cases = {
        "temperature 0.8": plain,
        "with top_p 0.9": replace(plain, top_p=np.full(32, 0.9, np.float32)),
        "with top_k 50": replace(plain, top_k=np.full(32, 50, np.int32)),
    }
    for name, batch in cases.items():
        times = take_turns(
            {
                "PyTorch": lambda batch=batch: draw_rows(logits, largest, batch, rows),
                "ours": lambda batch=batch: sampling.draw(TEAM, logits, largest, batch, rows),
            }
        )
        table.rows.append([name, *times.values(), times["PyTorch"].median / times["ours"].median])
    return table


if __name__ == "__main__":
    main()
