"""Traces made by a seed: chats and agents that grow turn by turn, share system prompts, and fan out.

A session is one *line* of turns. Each turn adds new tokens behind all that came before; its answer becomes part of the
next prompt. An agent's line may branch: sub-agents, lines of their own, go on from all that the agent has so far, side
by side, and the agent goes on when the last of them is done. Sessions begin as a Poisson process; a turn begins when
the answer before it is done, at so many seconds a token, and a person has thought or a tool has run.

Each line draws from a generator of its own, named by the seed and its place: another rate of arrival, or another block
size, leaves the sessions as they are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain, count
from random import Random
from typing import Any, Protocol

import numpy as np

from pagetable.replay.trace import IntArray

SYNTH_FORMATS = ("mooncake", "tokens")
Record = dict[str, Any]


@dataclass(frozen=True)
class Bounds:
    """What is known of a number of the shape besides its type and default. `low` and `high` are allowed themselves."""

    help: str
    low: float
    high: float


def _number(default: float, help: str, low: float = 0, high: float = 10**9) -> Any:
    return field(default=default, metadata={"bounds": Bounds(help, low, high)})


@dataclass(frozen=True)
class TraceShape:
    """What a trace looks like. Lengths are log-normal by median and sigma, numbers of turns geometric by their mean.

    ValueError for a number that is out of its bounds, or that contradicts another.
    """

    sessions: int = _number(1000, "Sessions in all; 0 is as many as the duration allows.")
    duration: float = _number(math.inf, "Seconds after which no request comes any more.", high=math.inf)
    session_rate: float = _number(1.0, "Sessions that begin in a second, a Poisson process.", low=1e-6)
    turns: float = _number(4.0, "Turns of a chat, the mean.", low=1)
    think_time: float = _number(60.0, "Seconds from an answer to the person's next turn, the median.")
    think_sigma: float = _number(1.2, "Its sigma; 0 is always the median.", high=4)
    prefixes: int = _number(20, "Different system prompts.", low=1, high=10**6)
    prefix_tokens: int = _number(2048, "Tokens of each.")
    prefix_zipf: float = _number(1.0, "Exponent of their popularity: 0 is even, more favours the first.", high=10)
    new_tokens: float = _number(300.0, "Tokens that a turn adds, the median.", low=1)
    new_sigma: float = _number(1.2, "Its sigma.", high=4)
    output_tokens: float = _number(200.0, "Tokens of an answer, the median.", low=1)
    output_sigma: float = _number(0.8, "Its sigma.", high=4)
    agents: float = _number(0.1, "Share of the sessions that are agents.", high=1)
    agent_turns: float = _number(15.0, "Turns of an agent, the mean.", low=1)
    tool_time: float = _number(5.0, "Seconds from an answer to an agent's next turn, the median.")
    tool_sigma: float = _number(1.5, "Its sigma.", high=4)
    fan_out: float = _number(0.1, "Chance that a turn of an agent spawns sub-agents.", high=1)
    sub_agents: int = _number(3, "Sub-agents spawned together.", low=1, high=10_000)
    sub_agent_turns: float = _number(4.0, "Turns of a sub-agent, the mean.", low=1)
    token_time: float = _number(0.02, "Seconds that a token of an answer takes.")
    max_length: int = _number(131_072, "Most tokens of a prompt and its answer; there a session ends.", 2, 2**30)
    block_size: int = _number(512, "Tokens of a block, for hashes.", low=1, high=2**30)
    vocab_size: int = _number(32_000, "Token ids are below this, for tokens.", low=2, high=2**31)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, bounds = getattr(self, each.name), each.metadata["bounds"]
            if isinstance(value, bool) or not isinstance(value, int if each.type == "int" else int | float):
                raise ValueError(f"{each.name}={value!r}: a {'whole ' * (each.type == 'int')}number is expected")
            if not bounds.low <= value <= bounds.high:
                raise ValueError(f"{each.name}={value}: it must be from {bounds.low:,} to {bounds.high:,}")
        if not self.sessions and math.isinf(self.duration):
            raise ValueError("sessions=0: a trace without a number of sessions needs a duration")
        if self.prefix_tokens + 2 > self.max_length:
            raise ValueError(
                f"max_length={self.max_length}: there is no room behind prefix_tokens={self.prefix_tokens}"
            )


def synthesize(
    shape: TraceShape, seed: int, format: str = "mooncake", *, session_ends: bool = False
) -> Iterator[Record]:
    """The records of a trace, in order of time. The same shape and seed give the same ones, in either format.

    `mooncake`: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`, `session_id`, `turn`,
    `block_size`. Ids count from 0 in order of appearance. A full block has one id wherever it appears behind the same
    prefix; the partial block at the end of a prompt has one of its own. `turn` counts from 1 along a line, so that an
    agent's next turn and the first ones of its sub-agents have the same number; all belong to one session.

    `tokens`: `timestamp` in seconds, `prompt_token_ids`, `output_token_ids`, `session_id`.

    With `session_ends` each has `end_session` as well, true in the last one of its session. A session that the duration
    cuts off has no end.

    Memory holds the live sessions and their contents, not what has passed. ValueError for an unknown format.
    """
    if format not in SYNTH_FORMATS:
        raise ValueError(f"format={format!r}: there are {', '.join(SYNTH_FORMATS)}")
    empty = _Hashes(shape.block_size, count()) if format == "mooncake" else _Tokens(shape.vocab_size)
    return _Synthesis(shape, seed, empty).records(session_ends)


# -------------------------------------------------------------------- who asks when


@dataclass(frozen=True, slots=True)
class _Role:
    """What tells a chat from an agent and from a sub-agent."""

    turns: float
    pause: float  # seconds between an answer and the next turn
    pause_sigma: float
    fan_out: float = 0.0


@dataclass(slots=True)
class _Line:
    """Turns one after the other, from `turn` on."""

    name: str  # of its random numbers
    session: int
    role: _Role
    content: _Content
    start: float
    turn: int = 1


@dataclass(slots=True)
class _Turn:
    """One request, of which the content is all there is up to the end of its answer."""

    line: _Line
    turn: int
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int


class _Synthesis:
    """All sessions of a trace."""

    def __init__(self, shape: TraceShape, seed: int, empty: _Content) -> None:
        self._shape = shape
        self._seed = seed
        self._empty = empty
        self._prefixes: dict[int, _Content] = {}
        self._popularity = list(accumulate((rank + 1) ** -shape.prefix_zipf for rank in range(shape.prefixes)))
        self._chat = _Role(shape.turns, shape.think_time, shape.think_sigma)
        self._agent = _Role(shape.agent_turns, shape.tool_time, shape.tool_sigma, shape.fan_out)
        self._sub_agent = _Role(shape.sub_agent_turns, shape.tool_time, shape.tool_sigma)

    def records(self, session_ends: bool) -> Iterator[Record]:
        """The turns of all sessions in order of time. A turn is written down before the one after it is asked for."""
        live: list[tuple[float, int, _Turn, Iterator[_Turn]]] = []
        for session, start in enumerate(chain(self._starts(), [math.inf])):
            while live and live[0][0] <= start:
                arrival, number, turn, following = live[0]
                if arrival > self._shape.duration:
                    return
                record = turn.line.content.record(turn)
                after = next(following, None)
                if session_ends:
                    record["end_session"] = after is None
                yield record
                if after is None:
                    heapq.heappop(live)
                else:
                    heapq.heapreplace(live, (after.arrival, number, after, following))
            if start < math.inf:
                following = self._line(self._session(session, start))
                heapq.heappush(live, (start, session, next(following), following))

    def _starts(self) -> Iterator[float]:
        rng, start = Random(f"{self._seed} arrivals"), 0.0
        for _ in range(self._shape.sessions) if self._shape.sessions else count():
            start += rng.expovariate(self._shape.session_rate)
            if start > self._shape.duration:
                return
            yield start

    def _session(self, session: int, start: float) -> _Line:
        name = f"{self._seed} session {session}"
        rng = Random(f"{name} kind")
        rank = rng.choices(range(self._shape.prefixes), cum_weights=self._popularity)[0]
        role = self._agent if rng.random() < self._shape.agents else self._chat
        return _Line(name, session, role, self._prefix(rank).fork(name), start)

    def _prefix(self, rank: int) -> _Content:
        if rank not in self._prefixes:
            self._prefixes[rank] = self._empty.fork(f"{self._seed} prefix {rank}")
            self._prefixes[rank].grow(self._shape.prefix_tokens)
        return self._prefixes[rank]

    def _line(self, line: _Line) -> Iterator[_Turn]:
        """The turns of a line and, between them, those of the sub-agents that it spawns."""
        shape, role, content, rng, now = self._shape, line.role, line.content, Random(line.name), line.start
        end = line.turn + _geometric(rng, role.turns)
        for turn in range(line.turn, end):
            room = shape.max_length - content.length
            if room < 2:
                return
            num_new = min(_length(rng, shape.new_tokens, shape.new_sigma), room - 1)
            num_output = min(_length(rng, shape.output_tokens, shape.output_sigma), room - num_new)
            content.grow(num_new + num_output)
            yield _Turn(line, turn, now, content.length - num_output, num_output)
            now += num_output * shape.token_time
            if turn + 1 < end and rng.random() < role.fan_out:
                for sub_turn in self._fan_out(line, turn + 1, now):
                    yield sub_turn
                    now = max(now, sub_turn.arrival + sub_turn.num_output_tokens * shape.token_time)
            now += _log_normal(rng, role.pause, role.pause_sigma)

    def _fan_out(self, line: _Line, turn: int, now: float) -> Iterator[_Turn]:
        """The turns of sub-agents that go on from a line's content, in order of time."""
        names = [f"{line.name} turn {turn} sub-agent {number}" for number in range(self._shape.sub_agents)]
        lines = [_Line(name, line.session, self._sub_agent, line.content.fork(name), now, turn) for name in names]
        return heapq.merge(*map(self._line, lines), key=lambda sub_turn: sub_turn.arrival)


def _geometric(rng: Random, mean: float) -> int:
    """A number from 1 up."""
    return 1 if mean <= 1 else 1 + int(math.log(1.0 - rng.random()) / math.log1p(-1 / mean))


def _log_normal(rng: Random, median: float, sigma: float) -> float:
    return median * math.exp(rng.normalvariate(0.0, sigma))


def _length(rng: Random, median: float, sigma: float) -> int:
    return max(1, round(_log_normal(rng, median, sigma)))


# -------------------------------------------------------------------- what is asked


class _Content(Protocol):
    """Text that grows at its end. What was forked off has all that was there, and goes another way from there on."""

    @property
    def length(self) -> int: ...  # tokens

    def grow(self, num_tokens: int) -> None: ...

    def fork(self, name: str) -> _Content: ...

    def record(self, turn: _Turn) -> Record: ...


class _Hashes:
    """Content as ids of its blocks. A block gets its id when it is first written down, by whoever is first."""

    def __init__(self, block_size: int, ids: Iterator[int], parent: _Hashes | None = None) -> None:
        self.length: int = 0 if parent is None else parent.length
        self._block_size = block_size
        self._ids = ids
        self._parent = parent  # until its blocks were taken over
        self._num_shared = self.length // block_size
        self._full: list[int] = []

    def grow(self, num_tokens: int) -> None:
        self.length += num_tokens

    def fork(self, name: str) -> _Hashes:
        return _Hashes(self._block_size, self._ids, self)

    def record(self, turn: _Turn) -> Record:
        num_full, rest = divmod(turn.num_prompt_tokens, self._block_size)
        return {
            "timestamp": int(turn.arrival * 1000),
            "input_length": turn.num_prompt_tokens,
            "output_length": turn.num_output_tokens,
            "hash_ids": self._full_blocks(num_full) + ([next(self._ids)] if rest else []),
            "session_id": turn.line.session,
            "turn": turn.turn,
            "block_size": self._block_size,
        }

    def _full_blocks(self, num_blocks: int) -> list[int]:
        """Ids of the first blocks; those of a prefix are asked of whoever has it, once."""
        if self._parent is not None:
            self._full, self._parent = self._parent._full_blocks(self._num_shared), None
        self._full += [next(self._ids) for _ in range(num_blocks - len(self._full))]
        return self._full[:num_blocks]


class _Tokens:
    """Content as random token ids."""

    def __init__(self, vocab_size: int, name: str = "", before: IntArray | None = None) -> None:
        self.token_ids = np.zeros(0, np.int32) if before is None else before
        self._vocab_size = vocab_size
        self._rng = Random(f"{name} tokens")

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def grow(self, num_tokens: int) -> None:
        drawn = np.frombuffer(self._rng.randbytes(4 * num_tokens), "<u4") % np.uint32(self._vocab_size)
        self.token_ids = np.append(self.token_ids, drawn.astype(np.int32))

    def fork(self, name: str) -> _Tokens:
        return _Tokens(self._vocab_size, name, self.token_ids)

    def record(self, turn: _Turn) -> Record:
        end = turn.num_prompt_tokens + turn.num_output_tokens
        return {
            "timestamp": int(turn.arrival * 1000) / 1000,
            "prompt_token_ids": self.token_ids[: turn.num_prompt_tokens].tolist(),
            "output_token_ids": self.token_ids[turn.num_prompt_tokens : end].tolist(),
            "session_id": turn.line.session,
        }
