"""What both kinds of completion share: from a request's body to its answer, whole or in chunks."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from starlette.datastructures import Headers

from pagetable.engine import SamplingParams
from pagetable.serving.front import Front, Job
from pagetable.serving.messages import Delta
from pagetable.serving.record import RequestRecord
from pagetable.serving.responses import event
from pagetable.serving.schema import GenerationRequest, Usage
from pagetable.serving.session_hints import cache_hints

Body = TypeVar("Body", bound=GenerationRequest)
Choice = dict[str, Any]
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Generation(ABC, Generic[Body]):
    """One request. Either `whole` or `chunks` is called, once."""

    ENDPOINT: ClassVar[str]
    ID_PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]  # what a whole answer calls itself
    CHUNK_OBJECT: ClassVar[str]
    PARAM: ClassVar[str]  # the field with the prompts

    def __init__(self, front: Front, body: Body, cache_salt: str | None, headers: Headers) -> None:
        self._front = front
        self._body = body
        self._cache_salt = cache_salt
        self._headers = headers
        self._arrival_time = time.monotonic()
        self._id = f"{self.ID_PREFIX}-{uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """The body of the answer."""
        job = await self._checked_job()
        choices = [self._empty_choice(index) for index in range(job.record.num_answers)]
        async with aclosing(self._front.answer(job)) as news:
            async for deltas in news:
                for part in self._parts(job, deltas):
                    self._add(choices[part["index"]], part)
        return {**self._envelope(job, self.OBJECT), "choices": choices, "usage": self._usage(job)}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, the last but one of the stream."""
        job = await self._checked_job()
        options = self._body.stream_options
        asked, continuous = (options.include_usage, options.continuous_usage_stats) if options else (False, False)
        envelope = self._envelope(job, self.CHUNK_OBJECT) | ({"usage": None} if asked or continuous else {})
        async with aclosing(self._front.answer(job)) as news:
            async for deltas in news:
                if continuous:
                    envelope["usage"] = self._usage(job)
                for part in self._parts(job, deltas):
                    yield event({**envelope, "choices": [part]})
        if asked:
            yield event({**envelope, "choices": [], "usage": self._usage(job)})

    async def _checked_job(self) -> Job:
        try:
            return await self._job()
        except Exception as error:
            self._front.note_refusal(self.ENDPOINT, error)
            raise

    async def _job(self) -> Job:
        front, body = self._front, self._body
        model = front.served_model(body.model)
        hints = cache_hints(body, self._headers)
        prompts, params, texts = await self._read()
        record = RequestRecord(
            request_id=self._id,
            endpoint=self.ENDPOINT,
            model=model,
            num_prompt_tokens=sum(map(len, prompts)),
            n=params.n,
            num_answers=len(prompts) * params.n,
            max_tokens=params.max_tokens,
            streamed=bool(body.stream),
            arrival_time=self._arrival_time,
            client_request_id=client_request_id(self._headers),
            trace_headers=self._front.trace_headers(self._headers),
        )
        return Job(record, prompts, params, self._cache_salt, body.priority, hints, texts, self.PARAM)

    def _envelope(self, job: Job, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": job.record.model}

    def _usage(self, job: Job) -> Usage:
        return job.usage()

    @abstractmethod
    async def _read(self) -> tuple[list[list[int]], SamplingParams, Sequence[Any]]:
        """Of the body: token ids of each prompt, how to go on from them, and the prompts as they were given."""

    @abstractmethod
    def _parts(self, job: Job, deltas: Sequence[Delta]) -> list[Choice]:
        """What these deltas add, as the `choices` of chunks."""

    @abstractmethod
    def _empty_choice(self, index: int) -> Choice:
        """An answer of which nothing is there yet."""

    @abstractmethod
    def _add(self, choice: Choice, part: Choice) -> None:
        """Add what a chunk would hold to a whole answer."""


def client_request_id(headers: Headers) -> str | None:
    """The client's own name for a request; None for none, or one that is not fit for a log or a header."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else None


def finish_reason(delta: Delta) -> str | None:
    """In the words of the OpenAI API."""
    return "length" if delta.finish_reason == "cache_full" else delta.finish_reason
