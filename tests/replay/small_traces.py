"""Small traces: records of each format, files of them, and random ones over small trees of prefixes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagetable.memory import EVICTION_POLICIES, CacheHints
from pagetable.memory.eviction import LRU
from pagetable.replay.blocks import Workload
from pagetable.replay.cache_replay import CacheReplay, CacheResult
from pagetable.replay.readers import Trace
from pagetable.replay.reuse import Reuse

Record = dict[str, Any]


# ---------------------------------------------------------------- records and files


def mooncake(seconds: float, *hash_ids: int | str, **changes: Any) -> Record:
    """A request of whole blocks."""
    lengths = {"input_length": 512 * len(hash_ids), "output_length": 1}
    return {"timestamp": int(1000 * seconds), **lengths, "hash_ids": list(hash_ids), **changes}


def qwen(chat: int, parent: int, seconds: float, *hash_ids: int, **changes: Any) -> Record:
    """One turn of a chat, of whole blocks."""
    record = {"chat_id": chat, "parent_chat_id": parent, "timestamp": seconds, "input_length": 16 * len(hash_ids)}
    return {**record, "output_length": 1, "type": "text", "turn": 1, "hash_ids": list(hash_ids), **changes}


def weka_request(seconds: float, *hash_ids: int, **changes: Any) -> Record:
    """One request of a session, of whole blocks."""
    return {"t": seconds, "type": "s", "in": 64 * len(hash_ids), "out": 1, "hash_ids": list(hash_ids), **changes}


def sub_agent(seconds: float, *requests: Record) -> Record:
    """A sub-agent that is started so many seconds into the session; the times of its requests count from there."""
    return {"t": seconds, "type": "subagent", "agent_id": "agent_001", "requests": list(requests)}


def weka(*requests: Record, **changes: Any) -> Record:
    """A session."""
    return {"id": "x", "models": [], "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **changes}


def tokens(seconds: float, prompt: Sequence[int], output: Sequence[int] | None = None, length: int = 1) -> Record:
    """A request whose tokens are known; those of its answer perhaps."""
    known = {"output_length": length} if output is None else {"output_token_ids": list(output)}
    return {"timestamp": seconds, "prompt_token_ids": list(prompt), **known}


def write_trace(path: Path, records: Iterable[Record]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# ---------------------------------------------------------------- what they are played through


def play(workload: Workload, policy: str, capacity: int, *, check: bool = False) -> CacheResult:
    """All requests through the page table."""
    replay = CacheReplay(workload, policy, capacity, check=check)
    for request, access in workload:
        replay.serve(request, access)
    return replay.finish()


class Listener(LRU):
    """A policy that writes down what it is told, and when."""

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float]) -> None:
        super().__init__(num_blocks, block_size, clock)
        self.num_blocks, self.block_size, self.clock = num_blocks, block_size, clock
        self.begun: list[tuple[float, int, CacheHints]] = []  # seconds, tokens, hints
        self.ended: list[tuple[float, int]] = []  # seconds, tokens of the answer

    def begin(self, hashes: Sequence[bytes], num_tokens: int, hints: CacheHints, tenant: str | None) -> None:
        self.begun.append((self.clock(), num_tokens, hints))

    def end(self, use: None, num_blocks: int, num_output_tokens: int) -> None:
        self.ended.append((self.clock(), num_output_tokens))


def listen(monkeypatch: pytest.MonkeyPatch) -> list[Listener]:
    """Makes "listener" a policy. The list gets each that a replay makes."""
    made: list[Listener] = []

    def make(num_blocks: int, block_size: int, clock: Callable[[], float]) -> Listener:
        made.append(Listener(num_blocks, block_size, clock))
        return made[-1]

    monkeypatch.setitem(EVICTION_POLICIES, "listener", make)
    return made


def reuse_of(workload: Workload) -> Reuse:
    """What can be known of all requests."""
    reuse = Reuse()
    for request, access in workload:
        reuse.add(access, request.arrival)
    return reuse


def hashed_workload(folder: Path, paths: Iterable[Sequence[int]], step: float = 1.0) -> Workload:
    """These paths as a trace of hashes, one every `step` seconds."""
    records = (mooncake(i * step, *path) for i, path in enumerate(paths))
    return Workload(Trace(write_trace(folder / "trace.jsonl", records)))


def token_workload(folder: Path, records: Iterable[Record], block_size: int) -> Workload:
    """These records as a trace of tokens."""
    return Workload(Trace(write_trace(folder / "trace.jsonl", records)), block_size)


# ---------------------------------------------------------------- random ones


def random_paths(rng: random.Random, num_nodes: int, num_requests: int, longest: int = 99) -> list[tuple[int, ...]]:
    """Paths from a root of a random tree down to any of its nodes, some nodes more often than others."""
    paths: list[tuple[int, ...]] = []
    roots = [()] * rng.randint(1, num_nodes)
    for node in range(num_nodes):
        above = rng.choice([*roots, *paths, *paths[-2:]])
        paths.append((*above[: longest - 1], node))
    weights = [rng.random() ** 2 + 0.02 for _ in paths]
    return rng.choices(paths, weights, k=num_requests)


def random_chats(
    rng: random.Random, num_requests: int, *, known_outputs: float = 0.5, longest: int = 40, num_tokens: int = 3
) -> list[Record]:
    """Chats whose prompts hold earlier answers, or what the trace does not know of them, and start anew now and then.

    Few different tokens, so that strangers share prefixes, and prompts end in blocks that are whole as often as not.
    """

    def some(most: int) -> list[int]:
        return [rng.randrange(num_tokens) for _ in range(rng.randint(1, most))]

    chats: list[list[int]] = [[] for _ in range(4)]
    system, records, seconds = some(8), [], 0.0
    for _ in range(num_requests):
        i, seconds = rng.randrange(len(chats)), seconds + rng.choice([0.0, 0.5, 1.0, 7.0])
        before = chats[i] if len(chats[i]) < longest - 12 else []
        prompt = (before or rng.choice([system, []])) + some(8)
        if rng.random() < 0.2:  # asked once more
            prompt = before or prompt
        answer = some(9)
        chats[i] = prompt + answer if rng.random() < 0.8 else prompt
        is_known = rng.random() < known_outputs
        records.append(tokens(seconds, prompt, answer if is_known else None, length=len(answer)))
    return records
