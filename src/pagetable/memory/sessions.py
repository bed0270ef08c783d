"""Which blocks only one session has used: those are worth nothing once it is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SessionKey = tuple[str | None, str]  # cache salt and session id: no tenant can end a session of another


def session_key(cache_salt: str | None, session_id: str | None) -> SessionKey | None:
    """What a session is known by; None for a request of none."""
    return None if session_id is None else (cache_salt, session_id)


class Sessions:
    """The registered blocks that each session has for itself, and which sessions have requests that have not ended."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """No block has a content any more, and requests of before do not count."""
        self._blocks: dict[SessionKey, dict[int, None]] = {}  # in order of registration: a parent before its child
        self._session_of: dict[int, SessionKey] = {}
        self._num_running: Counter[SessionKey] = Counter()
        self._ending: set[SessionKey] = set()  # declared over, but some of its requests have not ended

    # ---------------------------------------------------------------- requests

    def begin(self, session: SessionKey) -> None:
        """A request of this session is admitted for the first time."""
        self._num_running[session] += 1
        self._ending.discard(session)

    def finish(self, session: SessionKey, ends_session: bool) -> bool:
        """A request of this session has ended, and says whether it was the last. Whether the session is over now."""
        self._num_running[session] -= 1
        if ends_session:
            self._ending.add(session)
        if self._num_running[session]:
            return False
        del self._num_running[session]
        is_over = session in self._ending
        self._ending.discard(session)
        return is_over

    def end(self, session: SessionKey) -> bool:
        """A session is declared over. Whether it is: with requests that run, it is when the last of them ends."""
        if session in self._num_running:
            self._ending.add(session)
            return False
        return True

    # ---------------------------------------------------------------- blocks

    def note_registered(self, session: SessionKey, block_ids: Iterable[int]) -> None:
        """Blocks of a request of this session got a content."""
        for block_id in block_ids:
            self._session_of[block_id] = session
            self._blocks.setdefault(session, {})[block_id] = None

    def note_hit(self, session: SessionKey | None, block_ids: Iterable[int]) -> None:
        """A request hits these blocks: those of other sessions are now nobody's own."""
        if self._session_of:
            for block_id in block_ids:
                if self._session_of.get(block_id, session) != session:
                    self.note_gone(block_id)

    def note_gone(self, block_id: int) -> None:
        """A block lost its content, or is nobody's own any more."""
        session = self._session_of.pop(block_id, None)
        if session is not None:
            blocks = self._blocks[session]
            del blocks[block_id]
            if not blocks:
                del self._blocks[session]

    def own_blocks(self, session: SessionKey) -> list[int]:
        """The session's own blocks, a child before its parent."""
        return list(reversed(self._blocks.get(session, {})))
