"""Text out of a stream of tokens, as soon as it is certain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagetable.text.stop_strings import StopStrings
from pagetable.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # how half a character decodes

# What a token reads as may depend on those before it: a character begun by one and ended by the next (at most 4 tokens,
# as a character has at most 4 bytes), or a leading space that only the first token of a text loses. So a window of
# tokens is decoded, not one. _KEEP tokens are enough for the next to read as it does in the whole text: UTF-8 finds its
# beat again after three bytes, whatever went before. Cutting back at _LIMIT, not each time, halves the calls to decode.
_KEEP, _LIMIT = 6, 16


class Detokenizer:
    """Turns the output tokens of one request into text, token by token.

    What `push` returns, put together with what `finish` returns, is `tokenizer.decode(all output ids)`, cut before the
    first stop string. Half a character is never shown: it waits for its other half, and becomes U+FFFD at the end only.
    Each token costs the decoding of at most 16, however long the text is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: str | Iterable[str] = (),
        prompt_token_ids: Sequence[int] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`stop`: strings that end the text, on whatever borders of tokens they fall; not in the first `min_tokens`.

        With `prompt_token_ids` the text goes on from the prompt's, so that a leading space is kept, and a character
        that the prompt began can be completed; without, it reads as if nothing had gone before.

        Raises `ValueError` for an empty stop string.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stops = StopStrings(stop, include_stop_str_in_output=include_stop_str_in_output)
        self._unstoppable = min_tokens  # tokens still to come in whose text no stop string is looked for
        self._parts: list[str] = []
        self._finished = False
        self._window = [i for i in prompt_token_ids[-_LIMIT:] if self._has_text(i)][-_KEEP:]
        prompt_end = self._decode()
        self._shown = len(prompt_end)  # characters of the window's text that need not be shown any more
        self._prompt_ends_open = prompt_end.endswith(_UNFINISHED)

    @property
    def text(self) -> str:
        """All text shown so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None as long as none did."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Add one output token; returns the new text that is safe to show, often "".

        After a stop string or `finish`, tokens are ignored. Raises `ValueError` for a negative id.
        """
        if token_id < 0:
            raise ValueError(f"a token id cannot be negative: {token_id}")
        if self._finished or self.stopped is not None:
            return ""
        self._unstoppable -= 1
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode()
        if self._prompt_ends_open:
            self._settle_prompt_end(text)
        # Only the last U+FFFD can be half a character; those before it are broken for good.
        safe = len(text) - text.endswith(_UNFINISHED)
        new = text[self._shown : safe]
        self._shown = max(self._shown, safe)
        if len(self._window) >= _LIMIT:
            self._cut_back(len(text) - self._shown)
        return self._show(self._before_stop(new))

    def finish(self) -> str:
        """No more tokens come: returns the text that was held back. A character left unfinished reads U+FFFD."""
        if self._finished or self.stopped is not None:
            return ""
        self._finished = True
        rest = self._before_stop(self._decode()[self._shown :])
        return self._show(rest + self._stops.finish())

    def _before_stop(self, text: str) -> str:
        return text if self._unstoppable >= 0 else self._stops.push(text)

    def _show(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    def _has_text(self, token_id: int) -> bool:
        """Whether decoding would not leave it out. One without text must not push those with text off the window."""
        return token_id not in self._skipped and token_id in self._tokenizer

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _cut_back(self, unshown: int) -> None:
        """Forget the oldest tokens of the window. Their text may change by that, so count from the end of it."""
        self._window = self._window[-_KEEP:]
        self._shown = len(self._decode()) - unshown
        self._prompt_ends_open = False

    def _settle_prompt_end(self, text: str) -> None:
        """If the output completed the prompt's last character, that character belongs to the output."""
        completed = not text.startswith(_UNFINISHED, self._shown - 1)
        self._shown -= completed
        self._prompt_ends_open = not completed and len(text) == self._shown  # what has text behind it is settled
