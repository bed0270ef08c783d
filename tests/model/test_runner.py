"""What a runner takes and gives back; the numbers are in test_llama_equals_transformers.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pagetable.engine.step import StepOutput
from pagetable.model import Llama, LogitsError, ModelError, ModelRunner, load_config, load_model, open_checkpoint
from pagetable.model.loading import resolve_dtype
from tests.model.steps import ask, make_sampling, make_step
from tests.model.tiny_models import TYPES, save_hf, tiny_llama, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tiny_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["numba", "torch"])
def runner(folder: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return ModelRunner(load_model(open_checkpoint(folder), kernels=request.param), num_blocks=8, block_size=4)


@pytest.fixture
def torch_runner(folder: Path) -> ModelRunner:
    return ModelRunner(load_model(open_checkpoint(folder), kernels="torch"), num_blocks=8, block_size=4)


def test_a_step_without_logits_skips_the_head(torch_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Llama, "logits", lambda *_: pytest.fail("the head was computed"))
    step = make_step([[0, 1]], [0], [[1, 2, 3, 4, 5]], 4, needs_logits=[False])
    assert torch_runner.execute(step) == StepOutput(token_ids=[])


def test_a_step_without_logits_returns_nothing(runner: ModelRunner) -> None:
    step = make_step([[0, 1]], [0], [[1, 2, 3, 4, 5]], 4, needs_logits=[False])
    assert runner.execute(step) == StepOutput(token_ids=[])


def test_only_rows_that_need_logits_reach_the_head(torch_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    inner = Llama.logits
    monkeypatch.setattr(Llama, "logits", lambda self, hidden: rows.append(len(hidden)) or inner(self, hidden))
    step = make_step([[0], [1], [2]], [0, 0, 0], [[1, 2], [3], [4, 5, 6]], 4, needs_logits=[True, False, True])
    assert len(torch_runner.execute(step).token_ids) == 2
    assert rows == [2]


def test_what_a_step_returns_does_not_track_gradients(torch_runner: ModelRunner) -> None:
    assert not any(parameter.requires_grad for parameter in torch_runner.model.parameters())


def test_logprobs_come_for_the_rows_that_ask(runner: ModelRunner) -> None:
    sampling = make_sampling(2, num_logprobs=[-1, 2])
    output = runner.execute(make_step([[0], [1]], [0, 0], [[1, 2], [3]], 4, sampling=sampling))
    assert output.logprobs is not None
    assert output.logprobs[0] is None
    assert output.logprobs[1] is not None
    assert output.logprobs[1].token_ids[0] == output.token_ids[1]
    assert len(output.logprobs[1].token_ids) == 3


def test_nan_names_the_sequence_and_spares_no_silent_answer(runner: ModelRunner) -> None:
    with torch.inference_mode():
        embedding = dict(runner.model.placements())["model.embed_tokens.weight"]
        embedding.fill(7, torch.full((1, embedding.shape[1]), torch.nan))
    step = make_step([[0], [1], [2]], [0, 0, 0], [[1], [2], [7]], 4, needs_logits=[False, True, True])
    with pytest.raises(LogitsError, match=r"rows \[2\]") as caught:
        runner.execute(step)
    assert caught.value.rows == [2]
    assert isinstance(caught.value, FloatingPointError)


def test_nan_in_the_middle_of_a_prompt_names_the_sequence_that_asks(runner: ModelRunner) -> None:
    with torch.inference_mode():
        embedding = dict(runner.model.placements())["model.embed_tokens.weight"]
        embedding.fill(7, torch.full((1, embedding.shape[1]), torch.nan))
    chunks, needs = [[1], [2, 3], [4, 7, 7]], [True, False, False]
    asked = ask([1, 2, 3, 4, 5], [3, 9, 7, 7, 9], [0] * 5, [1, 1, 2, 2, 2])
    with pytest.raises(LogitsError, match=r"rows \[2\]") as caught:
        runner.execute(make_step([[0], [1], [2]], [0, 0, 0], chunks, 4, needs, prompt_logprobs=asked))
    assert caught.value.rows == [2]
    asked = ask([1, 2], [3, 9], [0] * 2, [1, 1])
    step = make_step([[0], [1], [2]], [0, 0, 0], chunks, 4, needs, prompt_logprobs=asked)
    assert len(runner.execute(step).prompt_logprobs or ()) == 2  # what nobody asks for harms nobody


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (make_step([[0]], [0], [[1, 2]], 4, prompt_logprobs=ask([2], [1], [0], [0])), "prompt_logprobs.rows"),
        (make_step([[0]], [0], [[1, 2]], 4, prompt_logprobs=ask([0], [160], [0], [0])), "prompt_logprobs.token_ids"),
        (make_step([[0]], [0], [[160]], 4), "token_ids"),
        (make_step([[0]], [0], [[-1]], 4), "token_ids"),
        (make_step([[8]], [0], [[1]], 4), "slot_mapping"),
        (make_step([[-1]], [0], [[1]], 4), "slot_mapping"),
        (make_step([[0] * 9], [32], [[1]], 4), "positions"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_by_name(runner: ModelRunner, step: object, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        runner.execute(step)  # type: ignore[arg-type]


def test_a_failed_step_leaves_the_runner_usable(runner: ModelRunner) -> None:
    good = make_step([[3]], [0], [[1, 2, 3]], 4)
    before = runner.execute(good)
    with pytest.raises(ValueError, match="token_ids"):
        runner.execute(make_step([[0]], [0], [[999]], 4))
    assert runner.execute(good) == before


def test_progress_hears_every_byte_once(folder: Path) -> None:
    heard: list[tuple[int, int]] = []
    hear = lambda done, total: heard.append((done, total))  # noqa: E731
    model = load_model(open_checkpoint(folder), kernels="torch", progress=hear)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert heard[-1] == (size, size)
    assert heard == sorted(set(heard))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("float", torch.float32),
        ("float32", torch.float32),
        (torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_names(folder: Path, dtype: str | torch.dtype, expected: torch.dtype) -> None:
    assert load_model(open_checkpoint(folder), dtype=dtype).dtype == expected


@pytest.mark.parametrize("dtype", ["float16", "half", "int8", "", torch.float16, torch.int32])
def test_other_dtypes_are_refused_by_name(folder: Path, dtype: str | torch.dtype) -> None:
    with pytest.raises(ModelError, match="auto, float32"):
        load_model(open_checkpoint(folder), dtype=dtype)


def test_auto_on_a_gpu_is_the_checkpoints_own_type_or_bfloat16(folder: Path, tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    config = load_config(open_checkpoint(folder))
    quantised = load_config(open_checkpoint(write_gguf(tiny_llama(), tmp_path / "q.gguf", TYPES.Q8_0)))
    assert resolve_dtype("auto", config, gpu) == torch.float32
    assert quantised.checkpoint_dtype == "Q8_0"
    assert resolve_dtype("auto", quantised, gpu) == torch.bfloat16
    assert resolve_dtype("auto", quantised, torch.device("cpu")) == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_a_clear_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="sees no GPU"):
        load_model(open_checkpoint(folder), device="cuda")


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:-1", "cpu:x"])
def test_other_devices_are_refused_by_name(folder: Path, device: str) -> None:
    with pytest.raises(ModelError, match="cuda"):
        load_model(open_checkpoint(folder), device=device)


def test_positions_end_where_the_cache_or_the_model_does(folder: Path) -> None:
    model = load_model(open_checkpoint(folder), kernels="torch")
    assert ModelRunner(model, 8, 4).max_positions == 32
    assert ModelRunner(model, 1000, 4).max_positions == 256
    assert model.cos.shape == (256, 8)


def test_the_rotary_table_is_the_same_whatever_its_length(folder: Path) -> None:
    model = load_model(open_checkpoint(folder), kernels="torch")
    model.reserve_positions(10)
    short = model.cos.clone()
    model.reserve_positions(200)
    assert torch.equal(model.cos[:10], short)
    model.reserve_positions(5)
    assert len(model.cos) == 200
    assert np.allclose(model.cos[:, 0], np.cos(np.arange(200)), atol=1e-5)
