"""What can go wrong, in the shape and with the status codes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from pagetable.engine import RequestError
from pagetable.serving.engine_client import EngineDeadError, QueueFullError
from pagetable.serving.schema import ErrorBody
from pagetable.text import ChatTemplateError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer that is an error: status, message, the parameter at fault, and a code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> ErrorBody:
        """As it goes over the wire."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """As an HTTP response."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body, self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`content` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about an exception. Of what is our own fault it hears no details."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case ChatTemplateError():
            return ApiError(400, str(error), param="messages")
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full")
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_unavailable")
    return ApiError(500, "internal error; the server's log has the details")


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first fault that pydantic found in a request, with the field's name."""
    first = max(errors, key=_how_telling)
    inner = first["loc"][1:]
    # Where a field may be of several types, pydantic puts the type's name in between.
    place = [str(part) for part in inner if isinstance(part, int) or (part.isidentifier() and part != "str")]
    param = place[0] if place else None
    if first["type"] == "extra_forbidden":
        name = ".".join([*place[:-1], ascii(inner[-1])[1:-1]])  # it may be anything
        return ApiError(400, f"{name[:80]} is not supported; leave it out", param=name[:80])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "missing":
        return ApiError(400, f"{'.'.join(place) or 'a JSON body'} is missing", param=param)
    if not place and isinstance(first.get("input"), bytes):
        return ApiError(400, "the body is not taken for JSON: send the header 'Content-Type: application/json'")
    given = ascii(first.get("input"))
    return ApiError(400, f"{'.'.join(place) or 'the body'}={given[:80]}: {first['msg']}", param=param)


def _how_telling(error: Any) -> tuple[bool, int, int]:
    """Of a union every branch has failed: the one that came deepest, and there farthest, is the one that was meant."""
    *_, last = error["loc"]
    return error["type"] == "extra_forbidden", len(error["loc"]), last if isinstance(last, int) else -1
