"""A load generator for OpenAI-compatible servers: what is asked, and when.

Sessions (the data) and arrivals (their times) go into `run_load`; the records of load_report.py come out, which says
what is measured. The client is aiohttp: with 1,000 streams at once an event cost it 32 us, HTTPX 353 us.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pagetable.serving.load_report import Measurement, RequestFailure, Run, error_message

Message = dict[str, Any]

# Short and common, so that nearly all are one token for nearly every tokenizer.
_TEXT = """
  air animal answer area back base bear best big bird black blue board boat body book box boy bridge build car care case
  chair change child circle city class clock cloud cold color corner country cross dark day deep door dream dress drink
  dry earth east edge egg engine evening eye face family farm father field figure fire fish five floor flower food foot
  force forest form four free fresh friend front fruit game garden girl glass gold good grass green ground group hand
"""
_WORDS = _TEXT.split()


# ------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Turn:
    """One request: the messages it adds to a conversation, and the longest answer to them in tokens."""

    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True)
class Session:
    """A conversation: each turn is sent `think_time` seconds after the answer to the one before it."""

    turns: tuple[Turn, ...]
    think_time: float = 0.0


@dataclass(frozen=True)
class Data:
    """What to ask. Lengths of prompts are in words, which is about a token each; the same seed makes the same data."""

    dataset_name: str = "random"  # random, shared-prefix, multi-turn or custom
    seed: int = 0
    input_len: int = 1024  # of a prompt of `random`, of a message of `multi-turn`
    output_len: int = 128
    range_ratio: float = 0.0  # lengths vary evenly between (1 - this) and (1 + this) of what is asked for
    num_prefixes: int = 10
    prefix_len: int = 256
    suffix_len: int = 256
    num_turns: int = 4
    think_time: float = 0.0
    dataset_path: Path | None = None


def make_sessions(data: Data, chat: bool) -> Iterator[Session]:
    """The sessions of a data set, without end. ValueError names the line of a file that is not understood."""
    if data.dataset_name == "custom":
        return itertools.cycle(read_custom(data.dataset_path, data.output_len, chat))
    rng = random.Random(f"{data.seed} {data.dataset_name}")
    make = {"random": _random, "shared-prefix": _shared_prefix, "multi-turn": _multi_turn}
    return make[data.dataset_name](data, rng)


def take(endless: Iterable[Session], num_requests: int) -> Iterator[Session]:
    """The first sessions that hold so many requests; the last one is cut short to fit."""
    for session in endless:
        yield Session(session.turns[:num_requests], session.think_time)
        num_requests -= len(session.turns)
        if num_requests <= 0:
            return


def _random(data: Data, rng: random.Random) -> Iterator[Session]:
    while True:
        yield Session((_turn(data, rng, _words(rng, _length(data, rng, data.input_len))),))


def _shared_prefix(data: Data, rng: random.Random) -> Iterator[Session]:
    prefixes = [_words(rng, data.prefix_len) for _ in range(data.num_prefixes)]
    while True:
        suffix = _words(rng, _length(data, rng, data.suffix_len))
        yield Session((_turn(data, rng, f"{rng.choice(prefixes)} {suffix}"),))


def _multi_turn(data: Data, rng: random.Random) -> Iterator[Session]:
    while True:
        texts = [_words(rng, _length(data, rng, data.input_len)) for _ in range(data.num_turns)]
        yield Session(tuple(_turn(data, rng, text) for text in texts), data.think_time)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def _length(data: Data, rng: random.Random, mean: int) -> int:
    return max(1, rng.randint(math.floor(mean * (1 - data.range_ratio)), math.ceil(mean * (1 + data.range_ratio))))


def _turn(data: Data, rng: random.Random, text: str) -> Turn:
    return Turn(({"role": "user", "content": text},), _length(data, rng, data.output_len))


def read_custom(path: Path | None, output_len: int, chat: bool) -> list[Session]:
    """Requests from JSON lines: `prompt` or `messages`, and `max_tokens` (or `output_tokens`) if not `output_len`."""
    if path is None:
        raise ValueError("the custom data set needs --dataset-path, a file of JSON lines")
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                found.append(_custom_session(json.loads(line), output_len, chat))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no requests")
    return found


def _custom_session(line: Any, output_len: int, chat: bool) -> Session:
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise ValueError("an object with either 'prompt' or 'messages' is needed")
    max_tokens = line.get("max_tokens", line.get("output_tokens", output_len))
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens!r}, not a whole number from 1 up")
    if "prompt" in line:
        if not isinstance(line["prompt"], str) or not line["prompt"]:
            raise ValueError("'prompt' is not a text")
        return Session((Turn(({"role": "user", "content": line["prompt"]},), max_tokens),))
    if not chat:
        raise ValueError("'messages' can be sent to a chat endpoint only: add --backend openai-chat")
    messages = line["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("'messages' is not a list of objects with a 'role'")
    return Session((Turn(tuple(messages), max_tokens),))


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """When each session starts, in seconds: a Poisson process of `rate` a second, or all at once if that is infinite.

    The gaps follow a gamma distribution of shape `burstiness`: below 1 arrivals come in bursts, above 1 more evenly.
    """
    if math.isinf(rate):
        return itertools.repeat(0.0)
    rng = random.Random(f"{seed} arrivals")  # of its own: the times do not change with the data
    return itertools.accumulate(rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in itertools.count())


# ----------------------------------------------------------------------------------------- client


@dataclass(frozen=True)
class Target:
    """The server, and what every request to it says."""

    url: str
    model: str
    chat: bool
    headers: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)  # temperature, ignore_eos and the like
    timeout: float | None = None  # seconds a request may take

    def body(self, conversation: Conversation, max_tokens: int) -> dict[str, Any]:
        """The JSON of one request."""
        asked = {"messages": conversation.messages} if self.chat else {"prompt": conversation.text}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked, "max_tokens": max_tokens, **streamed, **self.parameters}


class Conversation:
    """All that was said so far, as messages and as one text.

    In the text an answer follows its prompt with nothing in between, so that the next turn repeats what the server has
    already seen to the letter.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.text = ""

    def ask(self, turn: Turn) -> None:
        """Add the messages of the next turn."""
        self.messages += turn.messages
        self.text = "\n".join([*filter(None, [self.text]), *(str(message.get("content")) for message in turn.messages)])

    def answer(self, text: str) -> None:
        """Add what the server answered."""
        self.messages.append({"role": "assistant", "content": text})
        self.text += text


class EventParser:
    """Cuts the bytes of server-sent events, which may arrive cut anywhere, into the data of each event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that this chunk completes. Comments and other fields are dropped."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


async def run_load(
    target: Target,
    sessions: Iterable[Session],
    arrivals: Iterable[float],
    *,
    max_concurrency: int | None = None,
    duration: float = math.inf,
    on_record: Callable[[Measurement], None] = lambda record: None,
) -> Run:
    """Start each session at its arrival, at most `max_concurrency` at once, none after `duration` seconds.

    A session holds its slot until its last answer, also while it thinks: the cap is a number of users.
    Requests that are under way at the end are waited for.
    """
    _allow_many_sockets()
    async with _http(target.headers, target.timeout) as http:
        load = _Load(target, http, max_concurrency, duration, on_record)
        watch = asyncio.create_task(_watch_loop(load.run.loop_lags))
        try:
            await load.dispatch(sessions, arrivals)
        finally:
            watch.cancel()
    return load.run


async def first_model(base_url: str, headers: dict[str, str]) -> str:
    """The first model that a server names. ConnectionError if nobody answers there, ValueError if it names none."""
    url = f"{base_url}/v1/models"
    async with _http(headers, timeout=60) as http:
        try:
            async with http.get(url) as response:
                status, answer = response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            raise ConnectionError(f"no server answers at {base_url}: {error or 'it took too long'}") from None
    try:
        return str(json.loads(answer)["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"{url} names no model (HTTP {status}: {error_message(answer)}); give --model") from None


class _Load:
    """A run in progress."""

    def __init__(
        self,
        target: Target,
        http: aiohttp.ClientSession,
        max_concurrency: int | None,
        duration: float,
        on_record: Callable[[Measurement], None],
    ) -> None:
        self.run = Run()
        self._target, self._http = target, http
        self._duration, self._on_record = duration, on_record
        self._free_slots: asyncio.Queue[float] = asyncio.Queue()  # since when each has been free
        self._is_capped = max_concurrency is not None
        for _ in range(max_concurrency or 0):
            self._free_slots.put_nowait(0.0)
        self._began = time.perf_counter()

    async def dispatch(self, sessions: Iterable[Session], arrivals: Iterable[float]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for session, due in zip(sessions, arrivals, strict=False):
                await self._until(min(due, self._duration))
                freed = await self._free_slots.get() if self._is_capped else 0.0
                if self._is_over():
                    break
                tasks.create_task(self._converse(session, due, ready=max(due, freed)))

    async def _converse(self, session: Session, due: float, ready: float) -> None:
        conversation, failed = Conversation(), False
        for turn in session.turns:
            await self._until(min(due, self._duration))
            if failed or self._is_over():
                self.run.num_unsent += 1
                continue
            conversation.ask(turn)
            record = Measurement(due, ready)
            await self._request(self._target.body(conversation, turn.max_tokens), record)
            conversation.answer(record.text)
            self.run.records.append(record)
            self._on_record(record)
            failed = record.failure is not None
            due = ready = record.ended + session.think_time
        self._free_slots.put_nowait(self._now())

    async def _request(self, body: dict[str, Any], record: Measurement) -> None:
        """Send one request and note its answer, or why it failed."""
        record.sent = self._now()
        try:
            async with self._http.post(self._target.url, json=body) as response:
                if response.status != 200:
                    answer = await response.text(errors="replace")
                    raise RequestFailure(f"HTTP {response.status}", error_message(answer))
                await self._read(response, record)
        except RequestFailure as failure:
            record.failure = failure
        except TimeoutError:
            record.failure = RequestFailure("timeout", f"no end within {self._target.timeout} s")
        except (aiohttp.ClientError, OSError) as error:
            record.failure = RequestFailure("connection", str(error) or type(error).__name__)
        if record.failure:
            record.ended = self._now()

    async def _read(self, response: aiohttp.ClientResponse, record: Measurement) -> None:
        events = EventParser()
        async for chunk in response.content.iter_any():
            now = self._now()
            for data in events.feed(chunk):
                record.take(data, now)
        for data in events.feed(b"\n\n"):  # some servers leave out the empty line after the last event
            record.take(data, self._now())
        if not record.is_done:
            raise RequestFailure("cut stream", "the stream ended with neither a finish reason nor [DONE]")
        record.ended = record.ended or self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _is_over(self) -> bool:
        return self._now() >= self._duration

    async def _until(self, due: float) -> None:
        if (delay := due - self._now()) > 0:
            await asyncio.sleep(delay)


def _http(headers: dict[str, str], timeout: float | None) -> aiohttp.ClientSession:
    # Idle connections go before uvicorn's 5 s are over: a request never meets one that the server is closing.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout))


async def _watch_loop(lags: list[float], interval: float = 0.02) -> None:
    """Note how late a timer of the event loop rings: what is read while it is late gets a wrong time."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(interval)
        lags.append(time.perf_counter() - began - interval)


def _allow_many_sockets() -> None:
    """Each stream is a socket, and the usual soft limit is 1,024 of them."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # no such limits on Windows
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
