"""The eviction policies as one would do them on paper: a list of pages, and each rule by going through all of them.

One rule holds for all: the victim is the policy's minimum among the idle blocks without a registered child, the
*leaves*. Among equals the lower block id goes first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Page:
    """A registered block, in use or idle, and what the policies note on it."""

    block_id: int
    hash: bytes
    parent: int | None
    is_idle: bool = False
    queue: str = ""
    entered: int = 0  # the moment at which it was put at the end of its queue
    accesses: list[int] = field(default_factory=list)  # their moments
    num_hits: int = 0
    value: int = 0


class PlainPolicy:
    """What all share. A policy says what happens when a page comes, is hit, leaves, and which leaf is the victim."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        self.pages: list[Page] = []
        self.ended: list[int] = []  # idle block ids of sessions that are over, in the order in which they leave
        self.now = 0  # one more with each request that hits

    def comes(self, page: Page) -> None:
        """A page got its content just now."""

    def is_hit(self, page: Page) -> None:
        """A page was hit just now."""

    def victim(self, leaves: list[Page]) -> Page:
        """Which of these goes first."""
        raise NotImplementedError

    def leaves_memory(self, page: Page) -> None:
        """A page lost its content, and is no longer among the pages."""

    def page(self, block_id: int) -> Page:
        return next(page for page in self.pages if page.block_id == block_id)

    def forget_content(self, hash: bytes) -> None:
        """As if this content had never been here."""

    def register(self, block_id: int, hash: bytes, parent: int | None, is_access: bool = True) -> None:
        if not is_access:  # its request had it before
            self.forget_content(hash)
        page = Page(block_id, hash, parent)
        self.pages.append(page)
        self.comes(page)

    def access(self, block_ids: Iterable[int]) -> None:
        self.now += 1
        for block_id in block_ids:
            self.is_hit(self.page(block_id))

    def demote(self, block_ids: Iterable[int]) -> None:
        self.ended += [block_id for block_id in block_ids if block_id not in self.ended]

    def add(self, block_id: int) -> None:
        self.page(block_id).is_idle = True

    def remove(self, block_id: int) -> None:
        self.page(block_id).is_idle = False
        self.ended = [other for other in self.ended if other != block_id]

    def pop(self) -> int:
        parents = [page.parent for page in self.pages]
        leaves = [page for page in self.pages if page.is_idle and page.block_id not in parents]
        if not leaves:
            raise KeyError("no block is idle")
        ended = [page for page in leaves if page.block_id in self.ended]
        victim = min(ended, key=lambda page: self.ended.index(page.block_id)) if ended else self.victim(leaves)
        self.remove(victim.block_id)
        self.pages.remove(victim)
        self.leaves_memory(victim)
        return victim.block_id

    def __len__(self) -> int:
        return sum(page.is_idle for page in self.pages)

    def __iter__(self) -> Iterator[int]:
        rest = copy.deepcopy(self)
        while len(rest):
            yield rest.pop()

    def __contains__(self, block_id: object) -> bool:
        return any(page.block_id == block_id and page.is_idle for page in self.pages)


class PlainLRU(PlainPolicy):
    """The page that was released longest ago."""

    def clear(self) -> None:
        super().clear()
        self.releases: list[int] = []  # block ids, the latest last

    def add(self, block_id: int) -> None:
        super().add(block_id)
        self.releases = [other for other in self.releases if other != block_id] + [block_id]

    def demote(self, block_ids: Iterable[int]) -> None:
        self.ended = list(dict.fromkeys([*block_ids, *self.ended]))  # the session that ended last leaves first

    def victim(self, leaves: list[Page]) -> Page:
        return min(leaves, key=lambda page: self.releases.index(page.block_id))


class PlainLRUK(PlainPolicy):
    """The page whose last but one access is the longest ago, or never was; then the one whose last access is.

    Of the contents that left, the last access is remembered, for ten times as many as there are blocks.
    """

    def clear(self) -> None:
        super().clear()
        self.gone: list[tuple[bytes, int]] = []  # hash and last access

    def comes(self, page: Page) -> None:
        never = 0
        remembered = [moment for hash, moment in self.gone if hash == page.hash]
        self.forget_content(page.hash)
        page.accesses = [never, *remembered, self.now]

    def forget_content(self, hash: bytes) -> None:
        self.gone = [(other, moment) for other, moment in self.gone if other != hash]

    def is_hit(self, page: Page) -> None:
        page.accesses.append(self.now)

    def victim(self, leaves: list[Page]) -> Page:
        return min(leaves, key=lambda page: (page.accesses[-2], page.accesses[-1], page.block_id))

    def leaves_memory(self, page: Page) -> None:
        self.gone = [*self.gone, (page.hash, page.accesses[-1])][-10 * self.num_blocks :]


class PlainLFU(PlainPolicy):
    """The page of the least value: its number of accesses and the highest value of a victim by its last access.

    Among those of one value, the page whose last access is the longest ago.
    """

    def clear(self) -> None:
        super().clear()
        self.age = 0

    def comes(self, page: Page) -> None:
        self.is_hit(page)

    def is_hit(self, page: Page) -> None:
        page.accesses.append(self.now)
        page.value = len(page.accesses) + self.age

    def victim(self, leaves: list[Page]) -> Page:
        return min(leaves, key=lambda page: (page.value, page.accesses[-1], page.block_id))

    def leaves_memory(self, page: Page) -> None:
        self.age = max(self.age, page.value)


class PlainTwoQueues(PlainPolicy):
    """What 2Q and ARC share: two queues, each with the page first that entered it the longest ago."""

    def enter(self, page: Page, queue: str) -> None:
        """Put a page at the end of a queue, wherever it stood."""
        page.queue = queue
        page.entered = self.now

    def size(self, queue: str) -> int:
        return sum(page.queue == queue for page in self.pages)

    def first(self, leaves: list[Page], *queues: str) -> Page:
        """The first leaf of the first of these queues that has one."""
        return min(leaves, key=lambda page: (queues.index(page.queue), page.entered, page.block_id))


class Plain2Q(PlainTwoQueues):
    """2Q: from the queue of new pages while it is longer than a quarter of the blocks, else from the LRU.

    Only what comes back soon after it left the queue of new pages enters the LRU. Hits on new pages change nothing.
    """

    def clear(self) -> None:
        super().clear()
        self.gone: list[bytes] = []  # from the queue of new pages, the latest last

    def comes(self, page: Page) -> None:
        self.enter(page, "LRU" if page.hash in self.gone else "new")
        self.forget_content(page.hash)

    def forget_content(self, hash: bytes) -> None:
        self.gone = [other for other in self.gone if other != hash]

    def is_hit(self, page: Page) -> None:
        if page.queue == "LRU":
            self.enter(page, "LRU")

    def victim(self, leaves: list[Page]) -> Page:
        if self.size("new") > self.num_blocks // 4:
            return self.first(leaves, "new", "LRU")
        return self.first(leaves, "LRU", "new")

    def leaves_memory(self, page: Page) -> None:
        if page.queue == "new":
            self.gone = [*self.gone, page.hash][-max(1, self.num_blocks // 2) :]


class PlainARC(PlainTwoQueues):
    """ARC: T1 holds what was seen once, T2 what was seen again, B1 and B2 the hashes of what left T1 and T2.

    `p` is the size that T1 should have: a page that comes back from B1 raises it, one from B2 lowers it.
    """

    def clear(self) -> None:
        super().clear()
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0

    def comes(self, page: Page) -> None:
        c = self.num_blocks
        if page.hash in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1.0), c)
            self.b1.remove(page.hash)
            self.enter(page, "T2")
        elif page.hash in self.b2:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1.0), 0)
            self.b2.remove(page.hash)
            self.enter(page, "T2")
        else:
            self.enter(page, "T1")
        self.forget()

    def forget_content(self, hash: bytes) -> None:
        self.b1 = [other for other in self.b1 if other != hash]
        self.b2 = [other for other in self.b2 if other != hash]

    def is_hit(self, page: Page) -> None:
        self.enter(page, "T2")

    def victim(self, leaves: list[Page]) -> Page:
        return self.first(leaves, "T1", "T2") if self.size("T1") > self.p else self.first(leaves, "T2", "T1")

    def leaves_memory(self, page: Page) -> None:
        (self.b1 if page.queue == "T1" else self.b2).append(page.hash)
        self.forget()

    def forget(self) -> None:
        """Keep |T1| + |B1| <= c, |B2| <= c and |T1| + |T2| + |B1| + |B2| <= 2c, the oldest hashes going first."""
        c = self.num_blocks
        while self.b1 and self.size("T1") + len(self.b1) > c:
            del self.b1[0]
        del self.b2[: max(0, len(self.b2) - c)]
        while self.b2 and len(self.pages) + len(self.b1) + len(self.b2) > 2 * c:
            del self.b2[0]


class PlainS3FIFO(PlainPolicy):
    """S3-FIFO: two queues, both first in, first out; from the small one while it is longer than a tenth of the blocks.

    Whoever is first in the small one and was hit there twice moves to the end of the main one instead of leaving.
    Whoever is first in the main one and was hit goes to its end instead, and has one hit less; more than three do not
    count. What comes back soon after it left the small one enters the main one.
    """

    def clear(self) -> None:
        super().clear()
        self.small: list[Page] = []
        self.main: list[Page] = []
        self.gone: list[bytes] = []  # from the small queue, the latest last

    def comes(self, page: Page) -> None:
        (self.main if page.hash in self.gone else self.small).append(page)
        self.forget_content(page.hash)

    def forget_content(self, hash: bytes) -> None:
        self.gone = [other for other in self.gone if other != hash]

    def is_hit(self, page: Page) -> None:
        page.num_hits = min(page.num_hits + 1, 3)

    def victim(self, leaves: list[Page]) -> Page:
        while True:
            is_long = len(self.small) > self.num_blocks // 10
            in_order = self.small + self.main if is_long else self.main + self.small
            page = next(page for page in in_order if page in leaves)
            if page in self.small and page.num_hits >= 2:
                self.small.remove(page)
                self.main.append(page)
                page.num_hits = 0
            elif page in self.main and page.num_hits >= 1:
                self.main.remove(page)
                self.main.append(page)
                page.num_hits -= 1
            else:
                return page

    def leaves_memory(self, page: Page) -> None:
        if page in self.small:
            self.small.remove(page)
            self.gone = [*self.gone, page.hash][-self.num_blocks :]
        else:
            self.main.remove(page)


PLAIN_POLICIES: dict[str, type[PlainPolicy]] = {  # by the name of the policy that each is the reference of
    "lru": PlainLRU,
    "lru-k": PlainLRUK,
    "lfu": PlainLFU,
    "2q": Plain2Q,
    "arc": PlainARC,
    "s3-fifo": PlainS3FIFO,
}
