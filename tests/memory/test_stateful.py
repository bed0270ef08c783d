"""The block manager against a model so plain that it cannot be wrong, under any order of operations.

The model knows contents, not blocks: which (salt, prefix) are registered, who holds what, and that idle ones leave
least recently released first. Hypothesis prints the failing sequence of acts, shortened.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pagetable.memory import BlockManager
from tests.memory.plain_sequence import PlainSequence

Content = tuple[str | None, tuple[int, ...]]  # salt, and all tokens up to the end of the block


class NaiveCache:
    """Registered contents with the number of holders, and the idle ones in order of release."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.holders: dict[Content, int] = {}
        self.idle: list[Content] = []

    def contents(self, seq: PlainSequence, num_blocks: int) -> list[Content]:
        return [(seq.cache_salt, tuple(seq.token_ids[: (i + 1) * self.block_size])) for i in range(num_blocks)]

    def hits(self, seq: PlainSequence) -> int:
        hits = 0
        for content in self.contents(seq, seq.num_blocks - 1):
            if content not in self.holders:
                break
            hits += 1
        return hits

    def hold(self, content: Content) -> None:
        if content in self.idle:
            self.idle.remove(content)
        self.holders[content] = self.holders.get(content, 0) + 1

    def release(self, content: Content) -> None:
        self.holders[content] -= 1
        if self.holders[content] == 0:
            self.idle.append(content)

    def evict(self, count: int) -> None:
        for content in self.idle[:count]:
            del self.holders[content]
        del self.idle[:count]


class BlockManagerMachine(RuleBasedStateMachine):
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.registered_of: dict[int, list[Content]] = {}  # per live sequence: the contents that it holds, registered
        self.cut_off: set[int] = set()  # sequences from before a reset

    @rule(block_size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(1, 12))
    @precondition(lambda self: not hasattr(self, "manager"))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.naive = NaiveCache(block_size)
        self.num_blocks = num_blocks

    def num_empty(self) -> int:
        live = self.manager.live_sequences()
        unregistered = {i for seq in live for i in seq.block_table[len(self.registered_of[id(seq)]) :]}
        return self.num_blocks - len(self.naive.holders) - len(unregistered)

    @precondition(lambda self: hasattr(self, "manager"))
    @rule(target=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from([None, "s"]))
    def admit(self, tokens: list[int], salt: str | None) -> PlainSequence:
        seq = PlainSequence(tokens, self.manager.block_size, salt)
        hits = self.naive.hits(seq)
        held = self.naive.contents(seq, hits)
        idle_hits = sum(content in self.naive.idle for content in held)
        needed = seq.num_blocks - hits + idle_hits
        num_free = self.num_empty() + len(self.naive.idle)
        if needed > num_free:
            assert self.manager.can_allocate(seq) == -1
            self.registered_of[id(seq)] = []
            return seq
        assert self.manager.can_allocate(seq) == hits
        fresh = seq.num_blocks - hits
        evicted = max(0, fresh - self.num_empty())
        self.manager.allocate(seq, hits)
        for content in held:
            self.naive.hold(content)
        self.naive.evict(evicted)
        self.registered_of[id(seq)] = held
        assert seq.num_cached_tokens == hits * self.manager.block_size
        return seq

    @rule(seq=live, data=st.data())
    def compute(self, seq: PlainSequence, data: st.DataObject) -> None:
        remaining = seq.num_tokens - seq.num_cached_tokens
        if not seq.block_table or not remaining:
            return
        seq.num_scheduled_tokens = data.draw(st.integers(1, remaining))
        done = seq.num_cached_tokens + seq.num_scheduled_tokens
        self.manager.hash_blocks(seq)
        seq.num_cached_tokens, seq.num_scheduled_tokens = done, 0
        if id(seq) in self.cut_off:
            return
        mine = self.registered_of[id(seq)]
        for content in self.naive.contents(seq, done // self.manager.block_size)[len(mine) :]:
            self.naive.hold(content)
            mine.append(content)

    @rule(seq=live, token=st.integers(0, 1))
    def decode(self, seq: PlainSequence, token: int) -> None:
        if not seq.block_table or seq.num_cached_tokens != seq.num_tokens:
            return
        seq.token_ids.append(token)
        needs_block = (len(seq) - 1) % self.manager.block_size == 0
        num_free = self.num_empty() + len(self.naive.idle)
        assert self.manager.can_append(seq) == (not needs_block or num_free > 0)
        if not self.manager.can_append(seq):
            seq.token_ids.pop()
            return
        if needs_block and self.num_empty() == 0:
            self.naive.evict(1)
        self.manager.may_append(seq)

    @rule(seq=consumes(live))
    def deallocate(self, seq: PlainSequence) -> None:
        self.manager.deallocate(seq)
        for content in reversed(self.registered_of.pop(id(seq))):
            self.naive.release(content)
        self.cut_off.discard(id(seq))

    @precondition(lambda self: hasattr(self, "manager"))
    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.naive.holders.clear()
        self.naive.idle.clear()
        for seq in self.manager.live_sequences():
            self.cut_off.add(id(seq))
            self.registered_of[id(seq)] = []

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        stats = self.manager.stats()
        assert stats.blocks_cached_idle == len(self.naive.idle)
        assert stats.blocks_empty == self.num_empty()
        last_tokens = [content[1][-self.manager.block_size :] for content in self.naive.idle]
        order = [tuple(self.manager.blocks[i].token_ids) for i in self.manager.free_block_ids.cached]
        assert order == last_tokens
        assert len(self.manager.hash_to_block_id) == len(self.naive.holders)


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
