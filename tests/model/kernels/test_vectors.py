"""Registers as values: each operation against NumPy, float64 or PyTorch, over all that it may meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.linear import copy
from pagetable.model.kernels.vectors import (
    LANES,
    exp,
    first_lanes,
    fma,
    larger,
    largest_of,
    load,
    put,
    splat,
    store,
    sum_of,
    widen,
)


@compiled
def exp_all(x, out):
    for i in range(0, x.size, LANES):
        store(out, i, exp(load(x, i)))


@compiled
def copy_all(source, target):
    for i in range(0, source.size, LANES):
        store(target, i, load(source, i))


@compiled
def copy_one_by_one(source, target):
    for i in range(source.size):
        put(target, i, widen(source[i]))


@compiled
def fold_all(x, sums, largest):
    for i in range(sums.size):
        sums[i] = sum_of(load(x, i * LANES))
        largest[i] = largest_of(load(x, i * LANES))


@compiled
def choose(count, x, y, out):
    store(out, 0, first_lanes(count, load(x, 0), load(y, 0)))


@compiled
def calculate(x, y, out):
    for i in range(0, x.size, LANES):
        a, b = load(x, i), load(y, i)
        store(out[0], i, a + b)
        store(out[1], i, a - b)
        store(out[2], i, a * b)
        store(out[3], i, a / b)
        store(out[4], i, larger(a, b))
        store(out[5], i, fma(a, b, splat(np.float32(-1.0))))


@compiled
def copy_part(source, at, target, place, size):
    copy(source, at, target, place, size)


def compute_exp(x: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-x.size // LANES) * LANES, np.float32)
    padded[: x.size] = x
    out = np.empty_like(padded)
    exp_all(padded, out)
    return out[: x.size]


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """PyTorch's rounding, as uint16."""
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()


def test_exp_is_within_two_units_in_the_last_place_over_its_range() -> None:
    x = np.linspace(-87, 88, 400_000, dtype=np.float32)
    near_zero = np.geomspace(1e-30, 1, 20_000, dtype=np.float32)
    x = np.concatenate([x, near_zero, -near_zero])
    exact = np.exp(x.astype(np.float64))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert np.abs((compute_exp(x) - exact) / unit).max() <= 2


def test_exp_never_decreases() -> None:
    x = np.linspace(-90, 90, 400_000, dtype=np.float32)
    y = compute_exp(x).astype(np.float64)
    assert (np.diff(y) >= -2 * np.spacing(y[1:].astype(np.float32))).all()


def test_exp_of_zero_is_one_to_the_bit() -> None:
    assert compute_exp(np.array([0.0, -0.0, 1e-40, -1e-40], np.float32)).tolist() == [1.0] * 4


def test_exp_saturates_rather_than_overflows() -> None:
    least = np.nextafter(np.float32(-87), np.float32(-np.inf))
    assert compute_exp(np.array([least, -88, -1e4, -3e38, -np.inf], np.float32)).tolist() == [0.0] * 5
    top = compute_exp(np.array([88, 88.5, 1e4, 3e38, np.inf], np.float32))
    np.testing.assert_allclose(top, np.exp(88.0), rtol=1e-6)


def test_exp_of_nan_is_nan_and_stays_in_its_lane() -> None:
    x = np.zeros(2 * LANES, np.float32)
    x[3], x[LANES] = np.nan, -np.nan
    assert np.flatnonzero(np.isnan(compute_exp(x))).tolist() == [3, LANES]


@pytest.mark.parametrize("seed", range(3))
def test_arithmetic_is_that_of_float32(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 8 * LANES)).astype(np.float32) * np.float32(10) ** rng.integers(-20, 19, 8 * LANES)
    x, y = x.astype(np.float32), y.astype(np.float32)
    out = np.empty((6, x.size), np.float32)
    with np.errstate(all="ignore"):
        expected = [x + y, x - y, x * y, x / y, np.maximum(x, y)]
    calculate(x, y, out)
    for got, want in zip(out, expected, strict=False):
        assert got.tobytes() == want.tobytes()


def test_fma_rounds_once() -> None:
    x = np.full(LANES, 1 + 2**-12, np.float32)  # its square needs 25 bits: 1 + 2^-11 + 2^-24
    out = np.empty((6, LANES), np.float32)
    calculate(x, x, out)
    assert (out[5] == np.float32(2**-11 + 2**-24)).all()
    assert (out[2] - 1 == np.float32(2**-11)).all()


def test_the_larger_is_nan_if_the_left_one_is() -> None:
    x, y = np.zeros((2, LANES), np.float32)
    x[1], y[2] = np.nan, np.nan
    out = np.empty((6, LANES), np.float32)
    calculate(x, y, out)
    assert np.isnan(out[4, 1])
    assert not np.isnan(out[4, 2])


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_adds_all_lanes_in_pairs(seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((50, LANES)).astype(np.float32)
    sums, largest = np.empty((2, 50), np.float32)
    fold_all(x.reshape(-1), sums, largest)
    np.testing.assert_allclose(sums, x.astype(np.float64).sum(1), atol=1e-5)
    assert (largest == x.max(1)).all()
    folded = x
    while folded.shape[1] > 1:
        half = folded.shape[1] // 2
        folded = folded[:, :half] + folded[:, half:]
    assert sums.tobytes() == folded.ravel().tobytes()


@pytest.mark.parametrize("count", [-3, 0, 1, LANES // 2 + 1, LANES - 1, LANES, LANES + 5])
def test_lanes_past_the_count_come_from_the_other_even_if_nan_stands_there(count: int) -> None:
    x, y = np.arange(LANES, dtype=np.float32), np.full(LANES, -1, np.float32)
    kept = min(max(count, 0), LANES)
    x[kept:], y[:kept] = np.nan, np.nan
    out = np.empty(LANES, np.float32)
    choose(count, x, y, out)
    assert out.tolist() == [*range(kept), *[-1] * (LANES - kept)]


def bit_patterns() -> np.ndarray:
    """Float32s around every bfloat16: itself, just below, at and just above the middle to the next."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).ravel().view(np.float32)


@pytest.mark.parametrize("copy_kernel", [copy_all, copy_one_by_one])
def test_bfloat16_is_rounded_as_pytorch_rounds_it(copy_kernel) -> None:
    x = bit_patterns()
    stored = np.zeros(x.size, np.uint16)
    copy_kernel(x, stored)
    nan = np.isnan(x)
    assert (stored[~nan] == as_bfloat16(x)[~nan]).all()
    assert np.isnan((stored[nan].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("copy_kernel", [copy_all, copy_one_by_one])
def test_bfloat16_is_widened_without_a_change(copy_kernel) -> None:
    stored = np.arange(1 << 16, dtype=np.uint16)
    x = np.zeros(stored.size, np.float32)
    copy_kernel(stored, x)
    assert (x.view(np.uint32) == stored.astype(np.uint32) << 16).all()


@pytest.mark.parametrize("kind", [np.float32, np.uint16])
@pytest.mark.parametrize("size", [0, 1, LANES - 1, LANES, LANES + 1, 3 * LANES + 2])
def test_a_copy_writes_its_part_and_nothing_else(kind: type, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(100).astype(np.float32)
    target = np.full(100, 7, kind)
    copy_part(x, 3, target, 5, size)
    expected = np.full(100, 7, kind)
    expected[5 : 5 + size] = x[3 : 3 + size] if kind is np.float32 else as_bfloat16(x[3 : 3 + size])
    assert (target == expected).all()
