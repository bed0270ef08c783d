"""How answers go out: whole or as server-sent events, and never to somebody who has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagetable.serving.errors import ApiError, json_response

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
Refuse = Callable[[Exception], ApiError]


def event(content: Any) -> bytes:
    """One server-sent event with JSON in it."""
    return b"data: " + _ENCODER.encode(content) + b"\n\n"


class WholeAnswer(Response):
    """The result of `content` as JSON, or an error. Work on it ends when the client goes."""

    def __init__(self, content: Awaitable[Any], refuse: Refuse) -> None:
        super().__init__()
        self._content = content
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, and answer."""
        await _while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = json_response(await self._content)
        except Exception as error:
            response = self._refuse(error).response()
        await response(scope, receive, send)


class EventStream(Response):
    """Server-sent events: the given chunks, then [DONE].

    Nothing is sent before the first chunk is there, so that what fails until then has a status of its own; what fails
    later is the last event.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], refuse: Refuse) -> None:
        super().__init__()
        self._chunks = chunks
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream to the end, or until the client goes."""
        await _while_connected(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for chunk in self._chunks:
                if not started:
                    started = True
                    await send(_START)
                await send(_body(chunk))
            await send(_body(DONE))
        except Exception as error:
            refused = self._refuse(error)
            if not started:
                await refused.response()(scope, receive, send)
                return
            await send(_body(event(refused.body) + DONE))
        finally:
            await self._chunks.aclose()  # ends the request, if it has not ended
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy is to hand each event on
    ],
}


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do `work`; end it as soon as the client goes."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        with suppress(asyncio.CancelledError):
            await working


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
