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
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._tokenizer = tokenizer
        self.news: dict[Request, None] = {}  # where whoever waits for this request looks

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences, in order of index."""
        return [answer.seq for answer in self.answers]

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the cache at admission; None before it."""
        return self.answers[0].seq.num_prefix_tokens

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
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=replace(self.metrics),
        )

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One for each prompt token, None for the first. None unless they were asked for and are all there."""
        seq = self.sequences[0]
        asked = seq.sampling_params.prompt_logprobs is not None
        if self._prompt_logprobs is None and asked and not seq.lacks_prompt_logprobs:
            entries = (None, *seq.prompt_logprobs)
            self._prompt_logprobs = [None if e is None else _readable(e, self._tokenizer) for e in entries]
        return self._prompt_logprobs

    def note_scheduled(self, began: float) -> None:
        """A step that began then (monotonic seconds) has computed some of it."""
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = began

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
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.num_read = 0  # output tokens that were turned into text
        self._new_text: list[str] = []  # since the last output
        self.num_told = 0  # tokens that outputs have reported
        self._end_told = False
        self._closed = False

    def read(self) -> bool:
        """Turn new tokens into text. True when a stop string ended the answer: the sequence has to be finished then."""
        seq = self.seq
        new = self._tokens_from(self.num_read)
        self.num_read += len(new)
        if self._logprobs is not None:
            entries = seq.logprobs[len(self._logprobs) :]
            self._logprobs += [_readable(entry, self._tokenizer) for entry in entries if entry]
        if seq.finish_reason is FinishReason.STOP and new and not seq.sampling_params.include_stop_str_in_output:
            new.pop()  # the end token is no part of the text, even when special tokens are
        self._new_text += [self._detokenizer.push(token_id) for token_id in new]
        if seq.is_finished and not self._closed:
            self._closed = True
            self._new_text.append(self._detokenizer.finish())
        if self._detokenizer.stopped is None or seq.stop_reason is not None:
            return False
        seq.stop_reason = self._detokenizer.stopped
        if seq.finish_reason in (FinishReason.LENGTH, FinishReason.CACHE_FULL):
            seq.finish_reason = FinishReason.STOP  # its last token completed the stop string
        return not seq.is_finished

    @property
    def has_news(self) -> bool:
        """Whether there is something that no output has reported."""
        return bool(self._new_text) or self.num_told < self.num_read or (self.seq.is_finished and not self._end_told)

    def next_output(self) -> CompletionOutput:
        """What there is so far. `new_text` is what has come since the last call, so each call uses it up."""
        new_text, _ = self._take_news()
        text = self._detokenizer.text
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

    def next_delta(self) -> CompletionOutput:
        """What has come since the last call, and nothing else: text, tokens, log-probabilities."""
        new_text, begin = self._take_news()
        return CompletionOutput(
            index=self.index,
            text=new_text,
            token_ids=self._tokens_from(begin),
            logprobs=None if self._logprobs is None else self._logprobs[begin : self.num_told],
            finish_reason=self.seq.finish_reason and str(self.seq.finish_reason),
            stop_reason=self.seq.stop_reason,
            new_text=new_text,
            error=self.error,
            seq_id=self.seq.seq_id,
        )

    def _tokens_from(self, begin: int) -> list[int]:
        """The output tokens but for the first `begin`."""
        tokens: list[int] = self.seq.token_ids.view(self.seq.num_prompt_tokens + begin, self.seq.num_tokens).tolist()
        return tokens

    def _take_news(self) -> tuple[str, int]:
        """The text since the last output, and how many tokens had been reported by then."""
        new_text, begin = "".join(self._new_text), self.num_told
        self._new_text.clear()
        self.num_told = self.seq.num_output_tokens
        self._end_told = self.seq.is_finished
        return new_text, begin


def _readable(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The token that stands there first, then the alternatives, the likeliest first (rank 1, 2, ...)."""
    own, *others = zip(entry.token_ids, entry.logprobs, (entry.rank, *range(1, len(entry.token_ids))), strict=True)
    return {  # a model may have more columns than tokens
        token_id: Logprob(logprob, rank, tokenizer.token_text(token_id) if token_id in tokenizer else None)
        for token_id, logprob, rank in (own, *(other for other in others if other[0] != own[0]))
    }
