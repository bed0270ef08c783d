"""The client of a load generator for OpenAI-compatible servers.

Sessions and arrivals (load_data.py) go into `run_load`; the records of load_report.py come out, which says what is
measured. The client is aiohttp: with 1,000 streams at once an event cost it 32 us, HTTPX 353 us.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pagetable.serving.load_data import Message, Session, Turn
from pagetable.serving.load_report import Measurement, RequestFailure, Run, error_message


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
        """Note what comes and when. What it says is found out afterwards: that would delay the reading of others."""
        reads: list[tuple[float, bytes]] = []
        try:
            async for chunk in response.content.iter_any():
                reads.append((self._now(), chunk))
        finally:
            self._parse(reads, record)
        if not record.is_done:
            raise RequestFailure("cut stream", "the stream ended with neither a finish reason nor [DONE]")
        record.ended = record.ended or reads[-1][0]

    def _parse(self, reads: list[tuple[float, bytes]], record: Measurement) -> None:
        events = EventParser()
        for moment, chunk in reads:
            for data in events.feed(chunk):
                record.take(data, moment)
        for data in events.feed(b"\n\n"):  # some servers leave out the empty line after the last event
            record.take(data, reads[-1][0])

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
