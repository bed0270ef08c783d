"""What an eviction policy remembers grows with the pool and with nothing else; its work for a request not even so."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from types import FrameType

import pytest

from pagetable.memory import EVICTION_POLICIES, BlockManager
from pagetable.memory.hints import NO_HINTS
from tests.memory.request_stream import serve

every_policy = pytest.mark.parametrize("name", EVICTION_POLICIES)


def num_entries(value: object) -> int:
    """How many elements all the containers in here have together."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dict__"):
        return num_entries(vars(value))
    if not isinstance(value, list | tuple | set | frozenset | bytearray):
        return 0
    return len(value) + sum(num_entries(element) for element in value)


def bound_on_entries(name: str, num_blocks: int) -> int:
    return (10_000 if name == "lhc" else 1_000) + 50 * num_blocks  # LHC learns from up to 250 requests at once


@every_policy
@pytest.mark.parametrize("with_access", [True, False])
def test_a_policy_does_not_grow_as_the_same_blocks_are_claimed_and_released(name: str, with_access: bool):
    num_blocks = 8
    policy = EVICTION_POLICIES[name](num_blocks, 16, lambda: 0.0)
    hashes = [bytes([i]) * 16 for i in range(num_blocks)]
    for chain in (range(0, 4), range(4, 8)):
        use = policy.begin(hashes[chain[0] : chain[-1] + 1], 70, NO_HINTS, None)
        policy.register(use, list(chain), hashes[chain[0] : chain[-1] + 1], None)
        policy.end(use, 4, 1)
        policy.add(chain[::-1])
    for i in range(10_000):
        chain = range(0, 4) if i % 2 else range(4, 8)
        policy.remove(chain)
        use = policy.begin(hashes[chain[0] : chain[-1] + 1], 70, NO_HINTS, None)
        if with_access:
            policy.access(chain)
        policy.end(use, 4, 1)
        policy.add(chain[::-1])
    assert num_entries(policy) < bound_on_entries(name, num_blocks)
    assert sorted(policy) == list(range(num_blocks))


@every_policy
@pytest.mark.parametrize("num_blocks", [16, 64, 256])
def test_what_a_policy_remembers_is_bounded_by_the_blocks_not_by_the_contents_seen(name: str, num_blocks: int):
    manager = BlockManager(num_blocks, 1, eviction_policy=name)
    for i in range(1_600):
        serve(manager, [i, i + 1, i + 2, 0])
    assert manager.stats().evictions > 4_000
    assert num_entries(manager.free_block_ids.cached) < bound_on_entries(name, num_blocks)


def calls_per_request(name: str, num_blocks: int) -> float:
    """Function calls, built-in ones too, for one request of a full pool, half of them to known prefixes."""
    manager = BlockManager(num_blocks, 1, eviction_policy=name)
    rng = random.Random(num_blocks)
    num_prompts = num_blocks // 8
    fresh = iter(range(num_prompts, 1_000_000))
    num_calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    def some_requests(num_requests: int) -> None:
        for _ in range(num_requests):
            serve(manager, [rng.randrange(num_prompts) if rng.random() < 0.5 else next(fresh)] * 4)

    some_requests(num_blocks)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        some_requests(500)
    finally:
        sys.setprofile(before)
    assert manager.stats().evictions > num_blocks
    return num_calls / 500


@every_policy
def test_the_work_for_a_request_does_not_grow_with_the_pool(name: str):
    assert calls_per_request(name, 2048) < 1.5 * calls_per_request(name, 64)
