"""Every eviction policy against its plain reference, and what holds for all of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pagetable.memory import EVICTION_POLICIES, BlockManager, EvictionPolicy, OutOfBlocksError
from pagetable.memory.events import Event, Removed
from pagetable.memory.eviction import LRU
from pagetable.memory.hints import NO_HINTS, CacheHints
from tests.memory.plain_policies import PLAIN_POLICIES, PlainPolicy
from tests.memory.plain_sequence import PlainSequence, admit, compute
from tests.memory.request_stream import RequestStream, serve

every_policy = pytest.mark.parametrize("name", EVICTION_POLICIES)


class Twin:
    """A policy and its plain reference behind one door: both are told all, and must give the same answers."""

    def __init__(self, policy: EvictionPolicy, plain: PlainPolicy) -> None:
        self.policy, self.plain = policy, plain

    def begin(self, hashes: Sequence[bytes], num_tokens: int, hints: CacheHints, tenant: str | None) -> Any:
        return self.policy.begin(hashes, num_tokens, hints, tenant)

    def access(self, block_ids: Sequence[int]) -> None:
        self.policy.access(block_ids)
        self.plain.access(block_ids)

    def register(
        self, use: Any, block_ids: list[int], hashes: Sequence[bytes], parent: int | None, num_repeated: int = 0
    ) -> None:
        self.policy.register(use, block_ids, hashes, parent, num_repeated)
        for i, (block_id, hash) in enumerate(zip(block_ids, hashes, strict=True)):
            self.plain.register(block_id, hash, parent, is_access=i >= num_repeated)
            parent = block_id

    def end(self, use: Any, num_blocks: int, num_output_tokens: int) -> None:
        self.policy.end(use, num_blocks, num_output_tokens)

    def demote(self, block_ids: Sequence[int]) -> None:
        self.policy.demote(block_ids)
        self.plain.demote(block_ids)

    def add(self, block_ids: Sequence[int]) -> None:
        self.policy.add(block_ids)
        for block_id in block_ids:
            self.plain.add(block_id)

    def remove(self, block_ids: Sequence[int]) -> None:
        self.policy.remove(block_ids)
        for block_id in block_ids:
            self.plain.remove(block_id)

    def pop(self) -> int:
        victim = self.policy.pop()
        assert victim == self.plain.pop()
        return victim

    def clear(self) -> None:
        self.policy.clear()
        self.plain.clear()

    def __len__(self) -> int:
        assert len(self.policy) == len(self.plain)
        return len(self.policy)

    def __iter__(self) -> Iterator[int]:
        order = list(self.policy)
        assert order == list(self.plain)
        return iter(order)

    def __contains__(self, block_id: object) -> bool:
        assert (block_id in self.policy) == (block_id in self.plain)
        return block_id in self.policy


class AccessCounter(LRU):
    """LRU that counts the accesses that it is told of, by content."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_accesses: Counter[bytes] = Counter()
        self._hash: dict[int, bytes] = {}

    def register(
        self, use: Any, block_ids: list[int], hashes: Sequence[bytes], parent: int | None, num_repeated: int = 0
    ) -> None:
        self._hash.update(zip(block_ids, hashes, strict=True))
        self.num_accesses.update({hash: int(i >= num_repeated) for i, hash in enumerate(hashes)})

    def access(self, block_ids: Sequence[int]) -> None:
        self.num_accesses.update(self._hash[block_id] for block_id in block_ids)


def made(name: str, num_blocks: int) -> EvictionPolicy:
    """A policy for which time stands still."""
    return EVICTION_POLICIES[name](num_blocks, 2, lambda: 0.0)


def manager_with(policy: EvictionPolicy, num_blocks: int, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks, block_size, eviction_policy=policy)


def twin_manager(name: str, num_blocks: int, block_size: int) -> BlockManager:
    twin = Twin(made(name, num_blocks), PLAIN_POLICIES[name](num_blocks))
    return manager_with(twin, num_blocks, block_size)


def with_a_past(name: str, num_blocks: int, seed: int) -> RequestStream:
    """A manager and the stream of requests that it has gone through; some still run."""
    stream = RequestStream(manager_with(made(name, num_blocks), num_blocks, 2), seed, resets=False)
    for _ in stream.acts(300):
        pass
    return stream


# ---------------------------------------------------------------- the same victims as the plain reference


@pytest.mark.parametrize("name", PLAIN_POLICIES)
@pytest.mark.parametrize("seed", range(36))
def test_a_policy_agrees_with_its_plain_reference_after_every_act(name: str, seed: int):
    rng = random.Random(seed)
    num_blocks = rng.choice([2, 3, 4, 6, 8, 12, 16, 24, 40])
    manager = twin_manager(name, num_blocks, block_size=rng.choice([1, 2, 4]))
    for _ in RequestStream(manager, seed, num_tokens=rng.choice([2, 3])).acts(75):
        manager.check()
        cached = manager.free_block_ids.cached
        assert [block_id for block_id in range(-1, num_blocks + 1) if block_id in cached] == sorted(cached)


@pytest.mark.parametrize("name", PLAIN_POLICIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_blocks", "block_size"), [(3, 1), (9, 1), (20, 2), (40, 4)])
def test_they_agree_for_long(name: str, seed: int, num_blocks: int, block_size: int):
    manager = twin_manager(name, num_blocks, block_size)
    for _ in RequestStream(manager, seed, resets=False).acts(1200):
        pass
    manager.check()
    assert manager.stats().evictions > 100


@pytest.mark.parametrize("name", PLAIN_POLICIES)
def test_they_agree_when_the_same_blocks_come_and_go_for_long(name: str):
    num_blocks, rng = 8, random.Random(0)
    twin = Twin(made(name, num_blocks), PLAIN_POLICIES[name](num_blocks))
    for block_id in range(num_blocks):
        twin.register(None, [block_id], [bytes([block_id])], None)
        twin.add([block_id])
    for i in range(2000):
        chain = rng.sample(range(num_blocks), 2)
        twin.remove(chain)
        twin.access(chain if rng.random() < 0.5 else chain[:1])
        twin.add(chain)
        if i % 40 == 0:
            assert len(list(twin)) == num_blocks


@pytest.mark.parametrize("name", PLAIN_POLICIES)
@pytest.mark.parametrize(("period", "num_others"), [(1, 12), (12, 12), (12, 1000), (30, 1000)])
def test_they_agree_when_contents_come_back_sooner_or_later(name: str, period: int, num_others: int):
    num_blocks, rng = 6, random.Random(period)
    twin = Twin(made(name, num_blocks), PLAIN_POLICIES[name](num_blocks))
    block_of: dict[bytes, int] = {}
    for i in range(3000):  # half the time in turn, half the time any
        content = b"%d" % (i // 2 % period if i % 2 else rng.randrange(num_others))
        if content in block_of:
            twin.remove([block_of[content]])
            twin.access([block_of[content]])
        else:
            twin.access([])
            block_id = len(block_of) if len(block_of) < num_blocks else twin.pop()
            block_of = {hash: other for hash, other in block_of.items() if other != block_id} | {content: block_id}
            twin.register(None, [block_id], [content], None)
        twin.add([block_of[content]])


@pytest.mark.parametrize("name", PLAIN_POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_they_agree_when_strangers_share_hashes(name: str, seed: int, weak_hash: Callable[[int], None]):
    weak_hash(7)
    manager = twin_manager(name, 10, block_size=2)
    for _ in RequestStream(manager, seed).acts(60):
        manager.check()


def test_the_streams_do_all_that_they_are_for():
    counts: Counter[str] = Counter()
    for seed in range(20):
        manager = BlockManager(12, 2)
        stream = RequestStream(manager, seed)
        for _ in stream.acts(120):
            counts["most at once"] = max(counts["most at once"], len(stream.running))
        counts.update(stream.counts)
        counts["evictions"] += manager.stats().evictions
    acts = ("admitted", "came back", "computed", "decoded", "finished", "preempted", "refused", "hits", "evictions")
    assert min(counts[act] for act in acts) >= 20, counts
    assert counts["reset"] >= 3
    assert counts["most at once"] >= 4


# ---------------------------------------------------------------- what holds for every policy


@every_policy
@pytest.mark.parametrize("seed", range(8))
def test_a_block_never_leaves_before_what_hangs_on_it(name: str, seed: int):
    orphans: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, Removed):
            orphans.extend(b.block_id for b in manager.blocks if b.hash is not None and b.parent == event.block_id)

    manager = BlockManager(8 + seed, 1, eviction_policy=name, events=watch)
    for _ in RequestStream(manager, seed).acts(300):
        assert orphans == []
    assert manager.stats().evictions > 20


@every_policy
@pytest.mark.parametrize("seed", range(8))
def test_the_order_shown_is_the_order_of_eviction_and_looking_changes_nothing(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pagetable.memory.lhc.SHORTEST", 0.0)  # or the next request would be a later moment
    stream = with_a_past(name, 24, seed)
    stream.finish_all()
    manager = stream.manager
    order = list(manager.free_block_ids)
    assert len(manager.free_block_ids.cached) > 4
    assert list(manager.free_block_ids) == order
    assert [manager._take() for _ in order] == order  # no request: one is news to a policy that learns
    assert list(manager.free_block_ids.cached) == []


@every_policy
@pytest.mark.parametrize("seed", range(8))
def test_refusal_does_not_touch_the_order(name: str, seed: int):
    stream = with_a_past(name, 14, seed)
    manager = stream.manager
    while len(stream.running) > 1:
        stream.finish()
    for prompt in stream.prompts[1:]:
        if manager.can_allocate(PlainSequence(prompt, 2)) >= 0:
            serve(manager, prompt)
    assert len(manager.free_block_ids.cached) >= 4
    cached, free = list(manager.free_block_ids.cached), list(manager.free_block_ids)
    hits, prefix = max((manager.can_allocate(PlainSequence([*prompt, 9], 2)), prompt) for prompt in stream.prompts)
    assert hits > 0
    seq = PlainSequence([*prefix, *range(100, 130)], 2)  # with as many blocks of its own as there are, and one more
    assert manager.can_allocate(seq) == -1
    for num_cached_blocks in (0, hits):
        with pytest.raises(OutOfBlocksError):
            manager.allocate(seq, num_cached_blocks)
    with pytest.raises(ValueError, match="are cached"):
        manager.allocate(seq, seq.num_blocks)
    assert (list(manager.free_block_ids.cached), list(manager.free_block_ids)) == (cached, free)
    manager.check()


@every_policy
def test_a_refused_decode_step_does_not_touch_the_policy(name: str):
    manager = BlockManager(2, 4, eviction_policy=name)
    seq = PlainSequence(list(range(8)))
    admit(manager, seq)
    compute(manager, seq)
    seq.token_ids.append(8)
    with pytest.raises(OutOfBlocksError):
        manager.may_append(seq)
    seq.token_ids.pop()
    manager.deallocate(seq)
    assert list(manager.free_block_ids) == [1, 0]


@every_policy
def test_never_hashed_blocks_go_before_all_others(name: str):
    manager = BlockManager(8, 4, eviction_policy=name)
    for start in (0, 100):  # two registered blocks each, and one that is not full
        seq = PlainSequence(list(range(start, start + 9)))
        admit(manager, seq)
        compute(manager, seq)
        manager.deallocate(seq)
    assert len(manager.free_block_ids.cached) == 4
    flood = PlainSequence(list(range(200, 216)))
    admit(manager, flood)
    assert len(manager.free_block_ids.cached) == 4
    assert manager.stats().evictions == 0


@pytest.mark.parametrize("name", PLAIN_POLICIES)  # what LHC has learned of traffic outlives the contents
@pytest.mark.parametrize("seed", range(4))
def test_reset_leaves_nothing_behind_not_even_in_memory_of_what_left(name: str, seed: int):
    policy = made(name, 12)
    used = RequestStream(manager_with(policy, 12, block_size=2), seed)
    for _ in used.acts(200):
        pass
    used.manager.reset_prefix_cache()
    assert len(policy) == 0
    assert list(policy) == []
    assert [block_id for block_id in range(12) if block_id in policy] == []

    after_reset = manager_with(policy, 12, block_size=2)
    new = BlockManager(12, 2, eviction_policy=name)
    acts = (RequestStream(after_reset, seed).acts(200), RequestStream(new, seed).acts(200))
    for _ in zip(*acts, strict=True):
        assert list(after_reset.free_block_ids) == list(new.free_block_ids)


@every_policy
def test_nothing_to_evict_is_a_key_error(name: str):
    policy = made(name, 4)
    with pytest.raises(KeyError):
        policy.pop()
    use = policy.begin([], 2, NO_HINTS, None)
    policy.register(use, [0], [b"sixteen bytes of"], None)
    with pytest.raises(KeyError):
        policy.pop()
    policy.end(use, 1, 0)
    policy.add([0])
    assert policy.pop() == 0
    with pytest.raises(KeyError):
        policy.pop()


# ---------------------------------------------------------------- accesses


def test_a_request_that_is_preempted_and_comes_back_counts_once():
    policy = AccessCounter(16)
    manager = manager_with(policy, 16)
    first, second = PlainSequence(list(range(10))), PlainSequence([*range(8), 50, 51])
    for seq in (first, second):
        admit(manager, seq)
        compute(manager, seq)
    assert sorted(policy.num_accesses.values()) == [2, 2]
    for seq in (first, second):
        manager.preempt(seq)
    for seq in (first, second):
        assert admit(manager, seq) == 2
        compute(manager, seq)
    assert sorted(policy.num_accesses.values()) == [2, 2]

    first.token_ids += [10, 11]
    manager.may_append(first)
    compute(manager, first)  # registers a third block, then comes back to all three
    manager.preempt(first)
    first.token_ids.append(12)
    assert admit(manager, first) == 3
    assert sorted(policy.num_accesses.values()) == [1, 2, 2]


def test_a_copy_that_switches_to_the_owner_is_an_access_once():
    policy = AccessCounter(16)
    manager = manager_with(policy, 16)
    first, second = PlainSequence(list(range(10))), PlainSequence(list(range(10)))
    admit(manager, first)
    admit(manager, second)
    compute(manager, first)
    compute(manager, second)
    assert sorted(policy.num_accesses.values()) == [2, 2]
    manager.preempt(second)
    assert admit(manager, second) == 2
    assert sorted(policy.num_accesses.values()) == [2, 2]


@pytest.mark.parametrize("seed", range(12))
def test_where_nothing_is_evicted_a_content_has_as_many_accesses_as_requests_that_held_it(seed: int):
    policy = AccessCounter(1000)
    manager = manager_with(policy, 1000, block_size=2)
    stream = RequestStream(manager, seed, resets=False)
    holders: defaultdict[bytes, set[PlainSequence]] = defaultdict(set)
    for _ in stream.acts(200):
        for seq in stream.running:
            for block_id in seq.block_table:
                hash = manager.blocks[block_id].hash
                if hash is not None:
                    holders[hash].add(seq)
    assert manager.stats().evictions == 0
    assert stream.counts["came back"] > 0
    assert dict(policy.num_accesses) == {hash: len(seqs) for hash, seqs in holders.items()}


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize(("name", "kept"), [("lru", 0), ("lru-k", 16), ("2q", 16), ("arc", 16), ("s3-fifo", 16)])
def test_prefixes_in_steady_use_outlive_a_long_scan_except_under_lru(name: str, kept: int):
    manager = BlockManager(64, 4, eviction_policy=name)
    hot = [[i] * 17 for i in range(4)]  # four full blocks each
    fresh = iter(range(1000, 1_000_000))

    def scan(num_prompts: int) -> None:
        for _ in range(num_prompts):
            serve(manager, [next(fresh) for _ in range(9)])

    for _ in range(6):
        for prompt in hot:
            serve(manager, prompt)
        scan(16)  # with the hot ones, three quarters of what fits
    scan(320)  # ten times what fits
    assert sum(manager.can_allocate(PlainSequence(prompt)) for prompt in hot) == kept
    manager.check()
