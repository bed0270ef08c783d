"""Clients that ask, check what comes, and note how it went."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import aiohttp

from pagetable.serving.load import EventParser
from tests.serving.soak.questions import Question

ERROR_FIELDS = {"message", "type", "param", "code"}


class Wrong(Exception):
    """What no server may answer."""


class Gained:
    """What the answers to a request have gained so far."""

    def __init__(self, num_answers: int) -> None:
        self.texts = [""] * num_answers
        self.reasons: list[str | None] = [None] * num_answers
        self.usage: dict[str, int] | None = None

    def add(self, part: dict[str, Any]) -> None:
        """A chunk of a stream, or the whole."""
        self.usage = part.get("usage") or self.usage
        for choice in part["choices"]:
            index = choice["index"]
            if not 0 <= index < len(self.texts) or self.reasons[index] is not None:
                raise Wrong(f"there is no answer {index}, or it has ended")
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.texts[index] += said["content"]
            self.reasons[index] = choice["finish_reason"]

    def check(self, question: Question, is_whole: bool = True) -> None:
        """Raises Wrong unless it is the right answer, or the beginning of it."""
        for index, (text, right) in enumerate(zip(self.texts, question.texts, strict=True)):
            if text != right if is_whole else not right.startswith(text):
                raise Wrong(f"answer {index} is {text!r} and should be {right!r}")
        if is_whole:
            usage = self.usage and (self.usage["prompt_tokens"], self.usage["completion_tokens"])
            if (tuple(self.reasons), usage) != (question.reasons, question.usage):
                raise Wrong(f"{self.reasons}, {usage} should be {question.reasons}, {question.usage}")


class Load:
    """Clients that ask and check. `allowed` are the error codes that they may be told, `bound` the seconds to wait."""

    def __init__(
        self, url: str, questions: list[Question], seed: int, bound: float, allowed: Iterable[str] = ()
    ) -> None:
        self.url, self.questions, self.bound, self.allowed = url, questions, bound, set(allowed)
        self.rng = random.Random(f"{seed} load")
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_asked = 0
        self.tokens = 0  # of right answers
        self.longest = 0.0  # seconds that anybody waited
        self.is_over = False
        self.keeps_connections = True  # else each request has one of its own
        self.gone_since = float("inf")  # who asked after this (monotonic) may find nobody there
        self.http: aiohttp.ClientSession

    async def __aenter__(self) -> Load:
        kept = (
            {"keepalive_timeout": 2} if self.keeps_connections else {"force_close": True}
        )  # the server keeps them 5 s
        connector = aiohttp.TCPConnector(limit=0, **kept)
        self.http = aiohttp.ClientSession(self.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    async def client(self, mine: list[Question]) -> None:
        """Ask one's own questions, one after the other, until it is over."""
        await asyncio.sleep(self.rng.random())
        while not self.is_over and (outcome := await self.ask(self.rng.choice(mine))) != "nobody there":
            if outcome != "ok":
                await asyncio.sleep(self.rng.uniform(0.5, 1.5))  # about what Retry-After says

    async def ask(self, question: Question) -> str:
        """Ask; the outcome in a word or two, noted."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.bound):
                outcome, fault = await self._ask(question), ""
        except TimeoutError:
            outcome, fault = "WRONG", f"no end within {self.bound:.0f} s"
        except Wrong as wrong:
            outcome, fault = "WRONG", str(wrong)
        except (aiohttp.ClientError, OSError) as error:
            outcome, fault = "nobody there", "" if began > self.gone_since else f"{type(error).__name__}: {error}"
        if fault:
            self.faults.append(f"{fault}; asked {json.dumps(question.body, ensure_ascii=False):.400}")
        self.longest = max(self.longest, time.monotonic() - began)
        self.outcomes[outcome] += 1
        self.tokens += question.usage[1] * (outcome == "ok")
        return outcome

    async def _ask(self, question: Question) -> str:
        self.num_asked += 1
        async with self.http.post(question.path, json=question.body) as response:
            if response.status != 200:
                if response.status in (429, 503) and "Retry-After" not in response.headers:
                    raise Wrong(f"HTTP {response.status} without Retry-After")
                return f"HTTP {response.status} {self._code(await response.json())}"
            gained = Gained(len(question.texts))
            if question.body["stream"]:
                outcome = await self._read_stream(response, gained)
            else:
                gained.add(await response.json())
                outcome = "ok"
        gained.check(question, is_whole=outcome == "ok")
        return outcome

    async def _read_stream(self, response: aiohttp.ClientResponse, gained: Gained) -> str:
        events, outcome, is_done = EventParser(), "ok", False
        async for chunk in response.content.iter_any():
            for data in events.feed(chunk):
                if is_done or (outcome != "ok" and data != b"[DONE]"):
                    raise Wrong(f"after the end came {data[:200]!r}")
                if data == b"[DONE]":
                    is_done = True
                elif "error" in (part := json.loads(data)):
                    outcome = f"event {self._code(part)}"
                else:
                    gained.add(part)
        if not is_done:
            raise Wrong("the stream ended without [DONE]")
        return outcome

    def _code(self, body: Any) -> str:
        """The code of an error that is as it must be."""
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict) or set(error) != ERROR_FIELDS or error["code"] not in self.allowed:
            raise Wrong(f"an error that is none, or not allowed: {body!r:.300}")
        return str(error["code"])
