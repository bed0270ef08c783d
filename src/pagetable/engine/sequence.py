"""A sequence: the tokens of one answer in the making, and where its K and V lie."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from enum import StrEnum
from itertools import count
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pagetable.engine.errors import RequestError
from pagetable.engine.sampling_params import SamplingParams, is_integer
from pagetable.engine.step import TokenLogprobs
from pagetable.memory import CacheHints, check_block_size
from pagetable.memory.hints import NO_HINTS

MAX_TOKEN_ID = 2**31 - 1
_DEFAULT_PARAMS = SamplingParams()


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop text
    LENGTH = "length"  # `max_tokens`, or the longest the model allows
    ABORT = "abort"  # the caller gave up
    CACHE_FULL = "cache_full"  # it outgrew the whole pool; `length` on the OpenAI wire
    ERROR = "error"  # computing it failed twice


class TokenIds(SequenceABC[int]):
    """A list of token ids that is an int32 buffer inside: hashing, copying and comparing need no Python integers.

    Reads like a list; a slice is a view. Grows by `append`. NumPy takes it without a copy.
    """

    __slots__ = ("_buffer", "length")

    def __init__(self, token_ids: Any) -> None:
        self._buffer: NDArray[np.int32] = np.asarray(token_ids, dtype=np.int32)
        self.length = len(self._buffer)  # tokens in use, the buffer may be longer; read directly where it is hot

    def append(self, token_id: int) -> None:
        """Add one token; amortised O(1)."""
        if self.length == len(self._buffer):
            grown = np.empty(max(16, 2 * self.length), np.int32)
            grown[: self.length] = self._buffer
            self._buffer = grown
        self._buffer[self.length] = token_id
        self.length += 1

    def view(self, start: int, stop: int) -> NDArray[np.int32]:
        """The tokens from `start` to `stop` as an array that shares the buffer's memory; not to be written."""
        return self._buffer[start:stop]

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        item = self._buffer[: self.length][index]
        return TokenIds(item) if isinstance(index, slice) else int(item)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._buffer[: self.length], dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SequenceABC | np.ndarray) and not isinstance(other, str | bytes):
            return self.tolist() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return repr(self.tolist())

    def tolist(self) -> list[int]:
        """The tokens as a Python list."""
        tokens: list[int] = self._buffer[: self.length].tolist()
        return tokens


def checked_token_ids(token_ids: Iterable[int] | NDArray[Any]) -> NDArray[np.int32]:
    """A prompt's tokens as a fresh int32 array of shape (tokens,). RequestError unless all are integers from 0 up."""
    if isinstance(token_ids, str | bytes | bytearray):
        raise RequestError(f"token ids are expected, not text: {token_ids[:40]!r}")
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, set | frozenset | dict):
        raise RequestError(f"token ids must be a flat list of integers, not {token_ids!r}")
    given = token_ids if isinstance(token_ids, np.ndarray | list | tuple) else list(token_ids)
    try:
        tokens = np.asarray(given)
    except (ValueError, OverflowError):  # ragged
        tokens = np.empty(0, object)
    if tokens.ndim == 1 and len(given) == 0:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"token ids must be a flat list of integers, not {str(given)[:60]}")
    if tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID:
        wrong = tokens[(tokens < 0) | (tokens > MAX_TOKEN_ID)][0]
        raise RequestError(f"token id {wrong} is out of range: 0 to {MAX_TOKEN_ID} is allowed")
    return tokens.astype(np.int32)


class Sequence:
    """Tokens, progress and block table of one answer.

    What the scheduler and the block manager write is marked with whose it is; `len(seq)` is `num_tokens`. Raises
    RequestError for what are no token ids and for an empty salt.
    """

    _next_seq_id = count()

    def __init__(
        self,
        token_ids: Iterable[int] | NDArray[Any],
        sampling_params: SamplingParams | None = None,
        *,
        block_size: int = 16,
        cache_salt: str | None = None,
        priority: int = 0,
        cache_hints: CacheHints | None = None,
    ) -> None:
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt={cache_salt!r}: it must be a text that is not empty, or None")
        if not is_integer(priority):
            raise RequestError(f"priority={priority!r}: it must be a whole number; lower goes first")
        if cache_hints is not None and not isinstance(cache_hints, CacheHints):
            raise RequestError(f"cache_hints={cache_hints!r}: it must be CacheHints, or None")
        check_block_size(block_size)
        self.seq_id = next(Sequence._next_seq_id)
        self.sampling_params = sampling_params or _DEFAULT_PARAMS
        self.block_size = block_size
        self.cache_salt = cache_salt
        self.priority = priority  # lower goes first, under the `priority` policy
        self.cache_hints = NO_HINTS if cache_hints is None else cache_hints  # for the eviction policy
        self.token_ids = TokenIds(checked_token_ids(token_ids))  # prompt, then output
        self.num_prompt_tokens = len(self.token_ids)
        seed = self.sampling_params.seed
        self.seed = (random.getrandbits(64) if seed is None else seed) % 2**64
        self.logprobs: list[TokenLogprobs | None] = []  # one an output token, if asked for
        self.prompt_logprobs: list[TokenLogprobs | None] = []  # one a prompt token but the first, if asked for

        self.block_table: list[int] = []  # block manager
        self.num_cached_tokens = 0  # block manager at admission, then scheduler: tokens whose K/V is in the blocks
        self.num_scheduled_tokens = 0  # scheduler: tokens that the step in flight computes
        self.num_prefix_tokens: int | None = None  # scheduler: hit length at the first admission, kept for ever
        self.arrival = -1  # scheduler: rank among all requests
        self.num_failures = 0  # scheduler: steps that failed with this sequence in them
        self.finish_reason: FinishReason | None = None  # scheduler; or the text, when a stop string was the last of it
        self.stop_reason: int | str | None = None  # scheduler for a stop token, the text for a stop string
        self.prefix_chain: Any = None  # block manager: hashes of the full blocks

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and output."""
        return self.token_ids.length

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V is not in the blocks yet: 1 for a decode, more for a prefill."""
        return self.token_ids.length - self.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.token_ids.length - self.num_prompt_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are asked for and some are still to be computed."""
        asked = self.sampling_params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_blocks(self) -> int:
        """Blocks that the tokens so far fill or begin."""
        return -(-self.token_ids.length // self.block_size)

    def block(self, i: int) -> TokenIds:
        """The tokens of logical block i, fewer than `block_size` in the last. For readers: nothing here calls it."""
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    @property
    def is_finished(self) -> bool:
        """Whether it has a finish reason."""
        return self.finish_reason is not None

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.num_tokens} tokens, {self.num_cached_tokens} cached, "
            f"block_table={self.block_table}, finish_reason={self.finish_reason})"
        )
