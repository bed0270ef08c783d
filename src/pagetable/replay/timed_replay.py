"""A trace in time: requests arrive when they did, the real scheduler runs them, a cost model says how long it takes."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pagetable.engine import RequestError, SamplingParams, Scheduler, Sequence
from pagetable.engine.step import Step
from pagetable.memory import BlockManager, CacheHints, MissExplainer, check_block_size, events, make_policy
from pagetable.memory.hints import LONGEST_TIME
from pagetable.replay.blocks import SENTINEL, Workload
from pagetable.replay.cost import CostModel
from pagetable.replay.reuse import Access
from pagetable.replay.trace import IntArray, TraceError, TraceRequest

FIRST_UNKNOWN = 2**30  # tokens that the trace does not tell get ids from here on, each its own
GHOSTS = 10  # times as many contents as there are blocks are remembered, to say why one is missed


@dataclass(frozen=True)
class Limits:
    """Of the scheduler; names as everywhere."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 1 << 24
    scheduling_policy: str = "fcfs"


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class TimedResult:
    """What a policy with a capacity did with a trace in time. Times in seconds of the replay's clock."""

    policy: str
    capacity: int
    num_accesses: int = 0
    num_hits: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_output_tokens: int = 0
    num_refused: int = 0  # requests that can never fit
    num_cut_off: int = 0  # answers that outgrew the cache
    num_steps: int = 0
    clock: float = 0.0  # when the last answer ended
    busy: float = 0.0  # of which a step was computed
    evictions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # admissions by why their first missed block was missed
    waste: float = 0.0  # mean share of the slots in use that no token fills, over time
    seconds: float = 0.0  # of computing
    hits: list[int] = field(default_factory=list)  # by request in order of arrival, blocks
    queue: array[float] = field(default_factory=_seconds)
    ttft: array[float] = field(default_factory=_seconds)
    tpot: array[float] = field(default_factory=_seconds)
    itl: array[float] = field(default_factory=_seconds)
    e2e: array[float] = field(default_factory=_seconds)


@dataclass(slots=True)
class _Running:
    """A request between its arrival and its end."""

    number: int  # in order of arrival
    arrival: float
    output: Iterator[int]
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0


class TimedReplay:
    """One scheduler over one page table. `speed` 2 lets requests arrive twice as fast."""

    def __init__(
        self, workload: Workload, policy: str, capacity: int, cost: CostModel, limits: Limits, *, speed: float = 1.0
    ) -> None:
        try:
            check_block_size(workload.block_size)
        except ValueError as error:
            raise TraceError(f"timed replay: {error}") from None
        self.result = TimedResult(policy, capacity)
        self._workload, self._cost, self._speed = workload, cost, speed
        self._manager = BlockManager(
            capacity,
            workload.block_size,
            eviction_policy=make_policy(policy, capacity, workload.block_size, lambda: self.result.clock),
            events=MissExplainer(self._note, GHOSTS * capacity),
        )
        self._scheduler = Scheduler(
            self._manager,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            scheduling_policy=limits.scheduling_policy,
        )
        self._running: dict[int, _Running] = {}
        self._next_unknown = FIRST_UNKNOWN
        self._waste = 0.0  # share of slots times seconds

    def run(self, progress: Callable[[int], None] = lambda count: None) -> TimedResult:
        """Replay all of the trace. `progress` is called with the number of requests that have arrived."""
        began = time.perf_counter()
        for number, (request, access) in enumerate(self._workload, start=1):
            self._advance(until=request.arrival / self._speed)
            self._arrive(request, access)
            progress(number)
        self._advance(until=float("inf"))
        return self._finish(time.perf_counter() - began)

    def _finish(self, seconds: float) -> TimedResult:
        result, stats = self.result, self._manager.stats()
        result.evictions, result.preemptions = stats.evictions, stats.preemptions
        result.recomputed_tokens = stats.recomputed_tokens
        result.waste = self._waste / result.busy if result.busy else 0.0
        result.seconds = seconds
        return result

    def _arrive(self, request: TraceRequest, access: Access) -> None:
        result = self.result
        result.num_accesses += access.num_accesses
        result.num_prompt_tokens += request.num_prompt_tokens
        result.hits.append(0)
        room = min(result.capacity * self._workload.block_size, self._scheduler.max_model_len)
        if request.num_prompt_tokens > room:  # it is not even built
            result.num_refused += 1
            return
        params = SamplingParams(temperature=0, max_tokens=max(1, request.num_output_tokens), ignore_eos=True, seed=0)
        seq = Sequence(
            self._prompt(request, access),
            params,
            block_size=self._workload.block_size,
            cache_hints=self._hints(request.hints),
        )
        try:
            self._scheduler.add(seq)
        except RequestError:
            result.num_refused += 1
            return
        arrival = request.arrival / self._speed
        self._running[seq.seq_id] = _Running(len(result.hits) - 1, arrival, self._output(request))

    def _hints(self, hints: CacheHints) -> CacheHints:
        """Hints with their times on the replay's clock."""
        idle, ttl = (
            None if seconds is None else min(LONGEST_TIME, seconds / self._speed)
            for seconds in (hints.expected_idle_s, hints.ttl_s)
        )
        return replace(hints, expected_idle_s=idle, ttl_s=ttl)

    def _prompt(self, request: TraceRequest, access: Access) -> IntArray:
        """Tokens that are equal where the trace says so: each block is the number of its node, again and again."""
        if request.token_ids is not None:
            return request.token_ids
        block_size = self._workload.block_size
        path = access.path[: -(-request.num_prompt_tokens // block_size)]  # some traces have more hashes than tokens
        tokens = np.repeat(path, block_size)[: request.num_prompt_tokens]
        tail = self._unknown(request.num_prompt_tokens - len(tokens))
        return np.append(tokens, np.arange(tail.start, tail.stop, dtype=np.int32))

    def _output(self, request: TraceRequest) -> Iterator[int]:
        if request.output_token_ids is not None:
            return iter(request.output_token_ids.tolist())
        return iter(self._unknown(max(1, request.num_output_tokens)))

    def _unknown(self, num_tokens: int) -> range:
        """Tokens that the trace does not tell, so that nothing else has them."""
        if self._next_unknown + num_tokens > 2**31:
            self._next_unknown = FIRST_UNKNOWN  # those are long forgotten
        first = self._next_unknown
        self._next_unknown += num_tokens
        return range(first, first + num_tokens)

    def _advance(self, until: float) -> None:
        """Run steps until nothing is left to do or the clock has passed `until`, when the next request is there."""
        while self.result.clock < until:
            step = self._scheduler.schedule()
            if step is None:
                if until != float("inf"):
                    self.result.clock = until
                return
            self._run(step)

    def _run(self, step: Step) -> None:
        result, seconds = self.result, self._cost.seconds(step)
        self._note_admissions(step)
        stats = self._manager.stats()
        slots = stats.blocks_in_use * stats.block_size
        self._waste += seconds * stats.wasted_slots / slots if slots else 0.0
        result.clock += seconds
        result.busy += seconds
        result.num_steps += 1
        drawing = [seq for seq, draws in zip(step.seqs, step.needs_logits.tolist(), strict=True) if draws]
        tokens = [next(self._running[seq.seq_id].output, SENTINEL) for seq in drawing]
        for seq in drawing:
            self._note_token(self._running[seq.seq_id])
        for seq in self._scheduler.commit(step, tokens):
            self._note_end(seq)

    def _note_admissions(self, step: Step) -> None:
        for seq in step.seqs:
            running = self._running[seq.seq_id]
            if running.scheduled is None:
                running.scheduled = self.result.clock
                self.result.queue.append(running.scheduled - running.arrival)
                hits = (seq.num_prefix_tokens or 0) // self._workload.block_size
                self.result.hits[running.number] = hits
                self.result.num_hits += hits
                self.result.num_hit_tokens += seq.num_prefix_tokens or 0

    def _note_token(self, running: _Running) -> None:
        now = self.result.clock
        if running.first_token is None:
            running.first_token = now
            self.result.ttft.append(now - running.arrival)
        else:
            self.result.itl.append(now - running.last_token)
        running.last_token = now
        self.result.num_output_tokens += 1

    def _note_end(self, seq: Sequence) -> None:
        running = self._running.pop(seq.seq_id)
        self.result.num_cut_off += seq.finish_reason == "cache_full"
        self.result.e2e.append(self.result.clock - running.arrival)
        if running.first_token is not None and seq.num_output_tokens > 1:
            self.result.tpot.append((running.last_token - running.first_token) / (seq.num_output_tokens - 1))

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.Miss):
            self.result.misses[str(event.reason)] += 1
