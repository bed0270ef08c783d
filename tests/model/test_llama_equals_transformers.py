"""Our decoder, over a paged cache in shuffled blocks and in chunks, against transformers over whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pagetable.model import ModelRunner, load_model, open_checkpoint
from pagetable.model.kernels.backend import PagedAttention
from tests.model.steps import make_step
from tests.model.tiny_models import LLAMA3, gguf_tensors, llama3_factors, save_hf, tiny_llama, write_gguf

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "grouped_tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "multi_head": {"num_key_value_heads": 4},
    "wide_heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3_rope": {"rope_parameters": LLAMA3},
}
BLOCK_SIZE = 4

pytestmark = pytest.mark.parametrize("kernels", ["numba", "torch", "torch with compiled attention"])


def save(model: LlamaForCausalLM, kind: str, where: Path) -> Path:
    if kind == "folder":
        return save_hf(model, where / "one")
    if kind == "shards":
        folder = save_hf(model, where / "many", max_shard_size="60KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder
    rope, tensors, metadata = model.config.rope_parameters, gguf_tensors(model), {}
    if rope["rope_type"] == "linear":
        metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(model)
    return write_gguf(model, where / "tiny.gguf", tensors=tensors, metadata=metadata)


def make_runner(path: Path, kernels: str, dtype: str = "auto") -> ModelRunner:
    model = load_model(open_checkpoint(path), dtype=dtype, kernels=kernels.split()[0], threads=2)
    attention = PagedAttention if kernels == "torch with compiled attention" else None
    runner = ModelRunner(model, num_blocks=128, block_size=BLOCK_SIZE, attention=attention)
    runner.kv_cache.data.fill_(torch.nan)
    return runner


@torch.inference_mode()
def paged_logits(
    runner: ModelRunner, sequences: list[list[int]], chunks: list[list[int]], seed: int
) -> list[np.ndarray]:
    """Logits at every position, (tokens, vocabulary) a sequence; step k computes chunks[i][k] tokens of sequence i."""
    ids = np.random.default_rng(seed).permutation(128).tolist()
    tables = [[ids.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE))] for tokens in sequences]
    done, parts = [0] * len(sequences), [[] for _ in sequences]
    for number in range(max(map(len, chunks))):
        live = [i for i in range(len(sequences)) if number < len(chunks[i])]
        ends = [done[i] + chunks[i][number] for i in live]
        tokens = [sequences[i][done[i] : end] for i, end in zip(live, ends, strict=True)]
        step = make_step([tables[i] for i in live], [done[i] for i in live], tokens, BLOCK_SIZE)
        logits = runner.model.compute(step, runner.attention, np.arange(len(step.token_ids))).numpy().copy()
        for row, (i, end) in enumerate(zip(live, ends, strict=True)):
            parts[i].append(logits[step.query_start[row] : step.query_start[row + 1]])
            done[i] = end
    assert done == [len(tokens) for tokens in sequences]
    return [np.concatenate(part) for part in parts]


def whole_logits(model: LlamaForCausalLM, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.parametrize("kind", ["folder", "shards", "gguf"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_chunks_and_shuffled_blocks_equal_transformers(
    kernels: str, variant: str, kind: str, tmp_path: Path
) -> None:
    model = tiny_llama(**VARIANTS[variant])
    runner = make_runner(save(model, kind, tmp_path), kernels)
    rng = np.random.default_rng(7)
    sequences = [rng.integers(0, 160, length).tolist() for length in (50, 1, 23)]
    chunks = [[7, 30, 1, 1, 11], [1], [23]]
    for tokens, logits in zip(sequences, paged_logits(runner, sequences, chunks, seed=1), strict=True):
        np.testing.assert_allclose(logits, whole_logits(model, tokens), atol=1e-4, rtol=1e-4)


def greedy(runner: ModelRunner, prompts: list[list[int]], count: int, chunk: int) -> list[list[int]]:
    """Generate by `ModelRunner.execute`: prompts in chunks, middle ones without logits, then decode all together."""
    ids = np.random.default_rng(3).permutation(128).tolist()
    answers = [list(prompt) for prompt in prompts]
    tables = [[ids.pop() for _ in range(-(-(len(prompt) + count) // BLOCK_SIZE))] for prompt in prompts]
    done = [0] * len(prompts)
    while any(len(answer) < len(prompt) + count for answer, prompt in zip(answers, prompts, strict=True)):
        live = [i for i in range(len(prompts)) if len(answers[i]) < len(prompts[i]) + count]
        ends = [min(done[i] + chunk, len(answers[i])) for i in live]
        needs = [end == len(answers[i]) for i, end in zip(live, ends, strict=True)]
        tokens = [answers[i][done[i] : end] for i, end in zip(live, ends, strict=True)]
        step = make_step([tables[i] for i in live], [done[i] for i in live], tokens, BLOCK_SIZE, needs)
        drawn = iter(runner.execute(step).token_ids)
        for i, end, need in zip(live, ends, needs, strict=True):
            done[i] = end
            if need:
                answers[i].append(next(drawn))
        assert next(drawn, None) is None
    return answers


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_greedy_answers_equal_transformers(kernels: str, kind: str, chunk: int, tmp_path: Path) -> None:
    model = tiny_llama(seed=1)
    runner = make_runner(save(model, kind, tmp_path), kernels)
    prompts = [np.random.default_rng(5).integers(0, 160, length).tolist() for length in (3, 17, 40)]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(whole_logits(model, tokens)[-1].argmax()))
        expected.append(tokens)
    assert greedy(runner, prompts, 12, chunk) == expected


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_bfloat16_runs_and_is_close(kernels: str, kind: str, tmp_path: Path) -> None:
    model = tiny_llama(seed=2)
    runner = make_runner(save(model, kind, tmp_path), kernels, dtype="bfloat16")
    assert runner.kv_cache.dtype == runner.model.dtype == torch.bfloat16
    tokens = np.random.default_rng(9).integers(0, 160, 30).tolist()
    (logits,) = paged_logits(runner, [tokens], [[10, 1, 19]], seed=0)
    exact = whole_logits(model, tokens)
    assert np.abs(logits - exact).mean() < 0.02 * exact.std()


def test_a_checkpoint_in_bfloat16_loads_into_either_type(kernels: str, tmp_path: Path) -> None:
    model = tiny_llama(seed=3).to(torch.bfloat16)
    checkpoint = open_checkpoint(save_hf(model, tmp_path))
    wide, narrow = load_model(checkpoint, kernels="torch"), load_model(checkpoint, dtype="bfloat16", kernels="torch")
    assert wide.config.checkpoint_dtype == "bfloat16"
    assert wide.dtype == torch.float32
    assert torch.equal(narrow.embed_tokens, model.model.embed_tokens.weight)
    assert torch.equal(wide.embed_tokens, model.model.embed_tokens.weight.float())
