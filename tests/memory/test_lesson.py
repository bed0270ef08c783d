"""The lesson's exercise, its 800-token example, and the life of a block as it tells it."""

from pagetable.memory import BlockManager
from tests.memory.plain_sequence import PlainSequence, admit, compute


def test_the_exercise_to_the_letter():
    manager = BlockManager(5, 4)
    assert list(manager.free_block_ids) == [0, 1, 2, 3, 4]
    a = PlainSequence(list(range(10)))  # 8 of prompt, 2 generated
    assert manager.can_allocate(a) == 0
    assert a.num_blocks == 3
    manager.allocate(a, 0)
    assert a.block_table == [0, 1, 2]
    assert a.num_cached_tokens == 0

    a.num_scheduled_tokens = 10
    manager.hash_blocks(a)
    assert sorted(manager.hash_to_block_id.values()) == [0, 1]
    assert [manager.blocks[i].hash is None for i in range(3)] == [False, False, True]
    assert manager.blocks[1].token_ids == [4, 5, 6, 7]
    a.num_cached_tokens += a.num_scheduled_tokens
    assert a.num_cached_tokens == 10
    manager.check()


def test_two_requests_share_the_three_full_blocks_of_an_800_token_system_prompt():
    manager = BlockManager(16, 256)
    system_prompt = list(range(800))
    first = PlainSequence([*system_prompt, *[1] * 100], block_size=256)
    second = PlainSequence([*system_prompt, *[2] * 100], block_size=256)
    assert admit(manager, first) == 0
    compute(manager, first)

    assert admit(manager, second) == 3
    assert second.num_cached_tokens == 768  # what the runner need not compute
    shared = second.block_table[:3]
    assert shared == first.block_table[:3]  # nothing is copied
    assert set(second.block_table[3:]).isdisjoint(first.block_table)
    assert [manager.blocks[i].ref_count for i in shared] == [2, 2, 2]
    compute(manager, second)

    content = [manager.blocks[i].token_ids for i in shared]
    manager.deallocate(first)
    manager.check()
    assert [manager.blocks[i].ref_count for i in shared] == [1, 1, 1]
    assert second.block_table[:3] == shared
    assert [manager.blocks[i].token_ids for i in shared] == content


def test_a_freed_block_keeps_its_hash_and_a_later_hit_claims_it_back():
    manager = BlockManager(8, 4)
    a = PlainSequence(list(range(9)))
    admit(manager, a)
    compute(manager, a)
    manager.deallocate(a)
    assert a.block_table == []
    assert manager.used_block_ids == frozenset()
    assert len(manager.hash_to_block_id) == 2  # "the hash points at a free block" is a legal state

    b = PlainSequence([*range(8), 99])
    assert admit(manager, b) == 2
    assert b.block_table[:2] == [0, 1]
    assert manager.used_block_ids == frozenset(b.block_table)


def test_the_last_block_is_never_looked_up():
    manager = BlockManager(8, 4)
    a = PlainSequence(list(range(8)))
    admit(manager, a)
    compute(manager, a)
    assert len(manager.hash_to_block_id) == 2
    again = PlainSequence(list(range(8)))
    assert manager.can_allocate(again) == 1  # one token at least must be computed to have logits


def test_none_cached_is_0_and_no_memory_is_minus_1():
    manager = BlockManager(3, 4)
    a = PlainSequence(list(range(8)))
    assert admit(manager, a) == 0
    assert manager.can_allocate(PlainSequence([7] * 4)) == 0
    assert manager.can_allocate(PlainSequence([7] * 5)) == -1


def test_decode_takes_a_block_exactly_when_the_newest_token_is_the_first_of_one():
    for block_size in (1, 2, 4, 16):
        manager = BlockManager(64, block_size)
        seq = PlainSequence([0] * 5, block_size=block_size)
        admit(manager, seq)
        compute(manager, seq)
        for length in range(6, 40):
            seq.token_ids.append(length)
            before = len(seq.block_table)
            assert manager.can_append(seq)
            manager.may_append(seq)
            assert len(seq.block_table) - before == ((length - 1) % block_size == 0)
            assert len(seq.block_table) == seq.num_blocks
            compute(manager, seq)


def test_taking_a_block_for_new_content_deletes_its_old_entry():
    manager = BlockManager(2, 4)
    a = PlainSequence([1, 2, 3, 4, 5])
    admit(manager, a)
    compute(manager, a)
    manager.deallocate(a)
    b = PlainSequence([9] * 8)
    assert admit(manager, b) == 0
    assert manager.hash_to_block_id == {}
    assert manager.can_allocate(PlainSequence([1, 2, 3, 4, 5])) == -1
    manager.deallocate(b)
    assert manager.can_allocate(PlainSequence([1, 2, 3, 4, 5])) == 0
