"""What the HTTP front and the engine process tell each other: typed records, msgpack on the wire.

Both ends check types when they decode, and nothing but plain data can be expressed. All times are monotonic seconds,
which on one machine are the same clock in both processes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagetable.engine import SamplingParams, StepStats
from pagetable.memory import CacheHints, CacheStats
from pagetable.memory.hints import NO_HINTS
from pagetable.serving.kv_events import KVEventsConfig


class EngineConfig(msgspec.Struct):
    """All that the front tells an engine process before it starts."""

    arguments: dict[str, Any]  # of LLM
    log_level: str = "info"
    log_format: str = "text"
    kv_events: KVEventsConfig | None = None
    inbox: str = ""  # ZeroMQ addresses, which the client fills in
    outbox: str = ""


IDLE_REPORT_SECONDS = 1.0  # an engine with nothing to do says so this often


class Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Common to all: on the wire an array whose first item says which one it is."""


# -------------------------------------------------------------------- to the engine


class Submit(Message):
    """Answer these prompts, all or none. Answer i of prompt p has the index p * n + i."""

    request_id: str
    prompts: list[bytes]  # token ids, int32, little-endian
    params: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    cache_hints: CacheHints = NO_HINTS  # the same for all prompts and answers


class Abort(Message):
    """Nobody waits for this any more."""

    request_id: str


class ResetPrefixCache(Message):
    """Forget every cached prefix, and say `Done` with the same id."""

    call_id: int


class EndSession(Message):
    """Nothing will follow in this session. Say `Done` with the same id, and how many blocks are its own."""

    call_id: int
    session_id: str
    cache_salt: str | None = None


class Shutdown(Message):
    """End now."""


ToEngine = Submit | Abort | ResetPrefixCache | EndSession | Shutdown

# -------------------------------------------------------------------- to the front


class Ready(Message):
    """The model is loaded; requests are welcome."""

    description: str  # one line for people
    num_blocks: int
    block_size: int  # tokens
    max_model_len: int
    max_num_seqs: int


class Failed(Message):
    """The model cannot be loaded. The process ends after this."""

    reason: str


class Done(Message):
    """A call was carried out."""

    call_id: int
    num_blocks: int = 0  # of the session that `EndSession` ended


class Refused(Message):
    """A request that cannot be served. Nothing of it was queued."""

    request_id: str
    reason: str
    param: str | None = None
    is_our_fault: bool = False


class TokenChoice(msgspec.Struct, array_like=True, gc=False):
    """A token that was or could have been: natural log of its probability, its place in the vocabulary from 1."""

    token_id: int
    logprob: float
    rank: int
    text: str


TokenChoices = list[TokenChoice]  # at one position: the token that is there first, then the likeliest


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What one answer of a request has gained in a step."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenChoices] | None = None  # one a token
    finish_reason: str | None = None  # stop, length, abort, cache_full or error
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    prompt_logprobs: list[TokenChoices | None] | None = None  # with an answer's first delta, if asked for


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """The engine as of now."""

    num_running: int
    num_waiting: int
    cache: CacheStats


class Report(Message):
    """One a step, for all streams together; once a second when there is nothing to do."""

    stats: EngineStats
    deltas: list[Delta] = []
    refused: list[Refused] = []
    step: StepStats | None = None
    step_seconds: float = 0.0  # of the whole step, with text and bookkeeping


ToFront = Ready | Failed | Done | Report
