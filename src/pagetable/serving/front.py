"""What every endpoint needs: text to tokens off the event loop, requests to the engine, and a record of each."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers

from pagetable.engine import RequestError, SamplingParams
from pagetable.memory import CacheHints
from pagetable.serving.engine_client import EngineClient, EngineDeadError
from pagetable.serving.errors import ApiError, as_api_error
from pagetable.serving.logs import log_refusal, log_request
from pagetable.serving.messages import Delta, Ready
from pagetable.serving.metrics import ServerMetrics
from pagetable.serving.record import RequestRecord
from pagetable.serving.schema import Usage
from pagetable.serving.settings import ServerSettings
from pagetable.text import Tokenizer, render_chat

if TYPE_CHECKING:
    from pagetable.serving.tracing import Tracer  # needs packages that need not be there

logger = logging.getLogger(__name__)

TRACE_HEADERS = ("traceparent", "tracestate")
TEXT_THREADS = 2  # tokenizing releases the interpreter; more threads than that would take cores from the engine

Result = TypeVar("Result")


@dataclass(slots=True)
class Job:
    """What an endpoint has made of a request's body: tokens and how to go on from them."""

    record: RequestRecord
    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str | None
    priority: int
    cache_hints: CacheHints
    texts: Sequence[Any]  # the prompts as they were given, texts or token ids; for the log, if it may show them
    param: str  # the field that the prompts come from

    def usage(self) -> Usage:
        """Tokens of the whole request so far."""
        record = self.record
        return {
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_output_tokens,
            "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": record.num_cached_tokens},
        }


class Front:
    """The server's parts, put together: settings, tokenizer, engine, metrics."""

    def __init__(
        self,
        settings: ServerSettings,
        tokenizer: Tokenizer,
        engine: EngineClient,
        metrics: ServerMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.engine = engine
        self.metrics = metrics
        self.tracer = tracer
        self.model_names = settings.model_names()
        self.started = int(time.time())
        self._chat_template = settings.load_chat_template()
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    @property
    def ready(self) -> Ready:
        """The engine's facts. EngineDeadError while there is none."""
        if self.engine.ready is None:
            raise EngineDeadError
        return self.engine.ready

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def served_model(self, asked: str | None) -> str:
        """The name under which the answer goes out. ApiError 404 for a model that is not here."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            raise ApiError(
                404,
                f"the model {asked!r} does not exist here; there is {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return asked

    def trace_headers(self, headers: Headers) -> dict[str, str] | None:
        """The trace that a request is a part of (W3C), None if no traces are kept."""
        if self.tracer is None:
            return None
        return {name: ",".join(headers.getlist(name)) for name in TRACE_HEADERS if name in headers}

    # ---------------------------------------------------------------- text

    async def in_thread(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Run something that takes long beside the event loop."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def encode(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. ApiError for one that is no text, such as half a surrogate pair, or far too long."""
        # Twice as many, since a tokenizer may leave characters out. A text of megabytes would take seconds to refuse.
        most = 2 * self.tokenizer.longest_token * self.ready.max_model_len
        if len(text) > most:
            raise too_long(self.ready, f"the prompt has {len(text)} characters, more than {most}", param)
        try:
            return await self.in_thread(self.tokenizer.encode, text, add_special_tokens)
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param=param) from error

    async def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """A conversation as the text that the model was trained on. ChatTemplateError if it cannot be."""
        return await self.in_thread(render_chat, self.tokenizer, messages, chat_template=self._chat_template, **options)

    # ---------------------------------------------------------------- answers

    async def answer(self, job: Job) -> AsyncGenerator[list[Delta], None]:
        """The deltas of a request as they come. Left early, it is aborted; in any case it is recorded."""
        record = job.record
        last_told: dict[int, float] = {}
        stream = None
        try:
            self._check_length(job)
            stream = self.engine.submit(
                record.request_id,
                job.prompts,
                job.params,
                cache_salt=job.cache_salt,
                priority=job.priority,
                cache_hints=job.cache_hints,
            )
            async with aclosing(stream.deltas()) as news:
                async for deltas in news:
                    self._note(record, deltas, last_told)
                    yield deltas
        except RequestError as error:
            self._fail(record, str(error))
            error.param = error.param or job.param
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if record.finish_reason is None or (stream is not None and not stream.is_finished):
                record.finish_reason = "abort"
            raise
        except Exception as error:
            self._fail(record, str(error))
            raise
        finally:
            if stream is not None:
                self.engine.abort(stream)
            record.finished_time = time.monotonic()
            self.metrics.observe_request(record)
            if self.settings.log_requests:
                log_request(record, job.texts if self.settings.log_prompts else None)
            if self.tracer is not None:
                self.tracer.record(record, job.params)

    def _check_length(self, job: Job) -> None:
        """ApiError, with the numbers, for a prompt that can never be answered."""
        ready, longest = self.ready, max(map(len, job.prompts))
        cache_tokens = ready.num_blocks * ready.block_size
        if longest >= ready.max_model_len or longest > cache_tokens:
            raise too_long(ready, f"the prompt has {longest}, and the answer needs at least one", job.param)

    def _note(self, record: RequestRecord, deltas: list[Delta], last_told: dict[int, float]) -> None:
        """Write down what has come, and when. Raises for an answer that the engine could not finish."""
        now = time.monotonic()
        for delta in deltas:
            record.first_scheduled_time = record.first_scheduled_time or delta.first_scheduled_time
            if delta.token_ids:
                record.num_output_tokens += len(delta.token_ids)
                if delta.index in last_told:
                    self.metrics.observe_inter_token(now - last_told[delta.index], len(delta.token_ids))
                elif delta.index % record.n == 0:
                    record.num_cached_tokens += delta.num_cached_tokens
                last_told[delta.index] = now
                record.last_token_time = now
                if record.first_token_time is None:
                    record.first_token_time = now
                    self.metrics.observe_first_token(now - record.arrival_time)
            if delta.finish_reason is not None:
                record.finish_reason = delta.finish_reason
            if delta.finish_reason in ("error", "abort"):
                logger.error("request %s could not be computed: %s", record.request_id, delta.error or "it was ended")
                raise ApiError(500, "the engine could not go on with this request; the server's log has the details")

    def _fail(self, record: RequestRecord, reason: str) -> None:
        record.finish_reason, record.error = "error", reason

    def note_refusal(self, endpoint: str, error: Exception) -> None:
        """A line in the log for a request that does not get as far as `answer`."""
        if self.settings.log_requests:
            refused = as_api_error(error)
            log_refusal(endpoint, refused.status, str(refused))

    def refuse(self, error: Exception) -> ApiError:
        """What the client is told; what is our own fault goes to the log as well."""
        api_error = as_api_error(error)
        if api_error.status == 500:
            logger.error("a request failed: %s", error, exc_info=error)
        return api_error


def too_long(ready: Ready, why: str, param: str) -> ApiError:
    """What is said to a prompt that does not fit."""
    # Clients such as LiteLLM and LangChain know by the first words, not by the code, what is the matter.
    words = f"the prompt is too long, this model's maximum context length is {ready.max_model_len} tokens"
    cache_tokens = ready.num_blocks * ready.block_size
    cache = f" and the KV cache holds {cache_tokens}" if cache_tokens < ready.max_model_len else ""
    return ApiError(400, f"{words}{cache}: {why}", param=param, code="context_length_exceeded")
