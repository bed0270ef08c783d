"""What a step costs: counting what is in it, fitting costs to measurements, and files that hold them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetable.engine import SamplingParams, Scheduler, Sequence, Step
from pagetable.memory import BlockManager
from pagetable.replay.cost import DEFAULT_COST, TERMS, CostModel, features, fit
from pagetable.replay.trace import TraceError

COSTS = {"step": 2e-3, "prefill_token": 3e-5, "prefill_context": 4e-8, "decode": 5e-5, "decode_context": 6e-7}


def steps(seed: int, num_requests: int = 30) -> Iterator[Step]:
    """Steps of a real scheduler: chunks, decodes, hits, preemptions."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        BlockManager(rng.randint(30, 60), 4),
        max_num_seqs=rng.randint(2, 8),
        max_num_batched_tokens=rng.randint(16, 48),
        max_model_len=200,
    )
    for _ in range(num_requests):
        prompt = [0] * rng.randint(0, 20) + [rng.randint(1, 9) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 20), ignore_eos=True)
        scheduler.add(Sequence(prompt, params, block_size=4))
    while (step := scheduler.schedule()) is not None:
        yield step
        scheduler.commit(step, [rng.randint(1, 9) for _ in range(int(step.needs_logits.sum()))])


def counted(step: Step) -> dict[str, float]:
    """What is in a step, token by token. A single token costs what a decode does, of whatever it is the last."""
    found = dict.fromkeys(TERMS, 0.0) | {"step": 1.0}
    for row in range(len(step.seqs)):
        positions = step.positions[step.query_start[row] : step.query_start[row + 1]].tolist()
        term = "decode" if len(positions) == 1 else "prefill_token"
        for position in positions:
            found[term] += 1
            found["decode_context" if len(positions) == 1 else "prefill_context"] += position + 1
    return found


def samples_of(costs: dict[str, float], seeds: int = 3) -> list[tuple[np.ndarray, float]]:
    """Steps that take exactly what these costs say."""
    what = [features(step) for seed in range(seeds) for step in steps(seed)]
    return [(each, float(each @ [costs[term] for term in TERMS])) for each in what]


# ---------------------------------------------------------------- what is in a step


@pytest.mark.parametrize("seed", range(8))
def test_features_are_what_a_loop_over_all_tokens_counts(seed: int) -> None:
    seen = np.zeros(len(TERMS))
    for step in steps(seed):
        assert features(step).tolist() == [counted(step)[term] for term in TERMS]
        seen += features(step)
    assert seen.min() > 0


def test_the_cost_of_a_step_is_the_sum_of_its_parts() -> None:
    cost = CostModel(**COSTS)
    for step in steps(1):
        assert cost.seconds(step) == pytest.approx(sum(COSTS[term] * count for term, count in counted(step).items()))


def test_a_chunk_attends_to_all_that_was_computed_before_it() -> None:
    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=1, max_num_batched_tokens=4, max_model_len=40)
    scheduler.add(Sequence(list(range(7)), SamplingParams(max_tokens=2, ignore_eos=True), block_size=4))
    found = []
    while (step := scheduler.schedule()) is not None:
        found.append(features(step).tolist())
        scheduler.commit(step, [1] * int(step.needs_logits.sum()))
    assert found == [[1, 4, 1 + 2 + 3 + 4, 0, 0], [1, 3, 5 + 6 + 7, 0, 0], [1, 0, 0, 1, 8]]


# ---------------------------------------------------------------- fitting


def test_exact_measurements_give_the_costs_back() -> None:
    cost = fit(samples_of(COSTS), {"model": "m"})
    assert {term: getattr(cost, term) for term in TERMS} == pytest.approx(COSTS, rel=1e-6)
    assert cost.about["model"] == "m"
    assert cost.about["samples"] == len(samples_of(COSTS))
    assert cost.about["median_error"] == pytest.approx(0, abs=1e-9)
    assert cost.about["p90_error"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("term", TERMS[1:])
def test_so_they_do_where_something_costs_nothing(term: str) -> None:
    costs = {**COSTS, term: 0.0}
    cost = fit(samples_of(costs), {})
    assert {name: getattr(cost, name) for name in TERMS} == pytest.approx(costs, rel=1e-3, abs=1e-9)
    assert min(getattr(cost, name) for name in TERMS) >= 0


@pytest.mark.parametrize("term", ["prefill_context", "decode", "decode_context"])
def test_a_cost_that_would_be_negative_is_left_out_and_the_rest_fitted_without_it(term: str) -> None:
    samples = samples_of({**COSTS, term: -COSTS[term] / 10})
    assert min(seconds for _, seconds in samples) > 0
    cost = fit(samples, {})
    assert getattr(cost, term) == 0
    assert min(getattr(cost, name) for name in TERMS) >= 0
    # No step by a thousandth of what is left makes it better: it is the nearest without the term.
    kept = [name for name in TERMS if getattr(cost, name) > 0]
    best = squares(cost, samples)
    for name in kept:
        for factor in (0.999, 1.001):
            changed = CostModel(**{each: getattr(cost, each) * (factor if each == name else 1) for each in TERMS})
            assert squares(changed, samples) > best
    assert cost.about["p90_error"] > cost.about["median_error"] > 0


def squares(cost: CostModel, samples: list[tuple[np.ndarray, float]]) -> float:
    costs = [getattr(cost, term) for term in TERMS]
    return sum((float(what @ costs) / seconds - 1) ** 2 for what, seconds in samples)


def test_it_says_how_far_off_it_is() -> None:
    rng = random.Random(3)
    samples = [(what, seconds * rng.uniform(0.8, 1.25)) for what, seconds in samples_of(COSTS)]
    cost = fit(samples, {})
    costs = [getattr(cost, term) for term in TERMS]
    errors = sorted(abs(float(what @ costs) - seconds) / seconds for what, seconds in samples)
    assert cost.about["median_error"] == pytest.approx(float(np.median(errors)))
    assert errors[int(0.85 * len(errors))] < cost.about["p90_error"] < errors[math.ceil(0.95 * len(errors))]
    assert 0.02 < cost.about["median_error"] < 0.2


def test_steps_that_all_are_the_same_have_a_cost_too() -> None:
    what = features(next(steps(0)))
    cost = fit([(what, 0.5)] * 3, {})
    assert float(what @ [getattr(cost, term) for term in TERMS]) == pytest.approx(0.5)
    assert min(getattr(cost, term) for term in TERMS) >= 0


def test_the_cost_model_that_stands_in_is_one_that_a_file_could_hold(tmp_path: Path) -> None:
    DEFAULT_COST.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == DEFAULT_COST
    assert all(getattr(DEFAULT_COST, term) > 0 for term in TERMS)


# ---------------------------------------------------------------- files


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    cost = CostModel(**COSTS, about={"model": "tiny \u2013 no. 1", "median_error": 0.05, "samples": 7})
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost


def test_whole_numbers_are_seconds_too(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"version": 1, **dict.fromkeys(TERMS, 0), "step": 1}))
    assert asdict(CostModel.load(path)) == {**dict.fromkeys(TERMS, 0), "step": 1, "about": {}}


WRONG: dict[str, Any] = {
    "no JSON": "step: 1",
    "half of it": json.dumps({"version": 1, **COSTS})[:-20],
    "nothing": "",
    "no UTF-8": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "a list": [1, 2],
    "a number": 1,
    "null": None,
    "no version": COSTS,
    "another version": {"version": 2, **COSTS},
    "a version in words": {"version": "1", **COSTS},
    "nothing but a version": {"version": 1},
    **{f"without {term}": {"version": 1, **{k: v for k, v in COSTS.items() if k != term}} for term in TERMS},
    **{
        f"step is {value!r}": {"version": 1, **COSTS, "step": value}
        for value in (-1e-9, math.nan, math.inf, -math.inf, "1", "", None, True, [1], {}, 1e6, 10**400)
    },
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_cost_model_is_refused_by_the_name_of_its_file(wrong: str, tmp_path: Path) -> None:
    path, content = tmp_path / "cost.json", WRONG[wrong]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TraceError, match=r"cost\.json") as caught:
        CostModel.load(path)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_folder_and_nothing_are_no_cost_models(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere.json"):
        with pytest.raises(TraceError, match="is no cost model"):
            CostModel.load(path)
