"""A clock that a test moves, and requests that come at times of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagetable.memory import BlockManager, CacheHints
from pagetable.memory.hints import NO_HINTS
from tests.memory.request_stream import serve


@dataclass
class Clock:
    """Tells the seconds that it is set to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Request:
    at: float
    token_ids: list[int]
    kind: str = ""  # for the test to tell them apart
    hints: CacheHints = NO_HINTS
    salt: str | None = None


def timed_manager(num_blocks: int, block_size: int = 1, policy: str = "lhc") -> tuple[BlockManager, Clock]:
    clock = Clock()
    return BlockManager(num_blocks, block_size, eviction_policy=policy, clock=clock), clock


def play(manager: BlockManager, clock: Clock, requests: Iterable[Request]) -> dict[str, int]:
    """Serve each in order of time, at its time and within no time; returns how many blocks each kind hit."""
    hits: dict[str, int] = {}
    for request in sorted(requests, key=lambda request: request.at):
        clock.now = request.at
        num_hits = serve(manager, request.token_ids, request.hints, request.salt)
        hits[request.kind] = hits.get(request.kind, 0) + num_hits
    return hits
