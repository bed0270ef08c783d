"""What a request gives back. Names as in vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability, before temperature and filters."""

    logprob: float
    rank: int  # place in the vocabulary by probability, from 1
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int  # 0 to n - 1
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of the drawn tokens, when `logprobs` was asked for
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a token
    finish_reason: str | None = None  # None while it runs; stop, length, abort, cache_full or error
    stop_reason: int | str | None = None  # the stop token or text; None for the model's own end
    new_text: str = ""  # while streaming: what this output adds to the one before
    error: str | None = None  # what went wrong, when the finish reason is `error`
    seq_id: int | None = None  # its sequence, as events name it

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Monotonic times in seconds, comparable with each other only."""

    arrival_time: float
    first_scheduled_time: float | None = None  # when the first step that computed some of it began
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one a prompt token, the first None; or not asked
    num_cached_tokens: int | None = None  # prompt tokens found in the cache at admission; None before it
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
