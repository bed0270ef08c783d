"""The seam to whoever has sequences: what the page table reads and writes of one."""

from __future__ import annotations

from typing import Any, Protocol


class SequenceLike(Protocol):
    """What the manager needs of a sequence.

    May be absent: `prefix_chain` at first, `seq_id`, which events name, and what the eviction policy is told,
    `cache_hints`, `num_prompt_tokens` and `num_output_tokens`.
    """

    token_ids: Any  # tokens so far: a list or an int32 buffer, only ever appended to
    block_table: list[int]  # physical block of each logical block
    num_cached_tokens: int  # tokens whose K/V is in the blocks
    num_scheduled_tokens: int  # tokens that the present step computes
    cache_salt: str | None  # only sequences with the same salt share
    prefix_chain: Any  # the manager's own: hashes of the full blocks

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that they fill or begin."""
        ...
