"""Who asks for log-probabilities of the prompt gets each once, whatever was cached, preempted or rolled back."""

import numpy as np
import pytest

from pagetable.engine import RequestError, SamplingParams, Scheduler, Sequence, Step, StepOutput, TokenLogprobs
from pagetable.memory import BlockManager


def make(num_blocks: int = 64, **kwargs: int) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100} | kwargs
    return Scheduler(BlockManager(num_blocks, 4), **limits)


def request(token_ids: list[int] | int, prompt_logprobs: int | None = 0, max_tokens: int = 5) -> Sequence:
    tokens = list(range(token_ids)) if isinstance(token_ids, int) else token_ids
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return Sequence(tokens, params, block_size=4)


def entry_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs((token_id,), (-float(token_id),), 1)


def output_of(step: Step) -> StepOutput:
    entries = [entry_of(token_id) for token_id in step.prompt_logprobs.token_ids.tolist()]
    return StepOutput([7] * int(step.needs_logits.sum()), prompt_logprobs=entries)


def run_step(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, output_of(step))
    scheduler.block_manager.check()
    return step


def run_all(scheduler: Scheduler) -> None:
    while scheduler.has_unfinished:
        run_step(scheduler)
    assert len(scheduler.block_manager.free_block_ids) == len(scheduler.block_manager.blocks)


def expected(seq: Sequence) -> list[TokenLogprobs]:
    return [entry_of(token_id) for token_id in seq.prompt_token_ids[1:]]


def test_a_step_says_in_arrays_what_is_asked():
    scheduler = make(max_num_batched_tokens=10)
    silent, asking, more = request([9] * 3, None), request([50, 51, 52, 53], 2), request([60, 61, 62, 63], 0)
    for seq in (silent, asking, more):
        scheduler.add(seq)
    asked = run_step(scheduler).prompt_logprobs
    assert asked.rows.tolist() == [3, 4, 5, 7, 8, 9]
    assert asked.token_ids.tolist() == [51, 52, 53, 61, 62, 63]  # the last is not in the step
    assert asked.num_logprobs.tolist() == [2, 2, 2, 0, 0, 0]
    assert asked.seq_rows.tolist() == [1, 1, 1, 2, 2, 2]
    assert len(run_step(scheduler).prompt_logprobs) == 0  # the last token of a prompt tells of the first answer token


def test_nobody_asks_and_the_arrays_are_empty():
    scheduler = make()
    scheduler.add(request(9, None))
    asked = run_step(scheduler).prompt_logprobs
    assert len(asked) == 0
    assert [asked.rows.dtype, asked.token_ids.dtype, asked.num_logprobs.dtype] == [np.int64, np.int32, np.int32]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
def test_chunks_of_any_size_give_the_same(budget: int):
    scheduler = make(max_num_batched_tokens=budget)
    seqs = [request(20), request([30] * 13, None), request(list(range(40, 47)), 3), request([5])]
    for seq in seqs:
        scheduler.add(seq)
    run_all(scheduler)
    assert [seq.prompt_logprobs for seq in seqs] == [expected(seqs[0]), [], expected(seqs[2]), []]
    assert all(seq.output_token_ids == [7] * 5 for seq in seqs)


def test_what_is_cached_is_computed_again_and_has_one_owner_afterwards():
    scheduler = make()
    scheduler.add(request(17, None))
    run_all(scheduler)
    registered = dict(scheduler.block_manager.hash_to_block_id)
    asking, silent = request(17), request(17, None)
    scheduler.add(asking)
    step = run_step(scheduler)
    assert step.num_scheduled_tokens.tolist() == [17]
    assert asking.num_prefix_tokens == 0
    assert asking.block_table[:4] == list(registered.values())[:4]
    scheduler.add(silent)
    run_step(scheduler)
    assert silent.num_prefix_tokens == 16
    run_all(scheduler)
    assert asking.prompt_logprobs == expected(asking)


def test_who_asks_waits_for_nobody_and_others_wait_for_who_asks():
    scheduler = make()
    leader, asking = request(17, None), request(17)
    scheduler.add(leader)
    scheduler.add(asking)
    assert list(run_step(scheduler).seqs) == [leader, asking]
    run_all(scheduler)
    assert asking.prompt_logprobs == expected(asking)

    scheduler = make()
    asking, follower = request(17), request(17, None)
    scheduler.add(asking)
    scheduler.add(follower)
    assert list(run_step(scheduler).seqs) == [asking]
    run_all(scheduler)
    assert follower.num_prefix_tokens == 16


def test_preempted_in_the_middle_of_its_prompt_it_records_nothing_twice():
    scheduler = make(num_blocks=8, max_num_batched_tokens=4)
    head, asking = request([90, 91, 92], None, max_tokens=20), request(24)
    scheduler.add(head)
    scheduler.add(asking)
    while asking.block_table or not asking.prompt_logprobs:
        run_step(scheduler)
    recorded = len(asking.prompt_logprobs)
    assert 0 < recorded < 23
    assert scheduler.block_manager.stats().preemptions == 1
    while not asking.block_table:
        step = run_step(scheduler)
    assert step.context_lens[list(step.seqs).index(asking)] == asking.num_cached_tokens <= 4  # from the beginning
    run_all(scheduler)
    assert asking.prompt_logprobs == expected(asking)
    assert scheduler.block_manager.stats().recomputed_tokens == recorded


def test_once_all_is_recorded_a_preempted_sequence_hits_again():
    scheduler = make(num_blocks=10)
    head, asking = request([90] * 3, None, max_tokens=30), request(24, max_tokens=20)
    scheduler.add(head)
    scheduler.add(asking)
    while asking.block_table or not asking.prompt_logprobs:
        run_step(scheduler)
    while not asking.block_table:
        step = run_step(scheduler)
    assert step.num_scheduled_tokens[list(step.seqs).index(asking)] < asking.num_prompt_tokens
    assert scheduler.block_manager.stats().recomputed_tokens < asking.num_prompt_tokens
    assert asking.num_prefix_tokens == 0
    run_all(scheduler)
    assert asking.prompt_logprobs == expected(asking)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_step_that_is_rolled_back_loses_nothing(failing: int):
    scheduler = make(max_num_batched_tokens=6)
    asking = request(17)
    scheduler.add(asking)
    for _ in range(failing):
        run_step(scheduler)
    scheduler.rollback(scheduler.schedule())
    scheduler.block_manager.check()
    run_all(scheduler)
    assert asking.prompt_logprobs == expected(asking)
    assert asking.finish_reason == "length"


def test_an_aborted_sequence_keeps_what_it_has():
    scheduler = make(max_num_batched_tokens=6)
    asking = request(17)
    scheduler.add(asking)
    step = scheduler.schedule()
    scheduler.abort(asking.seq_id)
    scheduler.commit(step, output_of(step))
    assert asking.prompt_logprobs == expected(asking)[:6]
    assert asking.lacks_prompt_logprobs


def test_an_output_of_another_length_is_refused_and_changes_nothing():
    scheduler = make()
    asking = request(4)
    scheduler.add(asking)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="2 log-probabilities of prompts, 3 are needed"):
        scheduler.commit(step, StepOutput([7], prompt_logprobs=[None, None]))
    assert asking.prompt_logprobs == []
    scheduler.commit(step, output_of(step))
    assert asking.prompt_logprobs == expected(asking)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="1 log-probabilities of prompts, 0 are needed"):
        scheduler.commit(step, StepOutput([7], prompt_logprobs=[None]))


def test_a_stand_in_for_a_runner_may_have_none():
    scheduler = make()
    asking = request(4)
    scheduler.add(asking)
    scheduler.commit(scheduler.schedule(), [7])
    assert asking.prompt_logprobs == [None] * 3
    assert not asking.lacks_prompt_logprobs


def test_what_needs_more_memory_without_hits_waits_for_it():
    scheduler = make(num_blocks=6)
    first, asking = request(9, None), request(9, max_tokens=3)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(asking)
    assert list(run_step(scheduler).seqs) == [first]  # 3 fresh blocks and one spare are not there
    run_all(scheduler)
    assert asking.prompt_logprobs == expected(asking)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(RequestError, match="prompt_logprobs=-1"):
        request(3, -1)
