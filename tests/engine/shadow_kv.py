"""A runner that knows what every slot of KV memory ought to hold, and a storm of requests to catch it out.

Each slot of the shadow memory holds the exact history that its K/V would depend on: the salt and every token up to and
including its own. Before a step writes, every slot of the tokens that it takes as cached must hold the right history;
what it writes must not touch what anybody else reads. So no order of storing and attending inside a step can matter.
The log-probability of a prompt token is a function of the history in the slot before it.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagetable.engine import SamplingParams, Scheduler, Sequence, Step, StepOutput, TokenLogprobs
from pagetable.memory import BlockManager, CacheHints
from tests.memory.lhc_structure import check_structure
from tests.memory.timed_requests import Clock

History = tuple[str | None, tuple[int, ...]]


class WrongKV(AssertionError):
    """A sequence would have read K/V of something else."""


@dataclass
class ShadowRunner:
    """Checks a step against the shadow memory; its tokens, of a tiny vocabulary, are a function of the history."""

    block_size: int
    vocabulary: int = 3
    slots: dict[int, History] = field(default_factory=dict)

    def execute(self, step: Step) -> StepOutput:
        tables = [self._slots_of(step, i) for i in range(len(step.seqs))]
        for seq, slots, scheduled in zip(step.seqs, tables, step.num_scheduled_tokens, strict=True):
            self._expect(seq, slots[:-scheduled])
        self._no_overlap(step, tables)
        for i, seq in enumerate(step.seqs):
            start, stop = step.query_start[i : i + 2]
            for token_id, position, slot in zip(
                step.token_ids[start:stop], step.positions[start:stop], step.slot_mapping[start:stop], strict=True
            ):
                if seq.token_ids[position] != token_id or slot != tables[i][position]:
                    raise WrongKV(f"{seq}: wrong token or slot at position {position}")
                self.slots[int(slot)] = self._history(seq, int(position))
        for seq, slots in zip(step.seqs, tables, strict=True):
            self._expect(seq, slots)
        tokens = [self.next_token(seq) for seq, needs in zip(step.seqs, step.needs_logits, strict=True) if needs]
        return StepOutput(tokens, prompt_logprobs=self._prompt_logprobs(step))

    def next_token(self, seq: Sequence) -> int:
        """The answer that this sequence gets whatever is cached: a function of its history alone."""
        return zlib.crc32(repr((seq.cache_salt, seq.token_ids)).encode()) % self.vocabulary

    def _prompt_logprobs(self, step: Step) -> list[TokenLogprobs]:
        asked = step.prompt_logprobs
        slots, token_ids = step.slot_mapping[asked.rows].tolist(), asked.token_ids.tolist()
        counts = asked.num_logprobs.tolist()
        return [entry(self.slots[slot], *what) for slot, *what in zip(slots, token_ids, counts, strict=True)]

    def _slots_of(self, step: Step, i: int) -> list[int]:
        positions = np.arange(step.context_lens[i])
        blocks = step.block_tables[i][positions // self.block_size]
        if (blocks < 0).any():
            raise WrongKV("a position has no block")
        return (blocks.astype(np.int64) * self.block_size + positions % self.block_size).tolist()

    def _history(self, seq: Sequence, position: int) -> History:
        return seq.cache_salt, tuple(seq.token_ids[: position + 1])

    def _expect(self, seq: Sequence, slots: list[int]) -> None:
        for position, slot in enumerate(slots):
            if self.slots.get(slot) != self._history(seq, position):
                raise WrongKV(f"{seq} reads slot {slot} for position {position}: it holds {self.slots.get(slot)}")

    def _no_overlap(self, step: Step, tables: list[list[int]]) -> None:
        written = step.slot_mapping.tolist()
        if len(set(written)) != len(written):
            raise WrongKV("two tokens of one step are stored in one slot")
        read = {slot for slots, n in zip(tables, step.num_scheduled_tokens, strict=True) for slot in slots[:-n]}
        if not read.isdisjoint(written):
            raise WrongKV("a step writes a slot that it reads as cached")


def entry(history: History, token_id: int, num_alternatives: int) -> TokenLogprobs:
    """What is said of a token that follows `history`."""
    value = float(zlib.crc32(repr(history).encode()))
    return TokenLogprobs((token_id, *range(num_alternatives)), (value,) * (num_alternatives + 1), 1)


def check_prompt_logprobs(seq: Sequence) -> None:
    """Each prompt token of a sequence that asks has its own entry, and all have one once a token is drawn."""
    prompt, count = tuple(seq.prompt_token_ids), seq.sampling_params.prompt_logprobs
    every = []
    if count is not None:
        every = [entry((seq.cache_salt, prompt[:i]), prompt[i], count) for i in range(1, len(prompt))]
    assert seq.prompt_logprobs == every[: len(seq.prompt_logprobs)], "prompt log-probabilities of something else"
    assert not seq.num_output_tokens or len(seq.prompt_logprobs) == len(every), "prompt log-probabilities are lost"


class Talk:
    """What clients say to the cache: hints, ends of sessions; and a clock that moves by steps of any size, or back."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(~seed)  # its own, so that a storm is the same with and without
        self.clock = Clock()

    def hints(self) -> CacheHints:
        choice = self.rng.choice
        return CacheHints(
            session_id=choice([None, "a", "b", "c"]),
            end_session=choice([True, False, False, False]),
            expected_idle_s=choice([None, None, 0, 60.5]),
            cache_priority=choice([None, None, 0, 100]),
            ttl_s=choice([None, None, 0, 30.5]),
        )

    def go_on(self, manager: BlockManager) -> None:
        self.clock.now += self.rng.choice([0, 0, 0.1, 1, 60, 1e5, -60])
        if self.rng.random() < 0.1:
            manager.end_session(self.rng.choice("abc"), self.rng.choice([None, "a", "b"]))


def storm(
    seed: int, manager_class: type[BlockManager] = BlockManager, *, checked: bool = True, policy: str | None = None
) -> BlockManager:
    """Random requests through a tiny pool until all have ended; raises WrongKV or InvariantError on any fault.

    With an eviction policy they come with hints and as time passes. Returns the manager, with every block free again.
    """
    rng, talk = random.Random(seed), None if policy is None else Talk(seed)
    block_size = rng.choice([1, 2, 4])
    num_blocks = rng.randint(3, 14)
    options: dict[str, Any] = {} if talk is None else {"eviction_policy": policy, "clock": talk.clock}
    manager = manager_class(num_blocks, block_size, enable_prefix_caching=rng.random() < 0.95, **options)
    scheduler = Scheduler(
        manager,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(1, rng.choice([3, 24])),  # small: preempted in prefill
        max_model_len=40,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        eos_token_ids=[2] if rng.random() < 0.5 else [],
    )
    runner = ShadowRunner(block_size)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, num_blocks * block_size))] for _ in range(4)]
    to_come = rng.randint(4, 14)
    everyone: list[Sequence] = []
    for _ in range(3000):
        while to_come and rng.random() < 0.4:
            to_come -= 1
            everyone.append(_request(rng, prompts, block_size, num_blocks))
            if talk is not None:
                everyone[-1].cache_hints = talk.hints()
            scheduler.add(everyone[-1])
        if talk is not None:
            talk.go_on(manager)
        _disturb(rng, scheduler, manager, everyone)
        step = scheduler.schedule()
        if step is None:
            assert not scheduler.has_unfinished, "unfinished sequences, but nothing is scheduled"
            if not to_come:
                break
            continue
        _run(rng, scheduler, runner, step, everyone)
        if checked:
            manager.check()
        if policy == "lhc":
            check_structure(manager)
    else:
        raise AssertionError("the requests do not end")
    assert all(seq.is_finished for seq in everyone)
    for seq in everyone:
        check_prompt_logprobs(seq)
    manager.check()
    assert len(manager.free_block_ids) == num_blocks
    return manager


def _request(rng: random.Random, prompts: list[list[int]], block_size: int, num_blocks: int) -> Sequence:
    prompt = list(rng.choice(prompts))
    if rng.random() < 0.5:
        prompt = prompt[: rng.randint(1, len(prompt))] + [rng.randrange(2) for _ in range(rng.randint(0, 3))]
    params = SamplingParams(
        temperature=0,
        max_tokens=rng.randint(1, 20),
        ignore_eos=rng.random() < 0.3,
        prompt_logprobs=rng.choice([None, None, None, 0, 2]),
    )
    return Sequence(
        prompt[: min(39, num_blocks * block_size)],
        params,
        block_size=block_size,
        cache_salt=rng.choice([None, None, "a", "b"]),
        priority=rng.randrange(3),
    )


def _disturb(rng: random.Random, scheduler: Scheduler, manager: BlockManager, everyone: list[Sequence]) -> None:
    if everyone and rng.random() < 0.05:
        scheduler.abort(rng.choice(everyone).seq_id)
    if rng.random() < 0.01:
        manager.reset_prefix_cache()


def _run(rng: random.Random, scheduler: Scheduler, runner: ShadowRunner, step: Step, everyone: list[Sequence]) -> None:
    if rng.random() < 0.05:
        scheduler.abort(rng.choice(everyone).seq_id)
    if rng.random() < 0.03:
        if rng.random() < 0.5:  # it failed after it had written
            runner.execute(step)
        scheduler.rollback(step)
        return
    scheduler.commit(step, runner.execute(step))
