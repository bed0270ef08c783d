"""Attention of the compiled kernels: sizes and numbers at their limits, shared prefixes, and one result to the bit.

What every back-end must do is in tests/model/test_attention_backends.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from pagetable.model import KVCache
from pagetable.model.kernels.backend import PagedAttention
from pagetable.model.kernels.plan import PARTITION, UNIT_ROWS
from pagetable.model.kernels.team import Team
from tests.model.steps import make_step
from tests.model.test_attention_backends import attend_by_definition, make_config

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@dataclass(eq=False)
class Tokens:
    """Queries, keys and values of a whole sequence; with `parent`, its first `shared` keys and values are those."""

    q: torch.Tensor  # (n, H, D)
    k: torch.Tensor  # (n, G, D)
    v: torch.Tensor
    parent: Tokens | None = None
    shared: int = 0

    def exact(self, begin: int, end: int) -> np.ndarray:
        q, k, v = (x.double().numpy() for x in (self.q, self.k, self.v))
        return attend_by_definition(q[begin:end], k[:end], v[:end], begin)


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32  # of the cache, and so of keys and values; queries are float32

    def tokens(self, rng: np.random.Generator, count: int, parent: Tokens | None = None, shared: int = 0) -> Tokens:
        def draw(heads: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal((count, heads, self.head_dim), np.float32))

        q, k, v = draw(self.kv_heads * self.group), draw(self.kv_heads), draw(self.kv_heads)
        k, v = k.to(self.dtype), v.to(self.dtype)
        if parent is not None:
            k[:shared], v[:shared] = parent.k[:shared], parent.v[:shared]
        return Tokens(q, k, v, parent, shared)


@dataclass
class Pool:
    """A cache of shuffled blocks, its unwritten slots NaN, that hands out block tables."""

    cache: KVCache
    free: list[int]
    tables: dict[int, list[int]] = field(default_factory=dict)  # by the id of a sequence that others share with

    def table(self, tokens: Tokens, length: int, share: bool) -> list[int]:
        table: list[int] = []
        if share and tokens.parent is not None:
            parent = self.tables.get(id(tokens.parent)) or self.table(tokens.parent, len(tokens.parent.k), share)
            table = parent[: tokens.shared // self.cache.block_size]
        table = table + [self.free.pop() for _ in range(-(-length // self.cache.block_size) - len(table))]
        self.tables[id(tokens)] = table
        return table

    def fill(self, tokens: Tokens, table: list[int], end: int) -> None:
        position, size = np.arange(end), self.cache.block_size
        slots = torch.from_numpy(np.array(table, np.int64)[position // size] * size + position % size)
        for stored, numbers in zip(self.cache.slots(1), (tokens.k, tokens.v), strict=True):
            stored[slots] = numbers[:end]


Span = tuple[Tokens, int, int]  # tokens `begin` to `end` are computed, those before are in the cache


def attend(
    shape: Shape, spans: list[Span], block_size: int = 16, threads: int = 1, share: bool = True
) -> list[np.ndarray]:
    """One step; for each span (end - begin, H, D). With `share`, a prefix stands in the parent's blocks."""
    parents = {id(tokens.parent): tokens.parent for tokens, _, _ in spans if share and tokens.parent is not None}
    lengths = [end for _, _, end in spans] + [len(parent.k) for parent in parents.values()]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 2
    config = make_config(shape.kv_heads, shape.group, shape.head_dim)
    pool = Pool(KVCache(config, num_blocks, block_size, dtype=shape.dtype), [])
    pool.cache.data.fill_(torch.nan)
    pool.free = np.random.default_rng(num_blocks).permutation(num_blocks).tolist()
    tables = [pool.table(tokens, end, share) for tokens, _, end in spans]
    for (tokens, begin, _), table in zip(spans, tables, strict=True):
        pool.fill(tokens, table, begin)
    step = make_step(
        tables, [begin for _, begin, _ in spans], [[0] * (end - begin) for _, begin, end in spans], block_size
    )
    backend = PagedAttention(pool.cache, Team(threads))
    backend.plan(step)
    q, k, v = (torch.cat([getattr(tokens, name)[begin:end] for tokens, begin, end in spans]) for name in "qkv")
    out = backend.attend(1, q, k, v).numpy()
    return np.split(out, np.cumsum([end - begin for _, begin, end in spans])[:-1])


def check(shape: Shape, spans: list[Span], tolerance: float = 2e-5, **how: int) -> None:
    for (tokens, begin, end), out in zip(spans, attend(shape, spans, **how), strict=True):
        np.testing.assert_allclose(out, tokens.exact(begin, end), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------------- sizes


@DTYPES
@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_batch_of_any_sizes_attends_as_defined(dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head_dim = (16, 20, 64, 80, 96, 128)[seed % 6]
    shape = Shape(int(rng.integers(1, 4)), 1 + seed % 8, head_dim, dtype)
    spans = []
    for length in rng.integers(1, 400, rng.integers(1, 6)).tolist():
        begin = length - 1 if rng.random() < 0.5 else int(rng.integers(max(0, length - 60), length))
        spans.append((shape.tokens(rng, length), begin, length))
    check(shape, spans, block_size=int(rng.choice([1, 2, 16, 256])), threads=int(rng.integers(1, 4)))


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_contexts_of_thousands_attend_as_defined(dtype: torch.dtype, threads: int) -> None:
    rng = np.random.default_rng(threads)
    shape = Shape(2, 2, 64, dtype)
    lengths = [(5000, 4999), (2500, 2480), (1, 0), (256, 255), (257, 256), (1024, 1000), (512, 511)]
    spans = [(shape.tokens(rng, end), begin, end) for end, begin in lengths]
    check(shape, spans, threads=threads)


@pytest.mark.parametrize("edge", [PARTITION - 1, PARTITION, PARTITION + 1, 2 * PARTITION])
@pytest.mark.parametrize("block_size", [1, 256, 1024])
def test_a_context_that_ends_at_a_partitions_edge(edge: int, block_size: int) -> None:
    rng = np.random.default_rng(edge)
    shape = Shape()
    check(shape, [(shape.tokens(rng, edge), edge - count, edge) for count in (1, 2, 40)], block_size=block_size)


def test_more_heads_on_a_kv_head_than_a_unit_has_rows_are_refused() -> None:
    """They would be computed past the end of its arrays."""
    shape = Shape(1, UNIT_ROWS + 1, 16)
    tokens = shape.tokens(np.random.default_rng(0), 40)
    with pytest.raises(ValueError, match=f"at most {UNIT_ROWS}"):
        attend(shape, [(tokens, 39, 40)])
    check(Shape(1, UNIT_ROWS, 16), [(Shape(1, UNIT_ROWS, 16).tokens(np.random.default_rng(0), 40), 37, 40)])


# ------------------------------------------------------------------------------------------------------------- numbers


def scaled(tokens: Tokens, q: float = 1, k: float = 1, v: float = 1) -> Tokens:
    return Tokens(tokens.q * q, tokens.k * k, tokens.v * v, tokens.parent, tokens.shared)


SPANS = [(300, 299), (300, 260), (1, 0), (40, 0)]  # end, begin: a lone query, a piece, the shortest, a whole prompt


@DTYPES
@pytest.mark.parametrize(
    ("scales", "quantum"),
    [
        ({"v": 1e-40}, 1e-42),
        ({"v": 1e30}, 1e25),
        ({"k": 1e-40}, 0),
        ({"k": 1e30, "q": 1e-30}, 0),
        ({"k": 1e-30, "q": 1e30}, 0),
    ],
    ids=["denormal values", "huge values", "denormal keys", "huge keys", "huge queries"],
)
def test_denormal_and_huge_numbers_attend_as_defined(dtype: torch.dtype, scales: dict, quantum: float) -> None:
    rng = np.random.default_rng(5)
    shape = Shape(1, 4, 80, dtype)
    spans = [(scaled(shape.tokens(rng, end), **scales), begin, end) for end, begin in SPANS]
    for (tokens, begin, end), out in zip(spans, attend(shape, spans, threads=2), strict=True):
        np.testing.assert_allclose(out, tokens.exact(begin, end), rtol=2e-5, atol=quantum or 2e-5)
        assert np.abs(out).max() > 0


@pytest.mark.parametrize("scale", [4, 16, 64])
def test_scores_so_far_apart_that_weights_vanish_attend_as_defined(scale: int) -> None:
    """Whole numbers, whose scores are exact in float32: then even weights of e ** -80 must be right."""
    rng = np.random.default_rng(scale)
    shape = Shape(1, 2, 64)
    spans = []
    for end, begin in [*SPANS, (700, 699), (700, 660)]:
        tokens = shape.tokens(rng, end)
        tokens.q.copy_(torch.from_numpy(rng.integers(-scale, scale + 1, tokens.q.shape)))
        tokens.k.copy_(torch.from_numpy(rng.integers(-8, 9, tokens.k.shape)))
        spans.append((tokens, begin, end))
    check(shape, spans)


@DTYPES
@pytest.mark.parametrize("where", [0, 255, 256, 511, 698])
def test_all_weight_on_one_key_gives_its_value_to_the_bit(dtype: torch.dtype, where: int) -> None:
    rng = np.random.default_rng(where)
    shape = Shape(2, 2, 64, dtype)
    tokens = shape.tokens(rng, 700)
    tokens.q.fill_(1.0)
    tokens.k.fill_(-100.0)
    tokens.k[where] = 100.0
    for begin in (699, 690):
        (out,) = attend(shape, [(tokens, begin, 700)])
        out = out[max(0, where - begin) :]  # those before do not see that key
        expected = tokens.v[where].float().numpy().repeat(shape.group, 0)
        assert (out == expected).all()


# ---------------------------------------------------------------------------------------------------- shared prefixes


@DTYPES
@pytest.mark.parametrize("seed", range(4))
def test_decodes_that_share_a_prefix_attend_as_defined(dtype: torch.dtype, seed: int) -> None:
    """Two families, one with more members than fit into a unit; some share part of the prefix only."""
    rng = np.random.default_rng(seed)
    shape = Shape(1, 8, 16, dtype)
    large, small = shape.tokens(rng, 3 * PARTITION + 40), shape.tokens(rng, 2 * PARTITION)
    spans: list[Span] = []
    for _ in range(UNIT_ROWS // shape.group + 3):
        shared = int(rng.choice([768, 800, 512, 300, 16]))
        length = shared + int(rng.integers(1, 300))
        spans.append((shape.tokens(rng, length, large, shared), length - 1, length))
    for shared in (512, 512, 256, 255 // 16 * 16):
        length = shared + int(rng.integers(1, 30))
        spans.append((shape.tokens(rng, length, small, shared), length - 1, length))
    spans.append((shape.tokens(rng, 600, small, 512), 512, 600))  # a chunk after the shared prefix
    rng.shuffle(spans)  # type: ignore[arg-type]
    check(shape, spans, threads=2)


def test_more_sharers_than_a_unit_holds_are_split_among_units() -> None:
    rng = np.random.default_rng(1)
    shape = Shape(1, 2, 16)
    parent = shape.tokens(rng, 2 * PARTITION)
    count = UNIT_ROWS // shape.group * 2 + 1
    spans = [(shape.tokens(rng, 2 * PARTITION + 5, parent, 2 * PARTITION), 516, 517) for _ in range(count)]
    check(shape, spans, threads=2)


# ---------------------------------------------------------------------------------------------------------- to the bit

LENGTH = 2 * PARTITION + 88
LONE = (0, 1, 15, 16, 100, 254, 255, 256, 257, 511, 512, 513, LENGTH - 1)

VARIANTS = [
    Shape(2, 3, 64),
    Shape(2, 3, 64, torch.bfloat16),
    Shape(1, 1, 80),
    Shape(1, 8, 20, torch.bfloat16),
    Shape(1, 5, 128),
    Shape(3, 4, 16),
]
SHAPES = pytest.mark.parametrize("shape", VARIANTS, ids=lambda s: f"{s.group}x{s.head_dim}-{str(s.dtype)[6:]}")


@cache
def reference(shape: Shape) -> tuple[Tokens, np.ndarray]:
    """A sequence of three partitions, and its attention computed as one chunk by one thread."""
    tokens = shape.tokens(np.random.default_rng(8), LENGTH)
    (out,) = attend(shape, [(tokens, 0, LENGTH)])
    np.testing.assert_allclose(out[::17], tokens.exact(0, LENGTH)[::17], rtol=2e-5, atol=2e-5)
    return tokens, out


def assert_same_bits(out: np.ndarray, expected: np.ndarray, what: object) -> None:
    assert out.shape == expected.shape
    assert out.tobytes() == expected.tobytes(), f"{what}: rows {np.flatnonzero((out != expected).any((1, 2)))[:9]}"


@SHAPES
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_bits_do_not_depend_on_blocks_and_threads(shape: Shape, block_size: int, threads: int) -> None:
    tokens, expected = reference(shape)
    (out,) = attend(shape, [(tokens, 0, LENGTH)], block_size, threads)
    assert_same_bits(out, expected, "one chunk")
    for position in LONE:
        (out,) = attend(shape, [(tokens, position, position + 1)], block_size, threads)
        assert_same_bits(out, expected[position : position + 1], position)


@SHAPES
@pytest.mark.parametrize("seed", range(4))
def test_bits_do_not_depend_on_chunks(shape: Shape, seed: int) -> None:
    tokens, expected = reference(shape)
    rng = np.random.default_rng(seed)
    size = (2, 7, 64, 300)[seed]
    begin = int(rng.integers(0, 400)) if size < 64 else 0
    cuts = np.cumsum([begin, *rng.integers(1, 2 * size, 12)]).clip(max=LENGTH)
    for first, end in pairwise(cuts.tolist()):
        if first < end:
            (out,) = attend(shape, [(tokens, first, end)], 16, 1 + seed % 3)
            assert_same_bits(out, expected[first:end], (first, end))


@SHAPES
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_neighbours(shape: Shape, threads: int) -> None:
    tokens, expected = reference(shape)
    rng = np.random.default_rng(threads)
    spans: list[Span] = [(tokens, position, position + 1) for position in LONE]
    spans += [(tokens, 200, 280), (tokens, 0, 3), (tokens, 530, LENGTH)]
    mine = len(spans)
    for length in rng.integers(1, 700, 20).tolist():
        begin = length - 1 if rng.random() < 0.7 else int(rng.integers(max(0, length - 99), length))
        spans.append((shape.tokens(rng, length), begin, length))
    spans[-1][0].k.fill_(torch.nan)  # what is wrong with one is none of the others' business
    spans[-2][0].v.fill_(torch.inf)
    order = rng.permutation(len(spans))
    out = attend(shape, [spans[i] for i in order], 16, threads)
    for place, number in enumerate(order):
        if number < mine:
            _, begin, end = spans[number]
            assert_same_bits(out[place], expected[begin:end], (begin, end))


@SHAPES
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_bits_do_not_depend_on_who_holds_the_prefix(shape: Shape, block_size: int) -> None:
    parent, _ = reference(shape)
    rng = np.random.default_rng(block_size)
    spans: list[Span] = []
    for number in range(UNIT_ROWS // shape.group + 2):
        shared = (512, 512, 256)[number % 3]
        length = shared + (1, 3, 70, 256, 300)[number % 5]
        spans.append((shape.tokens(rng, length, parent, shared), length - 1 - number % 2 * (number % 5), length))
    together = attend(shape, spans, block_size, 2)
    apart = attend(shape, spans, block_size, 1, share=False)
    for number, (span, one, other) in enumerate(zip(spans, together, apart, strict=True)):
        assert_same_bits(one, other, span[1:])
        if number < 6:
            assert_same_bits(one, attend(shape, [span], block_size)[0], span[1:])
