"""Which idle blocks only one session has used: those are worth nothing once it is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SessionKey = tuple[str | None, str]  # cache salt and session id: no tenant can end a session of another


class Sessions:
    """The registered blocks of each session that has any for itself, and what its latest request was to the policy."""

    def __init__(self) -> None:
        self._blocks: dict[SessionKey, dict[int, None]] = {}  # in order of registration: a parent before its child
        self._session_of: dict[int, SessionKey] = {}
        self._use: dict[SessionKey, Any] = {}

    def __len__(self) -> int:
        return len(self._blocks)

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
                self._use.pop(session, None)

    def note_ended(self, session: SessionKey, use: Any) -> None:
        """A request of this session has ended."""
        if session in self._blocks:
            self._use[session] = use

    def own_blocks(self, session: SessionKey) -> tuple[Any, list[int]]:
        """What the policy knows its latest request by that has ended, and its own blocks, tail before head.

        None of either before the first has ended: what one has that was preempted it will want back.
        """
        if session not in self._use:
            return None, []
        return self._use[session], list(reversed(self._blocks[session]))

    def clear(self) -> None:
        """No block has a content any more."""
        self._blocks.clear()
        self._session_of.clear()
        self._use.clear()
