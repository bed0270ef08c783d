"""The official `openai` client against a real server: what people call, what comes back."""

import concurrent.futures

import openai
import pytest

from pagetable import LLM, SamplingParams

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a page table?"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 2048
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_chat_is_what_the_offline_api_answers(client: openai.OpenAI, tiny_llm: LLM):
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    (output,) = tiny_llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))
    assert answer.choices[0].message.content == output.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == output.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == len(output.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_in_every_chunk_on_request(client: openai.OpenAI):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **GREEDY))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_cached_tokens_are_always_told_and_grow_with_a_second_asking(client: openai.OpenAI):
    prompt = "A prompt that nobody has sent before, long enough for some blocks of sixteen tokens: " * 2
    first = client.completions.create(prompt=prompt, **GREEDY)
    second = client.completions.create(prompt=prompt, **GREEDY)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    assert second.choices[0].text == first.choices[0].text


def test_n_answers_have_indices_of_their_own(client: openai.OpenAI):
    settings = {"model": "tiny", "temperature": 1.0, "seed": 3, "max_tokens": 8, "n": 3}
    answer = client.chat.completions.create(messages=MESSAGES, **settings)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **settings):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_many_prompts_in_every_form(client: openai.OpenAI, tiny_llm: LLM):
    texts = ["def f(x):", "The quick brown fox", "x"]
    tokens = [tiny_llm.tokenizer.encode(text) for text in texts]
    by_text = client.completions.create(prompt=texts, **GREEDY)
    by_tokens = client.completions.create(prompt=tokens, **GREEDY)
    one = [client.completions.create(prompt=prompt, **GREEDY).choices[0].text for prompt in (*texts, *tokens)]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_tokens.choices] == one[:3]
    assert one[:3] == one[3:]
    assert by_text.usage.prompt_tokens == sum(map(len, tokens))


def test_prompts_with_n_answers_each(client: openai.OpenAI):
    settings = {"model": "tiny", "temperature": 1.0, "seed": 3, "max_tokens": 6, "n": 2}
    answer = client.completions.create(prompt=["one", "two"], **settings)
    texts = [""] * 4
    for chunk in client.completions.create(prompt=["one", "two"], stream=True, **settings):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in answer.choices]


def test_stop_texts(client: openai.OpenAI):
    free = client.completions.create(prompt="def f(x):", **GREEDY).choices[0].text
    stop = free[3:6]
    answer = client.completions.create(prompt="def f(x):", stop=[stop], **GREEDY).choices[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (free[: free.index(stop)], "stop", stop)
    kept = client.completions.create(
        prompt="def f(x):", stop=stop, extra_body={"include_stop_str_in_output": True}, **GREEDY
    )
    assert kept.choices[0].text == free[: free.index(stop) + len(stop)]


def test_a_seed_gives_the_same_answer(client: openai.OpenAI):
    settings = {"model": "tiny", "prompt": "once", "max_tokens": 10, "temperature": 1.0}
    seeded = {client.completions.create(seed=7, **settings).choices[0].text for _ in range(3)}
    free = {client.completions.create(**settings).choices[0].text for _ in range(3)}
    assert len(seeded) == 1
    assert len(free) > 1


def test_logprobs_of_a_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.bytes == list(entry.token.encode())
    streamed = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY)
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [e.logprob for p in pieces if p for e in p.content] == [entry.logprob for entry in entries]


def test_echo_with_logprobs_covers_the_prompt(client: openai.OpenAI):
    settings = {"model": "tiny", "prompt": "The quick brown fox", "temperature": 0, "logprobs": 2, "echo": True}
    answer = client.completions.create(max_tokens=3, **settings)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert choice.text.startswith("The quick brown fox")
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text[at : at + len(t)] for at, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
        logprobs.tokens
    )
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 3
    only_prompt = client.completions.create(max_tokens=0, **settings).choices[0]
    assert only_prompt.text == "The quick brown fox"
    assert only_prompt.logprobs.token_logprobs == logprobs.token_logprobs[:-3]
    streamed = list(client.completions.create(max_tokens=3, stream=True, **settings))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    assert [p for c in streamed if c.choices[0].logprobs for p in c.choices[0].logprobs.token_logprobs] == (
        logprobs.token_logprobs
    )


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_fields_without_a_meaning_are_accepted(client: openai.OpenAI, path: str):
    extras = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    if path == "chat":
        client.chat.completions.create(messages=MESSAGES, **GREEDY, **extras)
    else:
        client.completions.create(prompt="x", user="me", extra_body={"metadata": {"a": "b"}}, **GREEDY)


def test_vllm_extras(client: openai.OpenAI, tiny_llm: LLM):
    extras = {"ignore_eos": True, "min_tokens": 4, "top_k": 5, "min_p": 0.01, "priority": 0, "cache_salt": "me"}
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=5, extra_body=extras)
    assert answer.usage.completion_tokens == 5
    chat = {"add_generation_prompt": False, "chat_template_kwargs": {"unused": 1}}
    without = client.chat.completions.create(messages=MESSAGES, extra_body=chat, **GREEDY)
    assert without.usage.prompt_tokens < client.chat.completions.create(messages=MESSAGES, **GREEDY).usage.prompt_tokens


def test_parts_of_text_are_a_message(client: openai.OpenAI):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]}]
    whole = [{"role": "user", "content": "What is\nthis?"}]
    by_parts = client.chat.completions.create(messages=parts, **GREEDY)
    assert by_parts.choices[0].message == client.chat.completions.create(messages=whole, **GREEDY).choices[0].message
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(messages=[{"role": "user", "content": [{"type": "image_url"}]}], **GREEDY)


def test_errors_are_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.completions.create(model="tiny", prompt="x", top_p=5)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match=r"is 2048 tokens: the prompt has 3000,") as caught:
        client.completions.create(model="tiny", prompt=[5] * 3000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI, tiny_llm: LLM):
    prompts = [f"request number {i} says" for i in range(48)]
    expected = [o.outputs[0].text for o in tiny_llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))]

    def ask(prompt: str) -> str:
        stream = client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join(chunk.choices[0].text for chunk in stream)

    with concurrent.futures.ThreadPoolExecutor(48) as pool:
        assert list(pool.map(ask, prompts)) == expected


def test_the_request_id_is_the_clients_to_name(client: openai.OpenAI):
    raw = client.completions.with_raw_response.create(prompt="x", extra_headers={"X-Request-Id": "abc-1"}, **GREEDY)
    assert raw.headers["x-request-id"] == "abc-1"
    assert client.completions.create(prompt="x", **GREEDY)._request_id
