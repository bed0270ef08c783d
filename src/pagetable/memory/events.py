"""What happened to the page table, told to whoever listens.

A sink is any callable that takes one event. Folding `Stored`, `Removed` and `Cleared` in order gives exactly the set of
registered blocks. Events are built only when there is a sink.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum


class MissReason(StrEnum):
    """Why the first block that has to be computed was not found in the cache."""

    NEVER_SEEN = "never_seen"  # no such content was registered (as far back as the sink remembers)
    EVICTED = "evicted"  # it was, and its block was taken for other content
    PARTIAL_TAIL = "partial_tail"  # every full block before the last was hit; the last is never looked up
    IN_FLIGHT = "in_flight"  # another sequence is computing it right now
    DISABLED = "disabled"  # prefix caching is off, or this sequence has to compute what is cached
    RESET = "reset"  # it was registered before the cache was reset


@dataclass(frozen=True, slots=True)
class Stored:
    """A block was registered: it holds the K/V of `token_ids` after the prefix that `parent_hash` ends."""

    block_id: int
    hash: bytes
    parent_hash: bytes | None  # None for the first block of a prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """The last copy of a registered content is gone."""

    block_id: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """The prefix cache was reset: nothing is registered any more."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A sequence was admitted with its first `num_tokens` tokens found in the cache."""

    seq_id: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Miss:
    """A sequence was admitted and block `block_index` is the first that has to be computed, and why.

    There is one at each admission, since the last block is always computed: `partial_tail` says that all that could be
    hit was hit. `in_flight` occurs only where nobody waits, as the scheduler does unless all has to be computed.
    """

    seq_id: int | None
    block_index: int
    num_tokens: int  # tokens to compute
    hash: bytes | None  # of the missed block; None for a tail or where nothing may be hit
    reason: MissReason


@dataclass(frozen=True, slots=True)
class Allocated:
    """A sequence took these blocks for content yet to be computed."""

    seq_id: int | None
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """Blocks that nobody uses any more, in the order in which they were given back."""

    seq_id: int | None
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence lost its blocks to others after `num_computed_tokens` tokens, and waits again."""

    seq_id: int | None
    num_computed_tokens: int


Event = Stored | Removed | Cleared | Hit | Miss | Allocated | Freed | Preempted
EventSink = Callable[[Event], None]  # called in the middle of bookkeeping: it may take notes, not call back


class MissExplainer:
    """A sink that tells `evicted` and `reset` from `never_seen`, and passes every event on.

    The page table has no memory of what it forgot; this has, bounded: the last `capacity` contents that left. That one
    tenant's content was ever here is the operator's knowledge: do not show a reason to another tenant.
    """

    def __init__(self, sink: EventSink, capacity: int) -> None:
        self._sink = sink
        self._capacity = capacity
        self._ghosts: OrderedDict[bytes, MissReason] = OrderedDict()
        self.registered: dict[bytes, int] = {}  # hash to block id: the fold of the events so far

    def __call__(self, event: Event) -> None:
        """Take one event of the manager."""
        match event:
            case Stored():
                self.registered[event.hash] = event.block_id
                self._ghosts.pop(event.hash, None)
            case Removed():
                del self.registered[event.hash]
                self._remember(event.hash, MissReason.EVICTED)
            case Cleared():
                for hash in self.registered:
                    self._remember(hash, MissReason.RESET)
                self.registered.clear()
            case Miss(reason=MissReason.NEVER_SEEN) if event.hash is not None:
                event = replace(event, reason=self._ghosts.get(event.hash, event.reason))
        self._sink(event)

    def _remember(self, hash: bytes, reason: MissReason) -> None:
        self._ghosts[hash] = reason
        self._ghosts.move_to_end(hash)
        if len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)
