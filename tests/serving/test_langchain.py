"""LangChain's client for OpenAI's API: chat, stream, batch, log-probabilities, errors."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.serving.running import RunningServer
from tests.serving.test_openai_client import GREEDY, MESSAGES

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.exceptions import ContextOverflowError  # noqa: E402

TURNS = [(message["role"], message["content"]) for message in MESSAGES]
Chat = Callable[..., Any]


@pytest.fixture
def chat(server: RunningServer) -> Chat:
    def made(**options: Any) -> Any:
        return langchain_openai.ChatOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, **(GREEDY | options)
        )

    return made


@pytest.fixture
def expected(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)


def test_a_chat(chat: Chat, expected: Any):
    answer = chat().invoke(TURNS)
    assert answer.content == expected.choices[0].message.content
    assert answer.response_metadata["finish_reason"] == expected.choices[0].finish_reason
    usage = answer.usage_metadata
    assert (usage["input_tokens"], usage["output_tokens"]) == (expected.usage.prompt_tokens, 12)
    assert usage["input_token_details"]["cache_read"] >= 16


def test_a_stream_adds_up(chat: Chat, expected: Any):
    chunks = list(chat(stream_usage=True).stream(TURNS))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 2
    assert whole.content == expected.choices[0].message.content
    assert whole.response_metadata["finish_reason"] == expected.choices[0].finish_reason
    assert whole.usage_metadata["output_tokens"] == 12


def test_log_probabilities(chat: Chat, expected: Any):
    answer = chat(logprobs=True, top_logprobs=2).invoke(TURNS)
    found = [entry["logprob"] for entry in answer.response_metadata["logprobs"]["content"]]
    assert found == [entry.logprob for entry in expected.choices[0].logprobs.content]


def test_many_at_once(chat: Chat):
    questions = [f"What is {i} + {i}?" for i in range(12)]
    one_by_one = [chat().invoke(question).content for question in questions]
    assert [answer.content for answer in chat().batch(questions)] == one_by_one

    async def together() -> list[Any]:
        return await asyncio.gather(*(chat().ainvoke(question) for question in questions))

    assert [answer.content for answer in asyncio.run(together())] == one_by_one


def test_a_stream_left_early_is_aborted(chat: Chat, server: RunningServer):
    aborts = server.metric("vllm:request_success_total", finished_reason="abort")
    stream = chat(max_tokens=1900, extra_body={"ignore_eos": True}).stream(TURNS)
    next(stream)
    next(stream)
    stream.close()
    server.wait_until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborts + 1


def test_a_plain_completion(server: RunningServer, client: openai.OpenAI):
    llm = langchain_openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **GREEDY)
    assert llm.invoke("def f(x):") == client.completions.create(prompt="def f(x):", **GREEDY).choices[0].text
    assert "".join(llm.stream("def f(x):")) == llm.invoke("def f(x):")


def test_a_prompt_that_is_too_long_is_known_as_such(chat: Chat):
    with pytest.raises(ContextOverflowError, match="this model's maximum context length is 2048 tokens"):
        chat().invoke("on and on " * 1000)


def test_what_is_not_supported_is_refused_by_name(chat: Chat):
    with pytest.raises(openai.BadRequestError, match="tools are not supported") as caught:
        chat().bind_tools([{"name": "f", "description": "", "parameters": {"type": "object"}}]).invoke(TURNS)
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat().with_structured_output({"title": "x", "type": "object"}, method="json_mode").invoke(TURNS)
