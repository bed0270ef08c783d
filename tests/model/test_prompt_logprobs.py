"""Log-probabilities of prompts, through scheduler and runner, against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pagetable.engine import Engine, SamplingParams, Scheduler, Sequence, TokenLogprobs
from pagetable.memory import BlockManager
from pagetable.model import ModelRunner, load_model, open_checkpoint
from tests.model.tiny_models import save_hf, tiny_llama

BLOCK_SIZE = 4
PROMPT = np.random.default_rng(3).integers(0, 160, 75).tolist()  # longer than what is computed at once
OTHER = np.random.default_rng(4).integers(0, 160, 20).tolist()

pytestmark = pytest.mark.parametrize("kernels", ["numba", "torch"])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(seed=4)


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM) -> np.ndarray:
    """(tokens - 1, vocabulary): row i is the distribution of token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1].float(), dim=-1).numpy()


def make_engine(folder: Path, kernels: str, num_blocks: int = 64, budget: int = 512) -> Engine:
    runner = ModelRunner(load_model(open_checkpoint(folder), kernels=kernels, threads=2), num_blocks, BLOCK_SIZE)
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    return Engine(Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=200), runner)


def request(tokens: list[int], count: int | None = 3, max_tokens: int = 4) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=count)
    return Sequence(tokens, params, block_size=BLOCK_SIZE)


def run(engine: Engine, *seqs: Sequence) -> None:
    for seq in seqs:
        engine.scheduler.add(seq)
    while engine.scheduler.has_unfinished:
        engine.step()
        engine.scheduler.block_manager.check()
    assert [str(seq.finish_reason) for seq in seqs] == ["length"] * len(seqs), engine.last_error


def check(entries: list[TokenLogprobs | None], expected: np.ndarray, count: int = 3) -> None:
    assert len(entries) == len(PROMPT) - 1
    for token_id, row, found in zip(PROMPT[1:], expected, entries, strict=True):
        assert found is not None
        assert found.token_ids[0] == token_id
        assert found.rank == 1 + (row > row[token_id]).sum()
        assert len(found.token_ids) == len(found.logprobs) == 1 + count
        assert list(found.token_ids[1:]) == np.argsort(-row)[:count].tolist()
        np.testing.assert_allclose(found.logprobs, row[list(found.token_ids)], atol=1e-4)


@pytest.mark.parametrize("count", [0, 3, 20])
def test_equal_to_transformers(kernels: str, folder: Path, expected: np.ndarray, count: int) -> None:
    seq = request(PROMPT, count)
    run(make_engine(folder, kernels), seq)
    check(seq.prompt_logprobs, expected, count)


@pytest.mark.parametrize("budget", [1, 7, 64, 75])
def test_equal_in_chunks_of_any_size(kernels: str, folder: Path, expected: np.ndarray, budget: int) -> None:
    seq = request(PROMPT)
    run(make_engine(folder, kernels, budget=budget), seq)
    check(seq.prompt_logprobs, expected)


def test_a_warm_cache_gives_what_a_cold_one_gives(kernels: str, folder: Path, expected: np.ndarray) -> None:
    engine = make_engine(folder, kernels)
    first, silent, again = request(PROMPT), request(PROMPT, None), request(PROMPT)
    for seq in (first, silent, again):
        run(engine, seq)
    assert [seq.num_prefix_tokens for seq in (first, silent, again)] == [0, 72, 0]
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.output_token_ids == silent.output_token_ids == first.output_token_ids
    check(again.prompt_logprobs, expected)


def test_one_who_asks_and_one_who_does_not_in_one_batch(kernels: str, folder: Path, expected: np.ndarray) -> None:
    engine = make_engine(folder, kernels)
    alone = [request(PROMPT, None), request(OTHER, None)]
    for seq in alone:
        run(engine, seq)
    engine.scheduler.block_manager.reset_prefix_cache()
    together = [request(OTHER, None), request(PROMPT), request(PROMPT, 0)]
    run(engine, *together)
    check(together[1].prompt_logprobs, expected)
    check(together[2].prompt_logprobs, expected, 0)
    assert together[0].prompt_logprobs == []
    answers = [seq.output_token_ids for seq in alone]
    assert [seq.output_token_ids for seq in together] == [answers[1], answers[0], answers[0]]


def test_preempted_in_the_middle_of_the_prompt(kernels: str, folder: Path, expected: np.ndarray) -> None:
    engine = make_engine(folder, kernels, num_blocks=21, budget=4)
    head, seq = request(OTHER[:2], None, max_tokens=40), request(PROMPT)
    engine.scheduler.add(head)
    engine.scheduler.add(seq)
    while seq.block_table or not seq.prompt_logprobs:
        engine.step()
    assert 0 < len(seq.prompt_logprobs) < len(PROMPT) - 1
    while engine.scheduler.has_unfinished:
        engine.step()
        engine.scheduler.block_manager.check()
    check(seq.prompt_logprobs, expected)
