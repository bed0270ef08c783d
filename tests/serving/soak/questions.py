"""Requests and the one right answer to each, computed beforehand."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from pagetable import LLM, SamplingParams

WORDS = ("the", "quick", "brown", "fox", "jumps", "lazy", "12,345.67", "naïve", "café", "世界", "Привет", "😀", "def")


@dataclass(frozen=True)
class Question:
    """A request and the one right answer to it. `texts` and `reasons` by index; `usage` is tokens in and out."""

    body: dict[str, Any]
    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    usage: tuple[int, int]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"

    @property
    def is_simple(self) -> bool:
        """One prompt, one answer, and that a greedy one."""
        return "prompt" in self.body and len(self.texts) == 1

    def times(self, n: int) -> Question:
        """A simple one asked for n answers at once, all alike."""
        usage = (self.usage[0], self.usage[1] * n)
        return replace(self, body={**self.body, "n": n}, texts=self.texts * n, reasons=self.reasons * n, usage=usage)


def write_questions(llm: LLM, seed: int, count: int) -> list[Question]:
    """Questions of all kinds, none like another, with their answers."""
    rng = random.Random(f"{seed} questions")
    prefixes = ["", *(_words(rng, 40) for _ in range(6))]
    bodies = [_body(rng, f"[{i} {rng.getrandbits(64):016x}] ", prefixes) for i in range(count)]
    chats = [body for body in bodies if "messages" in body]
    texts = [(prompt, _params(body)) for body in bodies for prompt in body.get("prompt", ())]
    of_chats = iter(llm.chat([body["messages"] for body in chats], list(map(_params, chats)), use_tqdm=False))
    of_texts = iter(llm.generate([text for text, _ in texts], [params for _, params in texts], use_tqdm=False))
    return [
        _question(body, [next(of_chats)] if "messages" in body else [next(of_texts) for _ in body["prompt"]])
        for body in bodies
    ]


def _body(rng: random.Random, marker: str, prefixes: list[str]) -> dict[str, Any]:
    """A request: chat or completion, streamed or not, one prompt or several, greedy or drawn with a seed."""
    count = rng.choice((1, 1, 1, 2, 3))
    prompts = [rng.choice(prefixes) + f"{marker}{i} " + _words(rng, rng.randint(1, 30)) for i in range(count)]
    longest = rng.choice((8, 8, 32, 32, 32, 400))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "temperature": 0, "stream": rng.random() < 0.6}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.3:
        body |= {"n": rng.randint(2, 3), "temperature": 1, "seed": rng.getrandbits(32)}
    if rng.random() < 0.35:
        return {"messages": [{"role": "user", "content": prompt} for prompt in prompts], **body}
    return {"prompt": prompts, "echo": rng.random() < 0.5, **body}


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _params(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: body[name] for name in ("max_tokens", "temperature", "n", "seed") if name in body})


def _question(body: dict[str, Any], outputs: list[Any]) -> Question:
    answers = [answer for output in outputs for answer in output.outputs]
    return Question(
        body,
        tuple((o.prompt if body.get("echo") else "") + answer.text for o in outputs for answer in o.outputs),
        tuple(answer.finish_reason for answer in answers),
        (sum(len(o.prompt_token_ids) for o in outputs), sum(len(answer.token_ids) for answer in answers)),
    )
