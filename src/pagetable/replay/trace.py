"""What a trace is made of: requests, and the blocks of each as a path in the tree of all prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagetable.memory.hints import NO_HINTS, CacheHints

IntArray = NDArray[np.int32]


Content = int | str | bytes | tuple[Any, ...]  # what tells a block from others: a hash, or its tokens


class TraceError(ValueError):
    """A trace that cannot be read, or not in the way that was asked for. Says where and why."""


@dataclass(slots=True)
class TraceRequest:
    """One request as its trace tells it. Its prompt is known by tokens or by hashes of its blocks."""

    arrival: float  # seconds since the trace began
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: Sequence[Content] | None = None  # one a block, perhaps for the last, partial one too
    token_ids: IntArray | None = None
    output_token_ids: IntArray | None = None  # if the trace knows them
    session: Any = None  # requests with the same key belong together; None if the trace does not say
    hints: CacheHints = NO_HINTS  # what its client told the cache


class Grown:
    """An int32 array that grows, with `fill` in every place that was never written."""

    def __init__(self, fill: int) -> None:
        self._fill = fill
        self.values = np.full(1024, fill, np.int32)

    def fit(self, size: int) -> IntArray:
        """The array with at least `size` places."""
        if size > len(self.values):
            grown = np.full(max(size, 2 * len(self.values)), self._fill, np.int32)
            grown[: len(self.values)] = self.values
            self.values = grown
        return self.values


class PrefixTree:
    """Numbers the nodes of the tree of prefixes from 0, in the order in which they are first seen.

    A node is a block behind a certain prefix, as in the page table: the same hash or the same tokens behind another
    prefix are another node. Most traces chain their hashes, so that a hash belongs to one node; then a path costs one
    look-up a block and no more.
    """

    def __init__(self) -> None:
        self._nodes: dict[Content, int] = {}  # of each content the node that was seen first
        self._others: dict[tuple[int, Content], int] = {}  # the same content behind another parent
        self._parents = Grown(-1)
        self.num_nodes = 0

    def path(self, contents: Sequence[Content]) -> IntArray:
        """The nodes of a prompt, one a block, from the root down. int32, shape (blocks,)."""
        known = list(map(self._nodes.get, contents))
        num_known = known.index(None) if None in known else len(known)
        nodes = np.array(known[:num_known], np.int32)
        parents = self._parents.values[nodes]
        is_chained = bool((parents[1:] == nodes[:-1]).all()) and (not num_known or parents[0] == -1)
        if is_chained and num_known == len(contents):
            return nodes
        path: list[int] = nodes.tolist() if is_chained else []
        parent = path[-1] if path else -1
        for content in contents[len(path) :]:
            parent = self._child(parent, content)
            path.append(parent)
        return np.array(path, np.int32)

    def _child(self, parent: int, content: Content) -> int:
        node = self._nodes.get(content)
        if node is None:
            node = self._nodes[content] = self._new(parent)
        elif self._parents.values[node] != parent:
            other = self._others.get((parent, content))
            node = self._others[parent, content] = self._new(parent) if other is None else other
        return node

    def _new(self, parent: int) -> int:
        node = self.num_nodes
        self.num_nodes += 1
        self._parents.fit(self.num_nodes)[node] = parent
        return node


class SessionFinder:
    """Guesses which requests belong together where a trace does not say.

    A request goes on with a session when the last block that it shares with the past was seen by that session only and
    nothing else hangs on it. The second user of a common system prompt is taken for the first one; later ones are not.
    """

    def __init__(self) -> None:
        self._session = Grown(-1)  # that saw a node first
        self._num_children = Grown(0)
        self._num_sessions = Grown(0)
        self._num_found = 0

    def find(self, path: IntArray) -> int:
        """The session of a request, a number from 0."""
        size = int(path.max(initial=0)) + 1
        session, children, sessions = (
            array.fit(size) for array in (self._session, self._num_children, self._num_sessions)
        )
        num_seen = int(np.count_nonzero(session[path] >= 0))
        last = int(path[num_seen - 1]) if num_seen else -1
        goes_on = num_seen > 0 and sessions[last] <= 1 and children[last] <= 1
        if not goes_on:
            found = self._num_found
            self._num_found += 1
            sessions[path] += 1
        else:
            found = int(session[last])
            sessions[path[num_seen:]] += 1
        if 0 < num_seen < len(path):
            children[last] += 1
        session[path[num_seen:]] = found
        children[path[num_seen:-1]] += 1
        return found
