"""The numbers' side of the engine: executes one `Step` after another and knows nothing else.

A runner owns the model's KV cache. It never sees a request or a queue; which slot holds what is the scheduler's
business, and a runner's only memory from step to step is the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagetable.engine.step import SamplingBatch, Step, StepOutput, TokenLogprobs
from pagetable.model.attention import AttentionBackend
from pagetable.model.config import ModelConfig
from pagetable.model.kv_cache import KVCache
from pagetable.model.sampler import LogitsError, sample, token_logprobs

_PROMPT_ROWS = 64  # prompt tokens whose scores over the vocabulary are in memory at once
_TORCH_THREADS = threading.Lock()


class Decoder(Protocol):
    """What a runner asks of a model."""

    config: ModelConfig
    batch_invariant: bool  # a token's logits are the same to the bit, whatever batch or chunk it is computed in

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, and of the K and V that the cache must hold."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""

    def reserve_positions(self, length: int) -> None:
        """Be ready for positions below `length`."""

    def attention(self, cache: KVCache) -> Any:
        """The attention back-end that suits this model, for `cache`."""

    def compute(self, step: Step, attention: Any, wanted: NDArray[np.int64]) -> Tensor:
        """Compute all tokens of `step`; their K and V go into the cache.

        Returns scores over the vocabulary (R, V), float32, after each of the tokens `wanted` (R,). The caller may
        overwrite them, and so does the next call.
        """

    def more_logits(self, wanted: NDArray[np.int64]) -> Tensor:
        """Scores as from `compute`, after other tokens of the step that was computed last; may overwrite those."""

    def draw(self, logits: Tensor, largest: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
        """Draw a token for each of `rows` of `logits`: see `sampler.draw_rows`."""


class ModelRunner:
    """Runs a loaded model over a paged KV cache of `num_blocks` blocks of `block_size` tokens.

    The cache has the model's type and device. `attention` makes the back-end that serves it, by default the model's;
    only a `Llama` takes another than its own.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        *,
        attention: Callable[[KVCache], AttentionBackend] | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = KVCache(model.config, num_blocks, block_size, dtype=model.dtype, device=model.device)
        self.attention = (attention or model.attention)(self.kv_cache)
        # No sequence can be longer than the cache, however long a context the model was trained for.
        self.max_positions = min(model.config.max_position_embeddings, num_blocks * block_size)
        model.reserve_positions(self.max_positions)

    def warm_up(self) -> None:
        """Compute and draw a token, and so compile what is compiled at its first use. Spoils slot 0: call it first."""
        one = np.ones(1, np.int32)
        zero = np.zeros(1, np.int32)
        sampling = replace(SamplingBatch.greedy(1), temperature=np.ones(1, np.float32))
        with suppress(LogitsError):  # damaged weights are the business of the request that meets them
            self.execute(
                Step(
                    seqs=(),
                    num_scheduled_tokens=one,
                    needs_logits=np.ones(1, np.bool_),
                    context_lens=one,
                    token_ids=zero,
                    positions=zero,
                    slot_mapping=zero.astype(np.int64),
                    block_tables=zero[None],
                    query_start=np.array([0, 1], np.int32),
                    sampling=sampling,
                )
            )

    @torch.inference_mode()
    def execute(self, step: Step) -> StepOutput:
        """Compute `step`: K and V of all its tokens go into the cache, one token comes out per row that needs logits.

        And the log-probabilities of prompt tokens that are asked for. Raises `ValueError` for a step that does not fit
        this model and cache, before anything is computed, and `LogitsError` (with the places of the sequences in the
        batch) when nothing can be chosen.
        """
        self._check(step)
        wanted = np.flatnonzero(step.needs_logits)
        logits = self.model.compute(step, self.attention, step.query_start[wanted + 1].astype(np.int64) - 1)
        tokens, logprobs = self._sample(logits, step, wanted) if len(wanted) else ([], None)
        return StepOutput(tokens, logprobs, self._prompt_logprobs(step) if len(step.prompt_logprobs) else None)

    def _sample(
        self, logits: Tensor, step: Step, seq_rows: NDArray[np.int64]
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        with _one_thread(), _faults_at(seq_rows):
            return sample(logits, step.sampling, self.model.draw)

    def _prompt_logprobs(self, step: Step) -> list[TokenLogprobs | None]:
        asked = step.prompt_logprobs
        found: list[TokenLogprobs | None] = []
        for begin in range(0, len(asked), _PROMPT_ROWS):
            part = slice(begin, begin + _PROMPT_ROWS)
            logits = self.model.more_logits(asked.rows[part])
            with _one_thread(), _faults_at(asked.seq_rows[part]):
                found += token_logprobs(logits, asked.token_ids[part], asked.num_logprobs[part])
        return found

    def _check(self, step: Step) -> None:
        """On a GPU an index out of range ends the process; here it costs a few microseconds to say which."""
        cache, asked, vocab_size = self.kv_cache, step.prompt_logprobs, self.model.config.vocab_size
        limits: list[tuple[str, NDArray[Any], int]] = [
            ("token_ids", step.token_ids, vocab_size),
            ("positions", step.positions, self.max_positions),
            ("slot_mapping", step.slot_mapping, cache.num_blocks * cache.block_size),
            ("context_lens", step.context_lens, self.max_positions + 1),
        ]
        if len(asked):
            limits += [
                ("prompt_logprobs.rows", asked.rows, step.num_tokens),
                ("prompt_logprobs.token_ids", asked.token_ids, vocab_size),
            ]
        for name, array, limit in limits:
            if len(array) == 0 or array.min() < 0 or array.max() >= limit:
                given = f"{array.min()} to {array.max()}" if len(array) else "none"
                raise ValueError(f"step has {name} from {given}; this model and cache allow 0 to {limit - 1}")


@contextmanager
def _faults_at(seq_rows: NDArray[np.int64]) -> Iterator[None]:
    """Turn rows of logits that a LogitsError names into places of sequences in the batch, given for each row."""
    try:
        yield
    except LogitsError as error:
        raise LogitsError(np.unique(seq_rows[error.rows]).tolist()) from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep PyTorch's thread pool out: its threads spin for a while after their work, on cores that the model needs.

    The number is the process's, hence the lock: two runners at once could otherwise leave it at 1.
    """
    with _TORCH_THREADS:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
