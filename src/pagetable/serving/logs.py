"""Structured logs: one line a request, as text or as JSON. No prompt text unless asked for."""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pagetable.serving.record import RequestRecord

logger = logging.getLogger("pagetable.request")

MAX_WAITING = 10_000  # lines that are not written yet


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level and logger, and the fields of the record, or its message if it has none."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            **getattr(record, "fields", {"message": record.getMessage()}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(level: str, form: str) -> None:
    """All logs of this process to standard error, as `text` or `json`."""
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
    handler = _Handler(waiting)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    threading.Thread(target=_write, args=(waiting,), name="logs", daemon=True).start()
    atexit.register(flush_logs)
    warnings.showwarning = lambda message, category, *_: logging.getLogger("pagetable").warning("%s", message)


class _Handler(logging.handlers.QueueHandler):
    """Hands lines to the thread that writes them. If whoever reads them has stopped, lines are lost, not requests."""

    def enqueue(self, record: logging.LogRecord) -> None:
        """Add a line, unless too many wait."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)


def _write(waiting: queue.Queue[logging.LogRecord]) -> None:
    """Write what comes, for ever. Past `sys.stderr`, whose lock must not be held when the process ends."""
    while True:
        line = waiting.get().getMessage() + "\n"
        with suppress(OSError):  # whoever read it has gone
            os.write(sys.stderr.fileno(), line.encode(errors="backslashreplace"))
        waiting.task_done()


def flush_logs(seconds: float = 1.0) -> None:
    """Wait until all lines are written, or for so long."""
    end = time.monotonic() + seconds
    for handler in logging.getLogger().handlers:
        waiting = getattr(handler, "queue", None)
        while isinstance(waiting, queue.Queue) and waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)


def log_request(record: RequestRecord, prompts: Sequence[Any] | None) -> None:
    """The line of one request that has ended."""
    fields = _fields(record)
    if prompts is not None:
        fields["prompts"] = list(prompts)
    _log(logging.WARNING if record.error else logging.INFO, fields)


def log_refusal(endpoint: str, status: int, error: str) -> None:
    """The line of a request that was refused before it was known what it asks for."""
    _log(logging.WARNING, {"endpoint": endpoint, "status": status, "error": error})


def _log(level: int, fields: dict[str, Any]) -> None:
    text = " ".join(f"{name}={_quoted(value)}" for name, value in fields.items() if value is not None)
    logger.log(level, "%s", text, extra={"fields": fields})


def _fields(record: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id,
        "endpoint": record.endpoint,
        "model": record.model,
        "tokens_in": record.num_prompt_tokens,
        "tokens_cached": record.num_cached_tokens,
        "tokens_out": record.num_output_tokens,
        "n": record.n,
        "stream": record.streamed,
        "queue_ms": _milliseconds(record.arrival_time, record.first_scheduled_time),
        "ttft_ms": _milliseconds(record.arrival_time, record.first_token_time),
        "total_ms": _milliseconds(record.arrival_time, record.finished_time),
        "finish_reason": record.finish_reason,
        "error": record.error,
    }


def _milliseconds(begin: float, end: float | None) -> float | None:
    return None if end is None else round((end - begin) * 1000, 1)


def _quoted(value: Any) -> str:
    """A value that is one word stands for itself; anything else, line breaks above all, as JSON."""
    text = str(value)
    plain = not isinstance(value, list) and text.isprintable() and " " not in text and '"' not in text and text
    return text if plain else msgspec.json.encode(value).decode()
