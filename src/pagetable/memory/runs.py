"""The chains of all requests in pieces: what always was used together lies in one *run*, and one note does for it all.

A request goes through the runs from the root on; where it leaves one in the middle, the run is cut in two. Runs also
remember blocks that left (*ghosts*), so that a session is known again when it comes back. Notes are as many
as requests and branches, not as blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from pagetable.memory.hints import CacheHints
from pagetable.memory.sessions import SessionKey

DIGEST_BYTES = 8  # bytes of a hash that are kept: they rank, and prove nothing


class Use:
    """What a request did with its chain, by blocks from the root.

    [0, shared) are used by other sessions too, [shared, found) were known when it began, [found, num_blocks) it added.
    """

    __slots__ = (
        "ended_at",
        "factor",
        "found",
        "guarded",
        "hints",
        "new_record",
        "new_row",
        "num_blocks",
        "num_new_tokens",
        "num_runs",
        "prefix_record",
        "prefix_row",
        "session",
        "shared",
        "turn",
    )

    def __init__(self, session: SessionKey | None, hints: CacheHints) -> None:
        self.session = session
        self.hints = hints
        self.factor = 1.0  # of its blocks' scores, by priority
        self.shared = self.found = 0
        self.num_blocks = 0  # of its chain that have a content, set at the end
        self.num_new_tokens = 0
        self.turn = 1
        self.ended_at = -1.0  # when its blocks began to wait; -1 while it runs
        self.new_row = self.prefix_row = -1
        self.new_record = self.prefix_record = -1  # records of the hazard table; -1 for none
        self.num_runs = 0  # that it was the last to use and that are remembered; without any it has no records
        self.guarded: dict[Run, None] | None = None  # idle runs that it protects while it runs

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.ended_at < 0.0


class Run:
    """A piece of a chain. Its first `len(block_ids)` blocks are in memory; those behind them are ghosts."""

    __slots__ = (
        "block_ids",
        "branches",
        "hashes",
        "head",
        "interval",
        "is_shared",
        "last",
        "last_at",
        "parent",
        "record",
        "slot",
        "stamp",
        "start",
    )

    def __init__(self, start: int, parent: int, hashes: bytes, last: Use, last_at: float) -> None:
        self.start = start  # how many blocks of the chain lie before it
        self.parent = parent  # the block before its first, if that is here; -1 for the root
        self.head = hashes[:DIGEST_BYTES]
        self.hashes = bytearray(hashes)  # DIGEST_BYTES bytes a block
        self.block_ids: list[int] = []  # of those that are here
        self.branches: dict[int, int] | None = None  # by depth, how many other runs that are here go on there
        self.last = last  # use
        self.last_at = last_at
        self.is_shared = False
        self.interval = math.inf  # between uses since it is shared, smoothed
        self.record = -1  # of the hazard table, once it is shared
        self.slot = self.stamp = -1  # among the candidates

    def num_branches(self, depth: int) -> int:
        """Runs here that go on from this one at a depth."""
        return 0 if self.branches is None else self.branches.get(depth, 0)

    def add_branch(self, depth: int) -> None:
        """One more does."""
        self.branches = self.branches or {}
        self.branches[depth] = self.branches.get(depth, 0) + 1

    def drop_branch(self, depth: int) -> None:
        """One less does."""
        assert self.branches is not None
        self.branches[depth] -= 1
        if not self.branches[depth]:
            del self.branches[depth]
            self.branches = self.branches or None

    @property
    def end(self) -> int:
        """How many blocks of the chain there are up to its last block that is here."""
        return self.start + len(self.block_ids)

    @property
    def length(self) -> int:
        """Blocks, here or gone."""
        return len(self.hashes) // DIGEST_BYTES

    @property
    def num_ghosts(self) -> int:
        """Blocks that left."""
        return len(self.hashes) // DIGEST_BYTES - len(self.block_ids)


class Runs:
    """All runs with a block here or a ghost. A subclass learns of cuts and of what was forgotten."""

    _now: float

    def _forget_runs(self, num_blocks: int) -> None:
        self._run_of: list[Run | None] = [None] * num_blocks
        self._by_head: dict[bytes, Run] = {}  # runs by the hash of their first block
        self._with_ghosts: OrderedDict[Run, None] = OrderedDict()  # those that lost a block longest ago first
        self._num_ghosts = 0

    def _was_cut(self, run: Run, rest: Run) -> None:
        """`rest` was the end of `run` until now."""
        raise NotImplementedError

    def _was_forgotten(self, run: Run) -> None:
        """Nothing of a run is known any more."""
        raise NotImplementedError

    def _run_at(self, digests: bytes, depth: int) -> Run | None:
        """The run that begins with the first of these digests, `depth` blocks from the root."""
        run = self._by_head.get(digests[:DIGEST_BYTES])
        return run if run is not None and run.start == depth else None

    def _walk(self, digests: bytes) -> tuple[list[Run], Run | None]:
        """The runs that a chain begins with, cut where it leaves them, and what was cut off behind the last, if any."""
        path: list[Run] = []
        rest, depth = None, 0
        while rest is None and (run := self._run_at(digests, depth)) is not None:
            path.append(run)
            num_same = _num_same(digests[: len(run.hashes)], run.hashes)
            depth, digests = depth + num_same, digests[num_same * DIGEST_BYTES :]
            if num_same < run.length:
                behind = self._cut(run, num_same)
                rest = None if self._run_at(digests, depth) else behind
        return path, rest

    def register(
        self, use: Use, block_ids: list[int], hashes: Sequence[bytes], parent: int | None, num_repeated: int = 0
    ) -> None:
        """Blocks in use got a content each, one behind the other, the first behind that of the block `parent`.

        They go on with ghosts as long as they are those, then with the run of this request, or with one of their own.
        """
        digests = digests_of(hashes)
        run, depth = self._place_behind(parent)
        while block_ids:
            num = 0
            if run is not None and depth == run.end:
                if run.num_ghosts:
                    num = self._bring_back(run, block_ids, digests)
                elif run.last is use and not run.is_shared:
                    run.hashes += digests
                    self._take_in(run, block_ids)
                    return
            if num == 0:
                run = self._branch(run, depth, -1 if parent is None else parent, digests, use)
                num = self._bring_back(run, block_ids, digests)
            parent, depth = block_ids[num - 1], depth + num
            block_ids, digests = block_ids[num:], digests[num * DIGEST_BYTES :]

    def _place_behind(self, parent: int | None) -> tuple[Run | None, int]:
        """The run of a block, and how deep in the chain the next block lies."""
        if parent is None:
            return None, 0
        run = self._run_of[parent]
        assert run is not None
        if run.block_ids[-1] == parent:
            return run, run.end
        return run, run.start + run.block_ids.index(parent) + 1

    def _bring_back(self, run: Run, block_ids: list[int], digests: bytes) -> int:
        """As many of these blocks as are the next ghosts of a run are in memory again. Returns how many."""
        num = _num_same(digests, run.hashes[len(run.block_ids) * DIGEST_BYTES :])
        self._take_in(run, block_ids[:num])
        self._num_ghosts -= num
        if not run.num_ghosts:
            del self._with_ghosts[run]
        return num

    def _branch(self, above: Run | None, depth: int, parent: int, digests: bytes, use: Use) -> Run:
        """The run that goes on behind the block `parent`: one of ghosts that begins so, or a new one."""
        run = self._run_at(digests, depth)
        if run is None or run.block_ids:
            if above is not None and depth < above.start + above.length:
                self._cut(above, depth - above.start)
            run = self._new_run(depth, parent, digests, use, self._now)
            self._num_ghosts += run.length
            self._with_ghosts[run] = None
        run.parent = parent
        if above is not None:
            above.add_branch(depth)
        return run

    def _take_in(self, run: Run, block_ids: list[int]) -> None:
        run.block_ids += block_ids
        for block_id in block_ids:
            self._run_of[block_id] = run

    def _new_run(self, start: int, parent: int, hashes: bytes, last: Use, last_at: float) -> Run:
        run = Run(start, parent, hashes, last, last_at)
        last.num_runs += 1
        self._by_head[run.head] = run
        return run

    def _cut(self, run: Run, num_blocks: int) -> Run:
        """Leave a run its first blocks. The rest becomes a run of its own."""
        depth = run.start + num_blocks
        rest = self._new_run(depth, -1, bytes(run.hashes[num_blocks * DIGEST_BYTES :]), run.last, run.last_at)
        rest.is_shared, rest.interval = run.is_shared, run.interval
        had_ghosts = run.num_ghosts > 0
        del run.hashes[num_blocks * DIGEST_BYTES :]
        if len(run.block_ids) > num_blocks:
            rest.parent = run.block_ids[num_blocks - 1]
            rest.block_ids = run.block_ids[num_blocks:]
            del run.block_ids[num_blocks:]
            for block_id in rest.block_ids:
                self._run_of[block_id] = rest
            if run.branches is not None:
                rest.branches = {at: num for at, num in run.branches.items() if at > depth} or None
                run.branches = {at: num for at, num in run.branches.items() if at <= depth}
            run.add_branch(depth)
        if had_ghosts:
            self._with_ghosts[rest] = None
            if not run.num_ghosts:
                del self._with_ghosts[run]
        self._was_cut(run, rest)
        return rest

    def _forget_ghosts(self, num_blocks: int) -> None:
        """Forget so many of those that left the longest ago."""
        while num_blocks > 0 and self._with_ghosts:
            run = next(iter(self._with_ghosts))
            num = min(num_blocks, run.num_ghosts)
            del run.hashes[len(run.hashes) - num * DIGEST_BYTES :]
            num_blocks -= num
            self._num_ghosts -= num
            if not run.num_ghosts:
                del self._with_ghosts[run]
            if not run.hashes:
                if self._by_head.get(run.head) is run:
                    del self._by_head[run.head]
                run.last.num_runs -= 1
                self._was_forgotten(run)


def digests_of(hashes: Sequence[bytes]) -> bytes:
    """The first DIGEST_BYTES bytes of each hash of 16."""
    return np.frombuffer(b"".join(hashes), "<u8")[::2].tobytes() if hashes else b""


def _num_same(ours: bytes, theirs: bytes | bytearray) -> int:
    """How many digests are the same before the first that is not."""
    if ours == theirs:
        return len(ours) // DIGEST_BYTES
    size = min(len(ours), len(theirs)) // DIGEST_BYTES
    differ = np.frombuffer(ours, "<u8", size) != np.frombuffer(theirs, "<u8", size)
    return int(differ.argmax()) if differ.any() else size
