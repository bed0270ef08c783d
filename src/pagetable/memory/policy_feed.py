"""What the eviction policy is told of requests: each once, however often it is admitted, and each block of it once."""

from __future__ import annotations

from pagetable.memory.eviction import EvictionPolicy
from pagetable.memory.hints import NO_HINTS
from pagetable.memory.prefix import PrefixChain
from pagetable.memory.sequence_like import SequenceLike
from pagetable.memory.sessions import SessionKey, Sessions, session_key


class PolicyFeed:
    """An eviction policy, the sessions whose ends it is to hear of, and what it was told by request."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.sessions = Sessions()

    def begin(self, seq: SequenceLike, chain: PrefixChain) -> None:
        """A request is admitted, perhaps again. The full blocks of its prompt are hashed."""
        if chain.has_begun:
            return
        chain.has_begun = True
        hints = getattr(seq, "cache_hints", NO_HINTS)
        chain.session, chain.ends_session = session_key(seq.cache_salt, hints.session_id), hints.end_session
        if chain.session is not None:
            self.sessions.begin(chain.session)
        chain.num_prompt_tokens = getattr(seq, "num_prompt_tokens", seq.num_tokens)
        chain.use = self.policy.begin(chain.hashes, chain.num_prompt_tokens, hints, seq.cache_salt)

    def admit(self, chain: PrefixChain, hits: list[int]) -> None:
        """It hits these blocks, its first ones."""
        self.policy.access(hits[chain.num_accessed :])
        self.sessions.note_hit(chain.session, hits)
        chain.num_accessed = max(chain.num_accessed, len(hits))

    def publish(
        self, chain: PrefixChain, block_table: list[int], num_blocks: int, found: list[int], added: list[int]
    ) -> None:
        """Its first `num_blocks` blocks are registered by now: of the latest it found some, and added those behind."""
        if found:
            self.policy.access(found)
        if added:
            first = num_blocks - len(added)
            above = block_table[first - 1] if first else None
            num_repeated = max(0, chain.num_accessed - first)
            self.policy.register(chain.use, added, chain.hashes[first:num_blocks], above, num_repeated)
            if chain.session is not None:
                self.sessions.note_registered(chain.session, added)
        chain.num_accessed = max(chain.num_accessed, num_blocks)

    def end(self, seq: SequenceLike, chain: PrefixChain, num_blocks: int) -> bool:
        """It is over, with so many blocks registered. Whether its session is, once its blocks are given back."""
        num_output_tokens = getattr(seq, "num_output_tokens", seq.num_tokens - chain.num_prompt_tokens)
        self.policy.end(chain.use, num_blocks, num_output_tokens)
        chain.use, chain.has_begun = None, False
        return chain.session is not None and self.sessions.finish(chain.session, chain.ends_session)

    def demote(self, session: SessionKey) -> int:
        """A session is over. Returns how many blocks are its own."""
        own = self.sessions.own_blocks(session)  # all idle: nobody else uses them, and no request of it runs
        if own:
            self.policy.demote(own)
        return len(own)

    def clear(self) -> None:
        """No block has a content any more."""
        self.policy.clear()
        self.sessions.clear()
