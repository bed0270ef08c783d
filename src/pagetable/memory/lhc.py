"""LHC, learned-hazard chains: what leaves first is what promises the least use for each second that it is kept.

What a request leaves waits, as a record of the hazard table, until somebody uses it again, and the table foretells the
waits to come. Chains are known in pieces, the runs of runs.py; the piece whose end is worth the least loses its last
blocks. The whole story is in docs/eviction.md.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagetable.memory.candidates import Candidates
from pagetable.memory.eviction import IdleBlocks
from pagetable.memory.hazard import (
    ENDED,
    EXPECTED,
    KEPT,
    LEFT_BEHIND,
    NEW,
    PREFIX,
    SHARED,
    SHORTEST,
    HazardTable,
    announced_row,
    class_row,
)
from pagetable.memory.hints import NO_HINTS, CacheHints
from pagetable.memory.runs import Run, Runs, Use, digests_of
from pagetable.memory.sessions import session_key

GHOSTS = 5  # times as many blocks are remembered as there are
SHARE_DECAY = 0.998  # what each session that goes on leaves of the old mean
SMOOTHING = 0.3  # of the interval between uses of what is shared
MIN_PER_REFRESH, MAX_PER_REFRESH = 10, 250  # requests between two refreshes; at the start a fifth of all so far
NORMAL_PRIORITY = 50  # of a request that gives none
PRIORITY_DECAY = 0.95  # what each request leaves of the sums before it
POINTS_PER_DOUBLING = 25.0  # of cache_priority, of a score
LATEST = 1e12  # seconds; a clock that shows more, or no number, is not believed
KEPT_PER_REQUEST = 0.5 ** (1 / 10_000)  # what was learned 10,000 requests ago counts half
GAPS, LONGEST_GAP = 1000, 10.0  # between requests: of so many the mean is known; seconds, a night counts as no more
PAUSE = 4.0  # such gaps pass before it is thought over what is worth keeping
NUM_TENANTS = 1024  # whose mean priority is known


class LHC(IdleBlocks, Runs):
    """An eviction policy that learns how long each kind of idle K/V waits until it is used again.

    `clock` tells seconds, `block_size` is in tokens. It remembers at most `GHOSTS * num_blocks` blocks that left.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(num_blocks)
        self._block_size = block_size
        self._clock = clock
        self._now = 0.0
        self.hazards = HazardTable()
        self._num_uses = 0
        self._gap = 0.0  # between requests, seconds, of late
        self._num_uses_at_refresh = self._num_uses_between = MIN_PER_REFRESH
        self._last_block_share = 0.5  # of sessions that go on from the very last block, full by chance
        self._priorities: OrderedDict[str | None, tuple[float, float]] = OrderedDict()  # points by tokens, tokens
        self._forget_all()

    def clear(self) -> None:
        """Forget every content. What was learned stays."""
        self.hazards.clear(self._tick())
        self._forget_all()

    def _forget_all(self) -> None:
        self._forget_idle()
        self._forget_runs(self._num_blocks)
        self._candidates = Candidates(self._num_blocks, self.hazards)
        self._victim: Run | None = None  # the run that is leaving, and
        self._quota = 0  # how many more of its blocks may go before that is thought over

    # ---------------------------------------------------------------- requests

    def begin(
        self, hashes: Sequence[bytes], num_tokens: int, hints: CacheHints = NO_HINTS, tenant: str | None = None
    ) -> Use:
        """A request is admitted with a prompt of so many tokens. What waited for it has been reused."""
        before = self._now
        now = self._tick(least=SHORTEST)  # or all ages were the same where a clock stands still
        self._gap += (min(now - before, LONGEST_GAP) - self._gap) / min(self._num_uses + 1, GAPS)
        self._refresh_when_due(now)
        use = Use(session_key(tenant, hints.session_id), hints)
        use.factor = self._factor_of(hints.cache_priority, num_tokens, tenant)
        path, rest = self._walk(digests_of(hashes))
        use.found = path[-1].start + path[-1].length if path else 0
        use.num_new_tokens = max(0, num_tokens - use.found * self._block_size)
        goes_on = bool(path) and self._goes_on(use, path[-1], rest)
        if path and not path[-1].is_shared:
            self._come_back(use, path[-1].last, goes_on, rest, now)
        for run in path:
            if run.is_shared or not goes_on:
                self._share(run, now)
                use.shared = run.start + run.length
            self._take_over(run, use, now)
            if run.slot >= 0:
                self._offer(run)  # an idle block that is to be computed again all the same
        return use

    def _refresh_when_due(self, now: float) -> None:
        """Learn, and forget a little."""
        self._num_uses += 1
        if self._num_uses >= self._num_uses_at_refresh:
            self.hazards.fade(KEPT_PER_REQUEST**self._num_uses_between)
            self.hazards.refresh(now, PAUSE * self._gap)
            self._num_uses_between = min(MAX_PER_REFRESH, max(MIN_PER_REFRESH, self._num_uses // 5))
            self._num_uses_at_refresh = self._num_uses + self._num_uses_between

    def _come_back(self, use: Use, last: Use, goes_on: bool, rest: Run | None, now: float) -> None:
        """The chain of `last` is used up to block `use.found`, by its next turn or a stranger. `rest` lies behind."""
        if last.is_running:
            return
        self._reuse(last, use.found, now)
        if rest is None:
            self._close_records(last, now)
        if goes_on:
            use.turn = last.turn + 1
            self._last_block_share += (1.0 - SHARE_DECAY) * ((use.found >= last.num_blocks) - self._last_block_share)
            if rest is not None and last.new_row != LEFT_BEHIND and use.found < last.num_blocks:
                self._leave_behind(last, use.found, rest, now)

    def _leave_behind(self, last: Use, found: int, rest: Run, now: float) -> None:
        """A session has gone on from block `found` of its last chain: what lies behind begins another wait."""
        if last.new_record >= 0:
            self.hazards.close(last.new_record, now)
        last.new_record = self.hazards.open(LEFT_BEHIND, last.num_blocks - found, now)
        last.new_row, last.ended_at = LEFT_BEHIND, now
        if rest.slot >= 0:
            self._offer(rest)

    def end(self, use: Use, num_blocks: int, num_output_tokens: int) -> None:
        """A request has ended, the first `num_blocks` blocks of its chain have a content. They begin to wait."""
        hints = use.hints
        use.ended_at = now = self._tick()
        use.num_blocks = num_blocks
        if hints.end_session:
            use.new_row = use.prefix_row = ENDED
        elif hints.expected_idle_s is not None:
            use.new_row = use.prefix_row = announced_row(EXPECTED, hints.expected_idle_s)
        elif hints.ttl_s is not None:
            use.new_row = use.prefix_row = announced_row(KEPT, hints.ttl_s)
        else:
            use.new_row = class_row(NEW, use.num_new_tokens, use.turn, num_output_tokens)
            use.prefix_row = class_row(PREFIX, use.num_new_tokens, use.turn, num_output_tokens)
        use.num_new_tokens = 0  # nobody asks again, and a number takes room
        self._open_records(use, now)
        for run in use.guarded or ():
            if run.slot >= 0 and run.last is use:
                self._offer(run)
        use.guarded = None

    def demote(self, block_ids: Sequence[int]) -> None:
        """A session is declared over: these blocks, all idle, were used by nobody else."""
        runs = dict.fromkeys(run for block_id in block_ids if (run := self._run_of[block_id]) is not None)
        for use in dict.fromkeys(run.last for run in runs):
            if not use.is_running and use.new_row != ENDED:
                self._close_records(use, self._tick())
                use.new_row = use.prefix_row = ENDED
                use.ended_at = self._now
                self._open_records(use, self._now)
        own = set(block_ids)
        for run in runs:
            if run.is_shared and own.issuperset(run.block_ids):  # by requests of this one session
                self.hazards.close(run.record, self._tick())
                run.is_shared, run.record = False, -1
            if run.slot >= 0:
                self._offer(run)

    def _open_records(self, use: Use, now: float) -> None:
        if not use.num_runs:  # others, who used all of it meanwhile, have records of it
            return
        ttl = math.inf if use.hints.ttl_s is None else use.hints.ttl_s
        if use.num_blocks > use.found:
            use.new_record = self.hazards.open(use.new_row, use.num_blocks - use.found, now, ttl)
        if use.found > use.shared:
            use.prefix_record = self.hazards.open(use.prefix_row, use.found - use.shared, now, ttl)

    def _close_records(self, use: Use, now: float) -> None:
        """End the waits of what a request left, without a reuse."""
        for record in (use.new_record, use.prefix_record):
            if record >= 0:
                self.hazards.close(record, now)
        use.new_record = use.prefix_record = -1

    def _goes_on(self, use: Use, tip: Run, rest: Run | None) -> bool:
        """Whether a request that ends in a private run, or leaves it there, is the next turn of its session."""
        if tip.is_shared or tip.last.is_running:
            return False
        if use.session is not None and tip.last.session is not None:
            return use.session == tip.last.session
        # At most one known continuation here, the last block of the turn before. With more, chats branch here.
        return tip.num_branches(use.found) + (rest is not None and not rest.block_ids) <= 1

    def _reuse(self, last: Use, found: int, now: float) -> None:
        """The chain of the request `last` is used again up to block `found`: so much of its records is reused."""
        if last.prefix_record >= 0:
            share = (found - last.shared) / max(1, last.found - last.shared)
            if not self.hazards.reuse(last.prefix_record, now, min(1.0, max(0.0, share))):
                last.prefix_record = -1
        if last.new_record >= 0:  # its last block, which is partial in most traces, does not count
            low, high = max(last.found, last.shared), last.num_blocks - 1
            share = 1.0 if found >= high else max(0.0, (found - low) / max(1, high - low))
            if not self.hazards.reuse(last.new_record, now, share):
                last.new_record = -1

    def _take_over(self, run: Run, use: Use, now: float) -> None:
        """A run is used by another request than before."""
        last, run.last, run.last_at = run.last, use, now
        use.num_runs += 1
        last.num_runs -= 1
        if not last.num_runs:  # so all that waited for it has been reused
            self._reuse(last, run.start + run.length, now)
            self._close_records(last, now)

    def _share(self, run: Run, now: float) -> None:
        """One more session uses a run."""
        if run.is_shared:
            gap = now - run.last_at
            run.interval = gap if run.interval == math.inf else run.interval + SMOOTHING * (gap - run.interval)
            self.hazards.reuse(run.record, now)
        run.is_shared = True
        run.record = self.hazards.open(SHARED, run.length, now)

    def _factor_of(self, priority: int | None, num_tokens: int, tenant: str | None) -> float:
        """What a priority is worth next to the others of a tenant: who always asks for 100 gets what others get for 50.

        The mean is by tokens, and of late requests. A tenant that gives no priorities is not noted; one that does
        begins with its first as the mean.
        """
        sums = self._priorities
        if priority is None and tenant not in sums:
            return 1.0
        priority = NORMAL_PRIORITY if priority is None else priority
        weighted, tokens = (PRIORITY_DECAY * value for value in sums.get(tenant, (0.0, 0.0)))
        mean = weighted / tokens if tokens else priority
        sums[tenant] = weighted + priority * num_tokens, tokens + num_tokens
        sums.move_to_end(tenant)
        if len(sums) > NUM_TENANTS:
            sums.popitem(last=False)
        points = round(priority - mean)  # whole ones, or a rest of one would win all ties
        return float(2.0 ** (points / POINTS_PER_DOUBLING))

    def _tick(self, least: float = 0.0) -> float:
        """The time, which goes on by `least` seconds at least and never runs backwards."""
        now = self._clock()
        self._now = max(self._now + least, now if now < LATEST else 0.0)
        return self._now

    def _was_cut(self, run: Run, rest: Run) -> None:
        if run.record >= 0:
            rest.record = self.hazards.split(run.record, rest.length / (run.length + rest.length))
        if run.slot >= 0 and rest.block_ids:  # the last block, now that of the rest, was idle
            self._candidates.withdraw(run)
            self._offer(rest)

    def _was_forgotten(self, run: Run) -> None:
        if run.record >= 0:
            self.hazards.close(run.record, self._now)
        if not run.last.is_running and (run.record < 0 or not run.last.num_runs):
            self._close_records(run.last, self._now)

    # ---------------------------------------------------------------- idle blocks

    def access(self, block_ids: Sequence[int]) -> None:
        """Nothing: `begin` saw all hashes."""

    def add(self, block_ids: Sequence[int]) -> None:
        """Blocks became idle."""
        self._num_idle += len(block_ids)
        is_idle, run_of = self._is_idle, self._run_of
        for block_id in block_ids:
            is_idle[block_id] = True
            run = run_of[block_id]
            assert run is not None
            if run.block_ids[-1] == block_id:
                self._offer(run)

    def remove(self, block_ids: Sequence[int]) -> None:
        """Idle blocks are in use again."""
        self._quota = 0
        self._num_idle -= len(block_ids)
        for block_id in block_ids:
            self._is_idle[block_id] = False

    def pop(self) -> int:
        """Take out the victim."""
        if self._quota == 0:
            self._choose()
        run = self._victim
        assert run is not None
        block_id = run.block_ids.pop()
        self._run_of[block_id] = None
        self._is_idle[block_id] = False
        self._num_idle -= 1
        self._num_ghosts += 1
        self._quota -= 1
        if self._quota == 0:
            self._settle(run)
        return block_id

    def _choose(self) -> None:
        """Find the run to take blocks from, and how many have the same score."""
        if not self._num_idle:
            raise KeyError("no block is idle")
        now = self._tick()
        while True:
            run = self._candidates.first(now)
            if self._is_idle[run.block_ids[-1]] and not run.num_branches(run.end):
                break
            self._candidates.withdraw(run)  # it is in use again, or something hangs on it
        use, end = run.last, run.end
        stops = [run.start, *(run.branches or ())]
        if end >= use.num_blocks > run.start:
            stops.append(use.num_blocks - 1)
        if use.found < end:
            stops.append(use.found)
        num = end - max(stops)
        if not self._is_idle[run.block_ids[-num]]:  # whoever uses a block uses all before it
            num = next(i for i in range(1, num) if not self._is_idle[run.block_ids[-1 - i]])
        self._quota = num
        self._victim = run
        self._forget_ghosts(self._num_ghosts + self._quota - GHOSTS * self._num_blocks)
        self._with_ghosts[run] = None
        self._with_ghosts.move_to_end(run)
        self._candidates.note_left(self._quota)

    def _settle(self, run: Run) -> None:
        """The chosen blocks have left: offer what is the end now, of this run or of the one above."""
        if run.block_ids:
            self._offer(run)
            return
        self._candidates.withdraw(run)
        if run.parent < 0:
            return
        above = self._run_of[run.parent]
        assert above is not None
        above.drop_branch(run.start)
        if above.block_ids[-1] == run.parent:
            self._offer(above)

    def _offer(self, run: Run) -> None:
        """A run's last block became idle, or its score has changed: make it a candidate if it can leave."""
        self._quota = 0
        end = run.end
        if run.num_branches(end) or not self._is_idle[run.block_ids[-1]]:
            self._candidates.withdraw(run)
            return
        use = run.last
        row = SHARED if run.is_shared else use.prefix_row if end <= use.found else use.new_row
        factor, ttl = use.factor, math.inf if use.hints.ttl_s is None else use.hints.ttl_s
        if use.is_running:  # preempted, or it will compute this again: it comes back soon
            row, factor = SHARED, math.inf
            use.guarded = use.guarded or {}
            use.guarded[run] = None
        elif not run.is_shared and end == use.num_blocks and use.new_row != LEFT_BEHIND:
            factor *= self._last_block_share
        interval = min(run.interval, 1e9) if run.is_shared else math.inf
        since = self._now if use.is_running else use.ended_at
        self._candidates.offer(run, row, since, ttl, interval, factor, self._now)

    # ---------------------------------------------------------------- what outlives a restart

    def state(self) -> dict[str, Any]:
        """What was learned so far, as JSON has it."""
        return {"policy": "lhc", "last_block_share": self._last_block_share, **self.hazards.state(self._tick())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was learned before. ValueError, and nothing changed, if this is no such state."""
        share = state.get("last_block_share")
        if state.get("policy") != "lhc" or not isinstance(share, float) or not 0.0 <= share <= 1.0:
            raise ValueError("it is no state of lhc")
        self.hazards.restore(state)
        self._last_block_share = share
