"""The requests of benchmarks/engine.py: natural text as token ids, the same each time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from engine_peers import Requests
from pagetable.checkpoint import open_checkpoint
from pagetable.text import load_tokenizer

Results = dict[str, list[dict[str, Any]]]  # by contestant and round


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    w1_requests: int
    w2_requests: int
    w2_shared: int
    w3_conversations: int
    w3_turns: int
    w4: tuple[int, int]  # tokens in, tokens out
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    running: tuple[int, ...]


FULL = Scale(
    w1_requests=32,
    w2_requests=64,
    w2_shared=1_024,
    w3_conversations=4,
    w3_turns=6,
    w4=(512, 128),
    batches=(1, 2, 4, 8, 16, 32, 64, 128),
    contexts=(128, 512, 2_048, 8_000),
    running=(1, 16, 64, 256),
)
QUICK = Scale(
    w1_requests=8,
    w2_requests=8,
    w2_shared=256,
    w3_conversations=2,
    w3_turns=3,
    w4=(128, 32),
    batches=(1, 8),
    contexts=(128, 512),
    running=(1, 16),
)
W2_OWN, W2_OUT = 32, 16
W3_IN, W3_OUT = 64, 48


# ----------------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True)
class Workloads:
    """All prompts, as token ids of one text, no stretch of which is used twice."""

    w1: Requests
    w2: Requests
    w3: list[list[list[int]]]  # what the user says, by conversation and turn
    w4: Requests
    rest: list[int]

    @classmethod
    def make(cls, model: Path, scale: Scale) -> Workloads:
        """The same for the same scale, tokenizer and version of Python."""
        text = "\n\n".join(topics[name] for name in sorted(topics))
        stream = iter(load_tokenizer(open_checkpoint(model)).encode(text))
        draw = random.Random(1234)

        def take(count: int) -> list[int]:
            return [next(stream) for _ in range(count)]

        w1 = [(take(draw.randint(64, 512)), draw.randint(32, 128)) for _ in range(scale.w1_requests)]
        shared = take(scale.w2_shared)
        w2 = [(shared + take(W2_OWN), W2_OUT) for _ in range(scale.w2_requests)]
        w3 = [[take(W3_IN) for _ in range(scale.w3_turns)] for _ in range(scale.w3_conversations)]
        return cls(w1, w2, w3, [(take(scale.w4[0]), scale.w4[1])], list(stream))

    def prompts(self, count: int, length: int) -> Requests:
        """Prompts of the rest of the text; no output asked for but one token."""
        return [(self.rest[i * length : (i + 1) * length], 1) for i in range(count)]
