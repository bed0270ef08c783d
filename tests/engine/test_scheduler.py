"""What a step holds, who is let in, who is pushed out, and how a sequence ends. No model: tokens come from the test."""

from collections.abc import Callable

import numpy as np
import pytest

from pagetable.engine import Engine, RequestError, SamplingParams, Scheduler, Sequence, Step, StepOutput, TokenLogprobs
from pagetable.memory import BlockManager


def make(num_blocks: int = 64, block_size: int = 4, **kwargs: object) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100} | kwargs
    return Scheduler(BlockManager(num_blocks, block_size), **limits)


def request(token_ids: list[int] | int, max_tokens: int | None = 5, block_size: int = 4, **kwargs: object) -> Sequence:
    tokens = list(range(token_ids)) if isinstance(token_ids, int) else token_ids
    outside = {key: kwargs.pop(key) for key in ("cache_salt", "priority") if key in kwargs}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)
    return Sequence(tokens, params, block_size=block_size, **outside)


def add(scheduler: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        scheduler.add(seq)


def run_step(scheduler: Scheduler, token: int = 7) -> tuple[Step, list[Sequence]]:
    step = scheduler.schedule()
    assert step is not None
    finished = scheduler.commit(step, [token] * int(step.needs_logits.sum()))
    scheduler.block_manager.check()
    return step, finished


def run_all(scheduler: Scheduler, token: int = 7, limit: int = 2000) -> list[Sequence]:
    finished = []
    for _ in range(limit):
        if not scheduler.has_unfinished:
            assert len(scheduler.block_manager.free_block_ids) == len(scheduler.block_manager.blocks)
            return finished
        finished += run_step(scheduler, token)[1]
    raise AssertionError("the sequences do not end")


# ------------------------------------------------------------------ what a step holds


def test_a_step_is_plain_arrays():
    scheduler = make(max_num_batched_tokens=8)
    a, b = request(6), request([50, 51, 52, 53, 54, 55])
    add(scheduler, a, b)
    step = scheduler.schedule()
    assert list(step.seqs) == [a, b]
    assert step.num_scheduled_tokens.tolist() == [6, 2]
    assert step.needs_logits.tolist() == [True, False]  # the second is a first chunk
    assert step.context_lens.tolist() == [6, 2]
    assert step.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 50, 51]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert step.query_start.tolist() == [0, 6, 8]
    assert step.block_tables.tolist() == [[0, 1], [2, 3]]
    assert step.slot_mapping.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert len(step.sampling) == 1
    scheduler.commit(step, [7])

    step = scheduler.schedule()  # decode first, then the rest of the chunk, mixed in one batch
    assert list(step.seqs) == [a, b]
    assert step.num_scheduled_tokens.tolist() == [1, 4]
    assert step.token_ids.tolist() == [7, 52, 53, 54, 55]
    assert step.positions.tolist() == [6, 2, 3, 4, 5]
    assert step.context_lens.tolist() == [7, 6]
    assert step.needs_logits.tolist() == [True, True]


def test_block_tables_are_padded_with_minus_1():
    scheduler = make()
    add(scheduler, request(3), request([9] * 9))
    assert scheduler.schedule().block_tables.tolist() == [[0, -1, -1], [1, 2, 3]]


def test_decode_comes_first_and_the_budget_holds():
    scheduler = make(max_num_batched_tokens=6)
    first = request(3, max_tokens=20)
    add(scheduler, first)
    run_step(scheduler)
    add(scheduler, request([9] * 30))
    for _ in range(3):
        step, _ = run_step(scheduler)
        assert step.seqs[0] is first
        assert step.num_scheduled_tokens.tolist() == [1, 5]


def test_sampling_arrays_follow_the_rows_that_need_logits():
    scheduler = make(eos_token_ids=[3])
    greedy = request(2, min_tokens=2, stop_token_ids=[5])
    drawn = Sequence(
        [9], SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=11, logprobs=2), block_size=4
    )
    add(scheduler, greedy, drawn)
    sampling = scheduler.schedule().sampling
    assert sampling.temperature.tolist() == [0, 0.5]
    assert sampling.top_k.tolist() == [0, 0]
    assert sampling.top_p.tolist() == [1, pytest.approx(0.9)]
    assert sampling.min_p.tolist() == [0, pytest.approx(0.1)]
    assert sampling.seeds[1] == 11
    assert sampling.output_index.tolist() == [0, 0]
    assert sampling.num_logprobs.tolist() == [-1, 2]
    assert set(zip(sampling.banned_rows.tolist(), sampling.banned_token_ids.tolist(), strict=True)) == {(0, 3), (0, 5)}


def test_only_one_step_is_in_flight():
    scheduler = make()
    add(scheduler, request(3))
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule()
    scheduler.commit(step, [1])
    with pytest.raises(ValueError, match="not the one in flight"):
        scheduler.commit(step, [1])
    with pytest.raises(ValueError, match="not the one in flight"):
        scheduler.rollback(step)


@pytest.mark.parametrize("output", [[], [1, 2], StepOutput([1], [None, None]), [-1], [2**31]])
def test_an_output_that_does_not_fit_is_refused_and_changes_nothing(output: object):
    scheduler = make()
    seq = request(3)
    add(scheduler, seq)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="the output has"):
        scheduler.commit(step, output)
    scheduler.commit(step, [1])
    assert seq.output_token_ids == [1]


# ------------------------------------------------------------------ who is let in


def test_prefix_hits_are_kept_for_ever_as_num_prefix_tokens():
    scheduler = make()
    add(scheduler, request(10))
    run_all(scheduler)
    second = request([*range(8), 50, 51])
    add(scheduler, second)
    step, _ = run_step(scheduler)
    assert step.num_scheduled_tokens.tolist() == [2]
    assert second.num_prefix_tokens == 8
    run_all(scheduler)
    assert second.num_prefix_tokens == 8


def test_a_follower_waits_for_the_block_that_is_being_computed_and_others_pass_it():
    scheduler = make(max_num_batched_tokens=8)
    leader, follower, other = request(16), request([*range(12), 90, 91]), request([80] * 3)
    add(scheduler, leader, follower, other)
    step, _ = run_step(scheduler)
    assert list(step.seqs) == [leader]
    step, _ = run_step(scheduler)  # the leader computes blocks 2 and 3, of which 2 is the follower's
    assert list(step.seqs) == [leader]
    step, _ = run_step(scheduler)
    assert list(step.seqs) == [leader, follower, other]
    assert follower.num_prefix_tokens == 12


def test_a_follower_is_passed_over_and_not_those_behind_it():
    scheduler = make()
    leader, follower, other = request(9), request([*range(8), 90]), request([80] * 3)
    add(scheduler, leader, follower, other)
    step, _ = run_step(scheduler)
    assert list(step.seqs) == [leader, other]
    step, _ = run_step(scheduler)
    assert follower in step.seqs
    assert follower.num_prefix_tokens == 8


def test_no_token_of_identical_prompts_is_computed_twice():
    scheduler = make(num_blocks=200, max_num_seqs=64, max_num_batched_tokens=32)
    add(scheduler, *[request([*range(40), 50 + i]) for i in range(10)])
    computed = 0
    while scheduler.has_unfinished:
        step, _ = run_step(scheduler)
        computed += int(step.num_scheduled_tokens[step.positions[step.query_start[:-1]] < 41].sum())
    assert computed == 41 + 9


def test_if_the_leader_goes_its_followers_go_ahead_at_once():
    scheduler = make(max_num_batched_tokens=8)
    leader, follower = request(32), request([*range(30), 90, 91])
    add(scheduler, leader, follower)
    run_step(scheduler)
    scheduler.abort(leader.seq_id)
    step, _ = run_step(scheduler)
    assert list(step.seqs) == [follower]
    assert follower.num_prefix_tokens == 8


def test_running_sequences_are_capped():
    scheduler = make(max_num_seqs=2)
    add(scheduler, *[request([i] * 3) for i in range(5)])
    step, _ = run_step(scheduler)
    assert len(step.seqs) == 2
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 3)


def test_head_room_is_kept_for_those_who_run_and_waived_when_nobody_does():
    scheduler = make(num_blocks=4)
    alone = request(16)
    add(scheduler, alone)
    step, _ = run_step(scheduler)  # the whole pool
    assert list(step.seqs) == [alone]

    scheduler = make(num_blocks=4)
    first, second = request(5, max_tokens=1 + 3), request([9] * 5)
    add(scheduler, first, second)
    step, _ = run_step(scheduler)
    assert list(step.seqs) == [first]  # 2 blocks are free, one of them is the first's spare


def test_a_prompt_that_does_not_fit_yet_keeps_its_turn():
    scheduler = make(num_blocks=6)
    holder, large, small = request(12, max_tokens=3), request([8] * 14, max_tokens=1), request([9] * 2, max_tokens=1)
    add(scheduler, holder, large, small)
    finished = run_all(scheduler)
    assert finished == [holder, large, small]


def test_priority_goes_first_and_the_first_come_among_equals():
    scheduler = make(max_num_seqs=1, scheduling_policy="priority")
    low, high, also_high = request([1], 1, priority=5), request([2], 1, priority=-1), request([3], 1, priority=-1)
    add(scheduler, low, high, also_high)
    assert run_all(scheduler) == [high, also_high, low]


# ------------------------------------------------------------------ who is pushed out


def test_preemption_takes_the_last_in_order_and_it_comes_back_through_the_cache():
    scheduler = make(num_blocks=6)
    first, second = request(8, max_tokens=12), request([9] * 5, max_tokens=12)
    add(scheduler, first, second)
    finished = run_all(scheduler)
    assert {seq.seq_id for seq in finished} == {first.seq_id, second.seq_id}
    assert scheduler.block_manager.stats().preemptions >= 1
    assert first.output_token_ids == [7] * 12
    assert second.output_token_ids == [7] * 12
    assert second.num_prefix_tokens == 0


def test_the_head_of_the_order_is_never_preempted():
    for policy in ("fcfs", "priority"):
        scheduler = make(num_blocks=8, scheduling_policy=policy)
        seqs = [request([i] * 6, max_tokens=20, priority=-i) for i in range(4)]
        add(scheduler, *seqs)
        preempted: list[int] = []
        original = scheduler.block_manager.preempt
        scheduler.block_manager.preempt = lambda seq, original=original, seen=preempted: (
            seen.append(seq.seq_id),
            original(seq),
        )
        head = seqs[0] if policy == "fcfs" else seqs[-1]
        while not head.is_finished:
            run_step(scheduler)
        assert preempted
        assert head.seq_id not in preempted
        run_all(scheduler)


def test_no_one_is_let_in_by_a_step_that_preempted():
    scheduler = make(num_blocks=5, block_size=4)
    add(scheduler, request(4, max_tokens=30), request([9] * 4, max_tokens=30), request([8] * 4, max_tokens=30))
    preempting_steps = 0
    while scheduler.has_unfinished:
        preempted_before = scheduler.block_manager.stats().preemptions
        running_before = {seq.seq_id for seq in scheduler.running}
        step, _ = run_step(scheduler)
        if scheduler.block_manager.stats().preemptions > preempted_before:
            preempting_steps += 1
            assert {seq.seq_id for seq in step.seqs} <= running_before
    assert preempting_steps


def test_a_sequence_that_outgrows_the_pool_alone_ends_with_cache_full():
    scheduler = make(num_blocks=3)
    seq = request(5, max_tokens=None)
    add(scheduler, seq)
    assert run_all(scheduler) == [seq]
    assert seq.finish_reason == "cache_full"
    assert seq.num_tokens == 13  # the last token was drawn, its K/V has no place


def test_others_are_not_preempted_for_one_that_cannot_fit_at_all():
    scheduler = make(num_blocks=3)
    large, small = request(5, max_tokens=None), request([9], max_tokens=2)
    add(scheduler, large, small)
    run_all(scheduler)
    assert (large.finish_reason, small.finish_reason) == ("cache_full", "length")


# ------------------------------------------------------------------ how it ends


@pytest.mark.parametrize(
    ("make_request", "token", "reason", "num_output"),
    [
        (lambda: request(3, max_tokens=4), 7, "length", 4),
        (lambda: request(3, max_tokens=None), 7, "length", 17),  # max_model_len 20
        (lambda: request(3), 2, "stop", 1),
        (lambda: request(3), 1, "stop", 1),  # every end token that is declared
        (lambda: request(3, ignore_eos=True), 2, "length", 5),
        (lambda: request(3, min_tokens=3), 2, "stop", 3),
        (lambda: request(3, stop_token_ids=[9]), 9, "stop", 1),
        (lambda: request(3, stop_token_ids=[9], ignore_eos=True), 9, "stop", 1),
    ],
)
def test_finish_reasons(make_request: Callable[[], Sequence], token: int, reason: str, num_output: int):
    scheduler = make(eos_token_ids=[1, 2], max_model_len=20)
    seq = make_request()
    add(scheduler, seq)
    run_all(scheduler, token)
    assert seq.finish_reason == reason
    assert seq.output_token_ids == [token] * num_output
    assert seq.stop_reason == (9 if token == 9 else None)


def test_abort_of_waiting_running_unknown_and_finished():
    scheduler = make(max_num_seqs=1)
    running, waiting = request(6), request([9] * 6)
    add(scheduler, running, waiting)
    run_step(scheduler)
    assert scheduler.abort(waiting.seq_id)
    assert scheduler.abort(running.seq_id)
    assert not scheduler.abort(running.seq_id)
    assert not scheduler.abort(10**9)
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert scheduler.schedule() is None
    assert run_all(scheduler) == []


def test_abort_between_schedule_and_commit_takes_effect_at_commit():
    scheduler = make()
    seq, other = request(6), request([9] * 6)
    add(scheduler, seq, other)
    step = scheduler.schedule()
    assert scheduler.abort(seq.seq_id)
    assert seq.finish_reason is None
    assert seq.block_table  # the step in flight names them
    assert scheduler.commit(step, [7, 7]) == [seq]
    assert (seq.finish_reason, seq.output_token_ids, seq.block_table) == ("abort", [], [])
    assert other.output_token_ids == [7]
    run_all(scheduler)


def test_text_can_end_a_sequence_early():
    scheduler = make()
    seq = request(6)
    add(scheduler, seq)
    run_step(scheduler)
    assert scheduler.finish(seq.seq_id, "stop")
    assert seq.finish_reason == "stop"
    again = request(6)
    add(scheduler, again)
    with pytest.raises(ValueError, match="bored"):
        scheduler.finish(again.seq_id, "bored")


# ------------------------------------------------------------------ when a step fails


def test_rollback_gives_back_what_the_step_took_and_the_next_try_is_right():
    scheduler = make()
    a = request(8)
    add(scheduler, a)
    run_step(scheduler)
    b = request([9] * 9)
    add(scheduler, b)
    table, free = list(a.block_table), list(scheduler.block_manager.free_block_ids)
    step = scheduler.schedule()
    assert len(a.block_table) == 3
    assert scheduler.rollback(step) == []
    scheduler.block_manager.check()
    assert a.block_table == table
    assert a.num_cached_tokens == 8
    assert b.block_table == []
    assert sorted(scheduler.block_manager.free_block_ids) == sorted(free)
    assert list(scheduler.waiting) == [b]
    run_all(scheduler)
    assert (a.output_token_ids, b.output_token_ids) == ([7] * 5, [7] * 5)


def test_the_second_failure_ends_a_sequence_with_error():
    scheduler = make()
    seq = request(6)
    add(scheduler, seq)
    assert scheduler.rollback(scheduler.schedule()) == []
    assert scheduler.rollback(scheduler.schedule()) == [seq]
    assert seq.finish_reason == "error"
    assert not scheduler.has_unfinished
    assert len(scheduler.block_manager.free_block_ids) == 64


def test_abort_then_rollback_ends_with_abort():
    scheduler = make()
    seq = request(6)
    add(scheduler, seq)
    step = scheduler.schedule()
    scheduler.abort(seq.seq_id)
    assert scheduler.rollback(step) == [seq]
    assert seq.finish_reason == "abort"


class FailingRunner:
    def __init__(self, fails: Callable[[Step], bool]) -> None:
        self.fails = fails

    def execute(self, step: Step) -> StepOutput:
        if self.fails(step):
            raise MemoryError("no memory for activations")
        return StepOutput([7] * int(step.needs_logits.sum()))


def test_the_engine_outlives_a_runner_that_fails_once():
    tries = iter([False, True] + [False] * 100)
    scheduler = make()
    engine = Engine(scheduler, FailingRunner(lambda step: next(tries)))
    seqs = [request([i] * 6) for i in range(3)]
    add(scheduler, *seqs)
    while scheduler.has_unfinished:
        engine.step()
    assert all(seq.finish_reason == "length" and seq.output_token_ids == [7] * 5 for seq in seqs)


def test_a_fault_that_is_known_to_lie_at_one_row_is_held_against_that_one_only():
    class Poisoned(FailingRunner):
        def execute(self, step: Step) -> StepOutput:
            if poison in step.seqs:
                error = FloatingPointError("NaN")
                error.rows = [step.seqs.index(poison)]
                raise error
            return super().execute(step)

    scheduler = make()
    poison, *others = seqs = [request([i] * 6) for i in range(4)]
    engine = Engine(scheduler, Poisoned(lambda step: False))
    add(scheduler, *seqs)
    while scheduler.has_unfinished:
        engine.step()
    assert poison.finish_reason == "error"
    assert [seq.finish_reason for seq in others] == ["length"] * 3
    assert len(scheduler.block_manager.free_block_ids) == 64


@pytest.mark.parametrize("rows", [[], [9], 3, "x"])
def test_a_fault_that_lies_nowhere_is_held_against_all(rows: object):
    class Vague(FailingRunner):
        def execute(self, step: Step) -> StepOutput:
            error = FloatingPointError("NaN")
            error.rows = rows
            raise error

    scheduler = make()
    seq = request(6)
    add(scheduler, seq)
    engine = Engine(scheduler, Vague(lambda step: True))
    for _ in range(3):
        engine.step()
    assert seq.finish_reason == "error"


def test_ctrl_c_in_a_step_passes_through_with_the_step_rolled_back():
    class Interrupted(FailingRunner):
        def execute(self, step: Step) -> StepOutput:
            raise KeyboardInterrupt

    scheduler = make()
    seq = request(6)
    add(scheduler, seq)
    with pytest.raises(KeyboardInterrupt):
        Engine(scheduler, Interrupted(lambda step: True)).step()
    assert list(scheduler.waiting) == [seq]
    run_all(scheduler)
    assert seq.finish_reason == "length"


def test_a_step_that_cannot_be_built_is_undone(monkeypatch: pytest.MonkeyPatch):
    scheduler = make()
    seq = request(6)
    add(scheduler, seq)
    with monkeypatch.context() as patch:
        patch.setattr("pagetable.engine.scheduler.build_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.schedule()
    assert len(scheduler.block_manager.free_block_ids) == 64
    assert run_all(scheduler) == [seq]


def test_a_priority_must_be_a_whole_number():
    with pytest.raises(RequestError, match="priority='x'"):
        request(3, priority="x")


def test_the_engine_outlives_a_runner_that_always_fails():
    scheduler = make()
    engine = Engine(scheduler, FailingRunner(lambda step: True))
    seqs = [request([i] * 6) for i in range(3)]
    add(scheduler, *seqs)
    for _ in range(4):
        engine.step()
    assert [seq.finish_reason for seq in seqs] == ["error"] * 3
    assert isinstance(engine.last_error, MemoryError)
    assert len(scheduler.block_manager.free_block_ids) == 64
    engine.runner = FailingRunner(lambda step: False)
    add(scheduler, request(6))
    run_all(scheduler)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("token_ids", "says"),
    [
        ([], "no tokens"),
        ([1] * 100, "max_model_len=100"),
        ([1] * 33, "KV cache holds 32"),
    ],
)
def test_what_can_never_fit_is_refused(token_ids: list[int], says: str):
    scheduler = make(num_blocks=8)
    with pytest.raises(RequestError, match=says):
        scheduler.add(request(token_ids))
    assert not scheduler.has_unfinished


def test_adding_twice_and_the_wrong_block_size_are_refused():
    scheduler = make()
    seq = request(3)
    scheduler.add(seq)
    with pytest.raises(RequestError, match="added before"):
        scheduler.add(seq)
    with pytest.raises(RequestError, match="block_size=16"):
        scheduler.add(Sequence([1]))
    run_all(scheduler)
    with pytest.raises(RequestError, match="added before"):
        scheduler.add(seq)


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_below_1_are_refused(limit: str):
    with pytest.raises(ValueError, match=f"{limit}=0"):
        make(**{limit: 0})


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"'lifo'.*fcfs, priority"):
        make(scheduling_policy="lifo")


def test_under_fcfs_everyone_ends_in_bounded_steps_in_the_smallest_pool():
    for num_blocks in (3, 4, 7):
        scheduler = make(num_blocks=num_blocks, max_num_seqs=5, max_num_batched_tokens=3)
        seqs = [request([i % 3] * (1 + i % 9), max_tokens=1 + i % 7) for i in range(30)]
        add(scheduler, *seqs)
        finished = run_all(scheduler, limit=5000)
        assert len(finished) == 30


def test_logprobs_are_kept_for_those_who_asked():
    scheduler = make()
    asked, silent = request(3, logprobs=1, max_tokens=2), request([9] * 3, max_tokens=2)
    add(scheduler, asked, silent)
    entry = TokenLogprobs((7, 8), (-0.1, -2.0), 1)
    for _ in range(2):
        step = scheduler.schedule()
        scheduler.commit(step, StepOutput([7, 7], [entry, None]))
    assert asked.logprobs == [entry, entry]
    assert silent.logprobs == []


def test_tokens_read_like_a_list():
    seq = Sequence(np.arange(5))
    seq.append(9)
    assert seq.token_ids == [0, 1, 2, 3, 4, 9]
    assert seq.token_ids[-1] == 9
    assert seq.token_ids[3:] == [3, 4, 9]
    assert list(seq.block(0)) == [0, 1, 2, 3, 4, 9]
    assert len(seq) == seq.num_tokens == 6
    assert (seq.prompt_token_ids, seq.output_token_ids, seq.num_blocks) == ([0, 1, 2, 3, 4], [9], 1)


@pytest.mark.parametrize("token_ids", ["text", [1.5], [[1]], [-1], [2**31], [None], ["a"], [[1], [2, 3]]])
def test_prompts_that_are_not_token_ids_are_refused(token_ids: object):
    with pytest.raises(RequestError, match="token id"):
        Sequence(token_ids)


@pytest.mark.parametrize("salt", ["", 5, b"x"])
def test_a_salt_must_be_a_text(salt: object):
    with pytest.raises(RequestError, match="cache_salt"):
        Sequence([1], cache_salt=salt)
