"""POST /v1/completions: prompts as text or tokens, one or many, in any of the ways the OpenAI API takes them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from pagetable.serving.errors import ApiError
from pagetable.serving.front import Front, Job
from pagetable.serving.logprobs import completion_logprobs
from pagetable.serving.messages import Delta, TokenChoices
from pagetable.serving.record import RequestRecord
from pagetable.serving.responses import event
from pagetable.serving.sampling import completion_params
from pagetable.serving.schema import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage

ENDPOINT = "/v1/completions"


class CompletionAnswer:
    """One completion request, from its body to what goes back."""

    def __init__(
        self, front: Front, body: CompletionRequest, cache_salt: str | None, trace_headers: dict[str, str] | None = None
    ) -> None:
        self._front = front
        self._body = body
        self._cache_salt = cache_salt
        self._trace_headers = trace_headers
        self._id = f"cmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._echoes: list[str] = []  # the prompts' texts, if they are to be repeated
        self._offsets: dict[int, int] = {}  # characters so far, by answer

    async def whole(self) -> Completion:
        """All at once."""
        job = await self._job()
        choices = [self._empty_choice(index) for index in range(len(job.prompts) * job.params.n)]
        async with aclosing(self._choices(job)) as parts:
            async for part in parts:
                _add(choices[part["index"]], part)
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": job.record.model,
            "choices": choices,
            "usage": self._usage(job),
        }

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """As server-sent events."""
        job = await self._job()
        options = self._body.stream_options
        asked, continuous = options is not None and options.include_usage, options and options.continuous_usage_stats
        envelope: dict[str, Any] = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": job.record.model,
            **({"usage": None} if asked else {}),
        }
        async with aclosing(self._choices(job)) as parts:
            async for part in parts:
                if continuous:
                    envelope["usage"] = self._usage(job)
                yield event({**envelope, "choices": [part]})
        if asked:
            yield event({**envelope, "choices": [], "usage": self._usage(job)})

    # ---------------------------------------------------------------- in

    async def _job(self) -> Job:
        front, body = self._front, self._body
        model = front.served_model(body.model)
        given = _as_prompts(body.prompt)
        params = completion_params(body, front.settings, len(given))
        prompts = [await self._tokens(prompt) for prompt in given]
        if body.echo:
            self._echoes = [
                prompt if isinstance(prompt, str) else await front.in_thread(front.tokenizer.decode, prompt, False)
                for prompt in given
            ]
        record = RequestRecord(
            self._id, ENDPOINT, model, sum(map(len, prompts)), params.n, params.max_tokens, bool(body.stream)
        )
        record.trace_headers = self._trace_headers
        texts = [prompt if isinstance(prompt, str) else repr(prompt) for prompt in given]
        return Job(record, prompts, params, self._cache_salt, body.priority, texts)

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        add = self._body.add_special_tokens
        return await self._front.encode(prompt, param="prompt", add_special_tokens=add)

    # ---------------------------------------------------------------- out

    async def _choices(self, job: Job) -> AsyncGenerator[CompletionChoice, None]:
        """What the answers gain, one after the other."""
        async with aclosing(self._front.answer(job)) as news:
            async for deltas in news:
                for delta in deltas:
                    choice = self._choice(job, delta)
                    if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                        yield choice

    def _choice(self, job: Job, delta: Delta) -> CompletionChoice:
        """What one delta adds; before an answer's first comes the prompt, if it is to be repeated."""
        echo = bool(self._body.echo) and delta.index not in self._offsets
        text, choices, reason = delta.text, delta.logprobs, finish_reason(delta)
        if self._body.max_tokens == 0:  # the one token was drawn for nothing
            text, choices, reason = "", [], reason and "length"
        before: list[TokenChoices | None] = []
        if echo:
            text = self._echoes[delta.index // job.params.n] + text
            before = delta.prompt_logprobs or []
        offset = self._offsets.get(delta.index, 0)
        self._offsets[delta.index] = offset + len(text)
        return {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(job, delta, [*before, *(choices or [])], offset),
            "finish_reason": reason,
            "stop_reason": delta.stop_reason if reason == "stop" else None,
        }

    def _usage(self, job: Job) -> Usage:
        usage = job.usage()
        if self._body.max_tokens == 0:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _logprobs(
        self, job: Job, delta: Delta, choices: Sequence[TokenChoices | None], offset: int
    ) -> CompletionLogprobs | None:
        if job.params.logprobs is None or not choices:
            return None
        tokenizer, first = self._front.tokenizer, job.prompts[delta.index // job.params.n][0]
        text = tokenizer.token_text(first) if choices[0] is None and first in tokenizer else ""
        return completion_logprobs(choices, job.params.logprobs, offset, text)

    def _empty_choice(self, index: int) -> CompletionChoice:
        none: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        return {
            "index": index,
            "text": "",
            "logprobs": None if self._body.logprobs is None else none,
            "finish_reason": None,
            "stop_reason": None,
        }


def finish_reason(delta: Delta) -> str | None:
    """In the words of the OpenAI API."""
    return "length" if delta.finish_reason == "cache_full" else delta.finish_reason


def _as_prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or many, as a list of them."""
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
    if not prompts:
        raise ApiError(400, "prompt is an empty list; at least one prompt is needed", param="prompt")
    return prompts


def _add(choice: CompletionChoice, part: CompletionChoice) -> None:
    choice["text"] += part["text"]
    choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
    if part["logprobs"] is not None and choice["logprobs"] is not None:
        for name, values in part["logprobs"].items():
            choice["logprobs"][name].extend(values)  # type: ignore[literal-required]
