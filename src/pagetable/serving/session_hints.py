"""What a client says of its session: fields of a body, or headers from a client that can set nothing else."""

from __future__ import annotations

import re
from typing import Any

from starlette.datastructures import Headers

from pagetable.memory import CacheHints
from pagetable.memory.hints import HIGHEST_PRIORITY, LONGEST_SESSION_ID, LONGEST_TIME
from pagetable.serving.errors import ApiError
from pagetable.serving.schema import GenerationRequest

HEADERS = {
    "session_id": "X-Session-Id",
    "end_session": "X-End-Session",
    "expected_idle_s": "X-Expected-Idle-S",
    "cache_priority": "X-Cache-Priority",
    "ttl_s": "X-Ttl-S",
}
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_INTEGER = re.compile(r"\d{1,20}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")

# How the API's description announces the headers. Texts in headers are ASCII: no two clients agree on anything else.
_SECONDS = {"type": "number", "minimum": 0, "maximum": LONGEST_TIME}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "session_id": {"type": "string", "pattern": rf"^[!-~]([ -~]{{0,{LONGEST_SESSION_ID - 2}}}[!-~])?$"},
    "end_session": {"type": "string", "enum": list(_TRUTHS)},
    "expected_idle_s": _SECONDS,
    "cache_priority": {"type": "integer", "minimum": 0, "maximum": HIGHEST_PRIORITY},
    "ttl_s": _SECONDS,
}
PARAMETERS = [
    {"name": header, "in": "header", "description": f"The field {name} of a body without it.", "schema": _SCHEMAS[name]}
    for name, header in HEADERS.items()
]


def cache_hints(body: GenerationRequest, headers: Headers) -> CacheHints:
    """The hints of a request: each of the body, or of its header if the body leaves it out or says null.

    ApiError 400 for a header that stands twice or does not say what it may; one that does not count is not looked at.
    """
    given = {name: getattr(body, name) for name in HEADERS if name in body.model_fields_set}
    hints = {name: value for name, value in given.items() if value is not None}
    for name, header in HEADERS.items():
        texts = headers.getlist(header)
        if name not in hints and texts:
            hints[name] = _value(name, header, texts)
    return CacheHints(**hints)


def _value(name: str, header: str, texts: list[str]) -> Any:
    if len(texts) > 1:
        raise ApiError(400, f"the header {header} stands {len(texts)} times; once is allowed", param=name)
    (text,) = texts
    if name == "session_id" and not text.isascii():
        raise ApiError(400, f"the header {header} is not ASCII; the body's session_id may be any text", param=name)
    value = _parsed(name, text)
    try:
        CacheHints(**{name: value})
    except ValueError as error:
        raise ApiError(400, f"the header {header} is wrong: {error}", param=name) from None
    return value


def _parsed(name: str, text: str) -> Any:
    """What a header says; the text itself if it is no such thing, which `CacheHints` refuses."""
    match name:
        case "session_id":
            return text
        case "end_session":
            return _TRUTHS.get(text, text)
        case "cache_priority":
            return int(text) if _INTEGER.fullmatch(text) else text
    return float(text) if _NUMBER.fullmatch(text) else text
