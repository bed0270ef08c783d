"""What is known of one HTTP request: written while it is answered, read by metrics, logs and traces when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Counts and monotonic times in seconds of one request, all its prompts and answers together."""

    request_id: str
    endpoint: str  # its path, such as /v1/completions
    model: str
    num_prompt_tokens: int
    n: int = 1  # answers to each prompt
    num_answers: int = 1  # to all prompts together
    max_tokens: int | None = None
    streamed: bool = False
    arrival_time: float = field(default_factory=time.monotonic)  # its body was read
    first_scheduled_time: float | None = None  # the first step that computed some of it began
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None  # of the answer that ended last; `error` when it was refused or the engine failed
    error: str | None = None
    client_request_id: str | None = None  # the client's own name for it, the header X-Request-Id
    trace_headers: dict[str, str] | None = None  # the client's trace context, if traces are kept
