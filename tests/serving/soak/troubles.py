"""What goes wrong in chaos: killed engines, clients that drop, stall or talk nonsense, floods."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SHUT_WR, SO_LINGER, SO_RCVBUF, SOL_SOCKET, socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from pagetable.serving.gate import BODY_SECONDS, HEAD_SECONDS
from tests.serving.running import RunningServer
from tests.serving.soak.load import ERROR_FIELDS, Load

if TYPE_CHECKING:
    from tests.serving.soak.trials import Trial

MAX_REQUEST_BYTES = 1 << 20

Work = Coroutine[Any, Any, None]


def post(body: bytes, *headers: bytes, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """A request, after whose answer the connection is closed."""
    head = [b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", b"Connection: close", *headers]
    if not any(header.startswith(b"Transfer-Encoding") for header in headers):
        head.append(b"Content-Length: %d" % (len(body) if length is None else length))
    return b"\r\n".join([*head, b"Content-Type: application/json", b"", body])


CHUNKED = b"Transfer-Encoding: chunked"
GARBAGE: dict[str, bytes] = {
    "broken JSON": post(b'{"prompt": "a", '),
    "deep JSON": post(b"[" * 100_000),
    "no object": post(b"3"),
    "no body": post(b""),
    "not UTF-8": post(b'{"prompt": "\xff\xfe"}'),
    "half a surrogate": post(b'{"prompt": "\\ud800"}'),
    "not a number": post(b'{"prompt": "a", "temperature": NaN}'),
    "endless number": post(b'{"prompt": "a", "seed": %s}' % (b"9" * 100_000)),
    "unknown token": post(b'{"prompt": [2000000000]}'),
    "unknown field": post(b'{"prompt": "a", "%s": 1}' % (b"x" * 100_000)),
    "unknown path": post(b"{}", path="/v1/" + "x" * 1000),
    "long prompt": post(b'{"prompt": "%s"}' % (b"ab " * 10_000)),
    "many prompts": post(b'{"prompt": [%s"a"]}' % (b'"a",' * 10_000)),
    "bad part": post(b'{"messages": [{"role": "user", "content": [{"type": "x"}]}]}', path="/v1/chat/completions"),
    "huge body": post(b" " * (2 * MAX_REQUEST_BYTES)),
    "huge body, announced": post(b" " * 1000, length=10**12),
    "huge body, in chunks": post(b"100000\r\n%s\r\n" % (b" " * MAX_REQUEST_BYTES) * 2, CHUNKED),
    "broken chunk": post(b"xyz\r\nabc\r\n", CHUNKED),
    "huge header": post(b"{}", b"X-Huge: " + b"a" * 1_000_000),
    "endless head": post(b"", *[b"X-%d: 1" % i for i in range(100_000)]),
    "other host": b"GET /v1/models HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n",
    "other protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 500,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}
TRICKLES: dict[str, tuple[bytes, bytes]] = {  # at first, then every second
    "a slow head": (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"a"),
    "a slow body": (post(b"{", length=100_000), b" "),
    "a refused body": (post(b"", length=10**9).replace(b"Connection: close", b"X: y"), b" "),
    "nothing to say": (b"", b""),
    "line feeds": (b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n"),
}


class Troubles:
    """All that can happen to a server from outside. `counts` says what did."""

    def __init__(self, trial: Trial, server: RunningServer, load: Load, engine_timeout: float) -> None:
        self.trial, self.server, self.load, self.engine_timeout = trial, server, load, engine_timeout
        self.rng = random.Random(f"{trial.seed} troubles")
        self.counts: Counter[str] = Counter()
        self.num_deaths = 0  # of engines
        parts = urlsplit(server.url)
        self.address = (parts.hostname, parts.port)

    def all(self) -> list[Work]:
        """Everything at once."""
        often = [self.go_with_a_reset, self.half_close, self.read_nothing, self.talk_garbage]
        return [
            self._engine_troubles(),
            self._repeat(self.flood, min(5.0, self.trial.seconds / 8)),
            self._repeat(self.reset_cache, 1.0),
            *(self._repeat(what, 0.5) for what in often for _ in range(1 + self.trial.streams // 200)),
            *map(self.trickle, TRICKLES),
        ]

    async def _repeat(self, what: Callable[[], Work], mean: float) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0, 2 * mean))
            await what()

    # ---------------------------------------------------------------- processes

    async def _engine_troubles(self) -> None:
        gap = min(10.0, self.trial.seconds / 12)
        while True:
            for trouble in self.rng.sample([self._kill, self._hang, self._pause, self._pause_front], 4):
                await asyncio.sleep(self.rng.uniform(0.5, 1.5) * gap)
                await trouble(self.server.engine_pid())
                await self.until_up()

    async def _kill(self, pid: int) -> None:
        await self._end("engine killed", pid, signal.SIGKILL, 2.0)

    async def _hang(self, pid: int) -> None:
        await self._end("engine stopped for good", pid, signal.SIGSTOP, 1.5 * self.engine_timeout + 3)

    async def _end(self, how: str, pid: int, number: int, bound: float) -> None:
        self.counts[how] += 1
        self.num_deaths += 1
        os.kill(pid, number)
        end = time.monotonic() + bound
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.05)
            if time.monotonic() > end:
                self.load.faults.append(f"{how}, but it is still there after {bound:.1f} s")
                os.kill(pid, signal.SIGKILL)
                return

    async def _pause(self, pid: int) -> None:
        await self._stop_for("engine", pid, self.rng.uniform(0.1, 0.5) * self.engine_timeout)

    async def _pause_front(self, _: int) -> None:
        """Longer than an engine may be silent, but here it is not the engine that hangs."""
        await self._stop_for("front", self.server.process.pid, self.engine_timeout + 2)

    async def _stop_for(self, name: str, pid: int, seconds: float) -> None:
        self.counts[f"{name} stopped for a while"] += 1
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def until_up(self) -> None:
        """Until the server is healthy."""
        async with asyncio.timeout(90):  # the longest back-off is 30 s
            while True:
                async with self.load.http.get("/health") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.1)

    # ---------------------------------------------------------------- clients that ask for much

    async def flood(self) -> None:
        """More than the queue takes, at once."""
        await self.until_up()
        self.counts["floods"] += 1
        simple = [question for question in self.load.questions if question.is_simple]
        many = [question.times(32) for question in self.rng.choices(simple, k=self.trial.streams // 10)]
        await asyncio.gather(*map(self.load.ask, many))

    async def reset_cache(self) -> None:
        """As an operator may at any time."""
        self.counts["cache resets"] += 1
        try:
            async with asyncio.timeout(self.load.bound), self.load.http.post("/v1/cache/reset") as response:
                if response.status not in (200, 503):
                    self.load.faults.append(f"/v1/cache/reset: HTTP {response.status}")
        except (aiohttp.ClientError, OSError) as error:
            self.load.faults.append(f"/v1/cache/reset: {error!r}")

    # ---------------------------------------------------------------- clients that go

    async def go_with_a_reset(self) -> None:
        """Ask, perhaps read a little, and reset the connection."""
        self.counts["clients gone with a reset"] += 1
        with self._connect() as client:
            await self._send(client, self._any_request())
            if self.rng.random() < 0.7:
                await self._receive(client, 100)
            client.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))

    async def half_close(self) -> None:
        """Ask, say that nothing more will come, and read."""
        self.counts["clients half closed"] += 1
        with self._connect() as client:
            await self._send(client, self._any_request())
            with suppress(OSError):
                client.shutdown(SHUT_WR)
            await self._receive(client)

    async def read_nothing(self) -> None:
        """Ask for much and take nothing of it. The server must not keep the connection."""
        self.counts["clients that read nothing"] += 1
        much = {"prompt": "a", "n": 8, "max_tokens": 200, "logprobs": 5, "ignore_eos": True}
        body = {**much, "stream": self.rng.random() < 0.5}
        with self._connect(receive_buffer=4096) as client:
            await self._send(client, post(json.dumps(body).encode()))
            await self._until_dropped(client, self.load.bound, f"that reads nothing of {body}")

    async def trickle(self, how: str) -> None:
        """Send something now and then, to keep the connection. It must end some time."""
        self.counts[f"clients with {how}"] += 1
        first, then = TRICKLES[how]
        with self._connect() as client:
            await self._send(client, first)
            await self._until_dropped(client, 2 * HEAD_SECONDS + BODY_SECONDS + 10, f"with {how}", then)
        self.counts[f"clients with {how}, dropped"] += 1

    async def _until_dropped(self, client: socket, bound: float, who: str, data: bytes = b"") -> None:
        await asyncio.sleep(1)
        end = time.monotonic() + bound
        while self._is_kept(client):
            await self._send(client, data)
            await asyncio.sleep(1)
            if time.monotonic() > end:
                self.load.faults.append(f"a client {who} was kept for {bound:.0f} s")
                return

    def _is_kept(self, client: socket) -> bool:
        """Whether the server has its end of this connection open: then that end has an inode."""
        ends = [f"0100007F:{port:04X}" for port in (self.address[1], client.getsockname()[1])]
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        return any(row[1:3] == ends and row[9] != "0" for row in rows)

    def _any_request(self) -> bytes:
        question = self.rng.choice(self.load.questions)
        return post(json.dumps(question.body).encode(), path=question.path)

    # ---------------------------------------------------------------- clients that make no sense

    async def talk_garbage(self) -> None:
        """Something that is no proper request, or noise. A clear refusal, or the end of the connection."""
        self.counts["clients that talk garbage"] += 1
        noise = self.rng.randbytes(self.rng.randint(1, 5000)) + b"\r\n\r\n"
        name, data = self.rng.choice([*GARBAGE.items(), (f"noise {noise[:20]!r}", noise)])
        with self._connect() as client:
            await self._send(client, data)
            head, _, body = (await self._receive(client)).partition(b"\r\n\r\n")
        if b"application/json" in head:
            error = json.loads(body)["error"]
            is_fit = set(error) == ERROR_FIELDS and (b" 4" in head[:12] or error["code"] in self.load.allowed)
        else:  # what is not even HTTP is refused in plain text
            is_fit = not head or head.startswith(b"HTTP/1.1 400")
        if not is_fit:
            self.load.faults.append(f"{name} was answered with {head + body!r:.400}")

    # ---------------------------------------------------------------- sockets

    @contextmanager
    def _connect(self, receive_buffer: int | None = None) -> Iterator[socket]:
        with socket() as client:
            if receive_buffer:
                client.setsockopt(SOL_SOCKET, SO_RCVBUF, receive_buffer)
            client.connect(self.address)
            client.setblocking(False)
            yield client

    async def _send(self, client: socket, data: bytes) -> None:
        await self._bounded(asyncio.get_running_loop().sock_sendall(client, data))

    async def _receive(self, client: socket, least: int = sys.maxsize) -> bytes:
        """All until the end, or so many bytes."""
        data = b""
        while len(data) < least:
            more = await self._bounded(asyncio.get_running_loop().sock_recv(client, 1 << 16))
            if not more:
                break
            data += more
        return data

    async def _bounded(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Its result; None when the server has hung up."""
        bound = self.load.bound + HEAD_SECONDS
        try:
            async with asyncio.timeout(bound):
                return await work
        except TimeoutError:
            self.load.faults.append(f"a client waited for {bound:.0f} s")
        except OSError:
            pass
        return None
