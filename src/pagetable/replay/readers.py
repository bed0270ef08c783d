"""Traces of other people, read line by line: Mooncake, Qwen-Bailian, WEKA's agent sessions, and plain JSONL."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from pagetable.memory.hints import NO_HINTS, CacheHints
from pagetable.replay.files import open_packed, read_line, read_rest
from pagetable.replay.trace import IntArray, TraceError, TraceRequest

HEAD = 100  # records that tell the format and the block size
MAX_TIME = 1e15  # thirty million years in seconds, thirty thousand in milliseconds
MAX_TOKENS = 1 << 31  # of one request; more is a mistake, and would not fit into memory
HINTS = ("end_session", "expected_idle_s", "cache_priority", "ttl_s")  # a record with one of them speaks to the cache
FORMATS = """known formats, one JSON object a line (or a folder of WEKA sessions), plain or as .gz or .zst:
  mooncake  {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}    512 tokens a block,
            or as many as its "block_size" says, or as its lengths show
  qwen      the same with seconds, "chat_id", "parent_chat_id", "turn"                      16 tokens a block
  weka      {"block_size": 64, "requests": [{"t": seconds, "in": .., "out": .., "hash_ids": [..]}, ..]}, a session each
  tokens    {"prompt_token_ids": [..]}       and optionally "timestamp" (seconds), "output_length",
  text      {"prompt": ".."} or {"messages": [..]}, needs a tokenizer     "output_token_ids", "session_id"
  all but weka may have hints for the cache: "end_session", "expected_idle_s", "cache_priority", "ttl_s\""""

Record = dict[str, Any]
Encode = Callable[[str | list[Any]], list[int]]  # a prompt, or the messages of a chat, to tokens


@dataclass(frozen=True)
class TraceFormat:
    """How a record is told from others, and what it says."""

    name: str
    block_size: int | None  # tokens of one hash; None where tokens are given
    fits: Callable[[Record], bool]
    read: Callable[[Record, Reading], Iterator[TraceRequest]]


class Trace:
    """A trace in a file or a folder. Iterating reads it anew each time, in order of arrival.

    TraceError names the first line that cannot be understood; with `skip_bad` such lines are counted in `num_skipped`
    instead. `encode` turns text into tokens, for traces that hold text.
    """

    def __init__(self, path: Path, *, skip_bad: bool = False, encode: Encode | None = None) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file() and not self.path.is_dir():
            raise TraceError(f"{path}: a trace is read more than once; give a file or a folder")
        self._skip_bad = skip_bad
        self._encode = encode
        self.num_skipped = 0
        self.num_out_of_order = 0  # requests whose time lies before that of the one before; it is set to that one's
        records = (record for file in self._files() for _, record in self._records(file) if record is not None)
        self.format, first = _format_of(records, self.path)
        self.block_size = self.format.block_size  # tokens of a hash; None: tokens are given
        if self.format is TEXT and encode is None:
            raise TraceError(f"{self.path}: its prompts are texts; --model says whose tokenizer makes tokens of them")
        if self.block_size is not None:
            self.block_size = _block_size_of(first, records, self.block_size)
        self._reading = Reading(encode, self.block_size)

    @property
    def num_inconsistent(self) -> int:
        """Requests whose number of hashes does not fit the length of their prompt."""
        return self._reading.num_inconsistent

    def __iter__(self) -> Iterator[TraceRequest]:
        self.num_skipped = self.num_out_of_order = 0
        first, before = None, 0.0
        for request in self._requests():
            first = request.arrival if first is None else first
            request.arrival -= first
            if request.arrival < before:
                self.num_out_of_order += 1
                request.arrival = before
            before = request.arrival
            yield request

    def state(self) -> list[tuple[str, int, int]]:
        """Names, sizes and times of change of its files: whether it is still the same trace."""
        return [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in self._files()]

    def _requests(self) -> Iterator[TraceRequest]:
        files = self._files()
        reading = self._reading = Reading(self._encode, self.block_size)
        if self.format is not WEKA:
            return (request for file in files for request in self._of_file(file, reading))
        # Sessions lie one behind the other in files, and beside each other in time.
        sessions = [
            _packed(self._of_record(file, number, record, reading))
            for file in files
            for number, record in self._records(file)
            if record is not None
        ]
        return heapq.merge(*map(_unpacked, sessions), key=lambda request: request.arrival)

    def _of_file(self, file: Path, reading: Reading) -> Iterator[TraceRequest]:
        for number, record in self._records(file):
            if record is not None:
                yield from self._of_record(file, number, record, reading)

    def _of_record(self, file: Path, number: int, record: Record, reading: Reading) -> Iterator[TraceRequest]:
        try:
            requests = list(self.format.read(record, reading))  # a session is read whole or left out
        except KeyError as error:
            self._bad(file, number, f"{error.args[0]} is missing")
        except (ValueError, OverflowError, RecursionError) as error:
            self._bad(file, number, str(error) or type(error).__name__)
        else:
            yield from requests

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        files = sorted(f for f in self.path.iterdir() if {".json", ".jsonl"} & set(f.suffixes) and f.is_file())
        if not files:
            raise TraceError(f"{self.path}: there are no .json files in this folder; {FORMATS}")
        return files

    def _records(self, file: Path) -> Iterator[tuple[int, Record | None]]:
        """Number and JSON object of each line; None for a line that is none and may be skipped."""
        with open_packed(file) as lines:
            number, line = 1, read_line(lines, file, 0)
            if line.strip() == b"{":  # one object over many lines, if what follows is the inside of one
                second = read_line(lines, file, 1)
                if second.lstrip().startswith((b'"', b"}")):
                    line += second + read_rest(lines, file, 2)
                else:
                    yield number, self._record(file, number, line)
                    number, line = 2, second
            while line:
                if not line.isspace():
                    yield number, self._record(file, number, line)
                line = read_line(lines, file, number)
                number += 1

    def _record(self, file: Path, number: int, line: bytes) -> Record | None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._bad(file, number, f"it is not JSON: {error or 'nested too deeply'}")
            return None
        if not isinstance(record, dict):
            self._bad(file, number, f"it is not a JSON object: {line[:60]!r}")
            return None
        return record

    def _bad(self, file: Path, number: int, reason: str) -> None:
        if not self._skip_bad:
            raise TraceError(f"{file}, line {number}: {reason} (--skip-bad leaves such lines out)")
        self.num_skipped += 1


@dataclass
class Reading:
    """What is kept from one record to the next."""

    encode: Encode | None
    block_size: int | None
    num_sessions: int = 0
    num_inconsistent: int = 0
    roots: dict[Any, Any] = field(default_factory=dict)  # Qwen: of each chat the first one of its conversation


# -------------------------------------------------------------------- the formats


def _read_mooncake(record: Record, reading: Reading) -> Iterator[TraceRequest]:
    session = _session(record)
    yield _hashed(
        record,
        reading,
        arrival=_time(record, "timestamp") / 1000,
        lengths=("input_length", "output_length"),
        session=session,
        hints=_hints(record, session),
    )


def _read_qwen(record: Record, reading: Reading) -> Iterator[TraceRequest]:
    roots = reading.roots
    chat, parent = record["chat_id"], record.get("parent_chat_id")
    parent = -1 if parent is None else parent
    if not isinstance(chat, int | str) or not isinstance(parent, int | str):
        raise TraceError(f"chat_id={chat!r} and parent_chat_id={parent!r} must be numbers or texts")
    # Only what came before is looked up, so no circle of parents can be followed round.
    roots[chat] = chat if parent in (-1, "-1", chat) else roots.get(parent, parent)
    named = _session(record)
    yield _hashed(
        record,
        reading,
        arrival=_time(record, "timestamp"),
        lengths=("input_length", "output_length"),
        session=roots[chat],
        hints=_hints(record, roots[chat] if named is None else named),
    )


def _read_weka(record: Record, reading: Reading) -> Iterator[TraceRequest]:
    session = reading.num_sessions
    reading.num_sessions += 1
    is_local = record.get("hash_id_scope", "local") == "local"
    if record.get("block_size", 64) != reading.block_size:
        raise TraceError(f"block_size={record.get('block_size')}, in the first session it is {reading.block_size}")
    for arrival, entry in sorted(_entries(record["requests"], 0.0), key=itemgetter(0)):
        request = _hashed(entry, reading, arrival=arrival, lengths=("in", "out"), session=session)
        if is_local:
            request.hash_ids = [(session, hash) for hash in request.hash_ids or ()]
        yield request


Packed = list[tuple[TraceRequest, int, list[Any]]]


def _packed(requests: Iterator[TraceRequest]) -> Packed:
    """A session in little memory: of each request the hashes in which it differs from the one before."""
    packed: Packed = []
    before: list[Any] = []
    for request in requests:
        hash_ids = list(request.hash_ids or ())
        same = next((i for i, (a, b) in enumerate(zip(before, hash_ids, strict=False)) if a != b), None)
        same = min(len(before), len(hash_ids)) if same is None else same
        request.hash_ids = None
        packed.append((request, same, hash_ids[same:]))
        before = hash_ids
    return packed


def _unpacked(packed: Packed) -> Iterator[TraceRequest]:
    hash_ids: list[Any] = []
    for request, same, rest in packed:
        hash_ids = hash_ids[:same] + rest
        yield replace(request, hash_ids=hash_ids)


def _entries(entries: Any, start: float) -> Iterator[tuple[float, Record]]:
    """Requests of a session with their times; those of a sub-agent count from its start."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TraceError("requests must be a list of objects")
    for entry in entries:
        if "requests" in entry:
            yield from _entries(entry["requests"], start + _time(entry, "t"))
        else:
            yield start + _time(entry, "t"), entry


def _read_tokens(record: Record, reading: Reading) -> Iterator[TraceRequest]:
    given = next((record[name] for name in ("prompt_token_ids", "token_ids") if name in record), record.get("prompt"))
    yield _plain(record, _tokens(given, "prompt_token_ids"))


def _read_text(record: Record, reading: Reading) -> Iterator[TraceRequest]:
    assert reading.encode is not None  # or the trace would not have been opened
    prompt = record["messages"] if "messages" in record else record["prompt"]
    if not isinstance(prompt, list if "messages" in record else str):
        raise TraceError("prompt must be a text, messages a list of messages")
    try:
        tokens = reading.encode(prompt)
    except Exception as error:  # a chat template may raise anything
        raise TraceError(f"its prompt cannot be turned into tokens: {error!r}") from error
    yield _plain(record, _tokens(tokens, "prompt"))


def _is_mooncake(record: Record) -> bool:
    return {"timestamp", "input_length", "hash_ids"} <= record.keys()


def _is_qwen(record: Record) -> bool:
    return _is_mooncake(record) and "chat_id" in record


def _is_weka(record: Record) -> bool:
    return "requests" in record


def _has_tokens(record: Record) -> bool:
    return bool({"prompt_token_ids", "token_ids"} & record.keys()) or isinstance(record.get("prompt"), list)


def _has_text(record: Record) -> bool:
    return bool({"prompt", "messages"} & record.keys())


QWEN = TraceFormat("qwen", 16, _is_qwen, _read_qwen)
MOONCAKE = TraceFormat("mooncake", 512, _is_mooncake, _read_mooncake)
WEKA = TraceFormat("weka", 64, _is_weka, _read_weka)
TOKENS = TraceFormat("tokens", None, _has_tokens, _read_tokens)
TEXT = TraceFormat("text", None, _has_text, _read_text)


def _format_of(records: Iterator[Record], path: Path) -> tuple[TraceFormat, Record]:
    """The format of the first record that has one, and this record."""
    seen: Record | None = None
    for record in records:
        seen = record if seen is None else seen
        for known in (QWEN, MOONCAKE, WEKA, TOKENS, TEXT):  # a Qwen record has all the fields of a Mooncake record
            if known.fits(record):
                return known, record
    found = "no JSON objects in it" if seen is None else f"records with {_shown(list(seen)[:10])}"
    raise TraceError(f"{path}: there are {found}; {FORMATS}")


def _block_size_of(first: Record, others: Iterator[Record], usual: int) -> int:
    """Tokens of a hash: what the first record says, or what fits the first few: the usual size, or a power of two."""
    given = first.get("block_size")
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given < MAX_TOKENS:  # else its line is a bad one
        return given
    if "requests" in first:  # a session says it
        return usual
    sizes = [
        (len(record["hash_ids"]), record["input_length"])
        for record in chain([first], islice(others, HEAD))
        if isinstance(record.get("hash_ids"), list) and isinstance(record.get("input_length"), int)
    ]
    for block_size in (usual, *(1 << power for power in range(21))):
        if all(_fits(num_hashes, num_tokens, block_size) for num_hashes, num_tokens in sizes):
            return block_size
    return usual


def _fits(num_hashes: int, num_tokens: int, block_size: int) -> bool:
    """Whether so many tokens are so many blocks, with the last, partial one or without."""
    return num_hashes in (num_tokens // block_size, -(-num_tokens // block_size))


# -------------------------------------------------------------------- one record


def _hashed(
    record: Record,
    reading: Reading,
    *,
    arrival: float,
    lengths: tuple[str, str],
    session: Any,
    hints: CacheHints = NO_HINTS,
) -> TraceRequest:
    """A request whose prompt is known by the hashes of its blocks."""
    num_prompt_tokens, num_output_tokens = _count(record, lengths[0], least=1), _count(record, lengths[1])
    hash_ids = record.get("hash_ids")
    if not isinstance(hash_ids, list) or not set(map(type, hash_ids)) <= {int, str}:
        raise TraceError("hash_ids must be a list of whole numbers or texts")
    if record.get("block_size", reading.block_size) != reading.block_size:
        raise TraceError(f"block_size={_shown(record['block_size'])}, before it was {reading.block_size}")
    reading.num_inconsistent += not _fits(len(hash_ids), num_prompt_tokens, reading.block_size or 1)
    return TraceRequest(arrival, num_prompt_tokens, num_output_tokens, hash_ids, session=session, hints=hints)


def _plain(record: Record, token_ids: IntArray) -> TraceRequest:
    """A request whose prompt is known by its tokens."""
    output = record.get("output_token_ids")
    output_token_ids = None if output is None else _tokens(output, "output_token_ids", least=0)
    length = next((name for name in ("output_length", "max_tokens") if name in record), None)
    num_output_tokens = _count(record, length) if length else 1
    if output_token_ids is not None:
        num_output_tokens = len(output_token_ids)
    arrival = _time(record, "timestamp") if "timestamp" in record else 0.0
    session = _session(record)
    return TraceRequest(
        arrival,
        len(token_ids),
        num_output_tokens,
        token_ids=token_ids,
        output_token_ids=output_token_ids,
        session=session,
        hints=_hints(record, session),
    )


def _session(record: Record) -> int | str | None:
    session: int | str | None = record.get("session_id")
    if not isinstance(session, int | str | None):
        raise TraceError(f"session_id={_shown(session)} must be a number or a text")
    return session


def _hints(record: Record, session: int | str | None) -> CacheHints:
    """What a record tells the cache. That it names a session is not enough: most traces do, and no client said it."""
    given = {name: record[name] for name in HINTS if record.get(name) is not None}
    if not given:
        return NO_HINTS
    return CacheHints(None if session is None else str(session), **given)


def _count(record: Record, name: str, least: int = 0) -> int:
    value = record.get(name)
    if value is None and least == 0:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MAX_TOKENS:
        raise TraceError(f"{name}={_shown(value)}: a whole number from {least} to 2**31 is expected")
    return value


def _time(record: Record, name: str) -> float:
    value = record.get(name)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value < MAX_TIME
        or not math.isfinite(value)
    ):
        raise TraceError(f"{name}={_shown(value)}: a time from 0 up is expected")
    return float(value)


def _tokens(value: Any, name: str, least: int = 1) -> IntArray:
    if not isinstance(value, list) or len(value) < least or not set(map(type, value)) <= {int}:
        raise TraceError(f"{name}={_shown(value)}: a list of at least {least} whole numbers is expected")
    if value and (min(value) < 0 or max(value) >= MAX_TOKENS):
        raise TraceError(
            f"{name} holds {_shown(min(value))} to {_shown(max(value))}: token ids are from 0 to 2**31 - 1"
        )
    return np.array(value, np.int32)


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number with more than 30 digits"
    return text if len(text) <= 60 else text[:60] + ".."
