"""How a request wants its tokens drawn and when it wants to end. Names and meaning as in vLLM."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pagetable.engine.errors import RequestError

MAX_LOGPROBS = 20  # alternatives a token, as the OpenAI API allows
MAX_N = 1024  # answers to one prompt
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = 3.4e38


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; checked when they are made, RequestError names the field.

    The last group exists so that a script written for vLLM runs: those fields are accepted at the value that means
    "off" and refused otherwise, because a parameter that is taken and ignored is a wrong answer.
    """

    n: int = 1  # answers to one prompt; they share its full blocks
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the likeliest tokens that together have this probability
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this share as likely as the likeliest
    seed: int | None = None  # the same seed gives the same answer, whatever else runs
    max_tokens: int | None = 16  # output tokens; None: up to the model's length
    min_tokens: int = 0  # no end token before this many
    stop: str | SequenceABC[str] | None = None  # texts that end the answer
    stop_token_ids: SequenceABC[int] | None = None  # tokens that end the answer and are its last token
    ignore_eos: bool = False  # go on past the model's end tokens
    logprobs: int | None = None  # alternatives to report at each token; 0 only the drawn one
    prompt_logprobs: int | None = None  # alternatives to report at each prompt token; 0 only the prompt's own
    skip_special_tokens: bool = True  # in the text
    include_stop_str_in_output: bool = False  # what ends the answer, a stop text or token, is part of its text

    # From here on: accepted when off, refused otherwise (_refuse_unsupported).
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: SequenceABC[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: SequenceABC[int] | None = None
    logits_processors: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    extra_args: dict[str, Any] | None = None
    best_of: int | None = None
    guided_decoding: Any = None

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        _number(self, "temperature", 0, MAX_FLOAT32)
        _number(self, "top_p", 0, 1, low_allowed=False)
        _number(self, "min_p", 0, 1)
        _integer(self, "n", 1, MAX_N)
        _integer(self, "top_k", -1, MAX_INT32)
        _integer(self, "min_tokens", 0)
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", "min_tokens"
                )
        if self.seed is not None:
            _integer(self, "seed", -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(self, name, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}: it must be True or False", name)
        self._normalise_stops()

    def _refuse_unsupported(self) -> None:
        first = [field.name for field in fields(self)].index("presence_penalty")
        for field in fields(self)[first:]:
            value = getattr(self, field.name)
            if value != field.default and not (value in ([], {}, ()) and field.default is None):
                raise RequestError(
                    f"{field.name}={str(value)[:80]} is not supported yet; leave it at {field.default!r}", field.name
                )

    def _normalise_stops(self) -> None:
        """`stop` and `stop_token_ids` become tuples."""
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop)
        if stop is None or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop={self.stop!r}: it must be a text or a list of texts, none of them empty", "stop")
        token_ids = _as_tuple(self.stop_token_ids)
        if token_ids is None or not all(is_integer(token_id) and 0 <= token_id <= MAX_INT32 for token_id in token_ids):
            raise RequestError(
                f"stop_token_ids={self.stop_token_ids!r}: it must be a list of token ids", "stop_token_ids"
            )
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(int(token_id) for token_id in token_ids))


def _number(params: SamplingParams, name: str, low: float, high: float, *, low_allowed: bool = True) -> None:
    """Check a field and make it a plain float."""
    value: Any = getattr(params, name)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
    if not is_number or not low <= value <= high or (value == low and not low_allowed):
        bounds = f"{'at least' if low_allowed else 'more than'} {low:g}, at most {high:g}"
        raise RequestError(f"{name}={value!r}: it must be a number, {bounds}", name)
    object.__setattr__(params, name, float(value))


def _integer(params: SamplingParams, name: str, low: int, high: int | None = None) -> None:
    """Check a field and make it a plain int."""
    value: Any = getattr(params, name)
    if not is_integer(value) or value < low or (high is not None and value > high):
        bounds = f"from {low} up" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name}={value!r}: it must be a whole number {bounds}", name)
    object.__setattr__(params, name, int(value))


def is_integer(value: Any) -> bool:
    """Whether this is a whole number of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _as_tuple(value: Any) -> tuple[Any, ...] | None:
    """A list of any kind as a tuple, empty for None; None if it is no list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else None
