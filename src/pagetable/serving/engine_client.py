"""The front's end of the engine: starts its process, hands requests over, deals its reports out, restarts it.

One process at a time, a pair of sockets of its own for each, so that nothing of an engine that died reaches the next.
Whatever happens to it, every open stream gets an answer or an error.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from pagetable.engine import RequestError, SamplingParams
from pagetable.memory import CacheHints
from pagetable.memory.hints import NO_HINTS
from pagetable.serving.messages import (
    IDLE_REPORT_SECONDS,
    Abort,
    Delta,
    Done,
    EndSession,
    EngineConfig,
    Failed,
    Message,
    Ready,
    Refused,
    Report,
    ResetPrefixCache,
    Shutdown,
    Submit,
    ToFront,
)

logger = logging.getLogger(__name__)

MAX_BACK_OFF = 30.0  # seconds between two tries to restart
STABLE_SECONDS = 60.0  # an engine that lived this long starts the back-off anew
SHUTDOWN_SECONDS = 5.0  # then it is killed
LOAD_SECONDS = 1800.0  # to load a model
SHUTTING_DOWN = "the server is shutting down"


class EngineStartError(Exception):
    """The engine cannot be started: the reason is what it said."""


class EngineDeadError(Exception):
    """The engine process has ended; what it was computing is lost."""

    def __init__(self, reason: str = "the engine process has ended; it is being restarted, try again") -> None:
        super().__init__(reason)


class QueueFullError(Exception):
    """As many requests as are allowed wait already."""


class Observer(Protocol):
    """Whoever wants to know how the engine is doing."""

    def observe_report(self, report: Report) -> None:
        """Called for each report."""

    def engine_restarted(self) -> None:
        """Called when a new process has taken the place of one that ended."""

    def set_engine_up(self, up: bool) -> None:
        """Called when the engine becomes ready, and when it ends."""


class Stream:
    """The deltas of one request, for one reader. What comes while the reader is busy waits here, in order."""

    def __init__(self, request_id: str, num_answers: int) -> None:
        self.request_id = request_id
        self.num_answers = num_answers
        self._unfinished = num_answers
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Add what the engine reported."""
        self._deltas.append(delta)
        self._unfinished -= delta.finish_reason is not None
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Let the reader have this once it has read what came before."""
        self._error = error
        self._news.set()

    @property
    def is_finished(self) -> bool:
        """Whether all of its answers have ended, or it has failed. The reader may be behind."""
        return self._unfinished == 0 or self._error is not None

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """All that has come since the last time, until every answer has ended. Raises what `fail` was given."""
        while True:
            await self._news.wait()
            self._news.clear()
            deltas, self._deltas = self._deltas, []
            if deltas:
                yield deltas
            if self._error is not None and not self._deltas:
                raise self._error
            if self._unfinished == 0 and not self._deltas:
                return


class EngineClient:
    """An engine process and the streams that it answers. All methods belong to one event loop.

    `max_queued_requests` bounds the answers that wait for one of the `max_num_seqs` places. `timeout` is for how many
    seconds an engine with work may show no sign of life before it is taken for hung, and killed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_queued_requests: int = 2048,
        timeout: float = 120.0,
        observer: Observer | None = None,
    ) -> None:
        self._config = config
        self._max_queued_requests = max_queued_requests
        self._timeout = timeout
        self._observer = observer
        self._context = zmq.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="pagetable-")  # readable by this user only
        self._generation = count()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFront)
        self._process: asyncio.subprocess.Process | None = None
        self._inbox: zmq.Socket[bytes] | None = None  # of the engine: we push
        self._reading: asyncio.Task[None] | None = None  # of what the engine pushes to us
        self._first: asyncio.Future[Ready | Failed] | None = None  # what the process says when it has loaded
        self._streams: dict[str, Stream] = {}
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._call_ids = count()
        self._num_open = 0  # answers of all open streams
        self._last_sign = time.monotonic()
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.ready: Ready | None = None  # None while there is no engine to talk to

    # ---------------------------------------------------------------- life

    async def start(self) -> Ready:
        """Start the engine and wait until it is ready. EngineStartError if it cannot be."""
        try:
            ready = await self._spawn()
        except zmq.ZMQError as error:
            await self.close()
            raise EngineStartError(
                f"no sockets in {self._folder.name}: {error}; set TMPDIR to another folder"
            ) from error
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]
        return ready

    async def close(self) -> None:
        """End the engine. Open streams fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.refuse_all()
        process = self._process
        if process is not None and process.returncode is None:
            if self.ready is None:  # still loading: it would not listen
                _kill(process)
            else:
                with suppress(EngineDeadError):
                    self._send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), SHUTDOWN_SECONDS)
            except TimeoutError:
                _kill(process)
                await process.wait()
        self.ready = None
        self._close_sockets()
        if self._reading is not None:
            await asyncio.wait((self._reading,))
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def _spawn(self) -> Ready:
        """Start a process with sockets of its own, and wait until it is ready. EngineStartError if it cannot be."""
        folder = Path(self._folder.name)
        folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have cleaned up
        for left in folder.iterdir():
            left.unlink()
        place = f"ipc://{folder}/{next(self._generation)}"
        config = msgspec.structs.replace(self._config, inbox=f"{place}.inbox", outbox=f"{place}.outbox")
        self._inbox, outbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        try:
            for socket, address in ((self._inbox, config.inbox), (outbox, config.outbox)):
                socket.set_hwm(0)
                socket.bind(address)
        except BaseException:
            outbox.close(linger=0)
            self._close_sockets()
            raise
        first = self._first = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(outbox))
        try:
            await self._start_process(msgspec.msgpack.encode(config))
            return await self._wait_until_ready(first)
        except BaseException:
            self._close_sockets()
            raise

    async def _start_process(self, config: bytes) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pagetable.serving.engine_process", stdin=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended already: whoever waits for it sees that
            self._process.stdin.write(len(config).to_bytes(4, "big") + config)
            await self._process.stdin.drain()

    async def _read(self, outbox: zmq.Socket[bytes]) -> None:
        """Take what the engine sends. Between two messages the streams get their turn."""
        arrived, descriptor = asyncio.Event(), outbox.fileno()
        asyncio.get_running_loop().add_reader(descriptor, arrived.set)
        try:
            while True:
                try:
                    data = outbox.recv(zmq.DONTWAIT)
                except zmq.Again:  # only then does its descriptor tell of the next
                    arrived.clear()
                    await arrived.wait()
                    continue
                try:
                    self._take(self._decoder.decode(data))
                except Exception:  # one message must not end all streams
                    logger.exception("a message of the engine could not be handled")
                await asyncio.sleep(0)
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
            outbox.close(linger=0)

    async def _wait_until_ready(self, first: asyncio.Future[Ready | Failed]) -> Ready:
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((first, ended), timeout=LOAD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not first.done() and not ended.done():
                _kill(self._process)
                raise EngineStartError(f"the engine was not ready after {LOAD_SECONDS:.0f} s")
            if not first.done():
                await asyncio.wait((first,), timeout=1.0)  # its last word may still be on the way
            if not first.done():
                raise EngineStartError(f"the engine process ended with status {ended.result()} before it was ready")
            message = first.result()
        finally:
            ended.cancel()
        if isinstance(message, Failed):
            raise EngineStartError(message.reason)
        self._last_sign = time.monotonic()
        self.ready = message
        if self._observer is not None:
            self._observer.set_engine_up(True)
        return message

    async def _supervise(self) -> None:
        """Wait for the end of one engine process after another, and start the next."""
        back_off = 0.5
        while True:
            assert self._process is not None
            began = time.monotonic()
            await self._process.wait()
            self._note_death()
            if time.monotonic() - began > STABLE_SECONDS:
                back_off = 0.5
            while self.ready is None:
                await asyncio.sleep(back_off)
                back_off = min(2 * back_off, MAX_BACK_OFF)
                try:
                    await self._spawn()
                except Exception as error:  # whatever it is, the next try may succeed
                    logger.error("the engine could not be restarted, next try in %.1f s: %r", back_off, error)
            logger.warning("the engine has been restarted")
            if self._observer is not None:
                self._observer.engine_restarted()

    def _note_death(self) -> None:
        assert self._process is not None
        logger.error("the engine process has ended with status %s", self._process.returncode)
        self.ready = None
        self._close_sockets()
        if self._observer is not None:
            self._observer.set_engine_up(False)
        self._fail_all(EngineDeadError())

    def _close_sockets(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._inbox is not None:
            self._inbox.close(linger=0)
            self._inbox = None

    async def _watch(self) -> None:
        """Kill an engine that has work and shows no sign of life: its death is dealt with like any other."""
        pause = min(1.0, self._timeout / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if now - before > 2 * pause:  # we stood still ourselves: what the engine has said meanwhile is unread yet
                self._last_sign = now
            silent = now - self._last_sign - IDLE_REPORT_SECONDS  # so old its last word may be when work comes
            if (self._streams or self._calls) and self.ready is not None and silent > self._timeout:
                assert self._process is not None
                logger.error("the engine has shown no sign of life for %.0f s and is killed", silent)
                self._last_sign = time.monotonic()
                _kill(self._process)

    # ---------------------------------------------------------------- requests

    def submit(
        self,
        request_id: str,
        prompts: Sequence[Iterable[int]],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        cache_hints: CacheHints = NO_HINTS,
    ) -> Stream:
        """Hand the prompts of a request to the engine. QueueFullError or EngineDeadError if that cannot be.

        The stream raises RequestError if the engine refuses one of them. Whoever stops reading early calls `abort`.
        """
        if self.ready is None:
            raise EngineDeadError
        if self._is_closing:
            raise EngineDeadError(SHUTTING_DOWN)
        stream = Stream(request_id, len(prompts) * params.n)
        limit = self.ready.max_num_seqs + self._max_queued_requests
        if self._num_open + stream.num_answers > limit:
            raise QueueFullError(
                f"{self._num_open} answers are running or waiting and {stream.num_answers} more are asked for, "
                f"{limit} are allowed; try again later"
            )
        data = [np.asarray(prompt, np.dtype("<i4")).tobytes() for prompt in prompts]
        self._send(Submit(request_id, data, params, cache_salt, priority, cache_hints))
        self._streams[request_id] = stream
        self._num_open += stream.num_answers
        return stream

    def abort(self, stream: Stream) -> None:
        """Nobody reads this any more. Does nothing when it has ended."""
        if self._forget(stream.request_id) is not None and self.ready is not None:
            with suppress(EngineDeadError):
                self._send(Abort(stream.request_id))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self._call(ResetPrefixCache(next(self._call_ids)))

    async def end_session(self, session_id: str, cache_salt: str | None) -> int:
        """Nothing will follow in this session. Returns how many cached blocks are its own."""
        return (await self._call(EndSession(next(self._call_ids), session_id, cache_salt))).num_blocks

    async def _call(self, message: ResetPrefixCache | EndSession) -> Done:
        """Have it carried out. EngineDeadError if there is no engine, or if it dies meanwhile."""
        if self.ready is None:
            raise EngineDeadError
        call: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = call
        try:
            self._send(message)
            return await call
        finally:
            del self._calls[message.call_id]

    @property
    def num_open(self) -> int:
        """Answers that are running or waiting."""
        return self._num_open

    def _send(self, message: Message) -> None:
        assert self._inbox is not None
        try:
            self._inbox.send(self._encoder.encode(message), zmq.DONTWAIT)
        except zmq.Again:  # the queue has no limit, so nobody is at its other end
            raise EngineDeadError from None

    def _take(self, message: Any) -> None:
        self._last_sign = time.monotonic()
        match message:
            case Report():
                for delta in message.deltas:
                    self._deliver(delta)
                for refused in message.refused:
                    self._refuse(refused)
                if self._observer is not None:
                    self._observer.observe_report(message)
            case Done():
                call = self._calls.get(message.call_id)
                if call is not None and not call.done():
                    call.set_result(message)
            case Ready() | Failed():
                if self._first is not None and not self._first.done():
                    self._first.set_result(message)

    def _deliver(self, delta: Delta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is not None:  # else it was aborted, and this was on the way
            stream.put(delta)
            if stream.is_finished:
                self._forget(delta.request_id)

    def _refuse(self, refused: Refused) -> None:
        stream = self._forget(refused.request_id)
        if stream is not None:
            error = (
                RuntimeError(refused.reason) if refused.is_our_fault else RequestError(refused.reason, refused.param)
            )
            stream.fail(error)

    def _forget(self, request_id: str) -> Stream | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._num_open -= stream.num_answers
        return stream

    def refuse_all(self) -> None:
        """End every open stream, and let no new one begin: the server is shutting down."""
        self._is_closing = True
        self._fail_all(EngineDeadError(SHUTTING_DOWN))

    def _fail_all(self, error: Exception) -> None:
        for request_id in list(self._streams):
            stream = self._forget(request_id)
            if stream is not None:
                stream.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        process.kill()
