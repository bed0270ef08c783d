"""A sequence with nothing but what the block manager's protocol asks for, and the acts of one request's life."""

from dataclasses import dataclass, field

from pagetable.memory import BlockManager, CacheHints
from pagetable.memory.hints import NO_HINTS


@dataclass(eq=False)
class PlainSequence:
    token_ids: list[int]
    block_size: int = 4
    cache_salt: str | None = None
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    cache_hints: CacheHints = NO_HINTS

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // self.block_size)

    def block(self, i: int) -> list[int]:
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]


def admit(manager: BlockManager, seq: PlainSequence) -> int:
    """Allocate; returns the number of cached blocks."""
    hits = manager.can_allocate(seq)
    assert hits >= 0, "no memory"
    manager.allocate(seq, hits)
    manager.check()
    return hits


def compute(manager: BlockManager, seq: PlainSequence, num_tokens: int | None = None) -> None:
    """One step over the next tokens (all of them by default), as the scheduler does it."""
    seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens if num_tokens is None else num_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens += seq.num_scheduled_tokens
    seq.num_scheduled_tokens = 0
    manager.check()
