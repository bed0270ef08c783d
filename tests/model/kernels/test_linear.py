"""Packed weights and their product with a batch, by a team of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.linear import PackedRows, embed, empty, multiply, multiply_gated, padded
from pagetable.model.kernels.team import Team
from pagetable.model.kernels.tiles import ADD, STORE
from pagetable.model.kernels.vectors import TILE_COLUMNS, TILE_ROWS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
THREADS = (1, 2, 3)
ROWS = (1, 2, 5, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS - 1, 8 * TILE_ROWS, 8 * TILE_ROWS + 1, 200)
POISON = 99.0


@compiled
def multiply_all(thread, threads, sync, counters, rows, a, a_row, panels, bias, c, c_row, how):
    multiply(counters, 0, threads, rows, a, a_row, panels, bias, c, c_row, how)


@compiled
def multiply_gated_all(thread, threads, sync, counters, rows, a, a_row, panels, bias, c, c_row, scratch):
    multiply_gated(counters, 0, threads, rows, a, a_row, panels, bias, c, c_row, scratch[thread])


@compiled
def embed_all(thread, threads, sync, counters, panels, token_ids, x, x_row):
    embed(counters, 0, threads, panels, token_ids, x, x_row)


def make_panels(outputs: int, inputs: int, dtype: torch.dtype) -> np.ndarray:
    panels = empty((padded(outputs) // TILE_COLUMNS, inputs, TILE_COLUMNS), dtype)
    panels[:] = 0
    return panels


def unpack(panels: np.ndarray, stride: int = 1, turn: int = 0) -> torch.Tensor:
    """(all columns, inputs) in float32 of every `stride`-th panel."""
    chosen = panels[turn::stride]
    rows = np.ascontiguousarray(chosen.transpose(0, 2, 1)).reshape(-1, panels.shape[1])
    return torch.from_numpy(rows).view(torch.bfloat16).float() if rows.dtype == np.uint16 else torch.from_numpy(rows)


def fill_in_slices(place: PackedRows, values: torch.Tensor, rng: np.random.Generator) -> None:
    begin = 0
    while begin < len(values):
        count = int(rng.integers(1, 2 * TILE_COLUMNS))
        place.fill(begin, values[begin : begin + count])
        begin += count


# ------------------------------------------------------------------------------------------------------------ packing


@DTYPES
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rows_loaded_in_slices_stand_where_they_belong(dtype: torch.dtype, loaded: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, inputs = rng.integers(1, 3 * TILE_COLUMNS, 3).tolist(), int(rng.integers(1, 50))
    panels = make_panels(sum(sizes) + 5, inputs, dtype)
    PackedRows(panels, 0, (padded(sum(sizes) + 5), inputs)).fill(
        0, torch.full((padded(sum(sizes) + 5), inputs), POISON)
    )
    expected = unpack(panels)
    first = 0
    for size in sizes:
        values = torch.from_numpy(rng.standard_normal((inputs, size))).T.to(loaded)  # not contiguous
        place = PackedRows(panels, first, (size, inputs))
        assert place.shape == (size, inputs)
        fill_in_slices(place, values, rng)
        expected[first : first + size] = values.to(dtype).float()
        first += size
    assert torch.equal(unpack(panels), expected)


@DTYPES
def test_two_matrices_take_turns_among_the_panels(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(11)
    outputs, inputs = 2 * TILE_COLUMNS + 3, 17
    panels = make_panels(2 * padded(outputs), inputs, dtype)
    matrices = torch.from_numpy(rng.standard_normal((2, outputs, inputs))).to(dtype)
    for turn, matrix in enumerate(matrices):
        fill_in_slices(PackedRows(panels, 0, (outputs, inputs), 2, turn), matrix, rng)
    for turn, matrix in enumerate(matrices):
        rows = unpack(panels, 2, turn)
        assert torch.equal(rows[:outputs], matrix.float())
        assert not rows[outputs:].any()


def test_biases_are_packed_as_rows_of_one_input() -> None:
    rng = np.random.default_rng(12)
    flat = np.full(3 * TILE_COLUMNS, POISON, np.float32)
    values = torch.from_numpy(rng.standard_normal(TILE_COLUMNS + 9)).to(torch.bfloat16)
    fill_in_slices(PackedRows(flat.reshape(-1, 1, TILE_COLUMNS), 7, values.shape), values, rng)
    expected = np.full(3 * TILE_COLUMNS, POISON, np.float32)
    expected[7 : 7 + len(values)] = values.float().numpy()
    assert (flat == expected).all()


@DTYPES
@pytest.mark.parametrize("threads", THREADS)
def test_embedding_takes_rows_of_a_packed_matrix(dtype: torch.dtype, threads: int) -> None:
    rng = np.random.default_rng(13)
    words, size = 2 * TILE_COLUMNS + 7, 45
    table = torch.from_numpy(rng.standard_normal((words, size))).to(dtype)
    panels = make_panels(words, size, dtype)
    PackedRows(panels, 0, (words, size)).fill(0, table)
    token_ids = rng.integers(0, words, 150).astype(np.int32)
    token_ids[:2] = 0, words - 1
    x = np.full((150, padded(size)), POISON, np.float32)
    Team(threads).run(embed_all, np.zeros(1, np.int64), panels, token_ids, x.reshape(-1), x.shape[1])
    assert (x[:, :size] == table.float().numpy()[token_ids]).all()
    assert (x[:, size:] == POISON).all()


# ----------------------------------------------------------------------------------------------------------- products


class Product:
    """A layer with odd sizes: 200 rows of input, weights, biases, and the same in float64."""

    outputs, inputs = 2 * TILE_COLUMNS + 6, 45

    def __init__(self, dtype: torch.dtype, with_bias: bool, gated: bool = False) -> None:
        rng = np.random.default_rng(21)
        self.gated = gated
        turns = 2 if gated else 1
        self.width = padded(self.outputs)
        self.a_row = padded(self.inputs)
        self.a = np.full((max(ROWS), self.a_row), np.nan, np.float32)
        self.a[:, : self.inputs] = rng.standard_normal((max(ROWS), self.inputs))
        self.panels = make_panels(turns * self.width, self.inputs, dtype)
        self.bias = np.zeros(turns * self.width if with_bias else 0, np.float32)
        exact = []
        for turn in range(turns):
            weight = torch.from_numpy(rng.standard_normal((self.outputs, self.inputs))).to(dtype)
            PackedRows(self.panels, 0, weight.shape, turns, turn).fill(0, weight)
            exact.append(self.a[:, : self.inputs].astype(np.float64) @ weight.double().numpy().T)
            if with_bias:
                bias = torch.from_numpy(rng.standard_normal(self.outputs)).float()
                PackedRows(self.bias.reshape(-1, 1, TILE_COLUMNS), 0, bias.shape, turns, turn).fill(0, bias)
                exact[turn] += bias.double().numpy()
        self.exact = exact[0] / (1 + np.exp(-exact[0])) * exact[1] if gated else exact[0]

    def compute(self, team: Team, begin: int, end: int, how: int = STORE) -> np.ndarray:
        """(end - begin, outputs) for these rows as a batch of their own; with ADD, onto ones."""
        a, c = self.a[begin:end].reshape(-1), np.ones((end - begin + 1, self.width), np.float32)
        counters = np.full(1, 55, np.int64)  # a team sets them to zero
        arguments = (end - begin, a, self.a_row, self.panels, self.bias, c.reshape(-1), self.width)
        if self.gated:
            scratch = np.full((team.threads, 2 * TILE_ROWS * TILE_COLUMNS), np.nan, np.float32)
            team.run(multiply_gated_all, counters, *arguments, scratch)
        else:
            team.run(multiply_all, counters, *arguments, how)
        assert (c[-1] == 1).all(), "a row past the last was written"
        return c[:-1, : self.outputs].copy()


@DTYPES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_product_is_right_and_the_same_to_the_bit_for_any_batch_and_team(
    dtype: torch.dtype, bias: bool, gated: bool
) -> None:
    product = Product(dtype, bias, gated)
    reference = product.compute(Team(1), 0, 200)
    np.testing.assert_allclose(reference, product.exact, rtol=2e-5, atol=2e-5)
    for threads in THREADS:
        team = Team(threads)
        for rows in ROWS:
            for begin in {0, (200 - rows) // 2, 200 - rows}:
                got = product.compute(team, begin, begin + rows)
                assert got.tobytes() == reference[begin : begin + rows].tobytes(), (threads, rows, begin)


@DTYPES
@pytest.mark.parametrize("threads", THREADS)
def test_a_product_can_be_added_to_what_is_there(dtype: torch.dtype, threads: int) -> None:
    product = Product(dtype, with_bias=True)
    team, single = Team(threads), Team(1)
    added = product.compute(team, 0, 200, ADD)
    np.testing.assert_allclose(added, product.exact + 1, rtol=2e-5, atol=2e-5)
    for row in (0, 77, 199):
        assert product.compute(single, row, row + 1, ADD).tobytes() == added[row].tobytes()


@pytest.mark.parametrize("batch", [7, TILE_ROWS + 1, 150])
def test_a_row_of_nan_spoils_no_other(batch: int) -> None:
    product = Product(torch.float32, with_bias=True, gated=True)
    clean = product.compute(Team(2), 0, batch)
    product.a[3] = np.nan
    spoilt = product.compute(Team(2), 0, batch)
    assert np.isnan(spoilt[3]).all()
    assert np.delete(spoilt, 3, 0).tobytes() == np.delete(clean, 3, 0).tobytes()


def test_a_gate_far_from_zero_closes_or_passes_and_overflows_nowhere() -> None:
    panels, outputs = make_panels(2 * TILE_COLUMNS, 1, torch.float32), TILE_COLUMNS
    gate = torch.linspace(-200, 200, outputs)[:, None]
    PackedRows(panels, 0, (outputs, 1), 2, 0).fill(0, gate)
    PackedRows(panels, 0, (outputs, 1), 2, 1).fill(0, torch.ones(outputs, 1))
    c = np.empty(TILE_COLUMNS, np.float32)
    scratch = np.empty((1, 2 * TILE_ROWS * TILE_COLUMNS), np.float32)
    arguments = (1, np.ones(1, np.float32), 1, panels, np.empty(0, np.float32), c, TILE_COLUMNS, scratch)
    Team(1).run(multiply_gated_all, np.zeros(1, np.int64), *arguments)
    x = gate[:, 0].double().numpy()
    np.testing.assert_allclose(c, x / (1 + np.exp(-x)), rtol=1e-5, atol=1e-30)
