"""Hints for traces that have none, made by hindsight: what would a cache gain if clients said when they are done?"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from pagetable.memory.hints import NO_HINTS, CacheHints
from pagetable.replay.blocks import Workload
from pagetable.replay.reuse import Access
from pagetable.replay.trace import TraceError, TraceRequest

_SEVERAL = object()


def with_ends(
    workload: Workload, share: float, lies: float = 0.0, seed: int = 0
) -> Iterator[tuple[TraceRequest, Access]]:
    """The requests of a workload, which is read twice, with the ends of some sessions declared.

    This share of the sessions, chosen by `seed`, names itself in each of its requests and declares an end in its last
    one. `lies` is the chance that it declares one in any other. All other sessions say nothing, and what the trace
    itself hints is left out. The sessions of a smaller share are among those of a larger one, and so are the lies.

    Where the trace names no sessions they are guessed. TraceError for what is no share.
    """
    if not 0 <= share <= 1 or not 0 <= lies <= 1:
        raise TraceError(f"share={share} and lies={lies}: they must be from 0 to 1")
    return _with_ends(workload, share, lies, seed)


def _with_ends(workload: Workload, share: float, lies: float, seed: int) -> Iterator[tuple[TraceRequest, Access]]:
    last: dict[Any, int] = {}  # request of each session, and in order of their first ones
    for number, (request, _) in enumerate(workload):
        last[request.session] = number
    sessions = list(last)
    Random(f"{seed} sessions").shuffle(sessions)
    names = {session: str(i) for i, session in enumerate(sessions[: round(share * len(sessions))])}
    rng = Random(f"{seed} lies")
    for number, (request, access) in enumerate(workload):
        is_last = last[request.session] == number
        lie = rng.random() < lies  # drawn for each, so that another share lies at the same requests
        name = names.get(request.session)
        request.hints = NO_HINTS if name is None else CacheHints(name, end_session=is_last or lie)
        yield request, access


def with_last_uses(workload: Workload) -> Iterator[tuple[TraceRequest, Access]]:
    """The requests of a workload, which is read twice; each after which its session's own blocks stay unused ends it.

    So this also knows of chats that others branch off from, which ends of sessions do not: more than a client can tell.
    """
    last: dict[int, int] = {}  # request that uses a block
    for number, (_, access) in enumerate(workload):
        last.update(dict.fromkeys(access.path.tolist(), number))
    sessions: dict[int, Any] = {}  # the only one so far that has used a block, or _SEVERAL
    for number, (request, access) in enumerate(workload):
        is_last = True
        for node in access.path.tolist():
            if sessions.setdefault(node, request.session) != request.session:
                sessions[node] = _SEVERAL
            elif last[node] != number:
                is_last = False
        request.hints = CacheHints(str(request.session), end_session=is_last)
        yield request, access
