"""Matrices of weights, packed once for the way they are read, and their product with the rows of a batch.

A panel is TILE_COLUMNS outputs: `panels[p, k, j]` is the weight from input k to output p * TILE_COLUMNS + j. A product
walks through a panel in order, as memory likes it, while the sums of up to TILE_ROWS rows stay in registers
(Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication", section 4). At one row it runs at the
speed of memory, at many at that of the multipliers, and a row has the same bits in both: see `multiply_tile`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.team import claim, share
from pagetable.model.kernels.tiles import STORE, multiply_tile
from pagetable.model.kernels.vectors import LANES, TILE_COLUMNS, TILE_ROWS, exp, load, put, splat, store, widen

_CACHE_LINE = 64  # bytes
_BLOCK_ROWS = 8 * TILE_ROWS  # rows that one unit of work multiplies with one panel: many threads share a long prompt
_ZERO, _ONE = np.float32(0), np.float32(1)
_STEPS_AHEAD = 16  # rows of a panel; 8 to 64 measured within a tenth of each other
_SHARES = 2  # units that each thread takes of a product of few rows: long stretches of memory, yet some balance


def padded(size: int) -> int:
    """The least multiple of TILE_COLUMNS that holds `size`: the distance of two rows of a product."""
    return -(-size // TILE_COLUMNS) * TILE_COLUMNS


@compiled
def row_size(size):
    """`padded` for compiled code."""
    return (size + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A view of a CPU tensor; bfloat16, which NumPy lacks, as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Memory for numbers of this type, not taken from the system until it is written.

    It begins on a cache line, so that a full register is never read from two.
    """
    kind = np.dtype(np.uint16 if dtype == torch.bfloat16 else np.float32)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + size].view(kind).reshape(shape)


class PackedRows:
    """Rows `first` to `first + rows` of a packed matrix: a place that weights are loaded into."""

    def __init__(
        self, panels: np.ndarray | None, first: int, shape: tuple[int, ...], stride: int = 1, turn: int = 0
    ) -> None:
        """`stride`, `turn`: of every `stride` panels these rows use number `turn`. Without panels, a shape only."""
        self.shape = shape
        self._panels, self._first, self._stride, self._turn = panels, first, stride, turn

    def fill(self, begin: int, values: Tensor) -> None:
        """Write rows `begin`, `begin + 1`, … of this place."""
        assert self._panels is not None
        dtype = torch.bfloat16 if self._panels.dtype == np.uint16 else torch.float32
        rows = as_numpy(values.to(dtype).contiguous()).reshape(len(values), -1)
        at = self._first + begin
        while len(rows):
            panel, column = divmod(at, TILE_COLUMNS)
            count = min(len(rows), TILE_COLUMNS - column)
            self._panels[panel * self._stride + self._turn, :, column : column + count] = rows[:count].T
            rows, at = rows[count:], at + count


@compiled
def embed(counters, phase, threads, panels, token_ids, x, x_row):
    """x[t, :] = row token_ids[t] of a packed matrix."""
    depth = panels.shape[1]
    flat = panels.reshape(-1)
    run = share(token_ids.size, threads)
    while True:
        first = claim(counters, phase, run)
        if first >= token_ids.size:
            break
        for t in range(first, min(first + run, token_ids.size)):
            at = token_ids[t] // TILE_COLUMNS * depth * TILE_COLUMNS + token_ids[t] % TILE_COLUMNS
            for k in range(depth):
                x[t * x_row + k] = widen(flat[at + k * TILE_COLUMNS])


@compiled
def multiply(counters, phase, threads, rows, a, a_row, panels, bias, c, c_row, how):
    """c (+)= a @ panels + bias for `rows` rows; the threads of a team share it, panel by panel. `bias` may be empty."""
    depth = panels.shape[1]
    flat = panels.reshape(-1)
    blocks = row_blocks(rows)
    units = panels.shape[0] * blocks
    run = max(1, units // (threads * _SHARES)) if blocks == 1 else 1
    while True:
        first = claim(counters, phase, run)
        if first >= units:
            break
        for unit in range(first, min(first + run, units)):
            panel = unit // blocks
            begin, end = block_rows(unit % blocks, rows)
            height = tile_height(end - begin)
            at = panel * depth * TILE_COLUMNS
            for row in range(begin, end, height):
                count, place = min(height, end - row), row * c_row + panel * TILE_COLUMNS
                soon_at, soon_step = look_ahead(at, depth, row - begin, end - begin, height, 1)
                multiply_tile(
                    count, a, row * a_row, a_row, flat, at, TILE_COLUMNS, depth,
                    c, place, c_row, how, soon_at, soon_step,
                )  # fmt: skip
                if bias.size:
                    add_bias(bias, panel * TILE_COLUMNS, c, place, c_row, count)


@compiled
def multiply_gated(counters, phase, threads, rows, a, a_row, panels, bias, c, c_row, scratch):
    """c = silu(a @ gate + bias) * (a @ up + bias); gate and up take turns among the panels.

    `scratch` holds two tiles, 2 * TILE_ROWS * TILE_COLUMNS numbers.
    """
    depth = panels.shape[1]
    flat = panels.reshape(-1)
    blocks = row_blocks(rows)
    units = panels.shape[0] // 2 * blocks
    run = max(1, units // (threads * _SHARES)) if blocks == 1 else 1
    up = TILE_ROWS * TILE_COLUMNS  # where the second tile stands in scratch
    while True:
        first = claim(counters, phase, run)
        if first >= units:
            break
        for unit in range(first, min(first + run, units)):
            pair = unit // blocks
            begin, end = block_rows(unit % blocks, rows)
            height = tile_height(end - begin)
            for row in range(begin, end, height):
                count = min(height, end - row)
                for half in range(2):
                    panel = 2 * pair + half
                    at = panel * depth * TILE_COLUMNS
                    soon_at, soon_step = look_ahead(at, depth, row - begin, end - begin, height, 2)
                    multiply_tile(
                        count, a, row * a_row, a_row, flat, at, TILE_COLUMNS, depth,
                        scratch, half * up, TILE_COLUMNS, STORE, soon_at, soon_step,
                    )  # fmt: skip
                    if bias.size:
                        add_bias(bias, panel * TILE_COLUMNS, scratch, half * up, TILE_COLUMNS, count)
                for r in range(count):
                    for i in range(0, TILE_COLUMNS, LANES):
                        at = r * TILE_COLUMNS + i
                        value = silu(load(scratch, at)) * load(scratch, up + at)
                        store(c, (row + r) * c_row + pair * TILE_COLUMNS + i, value)


@compiled
def look_ahead(at, depth, row, rows, height, stride):
    """What to prefetch while a panel, at offset `at`, meets the tile that begins at `row`: where, and by which steps.

    A lone tile asks for the rows of its own panel that come next. With more, the panel is near after the first; all
    of them together fetch the next one, which is `stride` further on (2 where gate and up take turns).
    """
    tiles = (rows + height - 1) // height
    if tiles == 1:
        return at + _STEPS_AHEAD * TILE_COLUMNS, TILE_COLUMNS
    step = TILE_COLUMNS // tiles
    return at + stride * depth * TILE_COLUMNS + row // height * depth * step, step


@compiled
def silu(x):
    """x / (1 + exp(-x))."""
    one = splat(_ONE)
    return x / (one + exp(splat(_ZERO) - x))


@compiled
def add_bias(bias, at, c, place, c_row, rows):
    """One panel's biases onto each row of a tile."""
    for row in range(rows):
        for i in range(0, TILE_COLUMNS, LANES):
            store(c, place + row * c_row + i, load(c, place + row * c_row + i) + load(bias, at + i))


@compiled
def copy(source, at, target, place, size):
    """target[place : place + size] = source[at : at + size], between float32 and what holds bfloat16 as well."""
    i = 0
    while i + LANES <= size:
        store(target, place + i, load(source, at + i))
        i += LANES
    while i < size:
        put(target, place + i, widen(source[at + i]))
        i += 1


@compiled
def row_blocks(rows):
    """Into how many blocks a batch's rows are cut."""
    return (rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS


@compiled
def block_rows(block, rows):
    """From and to which row a block goes, all blocks being about as high."""
    blocks = row_blocks(rows)
    height = (rows + blocks - 1) // blocks
    return block * height, min(block * height + height, rows)


@compiled
def tile_height(rows):
    """Rows a tile, so that all tiles are about as high: 8 and 8 rather than 12 and 4."""
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    return (rows + tiles - 1) // tiles
