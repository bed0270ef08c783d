"""What the page table promises beyond the lesson."""

import pytest

from pagetable.memory import BlockManager, InvariantError, OutOfBlocksError
from pagetable.memory.block import Block
from tests.memory.plain_sequence import PlainSequence, admit, compute


def state(manager: BlockManager) -> object:
    blocks = [(b.ref_count, b.hash, b.content, b.parent) for b in manager.blocks]
    return blocks, list(manager.free_block_ids), dict(manager.hash_to_block_id), manager.stats()


def ran(manager: BlockManager, token_ids: list[int]) -> PlainSequence:
    seq = PlainSequence(token_ids, manager.block_size)
    admit(manager, seq)
    compute(manager, seq)
    return seq


def test_refusal_changes_nothing():
    manager = BlockManager(4, 4)
    manager.deallocate(ran(manager, list(range(9))))
    holder = ran(manager, [7] * 8)
    late = PlainSequence([*range(8), 50, 51, 52, 53, 54])
    before = state(manager)
    assert manager.can_allocate(late) == -1
    with pytest.raises(OutOfBlocksError, match="needed"):
        manager.allocate(late, 2)
    with pytest.raises(ValueError, match="cached"):
        manager.allocate(late, 3)
    with pytest.raises(ValueError, match="already holds"):
        manager.allocate(holder, 0)
    assert state(manager) == before
    assert late.block_table == []
    assert late.num_cached_tokens == 0
    manager.check()


def test_may_append_without_memory_changes_nothing():
    manager = BlockManager(2, 4)
    seq = ran(manager, list(range(8)))
    seq.token_ids.append(8)
    assert not manager.can_append(seq)
    before = state(manager)
    with pytest.raises(OutOfBlocksError):
        manager.may_append(seq)
    assert state(manager) == before


def test_an_idle_hit_counts_once_against_capacity():
    manager = BlockManager(3, 4)
    manager.deallocate(ran(manager, list(range(9))))  # 2 cached idle blocks, 1 empty
    assert manager.can_allocate(PlainSequence([*range(8), 9])) == 2
    assert manager.can_allocate(PlainSequence([*range(8), 9, 9, 9, 9, 9])) == -1


def test_headroom_must_be_left_over():
    manager = BlockManager(4, 4)
    seq = PlainSequence(list(range(9)))
    assert manager.can_allocate(seq, headroom=1) == 0
    assert manager.can_allocate(seq, headroom=2) == -1


def test_two_identical_prompts_in_one_step_end_on_one_owner():
    manager = BlockManager(16, 4)
    a, b = PlainSequence(list(range(10))), PlainSequence(list(range(10)))
    admit(manager, a)
    admit(manager, b)
    copies = b.block_table[:2]
    for seq in (a, b):
        seq.num_scheduled_tokens = 10
        manager.hash_blocks(seq)
        seq.num_cached_tokens = 10
        manager.check()
    assert b.block_table[:2] == a.block_table[:2]
    assert [manager.blocks[i].ref_count for i in a.block_table[:2]] == [2, 2]
    assert list(manager.free_block_ids)[:2] == copies[::-1]  # never hashed: reused first, last freed first
    manager.deallocate(a)
    assert manager.can_allocate(PlainSequence(list(range(10)))) == 2  # the first stays reachable


def test_a_copy_whose_owner_is_idle_switches_to_it():
    manager = BlockManager(16, 4)
    a, b = PlainSequence(list(range(10))), PlainSequence(list(range(10)))
    admit(manager, a)
    admit(manager, b)
    compute(manager, a)
    manager.deallocate(a)
    compute(manager, b)
    assert b.block_table[:2] == [0, 1]
    assert len(manager.used_block_ids) == 3


def test_never_hashed_blocks_are_reused_first_and_hashed_ones_by_lru_tail_before_head():
    manager = BlockManager(8, 4)
    a = ran(manager, list(range(9)))  # blocks 0 1 registered, 2 not
    b = ran(manager, list(range(100, 109)))  # blocks 3 4 registered, 5 not
    manager.deallocate(b)
    manager.deallocate(a)
    assert list(manager.free_block_ids) == [2, 5, 6, 7, 4, 3, 1, 0]
    assert len(manager.free_block_ids) == 8


def test_a_touched_block_moves_to_the_end_of_the_order():
    manager = BlockManager(8, 4)
    manager.deallocate(ran(manager, list(range(9))))
    manager.deallocate(ran(manager, list(range(100, 109))))
    touched = PlainSequence([*range(8), 77])
    assert admit(manager, touched) == 2
    manager.deallocate(touched)
    cached = list(manager.free_block_ids.cached)
    assert [manager.blocks[i].token_ids[0] for i in cached] == [104, 100, 4, 0]


def test_reset_lets_live_sequences_finish_but_register_nothing_more():
    manager = BlockManager(16, 4)
    idle = ran(manager, list(range(50, 59)))
    manager.deallocate(idle)
    live = PlainSequence(list(range(17)))
    admit(manager, live)
    compute(manager, live, 8)
    manager.reset_prefix_cache()
    manager.check()
    assert manager.hash_to_block_id == {}
    assert manager.can_allocate(PlainSequence(list(range(9)))) == 0
    assert manager.can_allocate(PlainSequence(list(range(50, 59)))) == 0
    compute(manager, live)
    assert manager.hash_to_block_id == {}
    manager.deallocate(live)
    manager.check()
    ran(manager, list(range(17)))
    assert len(manager.hash_to_block_id) == 4


def test_shared_blocks_outlive_whoever_ends_first():
    manager = BlockManager(16, 4)
    seqs = [ran(manager, [*range(8), tail]) for tail in range(3)]
    assert manager.blocks[0].ref_count == 3
    for left in (2, 1, 0):
        manager.deallocate(seqs.pop())
        manager.check()
        assert manager.blocks[0].ref_count == left


def test_a_sequence_of_another_block_size_is_refused():
    manager = BlockManager(16, 4)
    with pytest.raises(ValueError, match="block_size=4"):
        manager.allocate(PlainSequence(list(range(30)), block_size=16), 0)
    assert len(manager.free_block_ids) == 16


def test_deallocating_twice_is_harmless():
    manager = BlockManager(4, 4)
    seq = ran(manager, list(range(9)))
    manager.deallocate(seq)
    manager.deallocate(seq)
    manager.check()
    assert len(manager.free_block_ids) == 4


def test_with_caching_off_nothing_is_hashed_or_hit():
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    manager.deallocate(ran(manager, list(range(9))))
    assert manager.hash_to_block_id == {}
    assert manager.can_allocate(PlainSequence(list(range(9)))) == 0


def test_without_hits_all_is_computed_and_the_copies_go_when_it_is():
    manager = BlockManager(6, 4)
    first = ran(manager, list(range(9)))
    again = PlainSequence(list(range(9)))
    assert manager.can_allocate(again, may_hit=False) == 0
    manager.allocate(again, 0)
    assert set(again.block_table).isdisjoint(first.block_table)
    assert manager.can_allocate(PlainSequence(list(range(9)))) == -1
    compute(manager, again)
    manager.check()
    assert again.block_table[:2] == first.block_table[:2]
    assert len(manager.free_block_ids) == 2


@pytest.mark.parametrize(("num_blocks", "answer"), [(5, -1), (6, 0)])
def test_without_hits_capacity_counts_every_block_and_refusal_changes_nothing(num_blocks: int, answer: int):
    manager = BlockManager(num_blocks, 4)
    ran(manager, list(range(9)))
    seq = PlainSequence(list(range(9)))
    free = list(manager.free_block_ids)
    assert manager.can_allocate(seq) == 2
    assert manager.can_allocate(seq, may_hit=False) == answer
    assert list(manager.free_block_ids) == free
    assert (seq.block_table, seq.num_cached_tokens) == ([], 0)
    manager.check()


@pytest.mark.parametrize("block_size", [0, 3, -4, 12])
def test_block_size_must_be_a_power_of_two(block_size: int):
    with pytest.raises(ValueError, match=f"block_size={block_size}"):
        BlockManager(4, block_size)


def test_other_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockManager(0, 4)
    with pytest.raises(ValueError, match=r"eviction_policy='mru'.*lru"):
        BlockManager(4, 4, eviction_policy="mru")


def test_hashing_more_than_there_is_is_refused():
    manager = BlockManager(4, 4)
    seq = PlainSequence(list(range(6)))
    admit(manager, seq)
    seq.num_scheduled_tokens = 8
    with pytest.raises(ValueError, match="2 blocks computed"):
        manager.hash_blocks(seq)


def test_followers_see_what_is_being_computed_and_no_more():
    manager = BlockManager(32, 4)
    leader = PlainSequence(list(range(17)))
    follower = PlainSequence([*range(12), 99, 99])
    assert not manager.is_in_flight(follower, manager.can_allocate(follower))
    admit(manager, leader)
    assert manager.is_in_flight(follower, 0)
    compute(manager, leader, 6)  # block 0 done, block 1 half done
    assert manager.can_allocate(follower) == 1
    assert manager.is_in_flight(follower, 1)
    assert not manager.is_in_flight(PlainSequence([*range(4), 50, 51, 52, 53, 1]), 1)
    manager.deallocate(leader)  # the leader goes: followers go ahead
    assert not manager.is_in_flight(follower, 1)


def test_a_block_that_decode_is_about_to_fill_is_in_flight():
    manager = BlockManager(32, 4)
    leader = ran(manager, [1, 2, 3])
    follower = PlainSequence([1, 2, 3, 4, 5])
    assert not manager.is_in_flight(follower, 0)
    leader.token_ids.append(4)
    manager.may_append(leader)
    assert manager.is_in_flight(follower, 0)
    compute(manager, leader)
    assert manager.can_allocate(follower) == 1


def test_stats_count_a_request_once_and_recomputation_apart():
    manager = BlockManager(8, 4)
    a = ran(manager, list(range(10)))
    stats = manager.stats()
    assert (stats.query_tokens, stats.hit_tokens, stats.wasted_slots) == (10, 0, 2)
    assert (stats.blocks_in_use, stats.blocks_cached_idle, stats.blocks_empty) == (3, 0, 5)
    manager.preempt(a)
    stats = manager.stats()
    assert (stats.blocks_in_use, stats.blocks_cached_idle, stats.blocks_empty) == (0, 2, 6)
    admit(manager, a)
    stats = manager.stats()
    assert (stats.query_tokens, stats.preemptions, stats.recomputed_tokens) == (10, 1, 2)
    b = PlainSequence([*range(8), 1, 2])
    admit(manager, b)
    assert manager.stats().hit_tokens == 8
    assert manager.stats().hit_rate == 8 / 20


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda m, s: setattr(m.blocks[0], "ref_count", 5), "I2: block 0"),
        (lambda m, s: setattr(m.blocks[1], "hash", None), "I4"),
        (lambda m, s: m.hash_to_block_id.pop(m.blocks[1].hash), "I4: block 1"),
        (lambda m, s: m.hash_to_block_id.update({m.blocks[1].hash: 0}), "I4"),
        (lambda m, s: m.free_block_ids.empty.append(0), "I3: block 0"),
        (lambda m, s: m.free_block_ids.empty.append(7), "I3: block 7 is 2 times"),
        (lambda m, s: m.free_block_ids.empty.pop(), "I3: block 3"),
        (lambda m, s: s.block_table.append(0), "I2: block 0"),
        (lambda m, s: s.block_table.__setitem__(0, 6), "I2: block"),
        (lambda m, s: s.block_table.append(77), "I2: a live table names block 77"),
        (lambda m, s: setattr(m.blocks[1], "parent", 5), "I9: block 1"),
        (lambda m, s: setattr(m.blocks[1], "parent", 1), "I9: block 1"),
        (lambda m, s: setattr(m.blocks[1], "parent", None), "I9: block 1"),
        (lambda m, s: setattr(m.blocks[1], "parent", 99), "I9: block 1"),
        (lambda m, s: m.hash_to_block_id.update({b"x": 55}), "I4"),
        (lambda m, s: m.free_block_ids.empty.append(100), "I3: block 100"),
    ],
)
def test_check_names_the_block_that_is_wrong(fault, says: str):
    manager = BlockManager(8, 4)
    seq = ran(manager, list(range(9)))
    manager.check()
    fault(manager, seq)
    with pytest.raises(InvariantError, match=says):
        manager.check()


def test_a_block_can_be_made_and_read_by_hand():
    block = Block(3, 1, b"hash", [1, 2])
    assert (block.block_id, block.ref_count, block.hash, block.token_ids) == (3, 1, b"hash", [1, 2])
    assert Block(0).token_ids == []
