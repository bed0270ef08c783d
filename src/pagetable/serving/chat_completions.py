"""POST /v1/chat/completions: a conversation, written out by the model's chat template, and its next message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from pagetable.serving.completions import finish_reason
from pagetable.serving.errors import ApiError
from pagetable.serving.front import Front, Job
from pagetable.serving.logprobs import chat_logprobs
from pagetable.serving.messages import Delta
from pagetable.serving.record import RequestRecord
from pagetable.serving.responses import event
from pagetable.serving.sampling import chat_params
from pagetable.serving.schema import ChatChoice, ChatCompletion, ChatCompletionRequest, ChatLogprobs, Message

ENDPOINT = "/v1/chat/completions"
_OURS = {"messages", "tools", "add_generation_prompt", "chat_template"}  # a body's variables do not replace these


class ChatAnswer:
    """One chat request, from its body to what goes back."""

    def __init__(
        self,
        front: Front,
        body: ChatCompletionRequest,
        cache_salt: str | None,
        trace_headers: dict[str, str] | None = None,
    ) -> None:
        self._front = front
        self._body = body
        self._cache_salt = cache_salt
        self._trace_headers = trace_headers
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> ChatCompletion:
        """All at once."""
        job = await self._job()
        choices = [self._empty_choice(index) for index in range(job.params.n)]
        async with aclosing(self._front.answer(job)) as news:
            async for deltas in news:
                for delta in deltas:
                    self._add(choices[delta.index], delta)
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": job.record.model,
            "choices": choices,
            "usage": job.usage(),
        }

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """As server-sent events. The first of each answer names the role."""
        job = await self._job()
        options = self._body.stream_options
        asked, continuous = options is not None and options.include_usage, options and options.continuous_usage_stats
        envelope: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": job.record.model,
            **({"usage": None} if asked else {}),
        }
        begun: set[int] = set()
        async with aclosing(self._front.answer(job)) as news:
            async for deltas in news:
                for delta in deltas:
                    if delta.index not in begun:
                        begun.add(delta.index)
                        yield event({**envelope, "choices": [_first_chunk(delta.index)]})
                    if not (delta.text or delta.logprobs or delta.finish_reason):
                        continue
                    if continuous:
                        envelope["usage"] = job.usage()
                    yield event({**envelope, "choices": [self._chunk(delta)]})
        if asked:
            yield event({**envelope, "choices": [], "usage": job.usage()})

    # ---------------------------------------------------------------- in

    async def _job(self) -> Job:
        front, body = self._front, self._body
        model = front.served_model(body.model)
        params = chat_params(body, front.settings)
        text, tokens = await conversation_tokens(
            front, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
        record = RequestRecord(self._id, ENDPOINT, model, len(tokens), params.n, params.max_tokens, bool(body.stream))
        record.trace_headers = self._trace_headers
        return Job(record, [tokens], params, self._cache_salt, body.priority, [text], param="messages")

    # ---------------------------------------------------------------- out

    def _add(self, choice: ChatChoice, delta: Delta) -> None:
        choice["message"]["content"] += delta.text
        choice["finish_reason"], choice["stop_reason"] = finish_reason(delta), delta.stop_reason
        if choice["logprobs"] is not None:
            choice["logprobs"]["content"] += chat_logprobs(delta.logprobs or [], self._body.top_logprobs or 0)

    def _chunk(self, delta: Delta) -> dict[str, Any]:
        logprobs: ChatLogprobs | None = None
        if delta.logprobs:
            logprobs = {"content": chat_logprobs(delta.logprobs, self._body.top_logprobs or 0)}
        return {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": logprobs,
            "finish_reason": finish_reason(delta),
            "stop_reason": delta.stop_reason,
        }

    def _empty_choice(self, index: int) -> ChatChoice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": {"content": []} if self._body.logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
        }


def _first_chunk(index: int) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


async def conversation_tokens(
    front: Front, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> tuple[str, list[int]]:
    """A conversation as the model's chat template writes it, and its tokens."""
    taken = _OURS & (variables or {}).keys()
    if taken:
        names = ", ".join(sorted(taken))
        raise ApiError(400, f"chat_template_kwargs may not set {names}", param="chat_template_kwargs")
    text = await front.render(
        [message.model_dump() for message in messages],
        add_generation_prompt=add_generation_prompt,
        **(variables or {}),
    )
    # A template writes every special token it wants, the begin token too.
    return text, await front.encode(text, param="messages", add_special_tokens=False)
