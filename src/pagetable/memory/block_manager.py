"""The page table: which physical block holds which tokens of which sequence, and who may share it.

A block's life: `can_allocate` looks for cached blocks, `allocate` takes them and fresh ones, the model computes,
`hash_blocks` publishes what became full, `may_append` adds a block as the sequence grows, `deallocate` gives all back.

A live sequence *announces* the full block that it computes next. Another that needs the same block, a follower, can
wait for it (`is_in_flight`) instead of computing it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import xxhash

from pagetable.memory import events
from pagetable.memory.block import Block, check_block_size
from pagetable.memory.events import EventSink, MissReason
from pagetable.memory.eviction import EvictionPolicy
from pagetable.memory.free_queue import FreeQueue
from pagetable.memory.invariants import check_invariants
from pagetable.memory.policies import make_policy
from pagetable.memory.policy_feed import PolicyFeed
from pagetable.memory.prefix import PrefixChain, encode_root
from pagetable.memory.sequence_like import SequenceLike
from pagetable.memory.statistics import CacheStats, Counters

logger = logging.getLogger(__name__)


class OutOfBlocksError(RuntimeError):
    """A block was asked for and none is free. Ask `can_allocate` or `can_append` first; nothing was changed."""


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens, and finds the blocks that already hold a prefix.

    `namespace` says which numbers the K/V are (model and dtype): sequences of different namespaces never share.
    `eviction_policy` is a name, or a policy made for so many blocks; `clock` tells seconds to one given by name.
    `events` is called with each event of `pagetable.memory.events`. One step is in flight at a time.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        enable_prefix_caching: bool = True,
        eviction_policy: str | EvictionPolicy = "lru",
        namespace: bytes = b"",
        events: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: at least 1 block is needed")
        check_block_size(block_size)
        if not isinstance(namespace, bytes):
            raise TypeError(f"namespace={namespace!r}: it must be bytes")
        if isinstance(eviction_policy, str):
            eviction_policy = make_policy(eviction_policy, num_blocks, block_size, clock)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.namespace = namespace
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.hash_to_block_id: dict[bytes, int] = {}  # the registry: one owner for each content
        self.free_block_ids = FreeQueue(num_blocks, eviction_policy)
        self._feed = PolicyFeed(eviction_policy)
        self._sink = events
        self._identity = object()  # tells our chains from those of another manager
        self._live: dict[int, SequenceLike] = {}  # sequences that hold blocks, by id()
        self._in_flight: dict[bytes, tuple[SequenceLike, int]] = {}  # blocks being computed: hash to leader and index
        self._removals = 0  # how often blocks left the registry; what a look-up found is good while this is unchanged
        self._generation = 0  # how often the cache was reset
        self._counters = Counters()

    @staticmethod
    def compute_hash(token_bytes: bytes, prefix: bytes) -> bytes:
        """Hash of a block: its tokens as int32 little-endian bytes, chained over the hash of the block before.

        Without the chain the B of "A, B" and of "C, B" would be one key. XXH3-128, 16 bytes: fast, and it need not be
        more, because a hit compares the content and the parent as well. (The policy `lhc` keeps 8 of the 16.)
        """
        return xxhash.xxh3_128_digest(prefix + token_bytes)

    # ---------------------------------------------------------------- admission

    def can_allocate(self, seq: SequenceLike, headroom: int = 0, *, may_hit: bool = True) -> int:
        """How many leading blocks of `seq` are cached, or -1 when memory is short: 0 means "go ahead, nothing cached".

        A pure look-up. A hit on a block in use costs nothing; a cached idle block is itself one of the free ones, so it
        counts against capacity like a fresh block, once. `headroom` blocks must be left over. Without `may_hit` nothing
        counts as cached: for a sequence that has to compute all of its tokens.
        """
        matched = self._match(seq) if may_hit else []
        blocks = self.blocks
        num_needed = seq.num_blocks - sum(1 for block_id in matched if blocks[block_id].ref_count)
        return len(matched) if num_needed + headroom <= len(self.free_block_ids) else -1

    def allocate(self, seq: SequenceLike, num_cached_blocks: int) -> None:
        """Fill the block table: the cached blocks that `can_allocate` found, then fresh ones for all other tokens.

        Ends with `num_cached_tokens = num_cached_blocks * block_size`: what the runner need not compute. Raises
        ValueError when `seq` already has blocks or fewer are cached, OutOfBlocksError when memory is short.
        """
        if seq.block_table:
            raise ValueError(f"allocate: the sequence already holds {len(seq.block_table)} blocks")
        if seq.num_blocks != -(-seq.num_tokens // self.block_size):
            raise ValueError(
                f"allocate: {seq.num_tokens} tokens in {seq.num_blocks} blocks do not fit block_size={self.block_size}"
            )
        matched = self._match(seq)
        if not 0 <= num_cached_blocks <= len(matched):
            raise ValueError(f"allocate: num_cached_blocks={num_cached_blocks}, but {len(matched)} blocks are cached")
        hits = matched[:num_cached_blocks]
        num_fresh = seq.num_blocks - num_cached_blocks
        num_idle = sum(1 for block_id in hits if not self.blocks[block_id].ref_count)
        if num_fresh + num_idle > len(self.free_block_ids):
            raise OutOfBlocksError(f"{num_fresh + num_idle} blocks are needed, {len(self.free_block_ids)} are free")

        # All that can fail comes before the first change, hashing (of tokens that are no int32) too.
        chain = self._hashed(seq, seq.num_tokens // self.block_size if self.enable_prefix_caching else 0)
        self._live[id(seq)] = seq
        self._use(hits)  # before any fresh block is taken, so that no hit is evicted
        if chain.generation != self._generation:
            chain.generation, chain.num_accessed, chain.has_begun = self._generation, 0, False
        if self.enable_prefix_caching:
            self._feed.begin(seq, chain)
        self._feed.admit(chain, hits)
        fresh = [self._take() for _ in range(num_fresh)]
        seq.block_table.extend(hits)
        seq.block_table.extend(fresh)
        seq.num_cached_tokens = num_cached_blocks * self.block_size
        self._count(seq, chain)
        if self._sink is not None:
            self._tell_admission(seq, num_cached_blocks, fresh, refused=len(matched) > num_cached_blocks)
        self._announce(seq, num_cached_blocks)

    def is_in_flight(self, seq: SequenceLike, num_cached_blocks: int) -> bool:
        """Whether another sequence is computing the full block that `seq` needs next: waiting for it saves the work.

        `num_cached_blocks` is what `can_allocate(seq)` has just returned. Exact like a hit: the leader's block must
        have the same tokens under the same parent.
        """
        if not self.enable_prefix_caching or num_cached_blocks >= seq.num_blocks - 1:
            return False
        i, matched, chain = num_cached_blocks, self._match(seq), self._chain(seq)
        announced = self._in_flight.get(chain.hashes[i])
        if announced is None:
            return False
        leader, index = announced
        theirs = self._chain(leader)
        if leader is seq or index != i or theirs.contents[i] != chain.contents[i]:
            return False
        return leader.block_table[i - 1] == matched[i - 1] if i else theirs.root == chain.root

    # ---------------------------------------------------------------- growth

    def can_append(self, seq: SequenceLike) -> bool:
        """Whether the newest token of `seq` has a slot or can be given one."""
        return not self._needs_block(seq, seq.num_tokens) or len(self.free_block_ids) > 0

    def may_append(self, seq: SequenceLike) -> None:
        """Before a decode step: add a block if the newest token has no slot. OutOfBlocksError when none is free."""
        num_tokens = seq.num_tokens
        if self._needs_block(seq, num_tokens):
            block_id = self._take()
            seq.block_table.append(block_id)
            if self._sink is not None:
                self._tell(events.Allocated(_seq_id(seq), (block_id,)))
        if num_tokens % self.block_size == 0:  # this step fills a block whose content is known by now
            self._announce(seq, num_tokens // self.block_size - 1)

    def _needs_block(self, seq: SequenceLike, num_tokens: int) -> bool:
        # The newest token is already in the sequence while its K/V is not yet in a block. So a block is needed exactly
        # when the tokens before it, len(seq) - 1, fill whole blocks. (Often written len(seq) % block_size == 1,
        # which is the same for sizes above 1.) The second half: a table filled at admission may hold the slot already.
        return (num_tokens - 1) % self.block_size == 0 and len(seq.block_table) * self.block_size < num_tokens

    def hash_blocks(self, seq: SequenceLike) -> None:
        """Publish the blocks that this step filled: after the forward pass, before `num_cached_tokens` advances.

        Not earlier, because before it the content does not exist. If the same content has an owner already, the table
        is switched to the owner and the copy is freed. A hash that is taken by other content stays with it: then this
        block and its descendants remain unregistered.
        """
        start = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        if start == end or not self.enable_prefix_caching:
            return
        if end * self.block_size > seq.num_tokens or end > len(seq.block_table):
            raise ValueError(
                f"hash_blocks: {end} blocks computed, but the sequence has {seq.num_tokens} tokens in "
                f"{len(seq.block_table)} blocks"
            )
        if self._chain(seq).generation != self._generation:  # computed before a reset
            return
        chain = self._hashed(seq, end)
        found: list[int] = []
        added: list[int] = []
        published = start
        while published < end and self._publish(seq, chain, published, found, added):
            published += 1
        # What it added lies behind all that it found: what is new has no child that is not.
        self._feed.publish(chain, seq.block_table, published, found, added)
        self._announce(seq, end)

    def _publish(self, seq: SequenceLike, chain: PrefixChain, i: int, found: list[int], added: list[int]) -> bool:
        """Register block i of `seq`, or switch to the one that already is. False if neither can be.

        `added` gets the former, `found` the latter, if this is the first that the request has to do with it.
        """
        table = seq.block_table
        parent: int | bytes = table[i - 1] if i else chain.root
        if i and self.blocks[table[i - 1]].hash is None:
            return False
        hash, content, block = chain.hashes[i], chain.contents[i], self.blocks[table[i]]
        if block.hash is not None:  # published before
            return True
        owner_id = self.hash_to_block_id.setdefault(hash, block.block_id)
        if owner_id == block.block_id:
            block.register(hash, content, parent)
            added.append(owner_id)
            if self._sink is not None:
                parent_hash = chain.hashes[i - 1] if i else None
                self._tell(events.Stored(block.block_id, hash, parent_hash, tuple(block.token_ids)))
            return True
        owner = self.blocks[owner_id]
        if owner.content != content or owner.parent != parent:
            return False
        self._use([owner_id])
        self._feed.sessions.note_hit(chain.session, [owner_id])
        if i >= chain.num_accessed:
            found.append(owner_id)
        table[i] = owner_id
        self._release(seq, [block.block_id])
        return True

    # ---------------------------------------------------------------- return

    def deallocate(self, seq: SequenceLike) -> None:
        """Give back every block. A block that nobody else uses becomes free *and keeps its hash*: it can be hit again.

        In reverse order, so that the deepest block is the first to be evicted: a chain without its head is worthless.
        """
        chain = self._chain(seq)
        is_known = chain.has_begun and chain.generation == self._generation
        session_is_over = is_known and self._feed.end(seq, chain, self._num_registered(seq))
        self.withdraw(seq)
        if session_is_over and chain.session is not None:
            self._feed.demote(chain.session)

    def withdraw(self, seq: SequenceLike) -> None:
        """Give back every block of a sequence that will be admitted again."""
        self.shrink(seq, 0)
        seq.num_cached_tokens = seq.num_scheduled_tokens = 0
        self._live.pop(id(seq), None)
        self._retract(self._chain(seq), seq)

    def shrink(self, seq: SequenceLike, num_blocks: int) -> None:
        """Give back the blocks of `seq` past the first `num_blocks`, the last first."""
        tail = seq.block_table[num_blocks:]
        del seq.block_table[num_blocks:]
        self._release(seq, tail[::-1])

    def preempt(self, seq: SequenceLike) -> None:
        """Withdraw a running sequence for the sake of others, and count what it will have to compute again."""
        self._counters.preemptions += 1
        self._chain(seq).computed_before_preemption = seq.num_cached_tokens
        if self._sink is not None:
            self._tell(events.Preempted(_seq_id(seq), seq.num_cached_tokens))
        self.withdraw(seq)

    def end_session(self, session_id: str, cache_salt: str | None = None) -> int:
        """Nothing will follow in this session. Returns how many blocks are its own: no other session has used them.

        Under `lhc` they join a class of their own, whose rank is learned, under every other policy they go first. While
        requests of it have not ended there are none: it is over with the last of them. A session that nothing is known
        of is no error.
        """
        session = (cache_salt, session_id)
        return self._feed.demote(session) if self._feed.sessions.end(session) else 0

    def reset_prefix_cache(self) -> None:
        """Forget every content (after new weights, too). Live sequences finish, and register nothing more."""
        self._generation += 1
        self._removals += 1
        for block_id in self.hash_to_block_id.values():
            self.blocks[block_id].unregister()
        self.hash_to_block_id.clear()
        self._in_flight.clear()
        while len(self.eviction_policy):
            self.free_block_ids.empty.append(self.eviction_policy.pop())
        self._feed.clear()
        if self._sink is not None:
            self._tell(events.Cleared())

    # ---------------------------------------------------------------- what can be read

    @property
    def eviction_policy(self) -> EvictionPolicy:
        """Which cached block goes first."""
        return self.free_block_ids.cached

    @property
    def used_block_ids(self) -> frozenset[int]:
        """The blocks in use. Made anew at each call, O(num_blocks): for readers, not for the hot path."""
        return frozenset(block.block_id for block in self.blocks if block.ref_count)

    def live_sequences(self) -> Iterator[SequenceLike]:
        """The sequences that hold blocks."""
        return iter(self._live.values())

    def stats(self) -> CacheStats:
        """Counters and gauges; cost grows with the number of live sequences, not of blocks."""
        num_cached = len(self.free_block_ids.cached)
        num_empty = len(self.free_block_ids.empty)
        return CacheStats(
            num_blocks=len(self.blocks),
            block_size=self.block_size,
            blocks_in_use=len(self.blocks) - num_cached - num_empty,
            blocks_cached_idle=num_cached,
            blocks_empty=num_empty,
            wasted_slots=sum(max(0, len(s.block_table) * self.block_size - s.num_tokens) for s in self._live.values()),
            **asdict(self._counters),
        )

    def check(self) -> None:
        """Verify the invariants I1 to I4 and I9 of docs/guide.md. O(num_blocks); InvariantError names the block."""
        check_invariants(self)

    # ---------------------------------------------------------------- inside

    def _chain(self, seq: SequenceLike) -> PrefixChain:
        chain: PrefixChain | None = getattr(seq, "prefix_chain", None)
        if chain is None or chain.owner is not self._identity:
            chain = PrefixChain(self._identity, encode_root(self.namespace, self.block_size, salt=seq.cache_salt))
            seq.prefix_chain = chain
        return chain

    def _hashed(self, seq: SequenceLike, num_blocks: int) -> PrefixChain:
        """The chain of `seq` with its first `num_blocks` blocks, which must be full, hashed."""
        chain = self._chain(seq)
        # Looked up on the class at each call: a test may put a weak hash in its place.
        chain.extend(seq.token_ids, num_blocks, self.block_size, type(self).compute_hash)
        return chain

    def _match(self, seq: SequenceLike) -> list[int]:
        """The longest cached prefix of `seq`, as block ids. Never the last block: one token must be computed."""
        if not self.enable_prefix_caching:
            return []
        limit = seq.num_blocks - 1
        chain = self._hashed(seq, limit)
        if chain.matched_at != self._removals:
            chain.matched, chain.matched_at = [], self._removals
        matched = chain.matched
        parent: int | bytes = matched[-1] if matched else chain.root
        for i in range(len(matched), limit):
            block_id = self.hash_to_block_id.get(chain.hashes[i])
            if block_id is None:
                break
            block = self.blocks[block_id]
            if block.content != chain.contents[i] or block.parent != parent:  # same hash, other tokens or other prefix
                break
            matched.append(block_id)
            parent = block_id
        return matched

    def _num_registered(self, seq: SequenceLike) -> int:
        """How many of its first blocks are registered: those that are computed, unless one lost to a collision."""
        num_blocks = seq.num_cached_tokens // self.block_size
        while num_blocks and self.blocks[seq.block_table[num_blocks - 1]].hash is None:
            num_blocks -= 1
        return num_blocks

    def _use(self, block_ids: list[int]) -> None:
        """One more table entry names each of these registered blocks; idle ones leave the free queue."""
        idle = []
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                idle.append(block_id)
            block.ref_count += 1
        if idle:
            self.eviction_policy.remove(idle)

    def _take(self) -> int:
        """A free block for new content; evicts if it must."""
        free = self.free_block_ids
        if free.empty:
            block_id = free.empty.pop()
            self.blocks[block_id].ref_count = 1
            return block_id
        if not len(free.cached):
            raise OutOfBlocksError("no block is free")
        block_id = self.eviction_policy.pop()
        self._feed.sessions.note_gone(block_id)
        block = self.blocks[block_id]
        # The registry must forget the old content first: a hit on it would read memory about to be overwritten.
        assert block.hash is not None
        del self.hash_to_block_id[block.hash]
        if self._sink is not None:
            self._tell(events.Removed(block_id, block.hash))
        block.unregister()
        block.ref_count = 1
        self._removals += 1
        self._counters.evictions += 1
        return block_id

    def _release(self, seq: SequenceLike, block_ids: list[int]) -> None:
        """One entry less names each of these blocks; at zero the block is free, and keeps its hash."""
        freed: list[int] = []
        idle: list[int] = []
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                freed.append(block_id)
                (self.free_block_ids.empty if block.hash is None else idle).append(block_id)
        if idle:
            self.eviction_policy.add(idle)
        if freed and self._sink is not None:
            self._tell(events.Freed(_seq_id(seq), tuple(freed)))

    def _announce(self, seq: SequenceLike, i: int) -> None:
        """Say that `seq` computes its block i next, if that is full by then."""
        chain = self._chain(seq)
        self._retract(chain, seq)
        if not self.enable_prefix_caching or chain.generation != self._generation:
            return
        if (i + 1) * self.block_size <= seq.num_tokens:
            chain.announced = self._hashed(seq, i + 1).hashes[i]
            self._in_flight.setdefault(chain.announced, (seq, i))

    def _retract(self, chain: PrefixChain, seq: SequenceLike) -> None:
        if chain.announced is not None:
            if self._in_flight.get(chain.announced, (None,))[0] is seq:
                del self._in_flight[chain.announced]
            chain.announced = None

    def _count(self, seq: SequenceLike, chain: PrefixChain) -> None:
        """Statistics of one admission: a request counts once, what preemption cost apart."""
        if not chain.counted:
            chain.counted = True
            self._counters.query_tokens += seq.num_tokens
            self._counters.hit_tokens += seq.num_cached_tokens
        self._counters.recomputed_tokens += max(0, chain.computed_before_preemption - seq.num_cached_tokens)
        chain.computed_before_preemption = 0

    def _tell_admission(self, seq: SequenceLike, num_cached_blocks: int, fresh: list[int], refused: bool) -> None:
        """`refused`: the first block to compute was in the cache, and was not wanted."""
        seq_id, chain = _seq_id(seq), self._chain(seq)
        if num_cached_blocks:
            self._tell(events.Hit(seq_id, seq.num_cached_tokens))
        hash = None
        if not self.enable_prefix_caching or refused:
            reason = MissReason.DISABLED
        elif num_cached_blocks >= seq.num_blocks - 1:
            reason = MissReason.PARTIAL_TAIL
        else:
            hash = chain.hashes[num_cached_blocks]
            reason = MissReason.IN_FLIGHT if self.is_in_flight(seq, num_cached_blocks) else MissReason.NEVER_SEEN
        self._tell(events.Miss(seq_id, num_cached_blocks, seq.num_tokens - seq.num_cached_tokens, hash, reason))
        self._tell(events.Allocated(seq_id, tuple(fresh)))

    def _tell(self, event: events.Event) -> None:
        """Hand an event to the sink. A sink that fails must not leave the page table half changed."""
        assert self._sink is not None
        try:
            self._sink(event)
        except Exception:
            logger.exception("the event sink failed on %r", event)


def _seq_id(seq: SequenceLike) -> int | None:
    return getattr(seq, "seq_id", None)
