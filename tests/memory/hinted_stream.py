"""Random requests that say random things to the cache, of a few tenants, while time passes as it likes."""

from __future__ import annotations

from pagetable.memory import BlockManager, CacheHints
from pagetable.memory.hints import NO_HINTS
from tests.memory.plain_sequence import PlainSequence
from tests.memory.request_stream import RequestStream
from tests.memory.timed_requests import Clock


class HintedStream(RequestStream):
    """A stream of requests with hints; sessions are declared over, those who wait are given up, the clock moves."""

    def __init__(self, manager: BlockManager, seed: int, clock: Clock, *, resets: bool = True) -> None:
        super().__init__(manager, seed, resets=resets)
        self.clock = clock
        self._weights |= {self.preempt: 2, self.move_clock: 3, self.end_session: 1.5, self.give_up: 0.6}

    def made(self, token_ids: list[int]) -> PlainSequence:
        salt = self.rng.choice([None, None, None, "other"])
        return PlainSequence(token_ids, self.manager.block_size, salt, cache_hints=self._hints())

    def _hints(self) -> CacheHints:
        choice = self.rng.choice
        if choice([True, False]):
            return NO_HINTS
        return CacheHints(
            session_id=choice([None, "a", "b", "c"]),
            end_session=choice([True, False, False, False]),
            expected_idle_s=choice([None, None, 0, 5, 60.5]),
            cache_priority=choice([None, None, 0, 50, 100]),
            ttl_s=choice([None, None, 0, 3, 30.5]),
        )

    # ---------------------------------------------------------------- the acts

    def move_clock(self) -> None:
        self.clock.now += self.rng.choice([0, 0.001, 1, 10, 60, 1e3, 1e5, -50])

    def end_session(self) -> None:
        num_idle = self.manager.end_session(self.rng.choice("abc"), self.rng.choice([None, None, "other"]))
        self.counts["ended"] += num_idle > 0

    def give_up(self) -> None:
        """One that waits to come back after a preemption is aborted."""
        if self.preempted:
            self.manager.deallocate(self.preempted.pop(self.rng.randrange(len(self.preempted))))
            self.counts["given up"] += 1
