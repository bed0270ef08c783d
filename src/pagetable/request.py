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
        self.answers = [_Answer(index, seq, tokenizer) for index, seq in enumerate(sequences)]
        self.metrics = RequestMetrics(time.monotonic())

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences, in order of index."""
        return [answer.seq for answer in self.answers]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, all answers together."""
        return sum(answer.seq.num_output_tokens for answer in self.answers)

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.seq.is_finished for answer in self.answers)

    def output(self) -> RequestOutput:
        """What there is so far; `new_text` is what has come since the last call."""
        first = self.answers[0].seq
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[answer.output() for answer in self.answers],
            finished=self.is_finished,
            num_cached_tokens=first.num_prefix_tokens,
            metrics=replace(self.metrics),
        )

    def note_times(self) -> None:
        """Write down when the first and the last token came."""
        now = time.monotonic()
        if self.metrics.first_token_time is None and any(seq.num_output_tokens for seq in self.sequences):
            self.metrics.first_token_time = now
        if self.is_finished and self.metrics.finished_time is None:
            self.metrics.finished_time = now


class _Answer:
    """One sequence and its text."""

    def __init__(self, index: int, seq: Sequence, tokenizer: Tokenizer) -> None:
        params = seq.sampling_params
        self.index = index
        self.seq = seq
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop or (),
            prompt_token_ids=seq.prompt_token_ids,
            min_tokens=params.min_tokens,
        )
        self._num_read = 0  # output tokens that were turned into text
        self._num_told = 0  # characters that `output` has reported
        self._closed = False

    def read(self) -> bool:
        """Turn new tokens into text. True when a stop text ended the answer: the sequence has to be finished then."""
        seq = self.seq
        new = seq.token_ids[seq.num_prompt_tokens + self._num_read :].tolist()
        self._num_read += len(new)
        if seq.finish_reason is FinishReason.STOP and new:
            new.pop()  # the end token is no part of the text, even when special tokens are
        for token_id in new:
            self._detokenizer.push(token_id)
        if seq.is_finished and not self._closed:
            self._closed = True
            self._detokenizer.finish()
        if self._detokenizer.stopped is not None and seq.stop_reason is None:
            seq.stop_reason = self._detokenizer.stopped
            if seq.finish_reason in (FinishReason.LENGTH, FinishReason.CACHE_FULL):
                seq.finish_reason = FinishReason.STOP  # its last token completed the stop text
            return not seq.is_finished
        return False

    def output(self) -> CompletionOutput:
        text = self._detokenizer.text
        new_text, self._num_told = text[self._num_told :], len(text)
        wants_logprobs = self.seq.sampling_params.logprobs is not None
        drawn = [entry for entry in self.seq.logprobs if entry is not None]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.seq.output_token_ids,
            cumulative_logprob=sum(entry.logprobs[0] for entry in drawn) if wants_logprobs else None,
            logprobs=[self._readable(entry) for entry in drawn] if wants_logprobs else None,
            finish_reason=self.seq.finish_reason and str(self.seq.finish_reason),
            stop_reason=self.seq.stop_reason,
            new_text=new_text,
            error=self.error,
        )

    def _readable(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The drawn token first, then the alternatives, the likeliest first (rank 1, 2, ...)."""
        readable = {
            token_id: Logprob(logprob, rank, self._tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), 1)
        }
        drawn = entry.token_ids[0]
        first = {drawn: Logprob(entry.logprobs[0], entry.rank, self._tokenizer.token_text(drawn))}
        return first | {token_id: value for token_id, value in readable.items() if token_id != drawn}
