"""The sampler against plain loops over one row, and its promise that a draw depends on (seed, index) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pagetable.model import LogitsError, sample
from pagetable.model.sampler import draw_rows, uniform
from tests.model.steps import make_sampling


def random_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token -> probability by the definitions, one after the other: vLLM's order, min_p, top_k, top_p."""
    scaled = [value / temperature for value in logits]
    top = max(scaled)
    weight = {token: math.exp(value - top) for token, value in enumerate(scaled)}
    weight = {token: w for token, w in weight.items() if w >= min_p}
    if top_k:
        least = sorted(weight.values(), reverse=True)[: min(top_k, len(weight))][-1]
        weight = {token: w for token, w in weight.items() if w >= least}
    if top_p < 1:
        total, mass, last, nucleus = sum(weight.values()), 0.0, 2.0, {}
        for token in sorted(weight, key=lambda token: -weight[token]):
            if mass >= top_p * total and weight[token] < last:
                break
            nucleus[token] = last = weight[token]
            mass += last
        weight = nucleus
    total = sum(weight.values())
    return {token: w / total for token, w in weight.items()}


def draw_many(row: torch.Tensor, count: int, **columns: float) -> np.ndarray:
    tokens, _ = sample(row.expand(count, -1).clone(), make_sampling(count, seeds=np.arange(count), **columns))
    return np.bincount(tokens, minlength=len(row))


def test_temperature_zero_takes_the_largest() -> None:
    logits = random_logits(5, 100)
    tokens, logprobs = sample(logits.clone(), make_sampling(5, seeds=np.arange(5)))
    assert tokens == logits.argmax(dim=1).tolist()
    assert logprobs is None


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.7, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_have_the_right_distribution(filters: dict[str, float]) -> None:
    row = random_logits(1, 12, seed=4, scale=1.5)[0]
    wanted = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    expected = np.zeros(12)
    for token, probability in kept(row.tolist(), **wanted).items():  # type: ignore[arg-type]
        expected[token] = probability
    count = 8000
    seen = draw_many(row, count, **filters)
    assert not seen[expected == 0].any(), "a filtered token was drawn"
    likely = expected > 0
    chi_square = (((seen - count * expected) ** 2)[likely] / (count * expected[likely])).sum()
    assert chi_square < 3 * likely.sum() + 12, f"chi-square {chi_square:.1f} with {likely.sum()} tokens"


@pytest.mark.parametrize("seed", range(6))
def test_filters_keep_what_their_definitions_keep(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocabulary, rows = 3000, 24
    logits = random_logits(rows, vocabulary, seed, scale=float(rng.choice([0.2, 1.0, 4.0])))
    settings = {
        "temperature": rng.uniform(0.2, 3.0, rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 2, 50, 2999, 3000, 10**6], rows),
        "top_p": rng.choice([0.01, 0.5, 0.9, 0.999, 1.0], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.5, 1.0], rows).astype(np.float32),
    }
    tokens, _ = sample(logits.clone(), make_sampling(rows, seeds=rng.integers(0, 2**63, rows), **settings))
    for row, token in enumerate(tokens):
        values = {name: column[row].item() for name, column in settings.items()}
        assert token in kept(logits[row].tolist(), **values), (row, values)


def test_top_p_may_need_more_tokens_than_the_quick_look() -> None:
    vocabulary = 5000
    flat = torch.linspace(0, 1e-3, vocabulary)[None]
    expected = kept(flat[0].tolist(), 1.0, 0, 0.9, 0.0)
    seen = draw_many(flat[0], 400, temperature=1.0, top_p=0.9)
    assert set(np.flatnonzero(seen)) <= set(expected)
    assert 4000 < len(expected) < 4700
    assert (np.flatnonzero(seen) < 1000).any(), "the far end of the nucleus is never drawn"


def test_equal_tokens_stay_or_go_together() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    for filters in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}):
        seen = draw_many(row, 300, temperature=1.0, **filters)
        assert (seen > 0).tolist() == [False, True, True, True, False]


def test_the_likeliest_token_survives_any_filter() -> None:
    row = random_logits(1, 50)[0]
    for filters in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert draw_many(row, 20, temperature=1.0, **filters)[row.argmax()] == 20


@pytest.mark.parametrize("temperature", [1e-38, 1e-10, 1e30, 3e38, np.inf])
def test_extreme_temperatures_draw_without_nan(temperature: float) -> None:
    row = torch.tensor([5.0, 1.0, -3.0, 4.9])
    sampling = make_sampling(64, banned=[(i, 1) for i in range(64)], seeds=np.arange(64), temperature=temperature)
    tokens = np.array(sample(row.expand(64, -1).clone(), sampling)[0])
    assert set(tokens.tolist()) == ({0} if temperature < 1 else {0, 2, 3})


def test_a_draw_depends_on_seed_and_index_only() -> None:
    logits = random_logits(6, 4000, seed=1)
    own = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    for row in range(6):
        alone, _ = sample(logits[row : row + 1].clone(), make_sampling(1, seeds=77, output_index=5, **own))
        for place in (0, 2, 3):  # among neighbours of every kind
            batch = random_logits(4, 4000, seed=2)
            batch[place] = logits[row]
            columns = {
                "temperature": [0.0, 1.0, 1.0, 2.0],
                "top_k": [0, 3000, 0, 7],
                "top_p": [1.0, 1.0, 0.999, 0.2],
                "min_p": [0.0, 0.0, 0.0, 0.3],
                "seeds": [77, 1, 2, 77],
                "output_index": [0, 5, 5, 4],
            }
            for name, value in {**own, "seeds": 77, "output_index": 5}.items():
                columns[name][place] = value
            tokens, _ = sample(batch, make_sampling(4, **columns))
            assert tokens[place] == alone[0]


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    seeds, index = np.meshgrid(np.arange(40, dtype=np.uint64), np.arange(40), indexing="ij")
    numbers = uniform(seeds.ravel(), index.ravel(), torch.empty(1, 50)).reshape(40, 40, 50).numpy()
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 60
    for other in (numbers[1:], numbers[:, 1:], numbers[:, :, 1:]):  # neighbouring seeds, indices, tokens
        first = numbers[: other.shape[0], : other.shape[1], : other.shape[2]]
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.02


def test_uniform_numbers_never_change() -> None:
    # An answer given for a seed today must be the one given next year.
    seeds = np.array([0, 1, 2**64 - 1], np.uint64)
    numbers = uniform(seeds, np.array([0, 7, 2**40]), torch.empty(1, 3))
    assert numbers.tolist() == [
        [0.13870941014555427, 0.9711020828012883, 0.2778328726049074],
        [0.4206846226673492, 0.3416942056113864, 0.9074378179176826],
        [0.6101618111065336, 0.9919581987240668, 0.8285762606257788],
    ]


def test_rounding_of_logits_does_not_change_a_draw() -> None:
    logits = random_logits(1, 49152, seed=2, scale=2.0)
    sampling = make_sampling(400, temperature=1.0, seeds=np.arange(400))
    clean, _ = sample(logits.expand(400, -1).clone(), sampling)
    noisy, _ = sample(logits + 1e-5 * random_logits(400, 49152, seed=3, scale=1.0), sampling)
    assert sum(a != b for a, b in zip(clean, noisy, strict=True)) <= 1
    assert len(set(clean)) > 100


def test_banned_tokens_are_never_drawn_nor_taken() -> None:
    logits = random_logits(2, 8, seed=3)
    best = logits.argmax(dim=1).tolist()
    tokens, _ = sample(logits.clone(), make_sampling(2, banned=[(0, best[0])]))
    assert tokens[0] == logits[0].topk(2).indices[1]
    assert tokens[1] == best[1]
    rows = 500
    sampling = make_sampling(
        rows, banned=[(row, t) for row in range(rows) for t in (0, 3, 5)], seeds=np.arange(rows), temperature=3.0
    )
    tokens, _ = sample(logits[:1].expand(rows, -1).clone(), sampling)
    assert set(tokens) == {1, 2, 4, 6, 7}


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(4, 300, seed=6)
    banned = int(logits[2].argmax())
    sampling = make_sampling(
        4, banned=[(2, banned)], temperature=[0, 2.0, 0, 1.0], top_k=5, num_logprobs=[3, 0, 2, -1], seeds=np.arange(4)
    )
    tokens, reports = sample(logits.clone(), sampling)
    expected = torch.log_softmax(logits, dim=-1)
    assert reports is not None
    assert reports[3] is None
    for row, count in ((0, 3), (1, 0), (2, 2)):
        report = reports[row]
        assert report is not None
        top = expected[row].topk(count)
        assert report.token_ids == (tokens[row], *top.indices.tolist())
        np.testing.assert_allclose(report.logprobs, [expected[row, tokens[row]], *top.values], rtol=1e-6)
        assert report.rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
    assert reports[0].rank == 1  # type: ignore[union-attr]
    assert reports[2].rank == 2, "the banned token is still the likeliest in the raw logits"  # type: ignore[union-attr]
    assert reports[2].token_ids[1] == banned  # type: ignore[union-attr]


def test_more_alternatives_than_tokens() -> None:
    _, reports = sample(random_logits(1, 4), make_sampling(1, num_logprobs=20))
    assert reports is not None
    assert reports[0] is not None
    assert len(reports[0].token_ids) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "banned"])
def test_logits_that_allow_no_choice_are_refused_with_their_rows(temperature: float, bad: float | str) -> None:
    logits = random_logits(4, 10)
    banned = []
    if isinstance(bad, str):
        banned = [(row, token) for row in (1, 3) for token in range(10)]
    else:
        logits[[1, 3], 4] = bad
    with pytest.raises(LogitsError) as caught:
        sample(logits, make_sampling(4, banned=banned, temperature=temperature))
    assert caught.value.rows == [1, 3]
    assert "[1, 3]" in str(caught.value)


def test_rows_that_are_all_minus_infinity_are_refused() -> None:
    logits = random_logits(2, 10)
    logits[0] = -torch.inf
    with pytest.raises(LogitsError, match=r"\[0\]"):
        sample(logits, make_sampling(2))


def test_greedy_rows_pay_for_no_sort_and_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sort", "topk", "softmax", "log_softmax", "cumsum"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, **__: pytest.fail("a greedy row was sorted"))
        if hasattr(torch, name):
            monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("a greedy row was sorted"))
    sample(random_logits(3, 100), make_sampling(3))


def test_unfiltered_rows_pay_for_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sort", "topk"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, **__: pytest.fail("a row without filters was sorted"))
    sample(random_logits(3, 100), make_sampling(3, temperature=1.0))


def test_compiled_draws_are_those_of_the_reference() -> None:
    from pagetable.model.kernels.sampling import draw
    from pagetable.model.kernels.team import Team

    for vocabulary, seed in ((1003, 0), (160, 1), (49_152, 2)):
        rng = np.random.default_rng(seed)
        rows = 48
        logits = torch.from_numpy(rng.standard_normal((rows, vocabulary), dtype=np.float32) * 4)
        batch = make_sampling(
            rows,
            temperature=rng.choice([0.3, 0.8, 1, 2], rows),
            top_k=rng.choice([0, 1, 5, 50, vocabulary, vocabulary + 1], rows),
            top_p=rng.choice([1, 0.9, 0.5, 0.1, 1e-46], rows),
            min_p=rng.choice([0, 0, 0.05, 1], rows),
            seeds=rng.integers(0, 2**63, rows),
            output_index=rng.integers(0, 100, rows),
        )
        largest, every = logits.max(dim=-1).values, np.arange(rows)
        expected = draw_rows(logits, largest, batch, every)
        for team in (Team(1), Team(3)):
            assert torch.equal(draw(team, logits, largest, batch, every), expected)
        alone = [draw(Team(1), logits, largest, batch, every[row : row + 1]) for row in range(0, rows, 7)]
        assert torch.equal(torch.cat(alone), expected[::7])
