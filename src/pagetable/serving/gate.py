"""What a request passes before any endpoint sees it: size, time, host, key. All bounds on clients stand here."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagetable.serving.access import OPEN_PATHS, Access
from pagetable.serving.engine_client import SHUTTING_DOWN, EngineDeadError
from pagetable.serving.errors import ApiError
from pagetable.serving.front import Front
from pagetable.serving.generation import client_request_id

MAX_HEAD_BYTES = 64 << 10  # request line and headers
HEAD_SECONDS = 30.0  # to send them
BODY_SECONDS = 60.0  # to send the body
LINGER_SECONDS = 5.0  # for a client to notice that it is answered
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on what a client may send before, beside and after a request.

    A head may have `MAX_HEAD_BYTES` and take `HEAD_SECONDS`; so may trailers, which are dropped. A client that takes
    nothing of what is to be sent is cut off after one to two `stream_timeout`, one that goes on sending a request that
    is answered already after `LINGER_SECONDS`.
    """

    stream_timeout = 60.0  # the server's settings go into a subclass
    max_connections = 1 << 30

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = self._in_message = True
        self._unsent: int | None = None  # bytes to be sent at the last look, if none have been added since
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close)
        self._write_timer = self.loop.call_later(self.stream_timeout, self._look_at_unsent)
        if len(self.connections) > self.max_connections:
            transport.abort()  # the engine, too, needs file descriptors when it is restarted

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._head_timer.cancel()
        self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        if self._in_head:
            # No other protocol is spoken here; the parser would take what follows for one. (Java asks for HTTP/2.)
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nX-Not-Upgraded:", head) + end + rest
        super().data_received(data)
        if self._in_head:
            self._count(len(data))

    def on_message_begin(self) -> None:
        """The first byte of a request, perhaps not of the first one."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of a head, or of the trailers of a body in chunks."""
        if self._in_head:
            super().on_header(name, value)
        else:
            self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is all there."""
        self._in_head = False
        self._head_bytes = 0
        self._head_timer.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is all there."""
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written, perhaps before the request was read."""
        if self._in_message:
            self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        elif not self.pipeline and not self._in_head:  # an empty line stops uvicorn's own timer for idle connections
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close)
        super().on_response_complete()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self._in_head:
                self.send_400_response(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
            else:
                self.transport.abort()

    def _look_at_unsent(self) -> None:
        """Cut the client off if it has taken nothing since the last look."""
        unsent = self.transport.get_write_buffer_size()
        is_waiting = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if is_waiting and unsent and self._unsent is not None and unsent >= self._unsent:
            self.transport.abort()
            return
        self._unsent = unsent if is_waiting and unsent else None
        self._write_timer = self.loop.call_later(self.stream_timeout, self._look_at_unsent)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class ClientGoneError(Exception):
    """The client has gone before its request was all there."""


class Gate:
    """ASGI middleware: counts answers, names requests, refuses who may not come in and what is too large."""

    def __init__(self, app: ASGIApp, front: Front, access: Access) -> None:
        self._app = app
        self._front = front
        self._access = access
        self._only_local = not front.settings.is_public() and not access.needs_key
        self._known_hosts = {front.settings.host, "localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass, or answer with what is wrong."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        watched = _Watched(send, self._request_id(scope))
        try:
            self._admit(scope)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                receive = _replay(await self._body(scope, receive), receive)
            await self._app(scope, receive, watched)
        except ClientGoneError:
            return
        except asyncio.CancelledError:
            if watched.status is not None:
                raise
            # The server cannot wait any longer for the rest of this request.
            await self._front.refuse(EngineDeadError(SHUTTING_DOWN)).response()(scope, receive, watched)
        except Exception as error:
            refused = self._front.refuse(error)
            self._front.note_refusal(path_of(scope), error)
            if watched.status is None:
                await refused.response()(scope, receive, watched)
            else:
                raise
        finally:
            self._front.metrics.http_response(path_of(scope), watched.status or 499)

    def _request_id(self, scope: Scope) -> str | None:
        if not self._front.settings.enable_request_id_headers:
            return None
        return client_request_id(Headers(scope=scope)) or uuid4().hex

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._only_local and not self._is_local(headers.get("host", "localhost")):
            # A web page can give its own name this machine's address, and would be let in by the browser.
            raise ApiError(403, "this server answers to localhost only; give it an --api-key to use another name")
        origin = headers.get("origin")
        if self._only_local and origin is not None and not self._may_call(origin):
            raise ApiError(403, "a page of another origin may not call this server; see --allowed-origins")
        if path_of(scope) not in OPEN_PATHS:
            scope["caller"] = self._access.caller(headers.get("authorization"))

    def _may_call(self, origin: str) -> bool:
        allowed = self._front.settings.allowed_origins
        return "*" in allowed or origin in allowed or self._is_local(origin.partition("://")[2])

    def _is_local(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if name in self._known_hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._front.settings.max_request_bytes
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s", code="timeout") from None


def path_of(scope: Scope) -> str:
    """The path of a request, without what a proxy shows it under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class _Watched:
    """A `send` that remembers the status, and puts the request's name among the headers."""

    def __init__(self, send: Send, request_id: str | None) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._request_id is not None:
                headers = [*message.get("headers", ()), (b"x-request-id", self._request_id.encode())]
                message = {**message, "headers": headers}
        await self._send(message)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes, which is what this server allows", code="too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body at once, then what the client does next."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
