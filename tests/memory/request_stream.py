"""Requests drawn from a seed, over a small tree of prefixes, several alive at once: to drive a block manager with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from pagetable.memory import BlockManager, CacheHints
from pagetable.memory.hints import NO_HINTS
from tests.memory.plain_sequence import PlainSequence


def serve(
    manager: BlockManager, token_ids: list[int], hints: CacheHints = NO_HINTS, cache_salt: str | None = None
) -> int:
    """One request from admission to its end, without checks; returns the number of blocks that it hit."""
    seq = PlainSequence(token_ids, manager.block_size, cache_salt, cache_hints=hints)
    hits = manager.can_allocate(seq)
    manager.allocate(seq, hits)
    seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens = seq.num_tokens
    manager.deallocate(seq)
    return hits


class RequestStream:
    """Admits, computes, decodes, preempts, finishes and resets, as the dice say; `counts` is what took place.

    It asks for more than there is only at an admission or a decode step, and takes the refusal.
    """

    def __init__(self, manager: BlockManager, seed: int, *, resets: bool = True, num_tokens: int = 3) -> None:
        self.manager = manager
        self.rng = random.Random(seed)
        self.running: list[PlainSequence] = []
        self.preempted: list[PlainSequence] = []
        self.counts: Counter[str] = Counter()
        self._num_tokens = num_tokens  # distinct ones
        self._longest = manager.block_size * min(8, len(manager.blocks))
        self.prompts: list[list[int]] = [[]]
        while len(self.prompts) < 12:
            self.prompts.append(self._branch())
        self._weights = {self.admit: 7, self.compute: 9, self.decode: 6, self.finish: 5, self.preempt: 1}
        if resets:
            self._weights[self.reset] = 0.1

    def acts(self, count: int) -> Iterator[None]:
        """Play so many acts; yields after each."""
        for _ in range(count):
            (act,) = self.rng.choices(list(self._weights), list(self._weights.values()))
            act()
            yield

    def made(self, token_ids: list[int]) -> PlainSequence:
        """A new request."""
        return PlainSequence(token_ids, self.manager.block_size)

    def finish_all(self) -> None:
        """Let all that run finish where they are."""
        while self.running:
            self.finish()

    def _known(self) -> list[int]:
        """One of the prompts, the first ones most often."""
        popularity = [1 / i for i in range(1, len(self.prompts))]
        return list(self.rng.choices(self.prompts[1:], popularity)[0])

    def _branch(self) -> list[int]:
        """The start of a known prompt, with a tail of its own of up to four blocks."""
        known, size = self.rng.choice(self.prompts), self.manager.block_size
        tail = [self.rng.randrange(self._num_tokens) for _ in range(self.rng.randint(1, 4 * size))]
        return (known[: self.rng.randint(0, len(known))] + tail)[: self._longest]

    # ---------------------------------------------------------------- the acts

    def admit(self) -> None:
        comes_back = bool(self.preempted) and self.rng.random() < 0.6
        if comes_back:
            seq = self.preempted.pop(0)
        else:
            seq = self.made(self._branch() if self.rng.random() < 0.5 else self._known())
        hits = self.manager.can_allocate(seq)
        if hits < 0:
            self.counts["refused"] += 1
            if comes_back and seq.num_blocks <= len(self.manager.blocks):
                self.preempted.append(seq)
            elif comes_back:  # it has grown too long
                self.manager.deallocate(seq)
            return
        if hits and seq.num_blocks <= len(self.manager.free_block_ids) and self.rng.random() < 0.15:
            hits = self.rng.randrange(hits)  # whoever admits need not take all that is cached
        self.manager.allocate(seq, hits)
        self.running.append(seq)
        self.counts.update({"admitted": 1, "hits": hits, "came back": comes_back})

    def compute(self) -> None:
        todo = [seq for seq in self.running if seq.num_cached_tokens < seq.num_tokens]
        if todo:
            seq = self.rng.choice(todo)
            num_left = seq.num_tokens - seq.num_cached_tokens
            seq.num_scheduled_tokens = num_left if self.rng.random() < 0.5 else self.rng.randint(1, num_left)
            self.manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            self.counts["computed"] += 1

    def decode(self) -> None:
        done = [seq for seq in self.running if seq.num_cached_tokens == seq.num_tokens]
        if done:
            seq = self.rng.choice(done)
            seq.token_ids.append(self.rng.randrange(self._num_tokens))
            if self.manager.can_append(seq):
                self.manager.may_append(seq)
                self.counts["decoded"] += 1
            else:
                seq.token_ids.pop()
                self.counts["refused"] += 1

    def finish(self) -> None:
        if self.running:
            self.manager.deallocate(self.running.pop(self.rng.randrange(len(self.running))))
            self.counts["finished"] += 1

    def preempt(self) -> None:
        if self.running:
            seq = self.running.pop()
            self.manager.preempt(seq)
            self.preempted.append(seq)
            self.counts["preempted"] += 1

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.counts["reset"] += 1
