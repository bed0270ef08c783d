"""What a step of a model costs here: measured on a tiny model, and written to a file that a replay reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import pagetable.calibrate
from pagetable import LLM
from pagetable.calibrate import calibrate
from pagetable.cli import cli
from pagetable.engine import Sequence
from pagetable.replay.cost import TERMS, CostModel
from tests.replay.small_traces import mooncake, write_trace
from tests.serving.running import write_tiny_model

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head size, float32


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pagetable.calibrate, "LENGTHS", (8, 64, 256))
    monkeypatch.setattr(pagetable.calibrate, "BATCHES", (1, 2, 4))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tiny_llm(model: Path, num_blocks: int = 256, **options: object) -> LLM:
    memory = num_blocks * 16 * BYTES_PER_TOKEN
    return LLM(
        model, kernels="torch", threads=1, kv_cache_memory=memory, max_model_len=min(1024, 16 * num_blocks), **options
    )


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """All sequences that any engine is given."""
    from pagetable.engine import Scheduler

    seqs: list[Sequence] = []
    add = Scheduler.add

    def note(scheduler: Scheduler, seq: Sequence) -> None:
        seqs.append(seq)
        add(scheduler, seq)

    monkeypatch.setattr(Scheduler, "add", note)
    return seqs


def test_a_model_has_a_cost_and_no_prompt_hits_the_cache(tiny_model: Path, added: list[Sequence]) -> None:
    said: list[str] = []
    with tiny_llm(tiny_model) as llm:
        llm.generate("Hello, this stays in the cache from before.")
        del added[:]
        cost = calibrate(llm, rounds=2, say=said.append)
        assert llm.stats().blocks_in_use == 0
        llm.block_manager.check()
    assert min(getattr(cost, term) for term in TERMS) >= 0
    assert max(getattr(cost, term) for term in TERMS) > 0
    assert len(said) == 3 * 9  # rounds, the first only to warm up, of batches and lengths
    assert [seq.num_prefix_tokens for seq in added] == [0] * (3 * 3 * (1 + 2 + 4))
    assert {seq.num_prompt_tokens for seq in added} == {8, 64, 256}
    assert all(seq.num_output_tokens == pagetable.calibrate.NUM_DECODES for seq in added)
    about = cost.about
    assert about["samples"] >= 2 * 9 * pagetable.calibrate.NUM_DECODES
    assert 0 <= about["median_error"] <= about["p90_error"]
    assert (about["block_size"], about["max_num_batched_tokens"]) == (16, 512)


def test_prompts_of_a_round_are_different_from_each_other(tiny_model: Path, added: list[Sequence]) -> None:
    with tiny_llm(tiny_model) as llm:
        calibrate(llm, rounds=1, say=lambda text: None)
    beginnings = {tuple(seq.prompt_token_ids[:8]) for seq in added}
    assert len(beginnings) == len(added) == 2 * 3 * (1 + 2 + 4)


def test_what_does_not_fit_is_not_tried(tiny_model: Path, added: list[Sequence]) -> None:
    with tiny_llm(tiny_model, num_blocks=8, max_num_seqs=2) as llm:  # 128 tokens
        calibrate(llm, rounds=1, say=lambda text: None)
        assert llm.stats().preemptions == 0
    assert {seq.num_prompt_tokens for seq in added} == {8, 64}
    assert all(seq.finish_reason == "length" for seq in added)


def test_a_cache_that_is_too_small_for_any_prompt_is_named(tiny_model: Path) -> None:
    with tiny_llm(tiny_model, num_blocks=1) as llm, pytest.raises(ValueError, match="too small"):
        calibrate(llm, rounds=1, say=lambda text: None)


def test_a_step_that_fails_ends_it(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: object) -> None:
        raise ArithmeticError("out of luck")

    with tiny_llm(tiny_model) as llm:
        monkeypatch.setattr(llm.engine.runner, "execute", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            calibrate(llm, rounds=1, say=lambda text: None)


def test_the_command_writes_a_file_that_a_replay_reads(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    options = ["--rounds", "1", "--kernels", "torch", "--threads", "1", "--kv-cache-memory", "4MiB"]
    result = CliRunner().invoke(cli, ["bench", "calibrate", "-m", str(tiny_model), "-o", str(path), *options])
    assert result.exit_code == 0, result.output
    assert f"{path} written" in result.stdout
    assert "of a prompt" in result.stdout
    assert "round 1 of 1" in result.stderr
    cost = CostModel.load(path)
    assert min(getattr(cost, term) for term in TERMS) >= 0
    assert cost.about["samples"] > 0
    trace = write_trace(tmp_path / "trace.jsonl", [mooncake(i, 1, 2, i + 3) for i in range(5)])
    timed = ["replay", str(trace), "--timed", "--cost-model", str(path), "--capacity", "100%"]
    replayed = CliRunner().invoke(cli, timed)
    assert replayed.exit_code == 0, replayed.output
    assert str(cost.about["model"]) in replayed.stdout
