"""What a step costs in seconds: a line through what was measured on a real model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagetable.engine.step import Step
from pagetable.replay.trace import TraceError

VERSION = 1
TERMS = ("step", "prefill_token", "prefill_context", "decode", "decode_context")


@dataclass(frozen=True)
class CostModel:
    """Seconds, each of them times how much of it is in a step. Fitted by `pagetable bench calibrate`."""

    step: float  # whatever is in it: reading the weights, launching
    prefill_token: float  # a token of a prompt
    prefill_context: float  # a pair of such a token and one that it attends to
    decode: float  # a sequence that computes one token, nearly always to draw its next
    decode_context: float  # a token that such a sequence attends to
    about: dict[str, Any] = field(default_factory=dict)  # model, machine, how good the fit is

    def seconds(self, step: Step) -> float:
        """How long the model would compute."""
        return float(features(step) @ [getattr(self, term) for term in TERMS])

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read it. TraceError for a file that is none."""
        try:
            values = json.loads(path.read_text())
        except (ValueError, RecursionError, OSError) as error:
            raise TraceError(f"{path} is no cost model: {error}") from error
        if not isinstance(values, dict) or values.pop("version", None) != VERSION:
            raise TraceError(f"{path} is no cost model of version {VERSION}; make one: pagetable bench calibrate")
        costs: dict[str, Any] = {name: values.get(name) for name in TERMS}
        for name, value in costs.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
                raise TraceError(f"{path}: {name}={value!r} must be a number of seconds from 0 up")
        about = values.get("about")
        return cls(**costs, about=about if isinstance(about, dict) else {})


# The default model on 2 cores of an AMD EPYC with AVX-512, in float32: what stands in where nothing was calibrated.
DEFAULT_COST = CostModel(
    step=0.0124,
    prefill_token=4.39e-4,
    prefill_context=2.39e-7,
    decode=3.04e-4,
    decode_context=1.98e-6,
    about={"model": "SmolLM2-135M in float32 on 2 cores of an AMD EPYC", "median_error": 0.044, "p90_error": 0.124},
)


def features(step: Step) -> NDArray[np.float64]:
    """How much of each of TERMS is in a step."""
    scheduled = step.num_scheduled_tokens.astype(np.float64)
    contexts = step.context_lens.astype(np.float64)
    is_decode = scheduled == 1
    chunks, ends = scheduled[~is_decode], contexts[~is_decode]
    pairs = chunks * (ends - (chunks - 1) / 2)  # token i of a chunk attends to all up to itself
    return np.array([1.0, chunks.sum(), pairs.sum(), is_decode.sum(), contexts[is_decode].sum()])


def fit(samples: Sequence[tuple[NDArray[np.float64], float]], about: dict[str, Any]) -> CostModel:
    """The cost model that is nearest to (features, seconds) in relative terms, with no cost below zero.

    Least squares; a term that comes out negative is left out, and the rest fitted again.
    """
    what = np.array([features for features, _ in samples])
    seconds = np.array([seconds for _, seconds in samples])
    weighted = what / seconds[:, None]
    kept = list(range(len(TERMS)))
    while True:
        costs, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(seconds)), rcond=None)
        if (costs >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(costs))]
    full = np.zeros(len(TERMS))
    full[kept] = np.maximum(costs, 0)
    errors = np.abs(what @ full - seconds) / seconds
    quality = {
        "samples": len(samples),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
    }
    return CostModel(**dict(zip(TERMS, full.tolist(), strict=True)), about={**about, **quality})
