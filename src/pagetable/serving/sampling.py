"""From a request's body to `SamplingParams`: defaults, limits, and a clear no to what is not supported."""

from __future__ import annotations

from typing import Any

from pagetable.engine import SamplingParams
from pagetable.serving.errors import ApiError
from pagetable.serving.schema import ChatCompletionRequest, CompletionRequest
from pagetable.serving.settings import ServerSettings

# Taken over under the same name; None means the engine's default.
_COMMON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


def completion_params(body: CompletionRequest, settings: ServerSettings, num_prompts: int) -> SamplingParams:
    """How to answer a completion request. RequestError or ApiError names the field at fault."""
    _check_limits(body, settings, num_prompts)
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, f"best_of={body.best_of} is not supported; leave it out, or give n", param="best_of")
    if body.suffix:
        raise ApiError(400, "suffix is not supported; leave it out", param="suffix")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0: it must be at least 1, unless echo is true", param="max_tokens")
    return SamplingParams(
        **_common(body),
        max_tokens=body.max_tokens or (1 if body.max_tokens == 0 else None),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(body: ChatCompletionRequest, settings: ServerSettings) -> SamplingParams:
    """How to answer a chat request. RequestError or ApiError names the field at fault."""
    _check_limits(body, settings, 1)
    if body.tools:
        raise ApiError(400, "tools are not supported; leave them out", param="tools")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return SamplingParams(
        **_common(body),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _common(body: CompletionRequest | ChatCompletionRequest) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in _COMMON}
    return {name: value for name, value in given.items() if value is not None}


def _check_limits(body: CompletionRequest | ChatCompletionRequest, settings: ServerSettings, num_prompts: int) -> None:
    n = body.n or 1
    if n > settings.max_n:
        raise ApiError(400, f"n={n}: this server allows 1 to {settings.max_n}", param="n")
    if num_prompts * n > settings.max_queued_requests:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n={n} ask for {num_prompts * n} answers; "
            f"this server allows {settings.max_queued_requests} a request",
            param="prompt",
        )
    if body.priority and settings.scheduling_policy != "priority":
        raise ApiError(
            400,
            f"priority={body.priority}: this server answers in the order of arrival (--scheduling-policy fcfs)",
            param="priority",
        )
    num_stops = len(body.stop) if isinstance(body.stop, list) else 0
    if num_stops > settings.max_stop:
        raise ApiError(400, f"stop has {num_stops} texts; this server allows {settings.max_stop}", param="stop")
    asked = body.logprobs if isinstance(body, CompletionRequest) else body.top_logprobs
    if (asked or 0) > settings.max_logprobs:
        name = "logprobs" if isinstance(body, CompletionRequest) else "top_logprobs"
        raise ApiError(400, f"{name}={asked}: this server allows 0 to {settings.max_logprobs}", param=name)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is allowed together with stream only", param="stream_options")
