"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Lets text through up to the first stop string.

    Text that may be the beginning of a stop string is held back until that is decided. The outcome depends on the whole
    text only, not on how it was cut into pieces: the match that begins first wins, and of those the shortest.
    """

    def __init__(self, stop: str | Iterable[str] = (), *, include_stop_str_in_output: bool = False) -> None:
        """Raises `ValueError` for an empty stop string, `TypeError` for one that is no string."""
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""  # begins where a stop string may begin; shorter than the longest one
        self.stopped: str | None = None  # the stop string that ended the text
        for item in self._stops:
            if not isinstance(item, str):
                raise TypeError(f"a stop string must be a string, not {type(item).__name__}")
            if not item:
                raise ValueError("a stop string must not be empty: it would stop every text before its first character")

    def push(self, text: str) -> str:
        """Add `text`; returns what may be shown now. Nothing comes after a match."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        text = self._held + text
        begin = self._open_at(text)
        match = self._first_match(text)
        # A match is final only if no stop string that began before it can still be completed.
        if match is not None and match[0] <= begin:
            return self._stop_at(text, *match)
        self._held = text[begin:]
        return text[:begin]

    def finish(self) -> str:
        """No more text comes: decides what was held back, and returns what of it may be shown."""
        text, self._held = self._held, ""
        match = self._first_match(text)
        return text if match is None else self._stop_at(text, *match)

    def _stop_at(self, text: str, begin: int, stop: str) -> str:
        self.stopped, self._held = stop, ""
        return text[: begin + len(stop)] if self._include else text[:begin]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(begin, len(stop), stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if not found:
            return None
        begin, _, stop = min(found)
        return begin, stop

    def _open_at(self, text: str) -> int:
        """Where the earliest stop string begins of which `text` ends with a part; the end of `text` if none does."""
        earliest = len(text)
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), len(text) - earliest, -1):
                if text.endswith(stop[:size]):
                    earliest = len(text) - size
                    break
        return earliest
