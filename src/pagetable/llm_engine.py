"""Requests in flight: prompts become sequences, steps are run, tokens become text. One thread at a time drives it."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from pagetable.engine import Engine, FinishReason, RequestError, SamplingParams, Sequence
from pagetable.prompts import Prompt, tokens_of
from pagetable.request import Answer, Request
from pagetable.text import Tokenizer

if TYPE_CHECKING:
    from pagetable.memory import BlockManager, CacheHints

logger = logging.getLogger(__name__)


class LLMEngine:
    """An engine and the requests that it answers. Names as in vLLM's `LLMEngine`; `LLM` and the server drive one.

    `vocab_size` is the model's, `seed` starts the seeds of requests that bring none.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, vocab_size: int, seed: int = 0) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._request_ids = count()
        self._answering: dict[int, tuple[Request, Answer]] = {}  # unfinished, by seq_id

    @property
    def block_manager(self) -> BlockManager:
        """The page table."""
        return self.engine.scheduler.block_manager

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.engine.scheduler.has_unfinished

    def make_request(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, cache_hints: CacheHints | None = None
    ) -> Request:
        """A request that is not queued yet. RequestError for a prompt that is none."""
        text, token_ids, cache_salt = tokens_of(prompt, self.tokenizer)
        base = self._random.getrandbits(63) if params.seed is None else params.seed
        sequences = [
            Sequence(
                token_ids,
                # The prompt's log-probabilities are the same for all: the first computes them, the others hit
                replace(params, seed=(base + i) % 2**64, prompt_logprobs=None if i else params.prompt_logprobs),
                block_size=self.block_manager.block_size,
                cache_salt=cache_salt,
                priority=priority,
                cache_hints=cache_hints,
            )
            for i in range(params.n)
        ]
        largest = int(sequences[0].token_ids.view(0, len(sequences[0])).max(initial=0))
        if largest >= self._vocab_size:
            raise RequestError(f"token id {largest} is not in the vocabulary: 0 to {self._vocab_size - 1} are")
        return Request(str(next(self._request_ids)), text, sequences, self.tokenizer)

    def add_request(self, request: Request) -> None:
        """Queue all sequences of a request. RequestError for what can never be served; then none is queued."""
        try:
            for answer in request.answers:
                self.engine.scheduler.add(answer.seq)
                self._answering[answer.seq.seq_id] = request, answer
        except BaseException:
            self.abort_request(request)
            raise

    def abort_request(self, request: Request) -> None:
        """End what is unfinished of a request. Its blocks are free when this returns."""
        for seq in request.sequences:
            self.engine.scheduler.abort(seq.seq_id)
            self._answering.pop(seq.seq_id, None)

    def abort_all_requests(self) -> None:
        """End everything."""
        for request in {id(request): request for request, _ in self._answering.values()}.values():
            self.abort_request(request)

    def step(self) -> bool:
        """One step of the engine, its tokens turned into text; requests note their news. False: nothing was to do."""
        busy, began = self.has_unfinished_requests, time.monotonic()
        step, finished = self.engine.step()
        for seq in {seq.seq_id: seq for seq in (*(step.seqs if step else ()), *finished)}.values():
            if seq.seq_id in self._answering:
                self._read(*self._answering[seq.seq_id], began)
            if seq.is_finished:
                self._answering.pop(seq.seq_id, None)
        return busy

    def _read(self, request: Request, answer: Answer, began: float) -> None:
        """Turn a sequence's new tokens into text, which may end it."""
        error = self.engine.last_error if answer.seq.finish_reason is FinishReason.ERROR else None
        num_read = answer.num_read
        request.note_scheduled(began)
        try:
            if answer.read():
                self.engine.scheduler.finish(answer.seq.seq_id, FinishReason.STOP)
        except Exception as failure:  # one answer's text must not take the others along
            logger.exception("the text of request %s failed", request.request_id)
            self.engine.scheduler.finish(answer.seq.seq_id, FinishReason.ERROR)
            error = failure
        if error is not None:
            answer.error = f"{type(error).__name__}: {error}"
        if answer.num_read > num_read or answer.seq.is_finished:
            request.note_news()
