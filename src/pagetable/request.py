"""A request on its way: its sequences, and their tokens turning into text and outputs."""

from __future__ import annotations

import time
from dataclasses import replace

from pagetable.engine import FinishReason, Sequence, TokenLogprobs
from pagetable.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagetable.text import Detokenizer, Tokenizer


class Request:
    """One prompt with its `n` sequences, from the queue to the last token."""

    def __init__(self, request_id: str, prompt: str | None, sequences: list[Sequence], tokenizer: Tokenizer) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = sequences[0].prompt_token_ids
        self.answers = [Answer(index, seq, tokenizer) for index, seq in enumerate(sequences)]
        self.metrics = RequestMetrics(time.monotonic())
        self.news: dict[Request, None] = {}  # where whoever waits for this request looks

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences, in order of index."""
        return [answer.seq for answer in self.answers]

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.seq.is_finished for answer in self.answers)

    def next_output(self) -> RequestOutput:
        """What there is so far. `new_text` is what has come since the last call, so each call uses it up."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[answer.next_output() for answer in self.answers],
            finished=self.is_finished,
            num_cached_tokens=self.answers[0].seq.num_prefix_tokens,
            metrics=replace(self.metrics),
        )

    def note_news(self) -> None:
        """An answer has gone on or ended: write down when, and let whoever waits know."""
        self.news[self] = None
        now = time.monotonic()
        if self.metrics.first_token_time is None and any(seq.num_output_tokens for seq in self.sequences):
            self.metrics.first_token_time = now
        if self.is_finished and self.metrics.finished_time is None:
            self.metrics.finished_time = now


class Answer:
    """One sequence and its text."""

    def __init__(self, index: int, seq: Sequence, tokenizer: Tokenizer) -> None:
        params = seq.sampling_params
        self.index = index
        self.seq = seq
        self.error: str | None = None  # what went wrong, for the caller
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop or (),
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            min_tokens=params.min_tokens,
        )
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.num_read = 0  # output tokens that were turned into text
        self._num_told = 0  # characters that `next_output` has reported
        self._closed = False

    def read(self) -> bool:
        """Turn new tokens into text. True when a stop string ended the answer: the sequence has to be finished then."""
        seq = self.seq
        new = seq.token_ids[seq.num_prompt_tokens + self.num_read :].tolist()
        self.num_read += len(new)
        if self._logprobs is not None:
            self._logprobs += [self._readable(entry) for entry in seq.logprobs[len(self._logprobs) :] if entry]
        if seq.finish_reason is FinishReason.STOP and new:
            new.pop()  # the end token is no part of the text, even when special tokens are
        for token_id in new:
            self._detokenizer.push(token_id)
        if seq.is_finished and not self._closed:
            self._closed = True
            self._detokenizer.finish()
        if self._detokenizer.stopped is None or seq.stop_reason is not None:
            return False
        seq.stop_reason = self._detokenizer.stopped
        if seq.finish_reason in (FinishReason.LENGTH, FinishReason.CACHE_FULL):
            seq.finish_reason = FinishReason.STOP  # its last token completed the stop string
        return not seq.is_finished

    def next_output(self) -> CompletionOutput:
        """What there is so far. `new_text` is what has come since the last call, so each call uses it up."""
        text = self._detokenizer.text
        new_text, self._num_told = text[self._num_told :], len(text)
        token_ids, logprobs = self.seq.output_token_ids, self._logprobs
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=(
                None if logprobs is None else sum(e[t].logprob for e, t in zip(logprobs, token_ids, strict=False))
            ),
            logprobs=None if logprobs is None else list(logprobs),
            finish_reason=self.seq.finish_reason and str(self.seq.finish_reason),
            stop_reason=self.seq.stop_reason,
            new_text=new_text,
            error=self.error,
            seq_id=self.seq.seq_id,
        )

    def _readable(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The drawn token first, then the alternatives, the likeliest first (rank 1, 2, ...)."""
        drawn, *others = zip(
            entry.token_ids, entry.logprobs, (entry.rank, *range(1, len(entry.token_ids))), strict=True
        )
        text_of, known = self._tokenizer.token_text, self._tokenizer  # a model may have more columns than tokens
        return {
            token_id: Logprob(logprob, rank, text_of(token_id) if token_id in known else None)
            for token_id, logprob, rank in (drawn, *(other for other in others if other[0] != drawn[0]))
        }
