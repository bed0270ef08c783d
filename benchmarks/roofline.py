"""The least time that this machine can take for a step of a model; the formula stands at the top of engine.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from measure import Spread, Table, seconds
from pagetable.model.config import ModelConfig

Results = dict[str, list[dict[str, Any]]]  # by contestant and round
PROBE = 512  # tokens of the prompt whose prefill shows our own arithmetic's speed


@dataclass(frozen=True)
class Roofline:
    """The least time that this machine can take for a step of this model; the formula is at the top of this file."""

    config: ModelConfig
    speed: float  # float32 operations a second
    source: str  # what reached that speed
    bandwidth: Spread  # GB a second

    @classmethod
    def measure(cls, config: ModelConfig, probe_s: float, memory: Memory) -> Roofline:
        """`probe_s` is how long we take for the first token of a prompt of PROBE tokens."""
        memory.read()
        unknown = cls(config, 1.0, "", memory.bandwidth())
        speeds = {
            f"{name}, {i} x {o}": linear_speed(i, o, convert)
            for name, convert in {"F.linear": Tensor.contiguous, "oneDNN": Tensor.to_mkldnn}.items()
            for i, o in linear_sizes(config)
        }
        speeds["our prefill"] = unknown.operations([(PROBE, PROBE)]) / probe_s
        source = max(speeds, key=lambda name: speeds[name])
        return replace(unknown, speed=speeds[source], source=source)

    def operations(self, rows: list[tuple[int, int]]) -> float:
        """Of a step, `rows` as in `step_s`."""
        config = self.config
        layers = config.num_layers * sum(i * o for i, o in linear_sizes(config))
        head = config.hidden_size * config.vocab_size
        pair = 4 * config.num_heads * config.head_dim * config.num_layers
        return sum(2 * layers * n + 2 * head + pair * (n * c - n * (n - 1) / 2) for n, c in rows)

    def step_s(self, rows: list[tuple[int, int]], shared: int = 0) -> float:
        """Seconds of a step: for each sequence its new tokens and its context after them; all share the first few."""
        config = self.config
        weights = config.num_layers * sum(i * o for i, o in linear_sizes(config))
        weights += config.hidden_size * config.vocab_size
        tokens = sum(context for _, context in rows) - shared * (len(rows) - 1)
        read = weights * torch.float32.itemsize + tokens * config.kv_bytes_per_token(torch.float32)
        return max(read / self.bandwidth.median / 1e9, self.operations(rows) / self.speed)

    def serve_s(self, requests: list[tuple[int, int, int]], shared: int = 0) -> tuple[float, float]:
        """Seconds to the first tokens and from there to the last, of (prompt, of that cached, output) given at once."""
        prefill = self.step_s([(prompt - cached, prompt) for prompt, cached, _ in requests], shared)
        decode = 0.0
        for done in range(1, max(output for *_, output in requests)):
            rows = [(1, prompt + done) for prompt, _, output in requests if output > done]
            decode += self.step_s(rows, shared)
        return prefill, decode

    def table(self) -> Table:
        """Its two rates, as they are at the start."""
        rows = [
            ["reading, GB/s", self.bandwidth.median, "torch.sum of 1 GiB"],
            ["float32 products, GFLOP/s", self.speed / 1e9, self.source],
        ]
        return Table("What the machine allows", ["", "median", "the fastest"], rows)

    @property
    def note(self) -> str:
        """The rate that is not the same all day."""
        return f"Memory could be read at {self.bandwidth} GB/s meanwhile."


class Memory:
    """A GiB to read now and then: next to neighbours on its host, a virtual machine's bandwidth comes and goes."""

    def __init__(self) -> None:
        self._numbers = torch.ones(1 << 28)
        self._rates: list[float] = []

    def read(self, runs: int = 9) -> None:
        """With all threads."""
        median = statistics.median(seconds(self._numbers.sum) for _ in range(runs))
        self._rates.append(self._numbers.nbytes / median / 1e9)

    def bandwidth(self) -> Spread:
        """GB a second since this was asked last."""
        rates, self._rates = self._rates, []
        return Spread.of(rates)


def linear_sizes(config: ModelConfig) -> list[tuple[int, int]]:
    """Inputs and outputs of the linear layers of one block: q, k and v together, o, gate and up together, down."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]


def linear_speed(inputs: int, outputs: int, convert: Callable[[Tensor], Tensor], runs: int = 30) -> float:
    """Operations a second of PyTorch's product of PROBE rows, of operands in the form that `convert` gives them."""
    x, weight = convert(torch.rand(PROBE, inputs)), convert(torch.rand(outputs, inputs))
    times = [seconds(lambda: F.linear(x, weight)) for _ in range(runs)]
    return 2 * PROBE * inputs * outputs / statistics.median(times[runs // 3 :])
