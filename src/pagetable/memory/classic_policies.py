"""Eviction policies from the literature, over chains: LRU-2, LFU with ageing, 2Q, ARC, S3-FIFO.

The papers know single pages. Here pages hang on each other, so each policy ranks blocks as its paper says, and the
victim is the lowest among the idle blocks without a registered child (the *leaves*). Blocks of one request have nearly
always the same rank; so a chain leaves from its tail.

There is always such a leaf when any block is idle: whoever uses a block uses its parent, so all that hangs on an idle
block is idle too, and the last of it is a leaf.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from pagetable.memory.eviction import IdleBlocks
from pagetable.memory.hints import NO_HINTS, CacheHints


class LeafPolicy(IdleBlocks):
    """What they share: who is whose parent, who is idle, and for each queue of a policy a heap of its leaves.

    A subclass says in which queue and at which rank a block stands (`_place`), from which queue the next victim comes
    (`_queue_of_victim`), and what it remembers of one that left (`_evicted`). Heaps are cleaned lazily: an entry counts
    only as long as its block is an idle leaf that still has this queue and rank. All operations are O(log n),
    amortised.
    """

    NUM_QUEUES = 1

    def __init__(self, num_blocks: int, block_size: int = 16, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(num_blocks)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        num_blocks = self._num_blocks
        self._forget_idle()
        self._now = 0  # goes on with each request that is told of
        self._hash: list[bytes] = [b""] * num_blocks
        self._parent: list[int | None] = [None] * num_blocks
        self._num_children = [0] * num_blocks  # registered ones
        self._rank: list[Any] = [None] * num_blocks
        self._queue: list[int | None] = [None] * num_blocks  # of a registered block, in use or idle
        self._sizes = [0] * self.NUM_QUEUES
        self._heaps: list[list[tuple[Any, int]]] = [[] for _ in range(self.NUM_QUEUES)]
        self._ghosts: tuple[Ghosts, ...] = ()  # what is remembered of contents that left
        self._demoted: OrderedDict[int, None] = OrderedDict()  # leave before all others

    # ---------------------------------------------------------------- what the page table tells

    def begin(
        self, hashes: Sequence[bytes], num_tokens: int, hints: CacheHints = NO_HINTS, tenant: str | None = None
    ) -> None:
        """These policies know blocks only."""

    def access(self, block_ids: Sequence[int]) -> None:
        """A request hits these blocks, all at one moment."""
        self._now += 1
        for block_id in block_ids:
            self._accessed(block_id)

    def register(
        self, use: None, block_ids: list[int], hashes: Sequence[bytes], parent: int | None, num_repeated: int = 0
    ) -> None:
        """Blocks in use got a content."""
        for i, (block_id, hash) in enumerate(zip(block_ids, hashes, strict=True)):
            if i < num_repeated:  # that its request lost it and has it again says nothing about others
                for ghosts in self._ghosts:
                    ghosts.recall(hash)
            self._hash[block_id], self._parent[block_id] = hash, parent
            if parent is not None:
                self._num_children[parent] += 1
            self._registered(block_id)
            parent = block_id

    def end(self, use: None, num_blocks: int, num_output_tokens: int) -> None:
        """These policies know blocks only."""

    def demote(self, block_ids: Sequence[int]) -> None:
        """Let these leave first, whatever their rank."""
        self._demoted.update(dict.fromkeys(block_ids))

    def add(self, block_ids: Sequence[int]) -> None:
        """Blocks became idle."""
        self._num_idle += len(block_ids)
        for block_id in block_ids:
            self._is_idle[block_id] = True
            self._offer(block_id)

    def remove(self, block_ids: Sequence[int]) -> None:
        """Blocks are in use again."""
        self._num_idle -= len(block_ids)
        for block_id in block_ids:
            self._is_idle[block_id] = False
            self._demoted.pop(block_id, None)

    def pop(self) -> int:
        """Take out the victim."""
        if not self._num_idle:
            raise KeyError("no block is idle")
        if self._demoted:
            block_id = next(iter(self._demoted))
            queue = self._queue[block_id]
            assert queue is not None
        else:
            queue = self._queue_of_victim()
            _, block_id = heappop(self._heaps[queue])
        self.remove([block_id])
        self._sizes[queue] -= 1
        self._queue[block_id] = None
        self._evicted(block_id, queue)
        parent = self._parent[block_id]
        if parent is not None:
            self._num_children[parent] -= 1
            if self._is_idle[parent]:
                self._offer(parent)
        return block_id

    # ---------------------------------------------------------------- what a policy says

    def _registered(self, block_id: int) -> None:
        """Place a new content."""
        raise NotImplementedError

    def _accessed(self, block_id: int) -> None:
        """Place a content that was hit."""
        raise NotImplementedError

    def _evicted(self, block_id: int, queue: int) -> None:
        """Remember what is worth it of a block that left this queue."""

    def _queue_of_victim(self) -> int:
        """The queue whose first leaf goes next; it has one."""
        self._first(0)
        return 0

    # ---------------------------------------------------------------- what it says it with

    def _place(self, block_id: int, queue: int, rank: Any) -> None:
        """Put a block into a queue; the lowest rank leaves first."""
        before = self._queue[block_id]
        if before != queue:
            if before is not None:
                self._sizes[before] -= 1
            self._sizes[queue] += 1
            self._queue[block_id] = queue
        self._rank[block_id] = rank
        self._offer(block_id)

    def _offer(self, block_id: int) -> None:
        """Enter a block into the heap of its queue, if it is an idle leaf."""
        if self._is_idle[block_id] and not self._num_children[block_id]:
            queue = self._queue[block_id]
            assert queue is not None
            heap = self._heaps[queue]
            heappush(heap, (self._rank[block_id], block_id))
            if len(heap) > 64 + 2 * self._num_idle:
                heap[:] = {entry for entry in heap if self._counts(queue, entry)}
                heapify(heap)

    def _first(self, queue: int) -> int | None:
        """The leaf of a queue that is to leave first, now at the top of its heap; None if the queue has no leaf."""
        heap = self._heaps[queue]
        while heap:
            if self._counts(queue, heap[0]):
                return heap[0][1]
            heappop(heap)
        return None

    def _counts(self, queue: int, entry: tuple[Any, int]) -> bool:
        rank, block_id = entry
        is_leaf = self._is_idle[block_id] and not self._num_children[block_id]
        return bool(is_leaf) and self._queue[block_id] == queue and self._rank[block_id] == rank


class Ghosts:
    """The last `capacity` contents to leave, with a note on each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._notes: OrderedDict[bytes, Any] = OrderedDict()

    def remember(self, hash: bytes, note: Any = True) -> None:
        """Add one that has just left."""
        self._notes[hash] = note
        self._notes.move_to_end(hash)
        if len(self._notes) > self._capacity:
            self._notes.popitem(last=False)

    def recall(self, hash: bytes) -> Any:
        """Take out the note on one that has come back; None if it is not known."""
        return self._notes.pop(hash, None)

    def shrink(self) -> None:
        """Forget the oldest."""
        self._notes.popitem(last=False)

    def __len__(self) -> int:
        return len(self._notes)

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._notes


class LRUK(LeafPolicy):
    """LRU-2: the block whose last but one access is the longest ago leaves first.

    (O'Neil, O'Neil, Weikum, SIGMOD 1993, section 2; correlated references do not occur, since a request counts
    once.) So what was accessed once leaves before what was accessed twice. When a content comes back, its last
    access is still known (the paper's retained information), for ten times as many contents as there are blocks:
    without it the policy is below LRU on chats.
    """

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._ghosts = (Ghosts(10 * self._num_blocks),)

    def _registered(self, block_id: int) -> None:
        self._place(block_id, 0, (self._ghosts[0].recall(self._hash[block_id]) or 0, self._now))

    def _accessed(self, block_id: int) -> None:
        self._place(block_id, 0, (self._rank[block_id][1], self._now))

    def _evicted(self, block_id: int, queue: int) -> None:
        self._ghosts[0].remember(self._hash[block_id], self._rank[block_id][1])


class LFU(LeafPolicy):
    """LFU with dynamic ageing: fewest accesses first, and old glory fades.

    (LFU-DA of Arlitt et al., Performance Evaluation Review 27(4), 2000.) A block's rank is its number of accesses
    plus the highest rank that any victim had by then; ties go to the one that was accessed longest ago.
    """

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._age = 0
        self._count = [0] * self._num_blocks

    def _registered(self, block_id: int) -> None:
        self._count[block_id] = 0
        self._accessed(block_id)

    def _accessed(self, block_id: int) -> None:
        self._count[block_id] += 1
        self._place(block_id, 0, (self._age + self._count[block_id], self._now))

    def _evicted(self, block_id: int, queue: int) -> None:
        self._age = max(self._age, self._rank[block_id][0])  # lower when it was in use for long


class TwoQ(LeafPolicy):
    """2Q, full version (Johnson, Shasha, VLDB 1994, section 2.2): a queue for what is new, an LRU for what came back.

    What is new goes through a first-in, first-out queue of a quarter of the blocks; of what leaves it, the hashes are
    kept for half as many contents as there are blocks. What comes back while it is among them is kept in the LRU.
    """

    NUM_QUEUES = 2
    NEW, MAIN = 0, 1

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._ghosts = (Ghosts(max(1, self._num_blocks // 2)),)

    def _registered(self, block_id: int) -> None:
        came_back = self._ghosts[0].recall(self._hash[block_id])
        self._place(block_id, self.MAIN if came_back else self.NEW, self._now)

    def _accessed(self, block_id: int) -> None:
        if self._queue[block_id] == self.MAIN:
            self._place(block_id, self.MAIN, self._now)

    def _queue_of_victim(self) -> int:
        is_long = self._sizes[self.NEW] > self._num_blocks // 4
        return _first_with_leaf(self, (self.NEW, self.MAIN) if is_long else (self.MAIN, self.NEW))

    def _evicted(self, block_id: int, queue: int) -> None:
        if queue == self.NEW:
            self._ghosts[0].remember(self._hash[block_id])


class ARC(LeafPolicy):
    """ARC: an LRU for contents seen once, one for those seen again, and a moving border between them.

    (Megiddo, Modha, FAST 2003, figure 4.) Of both it keeps the hashes of what left. One that comes back shows which
    of the two is too small. (The paper moves the border before it evicts. Here memory is taken before the
    newcomer's content is known: the border moves after.)
    """

    NUM_QUEUES = 2
    ONCE, AGAIN = 0, 1

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._ghosts = (Ghosts(self._num_blocks), Ghosts(self._num_blocks))
        self._target = 0.0  # the size that ONCE should have

    def _registered(self, block_id: int) -> None:
        hash = self._hash[block_id]
        once, again = self._ghosts
        queue = self.AGAIN
        if hash in once:
            self._target = min(self._target + max(1.0, len(again) / len(once)), self._num_blocks)
            once.recall(hash)
        elif hash in again:
            self._target = max(self._target - max(1.0, len(once) / len(again)), 0.0)
            again.recall(hash)
        else:
            queue = self.ONCE
        self._place(block_id, queue, self._now)
        self._trim()

    def _accessed(self, block_id: int) -> None:
        self._place(block_id, self.AGAIN, self._now)

    def _queue_of_victim(self) -> int:
        is_long = self._sizes[self.ONCE] > self._target
        return _first_with_leaf(self, (self.ONCE, self.AGAIN) if is_long else (self.AGAIN, self.ONCE))

    def _evicted(self, block_id: int, queue: int) -> None:
        self._ghosts[queue].remember(self._hash[block_id])
        self._trim()

    def _trim(self) -> None:
        """Keep as much of the past as the paper does.

        Contents seen once, here or gone, are at most as many as there are blocks. So are those gone of the others, and
        all together are at most twice as many.
        """
        once, again = self._ghosts
        while len(once) and len(once) + self._sizes[self.ONCE] > self._num_blocks:
            once.shrink()
        while len(again) and len(once) + len(again) + sum(self._sizes) > 2 * self._num_blocks:
            again.shrink()


class S3FIFO(LeafPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main one, and only first in, first out.

    What was hit twice while it stood in the small queue, a tenth of the blocks, moves to the main one; of what leaves
    it, the hashes are kept, and what comes back goes to the main queue. There each hit, up to three, is worth another
    round (section 4, algorithm 1; hashes are kept of as many contents as there are blocks).
    """

    NUM_QUEUES = 2
    SMALL, MAIN = 0, 1
    MOST = 3  # hits that count

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._count = [0] * self._num_blocks  # accesses since a block entered its queue
        self._ghosts = (Ghosts(self._num_blocks),)
        self._entered = 0

    def _registered(self, block_id: int) -> None:
        came_back = self._ghosts[0].recall(self._hash[block_id])
        self._enter(block_id, self.MAIN if came_back else self.SMALL)

    def _accessed(self, block_id: int) -> None:
        self._count[block_id] = min(self._count[block_id] + 1, self.MOST)

    def _enter(self, block_id: int, queue: int) -> None:
        self._entered += 1
        self._count[block_id] = 0
        self._place(block_id, queue, self._entered)

    def _queue_of_victim(self) -> int:
        while True:
            is_long = self._sizes[self.SMALL] > self._num_blocks // 10
            queue = _first_with_leaf(self, (self.SMALL, self.MAIN) if is_long else (self.MAIN, self.SMALL))
            block_id = self._heaps[queue][0][1]
            count = self._count[block_id]
            if count < (2 if queue == self.SMALL else 1):
                return queue
            self._enter(block_id, self.MAIN)
            self._count[block_id] = 0 if queue == self.SMALL else count - 1

    def _evicted(self, block_id: int, queue: int) -> None:
        if queue == self.SMALL:
            self._ghosts[0].remember(self._hash[block_id])


def _first_with_leaf(policy: LeafPolicy, queues: tuple[int, ...]) -> int:
    """The first of these queues that has a leaf."""
    for queue in queues:
        if policy._first(queue) is not None:
            return queue
    raise KeyError("no block is idle")
