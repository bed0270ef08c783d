"""What runs when: one token budget a step, decode first, then chunks of prefill, then new sequences.

`schedule` reserves, the runner computes, `commit` publishes. If the runner fails, `rollback` gives back what the step
took. Nothing here knows a model: the tokens of a step may come from anywhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import count, repeat

from pagetable.engine.batch import build_step
from pagetable.engine.errors import RequestError
from pagetable.engine.sequence import MAX_TOKEN_ID, FinishReason, Sequence
from pagetable.engine.step import Step, StepOutput, TokenLogprobs
from pagetable.memory import BlockManager

MAX_FAILURES = 2  # a sequence in a failed step is tried once more, then ends with `error`

# Who goes first: the smallest key. The last in this order is the first to be preempted.
SCHEDULING_POLICIES: dict[str, Callable[[Sequence], tuple[int, ...]]] = {
    "fcfs": lambda seq: (seq.arrival,),
    "priority": lambda seq: (seq.priority, seq.arrival),
}


@dataclass(slots=True)
class _StepInFlight:
    """A step between schedule and commit: what it took, and what was asked of its sequences meanwhile."""

    seqs: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    blocks_before: dict[int, int] = field(default_factory=dict)  # seq_id to table length, where a block was added
    finishing: dict[int, FinishReason] = field(default_factory=dict)  # seq_id to reason, takes effect at commit
    step: Step | None = None
    budget: int = 0
    preempted: bool = False

    def take(self, seq: Sequence, num_tokens: int) -> None:
        """Schedule `num_tokens` of a sequence."""
        seq.num_scheduled_tokens = num_tokens
        self.budget -= num_tokens
        self.seqs.append(seq)


class Scheduler:
    """Queues of sequences over one `BlockManager`.

    `max_num_seqs` caps the running sequences, `max_num_batched_tokens` the tokens of a step, `max_model_len` the length
    of a sequence, output included. Under `fcfs` the oldest request always makes progress, so every accepted request
    ends in bounded steps.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        scheduling_policy: str = "fcfs",
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        for name, value in limits.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value}: it must be a whole number from 1 up")
        if scheduling_policy not in SCHEDULING_POLICIES:
            raise ValueError(
                f"scheduling_policy={scheduling_policy!r}: choose one of {', '.join(sorted(SCHEDULING_POLICIES))}"
            )
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._order = SCHEDULING_POLICIES[scheduling_policy]
        # Both in policy order.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._seqs: dict[int, Sequence] = {}  # unfinished, by seq_id
        self._arrivals = count()
        self._flight: _StepInFlight | None = None

    @property
    def step_in_flight(self) -> Step | None:
        """The step between schedule and commit or rollback."""
        return self._flight.step if self._flight else None

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._seqs)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. RequestError for what can never run; `max_tokens` is not counted against the pool."""
        manager = self.block_manager
        if seq.seq_id in self._seqs or seq.is_finished or seq.block_table:
            raise RequestError(f"sequence {seq.seq_id} was added before; make a new Sequence for each request")
        if seq.block_size != manager.block_size:
            raise RequestError(f"the sequence has block_size={seq.block_size}, the cache {manager.block_size}")
        if seq.num_tokens == 0:
            raise RequestError("the prompt has no tokens; at least 1 is needed")
        if seq.num_tokens >= self.max_model_len:
            raise RequestError(
                f"the prompt has {seq.num_tokens} tokens, with max_model_len={self.max_model_len} it must have fewer, "
                "so that one can be generated"
            )
        if seq.num_blocks > len(manager.blocks):
            raise RequestError(
                f"the prompt has {seq.num_tokens} tokens, the KV cache holds {len(manager.blocks) * seq.block_size}; "
                "shorten the prompt or give the cache more memory"
            )
        seq.arrival = next(self._arrivals)
        insort(self.waiting, seq, key=self._order)
        self._seqs[seq.seq_id] = seq

    # ---------------------------------------------------------------- a step

    def schedule(self) -> Step | None:
        """Reserve the next step, or None when there is nothing to do. Commit it or roll it back before the next."""
        if self._flight is not None:
            raise RuntimeError("a step is in flight: commit it or roll it back first")
        flight = _StepInFlight(budget=self.max_num_batched_tokens)
        self._schedule_decodes(flight)
        self._schedule_prefills(flight)
        if self.waiting and not flight.preempted:  # what was just pushed out must not be let in again at once
            self._admit(flight)
        if not flight.seqs:
            return None
        try:
            flight.step = build_step(flight.seqs, self.block_manager.block_size, self.eos_token_ids)
        except BaseException:
            self._give_back(flight)
            raise
        self._flight = flight
        return flight.step

    def _schedule_decodes(self, flight: _StepInFlight) -> None:
        for seq in list(self.running):  # in policy order, so a victim, taken from the end, is never scheduled already
            if not seq.block_table or seq.num_uncomputed_tokens > 1:  # preempted just now, or in prefill
                continue
            if flight.budget == 0:
                break
            while not self.block_manager.can_append(seq):
                victim = self.running[-1]
                self._preempt(victim)
                flight.preempted = True
                if victim is seq:  # nobody behind it is left
                    break
            else:
                blocks_before = len(seq.block_table)
                self.block_manager.may_append(seq)
                if len(seq.block_table) > blocks_before:
                    flight.blocks_before[seq.seq_id] = blocks_before
                flight.take(seq, 1)

    def _schedule_prefills(self, flight: _StepInFlight) -> None:
        for seq in self.running:
            if flight.budget == 0:
                break
            if seq.num_uncomputed_tokens > 1:
                flight.take(seq, min(seq.num_uncomputed_tokens, flight.budget))

    def _admit(self, flight: _StepInFlight) -> None:
        """Start waiting sequences in order, until one finds no memory.

        One that would compute a block which a running sequence is computing right now is passed over: next step it
        finds the block in the cache. One that still lacks log-probabilities of its prompt has to compute all of it: it
        neither hits nor waits. One spare block a running sequence is kept, so that decode does not at once
        preempt what was just admitted; when nothing runs there is nobody to keep it for.
        """
        manager = self.block_manager
        place = 0  # in the queue: behind those that were passed over
        while place < len(self.waiting) and flight.budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[place]
            may_hit = not seq.lacks_prompt_logprobs
            num_cached_blocks = manager.can_allocate(seq, headroom=len(self.running), may_hit=may_hit)
            if num_cached_blocks < 0:
                break
            if may_hit and manager.is_in_flight(seq, num_cached_blocks):
                place += 1
                continue
            manager.allocate(seq, num_cached_blocks)
            if seq.num_prefix_tokens is None:
                seq.num_prefix_tokens = seq.num_cached_tokens
            self._move(seq, self.waiting, self.running)
            flight.admitted.append(seq)
            flight.take(seq, min(seq.num_uncomputed_tokens, flight.budget))

    def commit(self, step: Step, output: StepOutput | list[int]) -> list[Sequence]:
        """Publish a computed step: register blocks, append tokens, free what finished. Returns what finished.

        `output` has one token for each sequence whose `needs_logits` is true. ValueError if it has not, or if `step` is
        not the one in flight; nothing is changed then.
        """
        flight = self._in_flight(step)
        output = _checked_output(output, int(step.needs_logits.sum()), len(step.prompt_logprobs))
        self._flight = None
        of_prompts = output.prompt_logprobs or repeat(None)
        for row, entry in zip(step.prompt_logprobs.seq_rows.tolist(), of_prompts, strict=False):
            flight.seqs[row].prompt_logprobs.append(entry)
        finished: list[Sequence] = []
        drawn = iter(zip(output.token_ids, output.logprobs or repeat(None), strict=False))
        for seq, needs_logits in zip(flight.seqs, step.needs_logits.tolist(), strict=True):
            self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            token = next(drawn) if needs_logits else None  # drawn, and dropped, for one that is being ended
            reason = flight.finishing.get(seq.seq_id)
            if reason is None and token is not None:
                reason = self._append(seq, *token)
            if reason is not None:
                self._end(seq, reason)
                finished.append(seq)
        return finished

    def rollback(self, step: Step, rows: Collection[int] | None = None) -> list[Sequence]:
        """Undo a step whose computation failed. Returns the sequences that ended by it.

        The blocks that it took are given back, K/V of earlier steps stays, evictions are not undone. Each sequence is
        tried once more; the second time it ends with `error`. If it is known at which `rows` of the batch the fault
        lies, it is held against those only.
        """
        flight = self._in_flight(step)
        # Someone must be at fault, or the step would be tried for ever.
        at_fault = {row for row in rows or () if 0 <= row < len(flight.seqs)} or set(range(len(flight.seqs)))
        self._flight = None
        self._give_back(flight)
        finished: list[Sequence] = []
        for row, seq in enumerate(flight.seqs):
            seq.num_failures += row in at_fault
            reason = flight.finishing.get(seq.seq_id)
            if reason is None and seq.num_failures >= MAX_FAILURES:
                reason = FinishReason.ERROR
            if reason is not None:
                self._end(seq, reason)
                finished.append(seq)
        return finished

    def _give_back(self, flight: _StepInFlight) -> None:
        """Return what a step that is not computed took: added blocks, and whom it admitted to the queue."""
        for seq in flight.seqs:
            seq.num_scheduled_tokens = 0
            if seq.seq_id in flight.blocks_before:
                self.block_manager.shrink(seq, flight.blocks_before[seq.seq_id])
        for seq in flight.admitted:
            self.block_manager.withdraw(seq)
            self._move(seq, self.running, self.waiting)

    # ---------------------------------------------------------------- ending

    def finish(self, seq_id: int, reason: str) -> bool:
        """End a sequence early for `reason`. False when it is unknown or has finished.

        Between schedule and commit this takes effect at commit, because the step in flight names its blocks. ValueError
        for a reason that is none of FinishReason.
        """
        seq = self._seqs.get(seq_id)
        if seq is None:
            return False
        reason = FinishReason(reason)
        if self._flight is not None and seq in self._flight.seqs:
            self._flight.finishing.setdefault(seq_id, reason)
        else:
            self._end(seq, reason)
        return True

    def abort(self, seq_id: int) -> bool:
        """End a sequence because its caller gave up; as `finish` with reason `abort`."""
        return self.finish(seq_id, FinishReason.ABORT)

    def _append(self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Add a drawn token; the reason to end, if it is one."""
        params = seq.sampling_params
        seq.append(token_id)
        if params.logprobs is not None:
            seq.logprobs.append(logprobs)
        num_output_tokens = seq.num_output_tokens
        if num_output_tokens >= params.min_tokens:
            if token_id in (params.stop_token_ids or ()):
                seq.stop_reason = token_id
                return FinishReason.STOP
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        if num_output_tokens == params.max_tokens or seq.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        if seq.num_blocks > len(self.block_manager.blocks):  # its next step would need more than there is
            return FinishReason.CACHE_FULL
        return None

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        del self._seqs[seq.seq_id]
        queue = self.running if seq.block_table else self.waiting
        del queue[self._index(queue, seq)]
        self.block_manager.deallocate(seq)

    # ---------------------------------------------------------------- queues

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence; it will find what is left of them and compute the rest again."""
        self.block_manager.preempt(seq)
        self._move(seq, self.running, self.waiting)

    def _move(self, seq: Sequence, source: list[Sequence], target: list[Sequence]) -> None:
        del source[self._index(source, seq)]
        insort(target, seq, key=self._order)

    def _index(self, queue: list[Sequence], seq: Sequence) -> int:
        return bisect_left(queue, self._order(seq), key=self._order)

    def _in_flight(self, step: Step) -> _StepInFlight:
        if self._flight is None or self._flight.step is not step:
            raise ValueError("this step is not the one in flight: it was committed or rolled back, or is another's")
        return self._flight


def _checked_output(output: StepOutput | list[int], num_needed: int, num_of_prompts: int) -> StepOutput:
    """The output of a step in its full form; ValueError unless it has what the step asks for.

    What stands in for a runner may have no log-probabilities at all, even if somebody asks: then None is recorded.
    """
    if not isinstance(output, StepOutput):
        output = StepOutput(list(output))
    token_ids = [int(token_id) for token_id in output.token_ids]
    num_logprobs = num_needed if output.logprobs is None else len(output.logprobs)
    if len(token_ids) != num_needed or num_logprobs != num_needed:
        raise ValueError(
            f"the output has {len(token_ids)} tokens and {num_logprobs} log-probabilities, {num_needed} are needed"
        )
    if output.prompt_logprobs is not None and len(output.prompt_logprobs) != num_of_prompts:
        raise ValueError(
            f"the output has {len(output.prompt_logprobs)} log-probabilities of prompts, {num_of_prompts} are needed"
        )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
        raise ValueError(f"the output has token ids {min(token_ids)} to {max(token_ids)}: they are int32 from 0 up")
    return StepOutput(token_ids, output.logprobs, output.prompt_logprobs)
