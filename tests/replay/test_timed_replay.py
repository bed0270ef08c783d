"""A trace in time: clocks that can be worked out by hand, what a small pool does, and what holds of any trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagetable.memory import EVICTION_POLICIES, CacheHints
from pagetable.memory.hints import NO_HINTS
from pagetable.replay.blocks import Workload
from pagetable.replay.cost import CostModel
from pagetable.replay.readers import Trace
from pagetable.replay.timed_replay import Limits, TimedReplay, TimedResult
from pagetable.replay.trace import TraceError
from tests.replay.small_traces import (
    Record,
    listen,
    mooncake,
    play,
    qwen,
    random_chats,
    random_paths,
    reuse_of,
    token_workload,
    tokens,
    weka,
    weka_request,
    write_trace,
)

A_SECOND = CostModel(step=1.0, prefill_token=0.0, prefill_context=0.0, decode=0.0, decode_context=0.0)
NOTHING = CostModel(step=1e-9, prefill_token=0.0, prefill_context=0.0, decode=0.0, decode_context=0.0)
SOMETHING = CostModel(step=0.05, prefill_token=1e-3, prefill_context=1e-6, decode=2e-3, decode_context=1e-5)


def run(
    workload: Workload,
    capacity: int,
    *,
    cost: CostModel = A_SECOND,
    policy: str = "lru",
    speed: float = 1.0,
    **limits: Any,
) -> TimedResult:
    """The whole trace, by default with steps of one second."""
    return TimedReplay(workload, policy, capacity, cost, Limits(**limits), speed=speed).run()


def run_tokens(folder: Path, records: Sequence[Record], capacity: int = 16, **options: Any) -> TimedResult:
    """Requests of tokens in blocks of 4."""
    return run(token_workload(folder, records, 4), capacity, **options)


def times(result: TimedResult) -> dict[str, list[float]]:
    return {name: list(getattr(result, name)) for name in ("queue", "ttft", "itl", "tpot", "e2e")}


def all_but_seconds(result: TimedResult) -> dict[str, Any]:
    return {**asdict(result), **times(result), "seconds": None}


def different(first: int, length: int) -> list[int]:
    """So many tokens that no other prompt has."""
    return list(range(first, first + length))


# ---------------------------------------------------------------- clocks by hand


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_later_token(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, range(8), length=3)])
    assert times(result) == {"queue": [0], "ttft": [1], "itl": [1, 1], "tpot": [1], "e2e": [3]}
    assert (result.clock, result.busy, result.num_steps) == (3, 3, 3)
    assert (result.num_prompt_tokens, result.num_output_tokens) == (8, 3)
    assert (result.num_accesses, result.num_hits, result.hits) == (2, 0, [0])


def test_an_answer_of_one_token_has_no_time_between_tokens(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, range(8), length=1)])
    assert times(result) == {"queue": [0], "ttft": [1], "itl": [], "tpot": [], "e2e": [1]}


def test_a_request_without_an_answer_draws_the_one_token_that_ends_it(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, range(8), length=0)])
    assert times(result) == {"queue": [0], "ttft": [1], "itl": [], "tpot": [], "e2e": [1]}


def test_requests_that_overlap_share_steps(tmp_path: Path) -> None:
    records = [tokens(0, different(0, 8), length=4), tokens(1.5, different(50, 8), length=2)]
    result = run_tokens(tmp_path, records)
    # Steps: [0, 1] the first prompt, [1, 2], [2, 3] with the second prompt, [3, 4] both.
    assert times(result) == {
        "queue": [0, 0.5],
        "ttft": [1, 1.5],
        "itl": [1, 1, 1, 1],
        "tpot": [1, 1],
        "e2e": [4, 2.5],
    }
    assert (result.clock, result.busy, result.num_steps) == (4, 4, 4)


def test_between_two_requests_the_clock_goes_on_and_nothing_is_computed(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, different(0, 8), length=2), tokens(10, different(50, 8), length=2)])
    assert times(result) == {"queue": [0, 0], "ttft": [1, 1], "itl": [1, 1], "tpot": [1, 1], "e2e": [2, 2]}
    assert (result.clock, result.busy) == (12, 4)


def test_a_request_waits_for_a_place_in_the_batch(tmp_path: Path) -> None:
    records = [tokens(0, different(0, 8), length=3), tokens(1, different(50, 8), length=2)]
    result = run_tokens(tmp_path, records, max_num_seqs=1)
    assert times(result) == {"queue": [0, 2], "ttft": [1, 3], "itl": [1, 1, 1], "tpot": [1, 1], "e2e": [3, 4]}
    assert result.clock == 5


def test_a_long_prompt_takes_as_many_steps_as_it_has_chunks(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, range(10), length=2)], max_num_batched_tokens=4)
    assert times(result) == {"queue": [0], "ttft": [3], "itl": [1], "tpot": [1], "e2e": [4]}
    assert result.num_steps == 4


def test_decoding_goes_before_the_chunks_of_another_prompt(tmp_path: Path) -> None:
    records = [tokens(0, different(0, 4), length=3), tokens(0.5, different(50, 9), length=1)]
    result = run_tokens(tmp_path, records, max_num_batched_tokens=4)
    # Steps: [0, 1] 4 tokens of the first; [1, 2] and [2, 3] one of it and 3 of the second; [3, 4] the last 3.
    assert times(result) == {"queue": [0, 0.5], "ttft": [1, 3.5], "itl": [1, 1], "tpot": [1], "e2e": [3, 3.5]}


def test_each_part_of_the_cost_counts(tmp_path: Path) -> None:
    cost = CostModel(step=1.0, prefill_token=0.1, prefill_context=0.01, decode=2.0, decode_context=0.001)
    result = run_tokens(tmp_path, [tokens(0, range(3), length=3)], cost=cost)
    prompt = 1 + 3 * 0.1 + (1 + 2 + 3) * 0.01
    first, second = 1 + 2 + 4 * 0.001, 1 + 2 + 5 * 0.001
    assert list(result.ttft) == pytest.approx([prompt])
    assert list(result.itl) == pytest.approx([first, second])
    assert list(result.tpot) == pytest.approx([(first + second) / 2])
    assert list(result.e2e) == pytest.approx([prompt + first + second])


def test_at_twice_the_speed_requests_arrive_in_half_the_time(tmp_path: Path) -> None:
    records = [tokens(0, different(0, 8), length=2), tokens(10, different(50, 8), length=2)]
    slow, fast = run_tokens(tmp_path, records), run_tokens(tmp_path, records, speed=2)
    assert (slow.clock, fast.clock) == (12, 7)
    assert times(slow) == times(fast)
    assert run_tokens(tmp_path, records, speed=20).clock == 3.0  # the second comes at 0.5 and shares a step


def test_slots_that_no_token_fills_are_wasted(tmp_path: Path) -> None:
    assert run_tokens(tmp_path, [tokens(0, range(8), length=1)]).waste == 0
    assert run_tokens(tmp_path, [tokens(0, range(10), length=1)]).waste == pytest.approx(2 / 12)
    assert run_tokens(tmp_path, [tokens(0, range(10), length=2)]).waste == pytest.approx((2 / 12 + 1 / 12) / 2)


# ---------------------------------------------------------------- hits and misses


def test_what_an_earlier_request_left_is_hit(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, range(8)), tokens(10, range(9)), tokens(20, range(9))])
    assert result.hits == [0, 2, 2]
    assert (result.num_hits, result.num_hit_tokens, result.num_accesses) == (4, 16, 6)
    assert result.misses == {"never_seen": 1, "partial_tail": 2}


def test_a_prompt_is_hit_as_soon_as_it_is_computed_while_its_answer_still_grows(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, range(8), length=9), tokens(2, range(9))])
    assert result.hits == [0, 2]
    assert list(result.queue) == [0, 0]


def test_an_answer_is_hit_as_far_as_it_was_computed(tmp_path: Path) -> None:
    prompt, answer = different(0, 4), different(50, 9)
    for arrival, hits in [(3.0, 1), (6.0, 2), (20.0, 3)]:
        records = [tokens(0, prompt, answer), tokens(arrival, [*prompt, *answer, 1])]
        assert run_tokens(tmp_path, records).hits == [0, hits], arrival


def test_who_needs_the_block_that_another_computes_waits_for_it_and_hits(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, [*range(8), 70]), tokens(0, [*range(8), 80])])
    assert result.hits == [0, 2]
    assert times(result) == {"queue": [0, 1], "ttft": [1, 2], "itl": [], "tpot": [], "e2e": [1, 2]}
    assert result.misses == {"never_seen": 1, "partial_tail": 1}


def test_of_hashes_the_last_block_has_to_be_computed_here(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(i * 10, 1, 2, 3) for i in range(2)])
    result = run(Workload(Trace(path)), 8)
    assert result.hits == [0, 2]
    assert (result.num_hits, result.num_accesses, result.num_hit_tokens) == (2, 6, 1024)


def test_an_evicted_block_is_missed_for_that_reason(tmp_path: Path) -> None:
    records = [tokens(0, range(9)), tokens(10, different(50, 12)), tokens(20, range(9))]
    result = run_tokens(tmp_path, records, capacity=3)
    assert result.hits == [0, 0, 0]
    assert result.misses == {"never_seen": 2, "evicted": 1}
    assert result.evictions > 0


@pytest.mark.parametrize("kind", ["mooncake", "qwen", "weka"])
def test_tokens_behind_the_last_hash_are_never_equal(kind: str, tmp_path: Path) -> None:
    make: dict[str, Callable[[float], Record]] = {
        "mooncake": lambda seconds: mooncake(seconds, 1, input_length=4 * 512),
        "qwen": lambda seconds: qwen(1, -1, seconds, 1, input_length=4 * 16),
    }
    if kind == "weka":
        records = [weka(*(weka_request(seconds, 1, **{"in": 4 * 64}) for seconds in (0, 100, 200)))]
    else:
        whole = make[kind](0) | {"hash_ids": [7, 8, 9, 10]}  # so that the lengths show the size of a block
        records = [whole, *(make[kind](seconds) for seconds in (100, 200, 300))]
    workload = Workload(Trace(write_trace(tmp_path / "trace.jsonl", records)))
    assert run(workload, 64).hits[-3:] == [0, 1, 1]


def test_answers_that_are_not_known_take_up_room(tmp_path: Path) -> None:
    records = [tokens(0, [1] * 4, length=9), tokens(20, [2] * 4, length=9), tokens(40, [1] * 5)]
    assert run_tokens(tmp_path, records, capacity=6).hits == [0, 0, 1]
    assert run_tokens(tmp_path, records, capacity=3).hits == [0, 0, 0]


# ---------------------------------------------------------------- a pool that is too small


def test_who_is_preempted_computes_again_and_ends_all_the_same(tmp_path: Path) -> None:
    records = [tokens(0, different(50 * i, 4), length=12) for i in range(2)]
    result = run_tokens(tmp_path, records, capacity=4)  # one answer fills all of it
    assert result.preemptions > 0
    assert result.recomputed_tokens > 0
    assert (len(result.e2e), result.num_output_tokens, result.num_cut_off) == (2, 24, 0)
    assert len(result.queue) == len(result.ttft) == len(result.tpot) == 2
    assert len(result.itl) == 22
    assert sum(result.misses.values()) == 2 + result.preemptions


def test_a_pool_with_room_for_all_preempts_nobody(tmp_path: Path) -> None:
    records = [tokens(0, different(50 * i, 4), length=12) for i in range(2)]
    result = run_tokens(tmp_path, records, capacity=8)
    assert (result.preemptions, result.recomputed_tokens, result.evictions) == (0, 0, 0)
    assert list(result.e2e) == [12, 12]


def test_an_answer_that_outgrows_the_pool_is_cut_off(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(0, range(4), length=100), tokens(50, range(5))], capacity=2)
    assert result.num_cut_off == 1
    assert result.num_output_tokens == 5 + 1  # 8 slots, and one token that has none
    assert list(result.e2e) == [5, 1]
    assert result.hits == [0, 1]


def test_a_prompt_that_can_never_fit_is_refused_and_counts_as_missed(tmp_path: Path) -> None:
    records = [tokens(0, range(4)), tokens(10, range(9)), tokens(20, range(5))]
    result = run_tokens(tmp_path, records, capacity=2)
    assert (result.num_refused, result.hits) == (1, [0, 0, 1])
    assert (result.num_accesses, result.num_prompt_tokens) == (1 + 2 + 1, 4 + 9 + 5)
    assert len(result.e2e) == len(result.ttft) == len(result.queue) == 2


def test_a_trace_of_which_nothing_fits_ends(tmp_path: Path) -> None:
    result = run_tokens(tmp_path, [tokens(i, range(9)) for i in range(3)], capacity=2)
    assert (result.num_refused, result.num_steps, result.busy, result.waste) == (3, 0, 0, 0)


# ---------------------------------------------------------------- what the policy is told


def test_a_policy_is_told_tokens_and_hints_by_the_clock_of_the_replay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = listen(monkeypatch)
    hinted = {"session_id": 7, "expected_idle_s": 60}
    run_tokens(
        tmp_path,
        [tokens(0, range(8), length=3), {**tokens(1, different(50, 9), length=2), **hinted}],
        policy="listener",
        max_num_seqs=1,
    )
    (policy,) = made
    assert (policy.num_blocks, policy.block_size) == (16, 4)
    assert policy.begun == [(0, 8, NO_HINTS), (3, 9, CacheHints("7", expected_idle_s=60))]  # when it had a place
    assert policy.ended == [(3, 3), (5, 2)]


def test_of_hashes_it_is_told_tokens_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = listen(monkeypatch)
    records = [mooncake(0, 1, 2, input_length=700, output_length=30), mooncake(90, 1, 2, 3, input_length=1100)]
    for block_size in (512, 1024):
        workload = Workload(Trace(write_trace(tmp_path / "trace.jsonl", records)), block_size)
        run(workload, 8, policy="listener")
        policy = made.pop()
        assert policy.block_size == block_size
        assert policy.begun == [(0, 700, NO_HINTS), (90, 1100, NO_HINTS)]
        assert policy.ended == [(30, 30), (91, 1)]


def test_who_is_preempted_begins_and_ends_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = listen(monkeypatch)
    records = [tokens(0, different(50 * i, 4), length=12) for i in range(2)]
    assert run_tokens(tmp_path, records, capacity=4, policy="listener").preemptions > 0
    assert [begun[1:] for begun in made[0].begun] == [(4, NO_HINTS)] * 2
    assert [num_output_tokens for _, num_output_tokens in made[0].ended] == [12, 12]


def test_times_of_hints_go_as_fast_as_the_requests_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = listen(monkeypatch)
    hinted = {"session_id": "s", "expected_idle_s": 60, "ttl_s": 1e9, "cache_priority": 70}
    for speed in (2, 0.5):
        run_tokens(tmp_path, [{**tokens(0, range(8)), **hinted}], policy="listener", speed=speed)
    fast, slow = (policy.begun[0][2] for policy in made)
    assert fast == CacheHints("s", False, 30, 70, 5e8)
    assert slow == CacheHints("s", False, 120, 70, 1e9)  # no more can be said


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("kind", ["hashes", "tokens"])
def test_the_blocks_of_a_session_that_has_ended_leave_before_all_others(policy: str, kind: str, tmp_path: Path) -> None:
    def hits_of(*ends: bool) -> list[int]:
        hints = [{"session_id": i, "end_session": is_end} for i, is_end in enumerate(ends)]
        if kind == "hashes":
            paths = [(1, 2), (3, 4), (5, 6), (1, 2, 7)]
            records = [mooncake(10 * i, *path, **hints[i]) for i, path in enumerate(paths)]
            workload = Workload(Trace(write_trace(tmp_path / "trace.jsonl", records)))
        else:
            prompts = [[1] * 8, [2] * 8, [3] * 8, [1] * 9]
            records = [{**tokens(10 * i, prompt), **hints[i]} for i, prompt in enumerate(prompts)]
            workload = token_workload(tmp_path, records, 4)
        return run(workload, 4, policy=policy).hits

    assert hits_of(False, True, False, False) == [0, 0, 0, 2]
    assert hits_of(True, False, False, False) == [0, 0, 0, 0]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("block_size", [3, 48, 100])
def test_blocks_that_are_no_power_of_two_are_refused(block_size: int, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(0, 1, input_length=block_size, block_size=block_size)])
    with pytest.raises(TraceError, match=f"block_size={block_size}.*power of two"):
        TimedReplay(Workload(Trace(path)), "lru", 4, A_SECOND, Limits())


def test_so_are_those_that_are_merged_to_be_none(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(0, 1, 2, 3)])
    with pytest.raises(TraceError, match=r"block_size=1536.*power of two"):
        TimedReplay(Workload(Trace(path), 1536), "lru", 4, A_SECOND, Limits())


# ---------------------------------------------------------------- any trace


HASHED_SIZES = {"mooncake": 4, "qwen": 16, "weka": 64}  # tokens of a block
every_format = pytest.mark.parametrize("kind", [*HASHED_SIZES, "tokens"])


def random_workload(kind: str, rng: random.Random, folder: Path) -> Workload:
    """Some 40 requests of a format; of hashes, some have fewer of them than blocks, or more."""
    if kind == "tokens":
        records = random_chats(rng, 40, known_outputs=rng.choice([0.0, 0.5, 1.0]))
        return token_workload(folder, records, rng.choice([1, 2, 4, 8]))
    size, seconds, records = HASHED_SIZES[kind], 0.0, []
    for number, path in enumerate(random_paths(rng, rng.randint(4, 30), 40, longest=6)):
        seconds += rng.choice([0.0, 0.1, 0.5, 3.0])
        length = max(1, size * len(path) - rng.randrange(size))
        if rng.random() < 0.2:
            length = max(1, length + rng.randint(-2, 3) * size)
        output = rng.choice([0, 1, 3, 2 * size])
        if kind == "mooncake":
            lengths = {"input_length": length, "output_length": output}
            records.append(mooncake(seconds, *path, block_size=size, **lengths))
        elif kind == "qwen":
            records.append(qwen(number, -1, seconds, *path, input_length=length, output_length=output))
        else:
            records.append(weka_request(seconds, *path, **{"in": length, "out": output}))
    if kind == "weka":
        half = len(records) // 2
        scope = rng.choice(["local", "global"])
        records = [weka(*part, hash_id_scope=scope) for part in (records[:half], records[half:])]
    return Workload(Trace(write_trace(folder / "trace.jsonl", records)))


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "cost": rng.choice([A_SECOND, SOMETHING, NOTHING]),
        "policy": rng.choice(list(EVICTION_POLICIES)),
        "speed": rng.choice([0.25, 1.0, 8.0]),
        "max_num_seqs": rng.choice([1, 3, 128]),
        "max_num_batched_tokens": rng.choice([64, 100, 2048]),
    }


@every_format
@pytest.mark.parametrize("seed", range(12))
def test_the_books_are_right(kind: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{kind}/{seed}")
    workload = random_workload(kind, rng, tmp_path)
    requests = [(request, access) for request, access in workload]
    capacity = rng.choice([rng.randint(3, 12), rng.randint(12, 60), 10_000])
    result = run(workload, capacity, **random_options(rng))
    num_served = len(requests) - result.num_refused

    assert len(result.hits) == len(requests)
    assert result.num_hits == sum(result.hits)
    assert result.num_hits <= min(reuse_of(workload).num_hits, result.num_accesses)
    assert result.num_accesses == sum(access.num_accesses for _, access in requests)
    assert result.num_prompt_tokens == sum(request.num_prompt_tokens for request, _ in requests)
    assert result.num_hit_tokens == workload.block_size * result.num_hits <= result.num_prompt_tokens
    for hits, (request, _) in zip(result.hits, requests, strict=True):
        assert 0 <= hits * workload.block_size < request.num_prompt_tokens
    blocks = [-(-request.num_prompt_tokens // workload.block_size) for request, _ in requests]
    assert result.num_refused == sum(size > capacity for size in blocks)

    assert len(result.queue) == len(result.ttft) == len(result.e2e) == num_served
    assert result.num_output_tokens == len(result.ttft) + len(result.itl)
    answers = sum(
        max(1, request.num_output_tokens)
        for (request, _), size in zip(requests, blocks, strict=True)
        if size <= capacity
    )
    assert (result.num_output_tokens == answers) if not result.num_cut_off else (result.num_output_tokens < answers)
    assert sum(result.misses.values()) == num_served + result.preemptions
    assert set(result.misses) <= {"never_seen", "evicted", "partial_tail"}
    assert min(result.queue, default=0) >= 0
    assert all(time > 0 for name in ("ttft", "itl", "tpot", "e2e") for time in getattr(result, name))
    assert sum(result.queue) < sum(result.ttft) <= sum(result.e2e) + 1e-6 or not num_served

    assert result.busy <= result.clock + 1e-6
    assert 0 <= result.waste <= 1
    if capacity == 10_000:
        assert (result.evictions, result.preemptions, result.num_refused, result.num_cut_off) == (0, 0, 0, 0)


@every_format
@pytest.mark.parametrize("seed", range(3))
def test_the_same_replay_has_the_same_result(kind: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{kind}/{seed}")
    workload, options = random_workload(kind, rng, tmp_path), random_options(rng)
    first, second = (run(workload, 12, **options) for _ in range(2))
    assert all_but_seconds(first) == all_but_seconds(second)


@pytest.mark.parametrize("kind", HASHED_SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_merged_blocks_hit_no_more_than_an_infinite_cache(kind: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{kind}/{seed}")
    workload = Workload(random_workload(kind, rng, tmp_path).trace, 2 * HASHED_SIZES[kind])
    result = run(workload, 10_000, **random_options(rng))
    assert result.num_hits <= reuse_of(workload).num_hits
    assert len(result.e2e) == 40


@pytest.mark.parametrize("known_outputs", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_with_time_and_memory_enough_the_hits_are_those_of_one_request_after_the_other(
    known_outputs: float, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    records = random_chats(rng, 50, known_outputs=known_outputs)
    records = [{**record, "timestamp": float(i)} for i, record in enumerate(records)]  # each after the one before
    workload = token_workload(tmp_path, records, rng.choice([1, 2, 4, 8]))
    timed, cache = run(workload, 5000, cost=NOTHING), play(workload, "lru", 5000)
    assert timed.hits == cache.hits
    assert sum(cache.hits) > 0
    assert (timed.num_hit_tokens, timed.num_accesses) == (cache.num_hit_tokens, cache.num_accesses)


@pytest.mark.parametrize("speed", [0.5, 2.0, 8.0])
def test_speed_is_a_unit_of_time(speed: float, tmp_path: Path) -> None:
    """As fast again, with steps as short again, is the same but for the unit."""
    records = random_chats(random.Random(5), 40)
    plain = run_tokens(tmp_path, records, capacity=20)
    shorter = CostModel(step=1 / speed, prefill_token=0.0, prefill_context=0.0, decode=0.0, decode_context=0.0)
    fast = run_tokens(tmp_path, records, capacity=20, cost=shorter, speed=speed)
    assert fast.hits == plain.hits
    assert (fast.evictions, fast.preemptions, fast.misses) == (plain.evictions, plain.preemptions, plain.misses)
    assert [speed * e2e for e2e in fast.e2e] == pytest.approx(list(plain.e2e))
