"""What a client may say of a session, so that the cache need not guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LONGEST_SESSION_ID = 256  # characters
LONGEST_TIME = 1e9  # seconds, thirty years
HIGHEST_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class CacheHints:
    """Hints on how long the K/V of a request is worth keeping. They cost or gain speed, and never change an answer.

    No hint pins anything: each but the priority is weighed by what came of earlier ones. ValueError for what is out of
    range.
    """

    session_id: str | None = None  # requests with the same one, and the same cache salt, belong together
    end_session: bool = False  # nothing will follow this request
    expected_idle_s: float | None = None  # seconds until the next one, about
    cache_priority: int | None = None  # 0 to 100, as compared with other requests of the same salt; None is 50
    ttl_s: float | None = None  # seconds after which nothing will follow any more

    def __post_init__(self) -> None:
        session_id = self.session_id
        if session_id is not None and not (isinstance(session_id, str) and 0 < len(session_id) <= LONGEST_SESSION_ID):
            self._refuse("session_id", f"a text of 1 to {LONGEST_SESSION_ID} characters")
        given: Any = self.end_session
        if not isinstance(given, bool):
            self._refuse("end_session", "true or false")
        if not _is_between(self.cache_priority, 0, HIGHEST_PRIORITY, int):
            self._refuse("cache_priority", f"a whole number from 0 to {HIGHEST_PRIORITY}")
        for name in ("expected_idle_s", "ttl_s"):
            if not _is_between(getattr(self, name), 0, LONGEST_TIME, int | float):
                self._refuse(name, f"a number of seconds from 0 to {LONGEST_TIME:.0f}")

    def _refuse(self, name: str, allowed: str) -> None:
        shown = repr(getattr(self, name))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ValueError(f"{name}={shown}: it must be {allowed}")


def _is_between(value: Any, low: float, high: float, kind: Any) -> bool:
    return value is None or (isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high)


NO_HINTS = CacheHints()
