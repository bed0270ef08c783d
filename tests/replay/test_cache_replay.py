"""A trace through the page table: invariants, hits and lifetimes against a plain cache, and against the engine."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagetable import LLM, RequestError, SamplingParams
from pagetable.memory import EVICTION_POLICIES, Block, InvariantError
from pagetable.memory.hints import NO_HINTS, CacheHints
from pagetable.memory.lhc import LHC
from pagetable.replay.blocks import Workload
from pagetable.replay.cache_replay import CacheReplay, CacheResult
from pagetable.replay.readers import Trace
from tests.replay.plain_caches import PlainLRU, Prefix
from tests.replay.small_traces import (
    Record,
    hashed_workload,
    listen,
    mooncake,
    play,
    random_chats,
    random_paths,
    token_workload,
    tokens,
    write_trace,
)
from tests.serving.running import write_tiny_model

every_policy = pytest.mark.parametrize("policy", EVICTION_POLICIES)


def lifetimes_of(result: CacheResult) -> list[float]:
    return np.concatenate([*result.lifetimes, np.zeros(0)]).tolist()


# ---------------------------------------------------------------- invariants


@every_policy
@pytest.mark.parametrize("seed", range(8))
def test_the_page_table_is_whole_after_each_request_of_a_trace_of_hashes(
    policy: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, rng.randint(4, 40), 80)
    result = play(hashed_workload(tmp_path, paths), policy, rng.randint(1, 20), check=True)
    assert len(result.hits) == len(paths)
    assert all(hits <= len(path) for hits, path in zip(result.hits, paths, strict=True))


@every_policy
@pytest.mark.parametrize("seed", range(8))
def test_so_it_is_of_a_trace_of_tokens(policy: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    records = random_chats(rng, 50, known_outputs=rng.choice([0.0, 0.5, 1.0]))
    result = play(token_workload(tmp_path, records, block_size), policy, rng.randint(2, 30), check=True)
    assert len(result.hits) == len(records)


@pytest.mark.parametrize("check", [True, False])
def test_only_a_replay_that_checks_finds_damage(check: bool, tmp_path: Path) -> None:
    workload = hashed_workload(tmp_path, [(1,), (1, 2)])
    replay = CacheReplay(workload, "lru", 4, check=check)
    (first, access), second = workload
    replay.serve(first, access)
    replay._manager.blocks[4].ref_count = 1  # in nobody's table
    if check:
        with pytest.raises(InvariantError):
            replay.serve(*second)
    else:
        assert replay.serve(*second) == 1


# ---------------------------------------------------------------- hits, against a plain cache


@pytest.mark.parametrize("seed", range(25))
def test_lru_hits_what_a_plain_lru_hits_on_a_trace_of_hashes(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, rng.randint(4, 40), 80)
    capacity = rng.randint(1, 20)
    expected: list[int] = []
    stack: list[int] = []  # cached blocks, the one used last at the end
    for path in paths:
        fits = len(path) <= capacity
        expected.append(next((i for i, node in enumerate(path) if node not in stack), len(path)) if fits else 0)
        if fits:
            stack = [*(node for node in stack if node not in path), *reversed(path)][-capacity:]
    result = play(hashed_workload(tmp_path, paths), "lru", capacity)
    assert result.hits == expected
    assert result.num_refused == sum(len(path) > capacity for path in paths)
    assert (result.num_hits, result.num_accesses) == (sum(expected), sum(map(len, paths)))
    assert result.num_hit_tokens == 512 * sum(expected)
    assert result.num_prompt_tokens == 512 * sum(map(len, paths))


@pytest.mark.parametrize("known_outputs", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_so_it_does_on_a_trace_of_tokens(known_outputs: float, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([1, 2, 4, 8]), rng.randint(1, 40)
    records = random_chats(rng, 50, known_outputs=known_outputs)
    plain = PlainLRU(num_blocks, block_size)
    hits = [serve_plainly(plain, record) for record in records]
    result = play(token_workload(tmp_path, records, block_size), "lru", num_blocks)
    assert result.hits == [max(0, n) for n in hits]
    assert result.num_refused == hits.count(-1)
    assert result.num_hit_tokens == block_size * result.num_hits
    assert result.num_prompt_tokens == sum(len(record["prompt_token_ids"]) for record in records)
    assert result.num_accesses == sum(len(record["prompt_token_ids"]) // block_size for record in records)
    assert result.evictions == len(plain.lifetimes)


def serve_plainly(plain: PlainLRU, record: Record) -> int:
    output: Prefix | int = record.get("output_length", 0)
    if "output_token_ids" in record:
        output = tuple(record["output_token_ids"])
    return plain.serve(tuple(record["prompt_token_ids"]), output, record["timestamp"])


def test_a_last_block_that_is_not_full_is_as_many_tokens_as_it_has(tmp_path: Path) -> None:
    records = [mooncake(i, 1, 2, 3, input_length=1100) for i in range(2)]
    result = play(Workload(Trace(write_trace(tmp_path / "trace.jsonl", records))), "lru", 3)
    assert (result.hits, result.num_hit_tokens, result.num_prompt_tokens) == ([0, 3], 1100, 2200)


def test_of_a_trace_of_tokens_the_last_token_is_never_a_hit(tmp_path: Path) -> None:
    records = [tokens(i, range(length)) for i, length in enumerate([8, 8, 9])]
    assert play(token_workload(tmp_path, records, 4), "lru", 8).hits == [0, 1, 2]


def test_an_answer_is_hit_by_the_prompt_that_holds_it_if_the_trace_knows_it(tmp_path: Path) -> None:
    prompt, answer = [1, 2, 3, 4], [5, 6, 7, 8, 9]
    known = [tokens(0, prompt, answer), tokens(1, [*prompt, *answer, 1])]
    assert play(token_workload(tmp_path, known, 4), "lru", 8).hits == [0, 2]
    unknown = [tokens(0, prompt, length=5), tokens(1, [*prompt, *answer, 1])]
    assert play(token_workload(tmp_path, unknown, 4), "lru", 8).hits == [0, 1]


def test_the_last_token_of_an_answer_was_never_computed(tmp_path: Path) -> None:
    prompt, answer = [1, 2, 3, 4], [5, 6, 7, 8]
    records = [tokens(0, prompt, answer), tokens(1, [*prompt, *answer, 1])]
    assert play(token_workload(tmp_path, records, 4), "lru", 8).hits == [0, 1]


def test_unknown_answers_take_up_room(tmp_path: Path) -> None:
    records = [tokens(0, [1] * 4, length=9), tokens(1, [2] * 4, length=9), tokens(2, [1] * 5)]
    assert play(token_workload(tmp_path, records, 4), "lru", 6).hits == [0, 0, 1]
    assert play(token_workload(tmp_path, records, 4), "lru", 3).hits == [0, 0, 0]


def test_an_answer_that_outgrows_the_cache_ends_there(tmp_path: Path) -> None:
    records = [tokens(0, [1] * 4, length=100), tokens(1, [1] * 5)]
    result = play(token_workload(tmp_path, records, 4), "lru", 3, check=True)
    assert (result.hits, result.num_refused) == ([0, 1], 0)


def test_an_endless_answer_takes_no_more_memory_than_the_cache_has_slots(tmp_path: Path) -> None:
    workload = token_workload(tmp_path, [tokens(0, [1] * 4, length=20_000_000), tokens(1, [1] * 5)], 4)
    tracemalloc.start()
    try:
        assert play(workload, "lru", 3).hits == [0, 1]
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- how long blocks lived


@pytest.mark.parametrize("seed", range(15))
def test_lifetimes_are_those_of_a_plain_lru(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([1, 2, 4]), rng.randint(8, 30)
    records = random_chats(rng, 50, known_outputs=rng.choice([0.0, 1.0]))
    plain = PlainLRU(num_blocks, block_size)
    for record in records:
        serve_plainly(plain, record)
    assert plain.lifetimes
    result = play(token_workload(tmp_path, records, block_size), "lru", num_blocks)
    assert sorted(lifetimes_of(result)) == pytest.approx(sorted(plain.lifetimes))


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Notes when blocks get and lose their contents: `now` is to be set, `lifetimes` to be read."""
    notes: dict[str, Any] = {"now": 0.0, "lifetimes": []}
    stored_at: dict[Block, float] = {}
    register, unregister = Block.register, Block.unregister

    def note_storing(block: Block, *identity: Any) -> None:
        stored_at[block] = notes["now"]
        register(block, *identity)

    def note_eviction(block: Block) -> None:
        notes["lifetimes"].append(notes["now"] - stored_at.pop(block))
        unregister(block)

    monkeypatch.setattr(Block, "register", note_storing)
    monkeypatch.setattr(Block, "unregister", note_eviction)
    return notes


@every_policy
@pytest.mark.parametrize(("kind", "seed"), product(["hashes", "tokens"], range(4)))
def test_each_eviction_has_its_lifetime(
    policy: str, kind: str, seed: int, witness: dict[str, Any], tmp_path: Path
) -> None:
    rng = random.Random(seed)
    if kind == "hashes":
        workload = hashed_workload(tmp_path, random_paths(rng, 30, 60, longest=6), step=1.5)
    else:
        workload = token_workload(tmp_path, random_chats(rng, 40), 2)
    replay = CacheReplay(workload, policy, 12 if kind == "hashes" else 30)
    for request, access in workload:
        witness["now"] = request.arrival
        replay.serve(request, access)
    result = replay.finish()
    assert result.evictions == len(witness["lifetimes"]) > 10
    assert sorted(lifetimes_of(result)) == pytest.approx(sorted(witness["lifetimes"]))


def test_blocks_lived_from_their_storing_to_their_eviction(tmp_path: Path) -> None:
    result = play(hashed_workload(tmp_path, [(1, 2), (3, 4), (5, 6), (5,), (7, 8)], step=10.0), "lru", 2)
    assert result.evictions == 6
    assert sorted(lifetimes_of(result)) == [10.0, 10.0, 10.0, 10.0, 20.0, 20.0]


def test_a_block_that_is_computed_again_and_kept_has_not_been_evicted(tmp_path: Path) -> None:
    result = play(token_workload(tmp_path, [tokens(0, [1] * 8), tokens(5, [1] * 8)], 4), "lru", 4)
    assert (result.evictions, lifetimes_of(result)) == (0, [])


# ---------------------------------------------------------------- what the policy is told


def test_a_policy_is_told_tokens_and_hints_by_the_clock_of_the_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = listen(monkeypatch)
    records = [
        mooncake(0, 1, 2, input_length=700, output_length=30),
        mooncake(90, 1, 2, 3, input_length=1100, output_length=0, session_id="s", ttl_s=60),
    ]
    play(Workload(Trace(write_trace(tmp_path / "trace.jsonl", records))), "listener", 8)
    play(
        token_workload(tmp_path, [tokens(0, range(9)), {**tokens(3, range(5), length=7), "ttl_s": 4}], 4), "listener", 8
    )
    hashed, plain = made
    assert (hashed.num_blocks, hashed.block_size) == (9, 512)  # one is for the sentinel
    assert hashed.begun == [(0, 700, NO_HINTS), (90, 1100, CacheHints("s", ttl_s=60))]
    assert hashed.ended == [(0, 30), (90, 0)]
    assert (plain.num_blocks, plain.block_size) == (8, 4)
    assert plain.begun == [(0, 9, NO_HINTS), (3, 5, CacheHints(ttl_s=4))]
    assert plain.ended == [(0, 1), (3, 7)]


def told(records: list[Record], *ends: bool) -> list[Record]:
    """Each a session of its own, the last request of which it may say that it is."""
    return [
        {**record, "session_id": i, "end_session": is_end}
        for i, (record, is_end) in enumerate(zip(records, ends, strict=True))
    ]


@every_policy
@pytest.mark.parametrize("kind", ["hashes", "tokens"])
def test_the_blocks_of_a_session_that_has_ended_leave_before_all_others(policy: str, kind: str, tmp_path: Path) -> None:
    paths = [(1, 2), (3, 4), (5, 6), (1, 2)]  # the third takes two of four blocks
    if kind == "hashes":
        records = [mooncake(10 * i, *path) for i, path in enumerate(paths)]
    else:
        records = [tokens(10 * i, [*([path[0]] * 4), *([path[1]] * 4)]) for i, path in enumerate(paths)]
    records[3] = {**records[3], "timestamp": records[3]["timestamp"] + 1}

    def hits_of(*ends: bool) -> list[int]:
        workload = (
            Workload(Trace(write_trace(tmp_path / "trace.jsonl", told(records, *ends))))
            if kind == "hashes"
            else token_workload(tmp_path, told(records, *ends), 4)
        )
        return play(workload, policy, 4, check=True).hits

    found = 2 if kind == "hashes" else 1  # of tokens the last one has to be computed
    assert hits_of(False, True, False, False) == [0, 0, 0, found]
    assert hits_of(True, False, False, False) == [0, 0, 0, 0]


@every_policy
def test_what_another_session_has_used_is_not_left_with_the_one_that_ends(policy: str, tmp_path: Path) -> None:
    paths = [(1, 2), (3, 4), (1, 5), (1, 6), (1, 7)]
    records = told([mooncake(i, *path) for i, path in enumerate(paths)], False, False, True, False, False)
    workload = Workload(Trace(write_trace(tmp_path / "trace.jsonl", records)))
    assert play(workload, policy, 5, check=True).hits == [0, 0, 1, 1, 1]


# ---------------------------------------------------------------- replay and engine agree


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


smaller_than_the_longest_request = pytest.mark.filterwarnings("ignore:the KV cache holds")


@contextmanager
def tiny_llm(
    model: Path, block_size: int, num_blocks: int, policy: str = "lru", max_model_len: int | None = None
) -> Iterator[LLM]:
    """An engine with so many blocks, by default for requests that never outgrow them."""
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head size, float32
    threads = torch.get_num_threads()
    try:
        with LLM(
            model,
            kernels="torch",
            threads=1,  # several of them wait longer for each other than such a model computes
            block_size=block_size,
            kv_cache_memory=num_blocks * block_size * bytes_per_token,
            max_model_len=max_model_len or num_blocks * block_size,
            max_num_batched_tokens=24,  # so that long prompts take several steps
            eviction_policy=policy,
        ) as llm:
            assert len(llm.block_manager.blocks) == num_blocks
            yield llm
    finally:
        torch.set_num_threads(threads)


def converse(llm: LLM, seed: int, num_requests: int, longest: int) -> tuple[list[Record], list[int]]:
    """Chats under a common system prompt, one request at a time: what a trace tells of them, and tokens found cached.

    Prompts hold the answers before them; some chats go back to an earlier turn, and some start anew.
    """
    rng = random.Random(seed)

    def some(most: int) -> list[int]:
        return [rng.randrange(3, 300) for _ in range(rng.randint(1, most))]

    system = some(20)
    chats: list[list[list[int]]] = [[system] for _ in range(4)]  # of each the turns so far
    records: list[Record] = []
    cached: list[int] = []
    for i in range(num_requests):
        turns = rng.choice(chats)
        if len(turns[-1]) > longest or rng.random() < 0.05:
            turns[:] = [system]
        prompt = rng.choice([turns[-1], turns[-1], rng.choice(turns)]) + some(12)
        if rng.random() < 0.15:  # the same once more
            prompt = records[-1]["prompt_token_ids"] if records else prompt
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 14), ignore_eos=True)
        if isinstance(llm.block_manager.free_block_ids.cached, LHC):
            llm.block_manager.free_block_ids.cached._clock = lambda now=float(i): now  # as the trace tells it
        (output,) = llm.generate([prompt], params)
        answer = list(output.outputs[0].token_ids)
        turns.append(prompt + answer)
        records.append(tokens(i, prompt, answer))
        cached.append(output.num_cached_tokens)
    return records, cached


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "policy"),
    [
        (1, 130, "lru"),
        (2, 70, "lru"),
        (4, 40, "lru"),
        (4, 64, "lru"),
        (8, 20, "lru"),
        (16, 9, "lru"),
        (16, 14, "lru"),
        *((4, 40, policy) for policy in EVICTION_POLICIES if policy != "lru"),
    ],
)
def test_replay_and_engine_agree(
    block_size: int, num_blocks: int, policy: str, tiny_model: Path, tmp_path: Path
) -> None:
    with tiny_llm(tiny_model, block_size, num_blocks, policy) as llm:
        records, cached = converse(llm, seed=block_size + num_blocks, num_requests=60, longest=90)
        evictions, hit_tokens = llm.stats().evictions, llm.stats().hit_tokens
        llm.block_manager.check()
    workload = token_workload(tmp_path, records, block_size)
    result = play(workload, policy, num_blocks, check=True)
    assert [hits * block_size for hits in result.hits] == cached
    assert (result.evictions, result.num_hit_tokens) == (evictions, hit_tokens)
    assert result.num_refused == 0
    assert evictions > 40 // block_size
    assert sum(hits > 0 for hits in result.hits) > 15


@smaller_than_the_longest_request
def test_they_agree_where_answers_end_because_the_cache_is_full(tiny_model: Path, tmp_path: Path) -> None:
    with tiny_llm(tiny_model, 4, 12, max_model_len=200) as llm:
        rng = random.Random(1)
        records: list[Record] = []
        cached: list[int] = []
        reasons: set[str | None] = set()
        for i in range(30):
            prompt = [7] * rng.choice([3, 8, 12]) + [rng.randrange(3, 300) for _ in range(rng.randint(1, 28))]
            (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
            reasons.add(output.outputs[0].finish_reason)
            records.append(tokens(i, prompt, output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens)
        evictions = llm.stats().evictions
    assert reasons == {"length", "cache_full"}
    result = play(token_workload(tmp_path, records, 4), "lru", 12, check=True)
    assert [hits * 4 for hits in result.hits] == cached
    assert result.evictions == evictions


@smaller_than_the_longest_request
def test_both_refuse_a_prompt_that_needs_more_blocks_than_there_are(tiny_model: Path, tmp_path: Path) -> None:
    fits, does_not = [5] * 32, [5] * 33
    with tiny_llm(tiny_model, 4, 8, max_model_len=200) as llm:
        with pytest.raises(RequestError):
            llm.generate([does_not], SamplingParams(max_tokens=1))
        (output,) = llm.generate([fits], SamplingParams(max_tokens=1))
        assert output.num_cached_tokens == 0
    result = play(token_workload(tmp_path, [tokens(0, does_not), tokens(1, fits)], 4), "lru", 8)
    assert (result.num_refused, result.hits) == (1, [0, 0])
