"""The offline optimum: against Belady's rule block by block, against every choice of victims, against every policy."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.blocks import Workload
from pagetable.replay.readers import Trace
from pagetable.replay.reuse import Access, Reuse
from tests.replay.plain_caches import Prefix, Visit, belady_hits, best_hits, lru_curve
from tests.replay.small_traces import (
    hashed_workload,
    mooncake,
    play,
    random_chats,
    random_paths,
    reuse_of,
    token_workload,
    tokens,
    write_trace,
)

every_policy = pytest.mark.parametrize("policy", EVICTION_POLICIES)


def visits_of(paths: list[Prefix]) -> list[Visit]:
    """All blocks can be hit, as in traces of hashes."""
    return [Visit(path, len(path), len(path)) for path in paths]


def random_visits(rng: random.Random, num_nodes: int, num_requests: int) -> list[Visit]:
    """The ends of paths cannot be hit, as the answers in traces of tokens, or the last block of a prompt."""
    visits = []
    for path in random_paths(rng, num_nodes, num_requests):
        num_reusable = max(0, len(path) - rng.choice([0, 0, 1, 1, 2, 3]))
        visits.append(Visit(path, num_reusable, num_reusable + 1))
    return visits


def add_visit(reuse: Reuse, visit: Visit, seconds: float) -> None:
    path = np.array(visit.path, np.int32)
    reuse.add(Access(path, len(path), visit.num_reusable, visit.num_needed), seconds)


def reuse_from(visits: list[Visit]) -> Reuse:
    reuse = Reuse()
    for seconds, visit in enumerate(visits):
        add_visit(reuse, visit, float(seconds))
    return reuse


def longest(visits: list[Visit]) -> int:
    """Blocks with which nothing is turned away or cut short."""
    return max(max(len(visit.path), visit.num_needed) for visit in visits)


# ---------------------------------------------------------------- against Belady's rule


def assert_min_is_beladys(visits: list[Visit], capacities: Iterable[int]) -> None:
    reuse = reuse_from(visits)
    for capacity in capacities:
        assert reuse.min_hits(capacity) == belady_hits(visits, capacity), f"{capacity=} {visits=}"


@pytest.mark.parametrize("seed", range(60))
def test_runs_give_what_beladys_rule_gives_block_by_block(seed: int) -> None:
    rng = random.Random(seed)
    visits = visits_of(random_paths(rng, rng.randint(3, 30), rng.randint(5, 60), longest=rng.choice([3, 6, 99])))
    assert_min_is_beladys(visits, range(longest(visits), reuse_from(visits).num_nodes + 2))


@pytest.mark.parametrize("seed", range(40))
def test_so_they_do_where_the_ends_of_paths_cannot_be_hit(seed: int) -> None:
    rng = random.Random(seed)
    visits = random_visits(rng, rng.randint(3, 20), rng.randint(5, 40))
    assert_min_is_beladys(visits, range(longest(visits), reuse_from(visits).num_nodes + 2))


@pytest.mark.parametrize("seed", range(40))
def test_so_they_do_where_some_requests_do_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    draw = rng.choice([random_visits, lambda *sizes: visits_of(random_paths(*sizes))])
    visits = draw(rng, rng.randint(3, 20), rng.randint(5, 40))
    assert_min_is_beladys(visits, range(longest(visits)))


# ---------------------------------------------------------------- against every choice there is


def assert_best(visits: list[Visit], capacity: int) -> None:
    """Nothing is better, and the optimum can be had."""
    optimum = reuse_from(visits).min_hits(capacity)
    assert best_hits(visits, capacity, leaves_only=False) == optimum, f"{capacity=} {visits=}"


def assert_best_of_leaves(visits: list[Visit], capacity: int) -> None:
    """The optimum can be had without ever taking a parent before its child."""
    optimum = reuse_from(visits).min_hits(capacity)
    assert best_hits(visits, capacity, leaves_only=True) == optimum, f"{capacity=} {visits=}"


@pytest.mark.parametrize("seed", range(100))
def test_no_choice_of_victims_gets_more_hits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        visits = visits_of(random_paths(rng, rng.randint(3, 8), rng.randint(4, 12), longest=3))
        capacity = rng.randint(longest(visits), 5)
        assert_best(visits, capacity)
        assert_best_of_leaves(visits, capacity)


@pytest.mark.parametrize("seed", range(60))
def test_nor_where_the_ends_of_paths_cannot_be_hit(seed: int) -> None:
    # With leaves alone it can be less: a block in the middle of a chain may be worth nothing while those below it are,
    # because its next user computes it in any case.
    rng = random.Random(seed)
    for _ in range(10):
        visits = random_visits(rng, rng.randint(3, 7), rng.randint(4, 11))
        assert_best(visits, max(longest(visits), rng.randint(2, 5)))


@pytest.mark.parametrize("seed", range(60))
def test_nor_where_some_requests_do_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        visits = visits_of(random_paths(rng, rng.randint(5, 9), rng.randint(8, 14)))
        for capacity in range(1, min(longest(visits), 6)):
            assert_best(visits, capacity)
            assert_best_of_leaves(visits, capacity)
        visits = random_visits(rng, rng.randint(5, 8), rng.randint(8, 13))
        for capacity in range(1, min(longest(visits), 5)):
            assert_best(visits, capacity)


def test_the_search_finds_what_only_the_future_tells() -> None:
    visits = visits_of([(0,), (1,), (2,), (0,), (1,)])  # LRU with two blocks hits nothing here
    assert best_hits(visits, 2, leaves_only=False) == belady_hits(visits, 2) == 1
    assert lru_curve([visit.path for visit in visits], range(3)) == [0, 0, 0]


# ---------------------------------------------------------------- LRU at every capacity


@pytest.mark.parametrize("seed", range(15))
def test_one_pass_gives_lru_at_every_capacity_as_the_page_table_does(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, rng.randint(3, 24), rng.randint(5, 60), longest=rng.choice([4, 8]))
    workload = hashed_workload(tmp_path, paths)
    reuse = reuse_of(workload)
    curve = reuse.lru_hits()
    assert len(curve) == reuse.num_nodes + 1
    for capacity in range(max(map(len, paths)), reuse.num_nodes + 1):
        assert play(workload, "lru", capacity).num_hits == curve[capacity], f"{capacity=} {paths=}"


@pytest.mark.parametrize("seed", range(2))
def test_distances_hold_over_thousands_of_requests(seed: int) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, 60, 2300, longest=6)
    curve = reuse_from(visits_of(paths)).lru_hits()
    assert curve.tolist() == lru_curve(paths, range(len(curve)))


@pytest.mark.parametrize("seed", range(5))
def test_seconds_between_two_uses_of_each_block(seed: int) -> None:
    rng = random.Random(seed)
    reuse, seconds = Reuse(), 0.0
    last: dict[int, float] = {}
    expected: list[float] = []
    for visit in random_visits(rng, 12, 60):
        seconds += rng.choice([0.0, 1.0, 2.5])
        add_visit(reuse, visit, seconds)
        expected += [seconds - last[node] for node in visit.path[: visit.num_reusable] if node in last]
        last.update(dict.fromkeys(visit.path, seconds))
    intervals, counts = reuse.intervals()
    assert sorted(np.repeat(intervals, counts).tolist()) == sorted(expected)


# ---------------------------------------------------------------- no policy is better


@every_policy
@pytest.mark.parametrize("seed", range(12))
def test_no_policy_gets_more_hits(policy: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, rng.randint(5, 30), 80, longest=rng.choice([3, 8]))
    workload = hashed_workload(tmp_path, paths)
    reuse = reuse_of(workload)
    for capacity in {max(map(len, paths)), reuse.num_nodes // 2, reuse.num_nodes - 1, reuse.num_nodes}:
        if capacity >= max(map(len, paths)):
            assert play(workload, policy, capacity).num_hits <= reuse.min_hits(capacity), f"{capacity=} {paths=}"


@every_policy
@pytest.mark.parametrize("seed", range(12))
def test_nor_where_some_requests_do_not_fit_into_the_page_table(policy: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, rng.randint(5, 30), 80)
    workload = hashed_workload(tmp_path, paths)
    reuse = reuse_of(workload)
    for capacity in {1, 2, max(map(len, paths)) // 2, max(map(len, paths)) - 1}:
        result = play(workload, policy, capacity)
        assert result.num_refused == sum(len(path) > capacity for path in paths)
        assert result.num_hits <= reuse.min_hits(capacity), f"{capacity=} {paths=}"


@every_policy
@pytest.mark.parametrize("known_outputs", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_nor_on_traces_of_tokens(policy: str, known_outputs: float, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    workload = token_workload(tmp_path, random_chats(rng, 40, known_outputs=known_outputs), block_size)
    reuse = reuse_of(workload)
    for capacity in (1, 3, 40 // block_size, 60 // block_size, reuse.num_nodes + 60):
        result = play(workload, policy, capacity)
        assert result.num_hits <= reuse.min_hits(capacity), f"{capacity=}"


def test_a_request_that_lacks_a_slot_for_its_last_tokens_evicts_nothing(tmp_path: Path) -> None:
    records = [tokens(0, [1] * 8), tokens(1, [2] * 9), tokens(2, [1] * 8)]  # nine tokens take three blocks
    workload = token_workload(tmp_path, records, 4)
    assert play(workload, "lru", 2).hits == [0, 0, 1]
    assert reuse_of(workload).min_hits(2) == 1


def test_an_answer_that_outgrows_the_cache_does_not_cost_its_prompt_the_hits(tmp_path: Path) -> None:
    workload = token_workload(tmp_path, [tokens(0, [1] * 5), tokens(1, [1] * 5, [7] * 20)], 4)
    assert play(workload, "lru", 2).hits == [0, 1]
    assert reuse_of(workload).min_hits(2) == 1


# ---------------------------------------------------------------- the ends of the range


@pytest.mark.parametrize("seed", range(10))
def test_with_room_for_all_everything_seen_before_is_hit(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, 20, 60, longest=6)
    workload = hashed_workload(tmp_path, paths)
    reuse = reuse_of(workload)
    seen: set[int] = set()
    expected = 0
    for path in paths:
        expected += len(seen.intersection(path))
        seen.update(path)
    assert (reuse.num_hits, reuse.num_nodes, reuse.num_requests) == (expected, len(seen), 60)
    assert reuse.num_accesses == sum(map(len, paths))
    assert reuse.min_hits(reuse.num_nodes) == reuse.min_hits(10**9) == reuse.lru_hits()[-1] == expected
    assert reuse.min_hits(reuse.num_nodes - 1) <= expected
    assert {play(workload, policy, reuse.num_nodes).num_hits for policy in EVICTION_POLICIES} == {expected}


@pytest.mark.parametrize("seed", range(6))
def test_an_infinite_cache_hits_the_prompt_and_not_its_last_token(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    records = random_chats(rng, 40)
    workload = token_workload(tmp_path, records, size)
    reuse = reuse_of(workload)
    seen: set[Prefix] = set()
    expected = 0
    for record in records:
        prompt = tuple(record["prompt_token_ids"])
        everything = (*prompt, *record.get("output_token_ids", ())[:-1])
        expected += sum(prompt[:end] in seen for end in range(size, len(prompt), size))
        seen.update(everything[:end] for end in range(size, len(everything) + 1, size))
    assert (reuse.num_hits, reuse.num_nodes) == (expected, len(seen))
    assert reuse.min_hits(10**9) == expected


@pytest.mark.parametrize("seed", range(10))
def test_more_blocks_never_cost_the_optimum_hits(seed: int) -> None:
    rng = random.Random(seed)
    visits = visits_of(random_paths(rng, 25, 80, longest=6))
    reuse = reuse_from(visits)
    hits = [reuse.min_hits(capacity) for capacity in range(longest(visits), reuse.num_nodes + 1)]
    assert hits == sorted(hits)
    assert (reuse.lru_hits()[longest(visits) :] <= hits).all()


def test_what_does_not_fit_hits_nothing_and_leaves_everything_where_it_is(tmp_path: Path) -> None:
    workload = hashed_workload(tmp_path, [(1,), (2,), (1, 4, 5), (1,), (2,)])
    result = play(workload, "lru", 2)
    assert (result.hits, result.num_refused) == ([0, 0, 0, 1, 1], 1)
    assert reuse_of(workload).min_hits(2) == 2


def test_a_next_use_that_does_not_fit_is_none(tmp_path: Path) -> None:
    workload = hashed_workload(tmp_path, [(1,), (2,), (3,), (1, 4, 5), (2,)])
    assert play(workload, "lru", 2).hits == [0, 0, 0, 0, 1]
    assert reuse_of(workload).min_hits(2) == 1


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_nothing_asked_for_is_nothing_hit(capacity: int, tmp_path: Path) -> None:
    reuse = Reuse()
    assert (reuse.min_hits(capacity), reuse.num_hits, reuse.lru_hits().tolist()) == (0, 0, [0])
    assert [array.tolist() for array in reuse.intervals()] == [[], []]
    workload = hashed_workload(tmp_path, [(1,), (1,)])
    assert reuse_of(workload).min_hits(capacity) == min(capacity, 1)


def test_a_prompt_shorter_than_a_block_asks_for_nothing(tmp_path: Path) -> None:
    records = [mooncake(0, 1), mooncake(1, input_length=5), mooncake(2, 1)]
    workload = Workload(Trace(write_trace(tmp_path / "trace.jsonl", records)))
    reuse = reuse_of(workload)
    assert (reuse.num_requests, reuse.num_accesses, reuse.min_hits(1)) == (3, 2, 1)
    assert play(workload, "lru", 1).hits == [0, 0, 1]
