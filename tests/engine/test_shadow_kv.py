"""No sequence ever reads K/V of anything but its own prefix: thousands of storms, and proof that a fault would show.

`STORMS=20000 pytest tests/engine/test_shadow_kv.py` runs more of them.
"""

import os
import zlib
from typing import Any

import pytest

from pagetable.memory import EVICTION_POLICIES, BlockManager, InvariantError
from pagetable.memory.lhc import LHC
from tests.engine.shadow_kv import WrongKV, storm

NUM_STORMS = int(os.environ.get("STORMS", 4000))
BATCH = 500


@pytest.mark.parametrize("first", range(0, NUM_STORMS, BATCH))
def test_storms_are_clean(first: int):
    for seed in range(first, min(first + BATCH, NUM_STORMS)):
        try:
            storm(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("num_values", [1, 4])
def test_storms_are_clean_when_hashes_collide_all_the_time(monkeypatch: pytest.MonkeyPatch, num_values: int):
    def weak(token_bytes: bytes, prefix: bytes) -> bytes:
        return bytes([zlib.crc32(prefix + token_bytes) % num_values])

    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(weak))
    for seed in range(600):
        try:
            storm(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_storms_with_hints_and_ends_of_sessions_are_clean_under_every_policy(policy: str):
    seeds = [10106, 10693, 10979, 11442]  # each once left a record that nothing would close
    for seed in [*seeds, *range(NUM_STORMS // (16 if policy == "lhc" else 80))]:
        try:
            storm(seed, checked=policy != "lhc" or seed % 8 == 0, policy=policy)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_storms_with_hints_do_all_that_they_are_for_too():
    managers = [storm(seed, checked=False, policy="lhc") for seed in range(150)]
    stats = [manager.stats() for manager in managers]
    assert sum(s.hit_tokens for s in stats) > 300
    assert sum(s.evictions for s in stats) > 300
    assert sum(s.preemptions for s in stats) > 40
    policies = [manager.eviction_policy for manager in managers]
    assert all(isinstance(policy, LHC) for policy in policies)
    assert sum(policy.hazards.num_waiting for policy in policies if isinstance(policy, LHC)) > 300


def test_storms_do_hit_evict_preempt_and_share():
    """A storm that never met the hard cases would prove nothing."""
    stats = [storm(seed, checked=False).stats() for seed in range(400)]
    assert sum(s.hit_tokens for s in stats) > 1000
    assert sum(s.evictions for s in stats) > 1000
    assert sum(s.preemptions for s in stats) > 100
    assert sum(s.recomputed_tokens for s in stats) > 100


class CountsInterruptions(BlockManager):
    """Counts who is preempted with some of its prompt log-probabilities, not all."""

    interrupted = 0

    def preempt(self, seq: Any) -> None:
        self.interrupted += bool(seq.prompt_logprobs) and seq.lacks_prompt_logprobs
        super().preempt(seq)


def test_storms_do_interrupt_those_who_ask_for_prompt_logprobs():
    managers = [storm(seed, CountsInterruptions, checked=False) for seed in range(400)]
    assert sum(manager.interrupted for manager in managers) > 4


class HitsWhatMustBeComputed(BlockManager):
    """Lets those hit who need every position's log-probability."""

    def can_allocate(self, seq: Any, headroom: int = 0, *, may_hit: bool = True) -> int:
        return super().can_allocate(seq, headroom)


def test_a_hit_before_all_prompt_logprobs_are_there_is_found():
    faults = []
    for seed in range(50):
        try:
            storm(seed, HitsWhatMustBeComputed, checked=False)
        except AssertionError as error:
            faults.append(str(error))
    assert any("prompt log-probabilities of something else" in fault for fault in faults)


class EvictsWithoutForgetting(BlockManager):
    """A taken block stays in the registry: a hit returns memory about to be overwritten."""

    def _take(self) -> int:
        before = dict(self.hash_to_block_id)
        block_id = super()._take()
        for hash, owner in before.items():
            if owner == block_id:
                self.hash_to_block_id[hash] = owner
                self.blocks[owner].register(hash, self._kept[owner], self._parents[owner])
        return block_id

    _kept: dict[int, bytes]
    _parents: dict[int, Any]

    def _publish(self, seq: Any, chain: Any, i: int, found: list[int], added: list[int]) -> bool:
        done = super()._publish(seq, chain, i, found, added)
        block = self.blocks[seq.block_table[i]]
        self.__dict__.setdefault("_kept", {})[block.block_id] = block.content
        self.__dict__.setdefault("_parents", {})[block.block_id] = block.parent
        return done


class PublishesTooEarly(BlockManager):
    """Registers at admission what is not computed yet."""

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        super().allocate(seq, num_cached_blocks)
        seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
        self.hash_blocks(seq)
        seq.num_scheduled_tokens = 0


class IgnoresTheSalt(BlockManager):
    """One root for all."""

    def _chain(self, seq: Any) -> Any:
        chain = super()._chain(seq)
        chain.root, chain.root_hash = b"", b""
        return chain


class SharesWithoutCounting(BlockManager):
    """A hit does not raise the reference count."""

    def _use(self, block_ids: list[int]) -> None:
        super()._use([block_id for block_id in block_ids if self.blocks[block_id].ref_count == 0])


class CountsOneTokenTooMany(BlockManager):
    """Says that a token is cached which is not."""

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        super().allocate(seq, num_cached_blocks)
        if num_cached_blocks and seq.num_tokens - seq.num_cached_tokens > 1:
            seq.num_cached_tokens += 1


class ComparesTokensOnly(BlockManager):
    """The source's fault: a hit compares the block's own tokens but not its parent. Needs a hash that collides."""

    @staticmethod
    def compute_hash(token_bytes: bytes, prefix: bytes) -> bytes:
        return token_bytes[:1] or b"-"

    def _match(self, seq: Any) -> list[int]:
        chain = self._chain(seq)
        chain.extend(seq.token_ids, seq.num_blocks - 1, self.block_size, type(self).compute_hash)
        matched: list[int] = []
        for hash, content in zip(chain.hashes[: seq.num_blocks - 1], chain.contents, strict=False):
            block_id = self.hash_to_block_id.get(hash)
            if block_id is None or self.blocks[block_id].content != content:
                break
            matched.append(block_id)
        return matched


@pytest.mark.parametrize(
    "faulty",
    [
        EvictsWithoutForgetting,
        PublishesTooEarly,
        IgnoresTheSalt,
        SharesWithoutCounting,
        CountsOneTokenTooMany,
        ComparesTokensOnly,
    ],
)
def test_a_planted_fault_is_found_by_what_the_slots_hold(faulty: type[BlockManager]):
    found = 0
    for seed in range(200):
        try:
            storm(seed, faulty, checked=False)
        except WrongKV:
            found += 1
        except (InvariantError, KeyError, AssertionError):
            pass
    assert found > 0
