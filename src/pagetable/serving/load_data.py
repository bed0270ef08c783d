"""What a load generator asks, and when: sessions of turns, made by a seed or read from a file, and arrival times."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

# Short and common, so that nearly all are one token for nearly every tokenizer.
_TEXT = """
  air animal answer area back base bear best big bird black blue board boat body book box boy bridge build car care case
  chair change child circle city class clock cloud cold color corner country cross dark day deep door dream dress drink
  dry earth east edge egg engine evening eye face family farm father field figure fire fish five floor flower food foot
  force forest form four free fresh friend front fruit game garden girl glass gold good grass green ground group hand
"""
_WORDS = _TEXT.split()


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
