"""Block managers that can be timed side by side, ours and a peer's, and the acts that are timed.

Their methods have the lesson's names, so one function drives any of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure import Spread
from pagetable.engine import Sequence
from pagetable.memory import BlockManager

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Contestant:
    """A block manager with the lesson's method names, and how its sequences are made."""

    name: str
    manager: Callable[[int, int], Any]  # number of blocks, block size
    sequence: Callable[[Tokens, int], Any]  # prompt, block size
    append: Callable[[Any, int], None]  # one token


def pagetable() -> Contestant:
    """Ours."""
    return Contestant(
        "pagetable",
        BlockManager,
        lambda tokens, block_size: Sequence(tokens, block_size=block_size),
        lambda seq, token_id: seq.append(token_id),
    )


def nano_vllm(checkout: Path) -> Contestant:
    """The block manager of a checkout of nano-vllm, given by the user. Its tokens are Python lists."""
    package = ModuleType("nanovllm")  # in place of its __init__, which would load torch
    package.__path__ = [str(checkout / "nanovllm")]
    sys.modules["nanovllm"] = package
    manager = importlib.import_module("nanovllm.engine.block_manager").BlockManager
    sequence = importlib.import_module("nanovllm.engine.sequence").Sequence

    def make(tokens: Tokens, block_size: int) -> Any:
        sequence.block_size = block_size
        return sequence(tokens.tolist())

    return Contestant("nano-vllm", manager, make, lambda seq, token_id: seq.append_token(token_id))


def admit(manager: Any, seq: Any) -> None:
    """Look for cached blocks, fill the block table, compute and publish the whole prompt."""
    manager.allocate(seq, manager.can_allocate(seq))
    publish(manager, seq)


def publish(manager: Any, seq: Any) -> None:
    """One step computed all that was not cached."""
    seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens += seq.num_scheduled_tokens


def live(manager: Any, seqs: list[Any]) -> None:
    """The whole life of requests, one after another."""
    for seq in seqs:
        admit(manager, seq)
        manager.deallocate(seq)


def decode(manager: Any, seqs: list[Any], append: Callable[[Any, int], None], steps: int) -> None:
    """Each sequence grows by `steps` tokens: append what was drawn, give it a slot, publish, advance."""
    for token_id in range(steps):
        for seq in seqs:
            append(seq, token_id)
            if manager.can_append(seq):
                manager.may_append(seq)
            seq.num_scheduled_tokens = 1
            manager.hash_blocks(seq)
            seq.num_cached_tokens += 1


def in_turns(contestants: list[Contestant], rounds: int) -> Iterator[Contestant]:
    """Each contestant in each round; who goes first changes."""
    for i in range(rounds):
        yield from contestants if i % 2 == 0 else contestants[::-1]


def ratio(peer: list[float], ours: list[float]) -> str | None:
    """How many times longer the peer takes; None without a peer."""
    return f"{Spread.of(peer).median / Spread.of(ours).median:.1f}x" if peer else None


def spread(values: list[float]) -> Spread | None:
    """None for what was not measured."""
    return Spread.of(values) if values else None


def unique_prompts(rng: np.random.Generator, count: int, length: int) -> list[Tokens]:
    """Prompts that share nothing."""
    return list(rng.integers(0, 50_000, (count, length), dtype=np.int32))
