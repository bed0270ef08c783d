"""A hit serves exactly the tokens after exactly the prefix, whatever the hash does."""

import pytest

from pagetable.memory import BlockManager, encode_root
from tests.memory.plain_sequence import PlainSequence, admit, compute


def test_the_same_block_after_another_prefix_is_another_content():
    manager = BlockManager(16, 4)
    ab = PlainSequence([1] * 4 + [2] * 4 + [0])
    admit(manager, ab)
    compute(manager, ab)
    assert manager.can_allocate(PlainSequence([3] * 4 + [2] * 4 + [0])) == 0


def test_a_collision_of_the_parents_hash_is_no_hit(weak_hash):
    """The source compares a block's own tokens only: here both blocks "B" would be one."""
    weak_hash(1)
    manager = BlockManager(16, 4)
    ab = PlainSequence([1] * 4 + [2] * 4 + [0])
    admit(manager, ab)
    compute(manager, ab)
    cb = PlainSequence([3] * 4 + [2] * 4 + [0])
    assert admit(manager, cb) == 0


def test_a_newcomer_that_collides_stays_unregistered_and_so_do_its_descendants(weak_hash):
    weak_hash(1)
    manager = BlockManager(16, 4)
    first = PlainSequence([1] * 4 + [0])
    admit(manager, first)
    compute(manager, first)
    second = PlainSequence([3] * 12 + [0])
    admit(manager, second)
    compute(manager, second)
    assert list(manager.hash_to_block_id.values()) == first.block_table[:1]
    manager.deallocate(second)
    manager.check()
    assert manager.can_allocate(PlainSequence([3] * 12 + [0])) == 0
    assert manager.can_allocate(PlainSequence([1] * 4 + [0])) == 1


def test_collisions_leave_followers_free_to_go(weak_hash):
    weak_hash(1)
    manager = BlockManager(32, 4)
    leader = PlainSequence([1] * 8 + [0])
    admit(manager, leader)
    stranger = PlainSequence([3] * 8 + [0])
    assert not manager.is_in_flight(stranger, manager.can_allocate(stranger))


def test_salts_namespaces_and_block_sizes_do_not_share():
    manager = BlockManager(32, 4, namespace=b"model")
    tokens = list(range(9))
    for salt in (None, "x", "y"):
        seq = PlainSequence(tokens, cache_salt=salt)
        assert admit(manager, seq) == 0
        compute(manager, seq)
        assert manager.can_allocate(PlainSequence(tokens, cache_salt=salt)) == 2
    manager.check()


def test_the_root_tells_every_part_from_every_other():
    roots = [
        encode_root(b"", 16),
        encode_root(b"X", 16),
        encode_root(b"", 8),
        encode_root(b"", 16, salt="X"),
        encode_root(b"", 16, lora="X"),
        encode_root(b"", 16, salt=b"X"),
        encode_root(b"", 16, salt="X", lora="Y"),
        encode_root(b"", 16, salt="XY"),
        encode_root(b"", 16, salt=""),
    ]
    assert len(set(roots)) == len(roots)
    assert encode_root(b"n", 16, salt="a", lora="b") == encode_root(b"n", 16, lora="b", salt="a")
    assert encode_root(b"n", 16, salt=None) == encode_root(b"n", 16)


def test_each_block_is_hashed_once_in_its_life(monkeypatch: pytest.MonkeyPatch):
    original, calls = BlockManager.compute_hash, []

    def counting(token_bytes: bytes, prefix: bytes) -> bytes:
        calls.append(token_bytes)
        return original(token_bytes, prefix)

    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(counting))
    manager = BlockManager(8, 4)
    seq = PlainSequence(list(range(17)))
    for _ in range(5):
        manager.can_allocate(seq)
    admit(manager, seq)
    compute(manager, seq, 8)
    compute(manager, seq)
    manager.preempt(seq)
    assert admit(manager, seq) == 4
    compute(manager, seq)
    assert len(calls) == 4


def test_tokens_may_come_as_a_list_or_as_an_int32_buffer():
    import numpy as np

    manager = BlockManager(16, 4)
    a = PlainSequence(list(range(9)))
    admit(manager, a)
    compute(manager, a)
    b = PlainSequence(np.arange(9, dtype=np.int32))
    assert admit(manager, b) == 2
