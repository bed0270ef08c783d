"""POST /v1/completions: prompts as text or tokens, one or many, in any of the ways the OpenAI API takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagetable.engine import SamplingParams
from pagetable.serving.errors import ApiError
from pagetable.serving.front import Job
from pagetable.serving.generation import Choice, Generation, finish_reason
from pagetable.serving.logprobs import completion_logprobs
from pagetable.serving.messages import Delta, TokenChoices
from pagetable.serving.sampling import completion_params
from pagetable.serving.schema import CompletionChoice, CompletionLogprobs, CompletionRequest, Usage


class CompletionAnswer(Generation[CompletionRequest]):
    """One completion request, from its body to what goes back."""

    ENDPOINT = "/v1/completions"
    ID_PREFIX = "cmpl"
    OBJECT = CHUNK_OBJECT = "text_completion"
    PARAM = "prompt"

    async def _read(self) -> tuple[list[list[int]], SamplingParams, Sequence[Any]]:
        front, body = self._front, self._body
        given = _as_prompts(body.prompt)
        params = completion_params(body, front.settings, len(given))
        self._echoes: list[str] = []  # the prompts' texts, if they are to be repeated
        self._offsets: dict[int, int] = {}  # characters of the tokens so far, by answer
        prompts = [await self._tokens(prompt) for prompt in given]
        if body.echo:
            self._echoes = [
                prompt if isinstance(prompt, str) else await front.in_thread(front.tokenizer.decode, prompt, False)
                for prompt in given
            ]
        return prompts, params, given

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        add = self._body.add_special_tokens
        return await self._front.encode(prompt, param=self.PARAM, add_special_tokens=add)

    def _parts(self, job: Job, deltas: Sequence[Delta]) -> list[Choice]:
        choices = [dict(self._choice(job, delta)) for delta in deltas]
        return [choice for choice in choices if choice["text"] or choice["logprobs"] or choice["finish_reason"]]

    def _choice(self, job: Job, delta: Delta) -> CompletionChoice:
        """What one delta adds; before an answer's first comes the prompt, if it is to be repeated."""
        is_first = delta.index not in self._offsets
        text, choices, reason = delta.text, delta.logprobs, finish_reason(delta)
        if self._body.max_tokens == 0:  # the one token was drawn for nothing
            text, choices, reason = "", [], reason and "length"
        before: list[TokenChoices | None] = []
        if is_first and self._body.echo:
            text = self._echoes[delta.index // job.params.n] + text
            before = delta.prompt_logprobs or []
        offset = self._offsets.setdefault(delta.index, 0)
        logprobs = self._logprobs(job, delta, [*before, *(choices or [])], offset)
        if logprobs is not None:  # not by `text`, which may be held back for a stop string that does not come
            self._offsets[delta.index] += sum(map(len, logprobs["tokens"]))
        return {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason if reason == "stop" else None,
        }

    def _logprobs(
        self, job: Job, delta: Delta, choices: Sequence[TokenChoices | None], offset: int
    ) -> CompletionLogprobs | None:
        if job.params.logprobs is None or not choices:
            return None
        tokenizer, first = self._front.tokenizer, job.prompts[delta.index // job.params.n][0]
        text = tokenizer.token_text(first) if choices[0] is None and first in tokenizer else ""
        return completion_logprobs(choices, job.params.logprobs, offset, text)

    def _usage(self, job: Job) -> Usage:
        usage = job.usage()
        if self._body.max_tokens == 0:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _empty_choice(self, index: int) -> Choice:
        none: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        return {
            "index": index,
            "text": "",
            "logprobs": None if self._body.logprobs is None else none,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _add(self, choice: Choice, part: Choice) -> None:
        choice["text"] += part["text"]
        choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"][name] += values


def _as_prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or many, as a list of them."""
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
    if not prompts:
        raise ApiError(400, "prompt is an empty list; at least one prompt is needed", param="prompt")
    return prompts
