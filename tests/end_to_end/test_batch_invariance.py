"""An answer has the same bits whatever was cached, however it is chunked and paged, and whoever else is in the batch.

Each situation is a process of its own, so that nothing left over from one can make another the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagetable import LLM, SamplingParams
from pagetable.checkpoint import ModelError

LENGTH = 301  # tokens of the prompt: no multiple of any block size
SCRIPT = Path(__file__).with_name("answer_in_a_situation.py")


def answers(situations: list[str], **llm: Any) -> list[dict[str, Any]]:
    """What a new process answers in each situation."""
    order = {"llm": {"kv_cache_memory": "256MiB", **llm}, "situations": situations, "length": LENGTH}
    command = [sys.executable, str(SCRIPT), json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@cache
def cold() -> dict[str, Any]:
    (answer,) = answers(["cold"], batch_invariant=True)
    assert answer["cached"] == 0
    return answer


def bits(answer: dict[str, Any]) -> tuple[Any, Any]:
    return answer["tokens"], answer["logprobs"]


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> int | None:
    """The first output token at which two answers differ in any bit."""
    for place, (a, b) in enumerate(zip(zip(*bits(one), strict=True), zip(*bits(other), strict=True), strict=True)):
        if a != b:
            return place
    return None


def test_warm() -> None:
    (answer,) = answers(["warm"], batch_invariant=True)
    assert answer["cached"] >= LENGTH - 17
    assert first_difference(answer, cold()) is None


def test_among_neighbours() -> None:
    for answer in answers(["among 1", "among 7", "among 31"], batch_invariant=True):
        assert first_difference(answer, cold()) is None


def test_preempted() -> None:
    (answer,) = answers(
        ["crowded"], batch_invariant=True, kv_cache_memory=46_080 * (3 * LENGTH + 3 * 16), max_num_batched_tokens=128
    )
    assert answer["preemptions"] > 0
    assert first_difference(answer, cold()) is None


@pytest.mark.parametrize(
    "how",
    [
        {"max_num_batched_tokens": 37, "threads": 1},
        {"max_num_batched_tokens": 64, "threads": 2, "block_size": 256},
        {"block_size": 4, "threads": 3},
    ],
    ids=lambda how: " ".join(f"{name}={value}" for name, value in how.items()),
)
def test_however_it_is_chunked_and_paged_and_by_however_many_threads(how: dict[str, Any]) -> None:
    for answer in answers(["cold", "warm"], batch_invariant=True, **how):
        assert first_difference(answer, cold()) is None


def test_this_comparison_sees_a_difference_where_there_is_one() -> None:
    """Products of plain PyTorch depend on the number of rows, which a cached prefix makes fewer."""
    alone, warm = answers(["cold", "warm"], kernels="torch")
    if first_difference(alone, warm) is None:
        pytest.skip("here PyTorch's products have the same bits in any batch")


def test_plain_pytorch_is_refused_where_equal_bits_are_asked_for() -> None:
    with pytest.raises(ModelError, match="batch_invariant"):
        LLM("smollm2", kernels="torch", batch_invariant=True)


@pytest.mark.parametrize("kernels", ["cuda", "", "Numba"])
def test_other_kernels_are_refused_by_name(kernels: str) -> None:
    with pytest.raises(ModelError, match=f"kernels '{kernels}' are not known: use auto, numba, torch"):
        LLM("smollm2", kernels=kernels)


def test_both_kernels_give_the_same_greedy_tokens(llm: LLM, prompts: list[list[int]]) -> None:
    chosen = sorted(prompts, key=len)[:6]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM("smollm2", kernels="torch", kv_cache_memory="64MiB", max_model_len=1024) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(chosen, params)]
    assert [output.outputs[0].token_ids for output in llm.generate(chosen, params)] == expected
