"""The default model's greedy tokens are those of transformers in float32, however they are paged, chunked or preempted.

One forward pass of transformers over prompt and answer gives its choice after every prefix of the answer. If each is
our token, then by induction its own greedy decoding gives our answer.
"""

import pytest
import torch

from pagetable import LLM, SamplingParams
from pagetable.text import resolve_model

SHORT = 200  # tokens; shorter prompts get longer answers, so that they outgrow what they were admitted with


@pytest.fixture(scope="module")
def params(prompts: list[list[int]]) -> list[SamplingParams]:
    lengths = [96 if len(prompt) < SHORT else 16 + i for i, prompt in enumerate(prompts)]
    return [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.filterwarnings("ignore")  # of transformers' own
def test_equal_to_transformers(prompts: list[list[int]], answers: list[list[int]]):
    from transformers import AutoModelForCausalLM

    path = resolve_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
        assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize(
    "how",
    [{"block_size": 4}, {"max_num_batched_tokens": 64}, {"block_size": 256, "enable_prefix_caching": False}],
    ids=["blocks of 4", "chunks of 64", "blocks of 256, no cache"],
)
def test_equal_however_it_is_paged_and_chunked(how: dict, prompts, answers, params):
    with LLM("smollm2", kv_cache_memory="1GiB", **how) as other:
        outputs = other.generate(prompts, params)
        other.block_manager.check()
        assert [output.outputs[0].token_ids for output in outputs] == answers


@pytest.mark.filterwarnings("ignore:the KV cache holds")
def test_equal_in_a_pool_so_small_that_it_preempts(prompts, answers, params):
    with LLM("smollm2", kv_cache_memory=46_080 * 640, max_num_batched_tokens=128) as other:
        outputs = other.generate(prompts, params)
        other.block_manager.check()
        assert [output.outputs[0].token_ids for output in outputs] == answers
        assert other.stats().preemptions > 0
        assert other.stats().blocks_in_use == 0


def test_a_cached_prompt_gives_the_same_answer_as_a_cold_one(whole: LLM, prompts, answers, params):
    whole.reset_prefix_cache()
    for _ in range(2):
        outputs = whole.generate(prompts[:6], params[:6])
        assert [output.outputs[0].token_ids for output in outputs] == answers[:6]
    assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 17 for output in outputs)
