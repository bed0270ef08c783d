"""Log-probabilities of prompts and stop texts in the output, with the real model, as people call them."""

import pytest
import torch

from pagetable import LLM, SamplingParams
from pagetable.text import resolve_model

ASK = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)


def values_of(output) -> list[dict[int, float] | None]:
    first, *others = output.prompt_logprobs
    return [first, *({token_id: found.logprob for token_id, found in entry.items()} for entry in others)]


@pytest.mark.filterwarnings("ignore")  # of transformers' own
def test_equal_to_transformers(whole: LLM, prompts: list[list[int]]):
    from transformers import AutoModelForCausalLM

    path = resolve_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    some = sorted(prompts, key=len)[:3]
    for output in whole.generate(some, ASK):
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([output.prompt_token_ids])).logits[0], dim=-1)
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(output.prompt_token_ids) - 1
        for token_id, entry, row in zip(output.prompt_token_ids[1:], others, logprobs, strict=False):
            assert next(iter(entry)) == token_id
            assert set(entry) - {token_id} <= set(row.topk(3).indices.tolist())
            for other, found in entry.items():
                assert found.logprob == pytest.approx(row[other].item(), abs=1e-4)
                assert found.decoded_token == whole.tokenizer.token_text(other)


def test_a_warm_cache_and_other_chunks_give_the_same_bits(whole: LLM, prompts: list[list[int]]):
    prompt = max(prompts, key=len)
    whole.reset_prefix_cache()
    (cold,) = whole.generate([prompt], ASK)
    warm, other = whole.generate([prompt, prompts[0]], [ASK, SamplingParams(temperature=0, max_tokens=4)])
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 0)
    assert values_of(warm) == values_of(cold)
    assert other.prompt_logprobs is None
    with LLM("smollm2", kv_cache_memory="128MiB", max_model_len=1024, max_num_batched_tokens=48) as chunked:
        assert values_of(chunked.generate([prompt], ASK)[0]) == values_of(cold)


def test_the_likeliest_come_with_their_ranks(whole: LLM):
    (output,) = whole.generate("The capital of France is Paris", ASK)
    for entry in output.prompt_logprobs[1:]:
        (own, *others) = entry.values()
        assert [found.rank for found in others] == ([1, 2] if own.rank > 2 else [3 - own.rank])
        assert all((found.logprob <= own.logprob) == (found.rank > own.rank) for found in others)
    assert output.prompt_logprobs[-1][whole.tokenizer.encode(" Paris")[0]].rank == 1


def test_the_first_token_has_none_and_n_answers_share_one_report(whole: LLM):
    (alone,) = whole.generate([[504]], ASK)
    assert alone.prompt_logprobs == [None]
    (output,) = whole.generate("The sky is", SamplingParams(n=3, seed=1, max_tokens=3, prompt_logprobs=0))
    assert [len(entry or ()) for entry in output.prompt_logprobs] == [0, 1, 1]
    assert len(output.outputs) == 3


def test_a_stream_has_them_from_the_first_token_on(whole: LLM):
    pieces = list(whole.stream("The sky is", ASK))
    assert [len(piece.prompt_logprobs) for piece in pieces] == [3] * len(pieces)


def test_stop_texts_and_end_tokens_are_part_of_the_text_if_asked_for(whole: LLM):
    prompt = "Count: one, two, three,"
    free = whole.generate(prompt, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    stop = free.text[4:9]
    params = SamplingParams(temperature=0, max_tokens=20, stop=stop, include_stop_str_in_output=True)
    answer = whole.generate(prompt, params)[0].outputs[0]
    assert answer.text == free.text[: free.text.index(stop)] + stop
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)

    end = free.token_ids[5]
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[end], include_stop_str_in_output=True)
    answer = whole.generate(prompt, params)[0].outputs[0]
    assert answer.stop_reason == end
    assert answer.text == whole.tokenizer.decode(answer.token_ids)
