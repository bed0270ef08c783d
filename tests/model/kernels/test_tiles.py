"""A tile of a product: right for every number of rows, and the same to the bit for each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.tiles import ADD, CHAIN, STORE, multiply_tile, transpose_square
from pagetable.model.kernels.vectors import LANES, TILE_COLUMNS, TILE_ROWS

GUARD = np.float32(-77)


@compiled
def multiply_at(rows, a, a_at, a_row, b, b_at, b_row, depth, c, c_at, c_row, how, soon_at, soon_step):
    multiply_tile(rows, a, a_at, a_row, b, b_at, b_row, depth, c, c_at, c_row, how, soon_at, soon_step)


@compiled
def transpose_at(a, a_at, a_row, c, c_at, c_row):
    transpose_square(a, a_at, a_row, c, c_at, c_row)


class Operands:
    """a (TILE_ROWS, depth), b (depth, TILE_COLUMNS) and c, each in the middle of a flat array with other numbers."""

    def __init__(self, seed: int, depth: int, kind: str) -> None:
        rng = np.random.default_rng(seed)
        self.depth, self.prefetched = depth, 0
        self.a_at, self.b_at, self.c_at = (int(n) for n in rng.integers(0, 9, 3))
        self.a_row, self.b_row = depth + int(rng.integers(0, 5)), TILE_COLUMNS + int(rng.integers(0, 5))
        self.c_row = TILE_COLUMNS + int(rng.integers(0, 5))
        self.a = np.full(self.a_at + TILE_ROWS * self.a_row + 9, np.nan, np.float32)
        wide = torch.from_numpy(rng.standard_normal((depth, TILE_COLUMNS)).astype(np.float32))
        if kind == "bfloat16":
            stored = wide.to(torch.bfloat16)
            self.b = np.full(self.b_at + depth * self.b_row + 9, 0x7FC0, np.uint16)  # NaN
            self.matrix_b, numbers = stored.double().numpy(), stored.view(torch.uint16).numpy()
        else:
            self.b = np.full(self.b_at + depth * self.b_row + 9, np.nan, np.float32)
            self.matrix_b, numbers = wide.double().numpy(), wide.numpy()
        self.matrix_a = rng.standard_normal((TILE_ROWS, depth)).astype(np.float32)
        rows_of(self.a, self.a_at, self.a_row, TILE_ROWS, depth)[:] = self.matrix_a
        rows_of(self.b, self.b_at, self.b_row, depth, TILE_COLUMNS)[:] = numbers
        self.before = rng.standard_normal((TILE_ROWS, TILE_COLUMNS)).astype(np.float32)

    def compute(
        self, rows: int, how: int, first: int = 0, begin: int = 0, end: int | None = None, c: np.ndarray | None = None
    ) -> np.ndarray:
        """The whole of c, flat, after `rows` rows from `first` on over the depth from `begin` to `end`."""
        if c is None:
            c = np.full(self.c_at + TILE_ROWS * self.c_row + 9, GUARD)
            self.tile(c)[:] = self.before
        depth = (self.depth if end is None else end) - begin
        multiply_at(
            rows, self.a, self.a_at + first * self.a_row + begin, self.a_row,
            self.b, self.b_at + begin * self.b_row, self.b_row, depth,
            c, self.c_at + first * self.c_row, self.c_row, how, self.b_at + self.prefetched, 256 * rows,
        )  # fmt: skip
        return c

    def tile(self, c: np.ndarray) -> np.ndarray:
        return rows_of(c, self.c_at, self.c_row, TILE_ROWS, TILE_COLUMNS)


def rows_of(flat: np.ndarray, at: int, row: int, rows: int, columns: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(flat[at:], (rows, columns), (row * flat.itemsize, flat.itemsize))


KINDS = pytest.mark.parametrize("kind", ["float32", "bfloat16"])
HOW = pytest.mark.parametrize("how", [STORE, ADD, CHAIN], ids=["store", "add", "chain"])


@KINDS
@HOW
@pytest.mark.parametrize("depth", [0, 1, 2, 37, 300])
def test_a_tile_of_any_height_is_the_product_and_leaves_the_rest(kind: str, how: int, depth: int) -> None:
    operands = Operands(depth, depth, kind)
    exact = operands.matrix_a @ operands.matrix_b + (0 if how == STORE else operands.before)
    for rows in range(1, TILE_ROWS + 1):
        c = operands.compute(rows, how)
        np.testing.assert_allclose(operands.tile(c)[:rows], exact[:rows], rtol=1e-5, atol=1e-5)
        assert (operands.tile(c)[rows:] == operands.before[rows:]).all()
        rows_of(c, operands.c_at, operands.c_row, TILE_ROWS, TILE_COLUMNS)[:] = GUARD
        assert (c == GUARD).all(), "something outside the tile was written"


@KINDS
@HOW
@pytest.mark.parametrize("depth", [5, 64, 257])
def test_a_row_has_the_same_bits_in_a_tile_of_any_height(kind: str, how: int, depth: int) -> None:
    operands = Operands(100 + depth, depth, kind)
    whole = operands.tile(operands.compute(TILE_ROWS, how)).copy()
    for rows in range(1, TILE_ROWS + 1):
        for first in {0, (TILE_ROWS - rows) // 2, TILE_ROWS - rows}:
            here = operands.tile(operands.compute(rows, how, first))[first : first + rows]
            assert here.tobytes() == whole[first : first + rows].tobytes()


@KINDS
@pytest.mark.parametrize("cuts", [(1,), (32,), (63,), (16, 17, 40)])
def test_a_chain_over_parts_of_the_depth_has_the_bits_of_one_over_all(kind: str, cuts: tuple[int, ...]) -> None:
    operands = Operands(7, 64, kind)
    for rows in (1, 3, TILE_ROWS):
        whole = operands.tile(operands.compute(rows, STORE))[:rows]
        c, begin = None, 0
        for end in (*cuts, 64):
            c = operands.compute(rows, CHAIN if begin else STORE, 0, begin, end, c)
            begin = end
        assert operands.tile(c)[:rows].tobytes() == whole.tobytes()


def test_adding_forms_the_sum_apart() -> None:
    operands = Operands(8, 50, "float32")
    product = operands.tile(operands.compute(TILE_ROWS, STORE))
    assert operands.tile(operands.compute(TILE_ROWS, ADD)).tobytes() == (operands.before + product).tobytes()


@pytest.mark.parametrize("prefetched", [TILE_COLUMNS, 10**9, -(10**9)])
def test_what_is_prefetched_need_not_exist_and_changes_nothing(prefetched: int) -> None:
    operands = Operands(10, 50, "bfloat16")
    plain = operands.compute(TILE_ROWS, STORE)
    operands.prefetched = prefetched
    assert operands.compute(TILE_ROWS, STORE).tobytes() == plain.tobytes()


def test_nan_and_infinity_stay_in_their_row_and_column() -> None:
    operands = Operands(9, 40, "float32")
    clean = operands.tile(operands.compute(TILE_ROWS, STORE)).copy()
    rows_of(operands.a, operands.a_at, operands.a_row, TILE_ROWS, 40)[1, 20] = np.nan
    rows_of(operands.b, operands.b_at, operands.b_row, 40, TILE_COLUMNS)[0, 3] = np.inf
    spoilt = operands.tile(operands.compute(TILE_ROWS, STORE))
    assert np.isnan(spoilt[1]).all()
    assert not np.isfinite(spoilt[:, 3]).any()
    others = np.ix_(np.arange(TILE_ROWS) != 1, np.arange(TILE_COLUMNS) != 3)
    assert (spoilt[others] == clean[others]).all()


@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_a_square_is_turned_over(kind: type) -> None:
    rng = np.random.default_rng(3)
    a = rng.integers(0, 1 << 15, 5 + LANES * (LANES + 3)).astype(kind)
    c = np.full(2 + LANES * (LANES + 1) + LANES, GUARD)
    transpose_at(a, 5, LANES + 3, c, 2, LANES + 1)
    square = rows_of(a, 5, LANES + 3, LANES, LANES)
    wide = square if kind is np.float32 else (square.astype(np.uint32) << 16).view(np.float32)
    assert rows_of(c, 2, LANES + 1, LANES, LANES).tobytes() == np.ascontiguousarray(wide.T).tobytes()
    rows_of(c, 2, LANES + 1, LANES, LANES)[:] = GUARD
    assert (c == GUARD).all()
