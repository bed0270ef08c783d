"""How large a token of a model's KV cache is, and how many blocks a capacity means. Reads headers only, no torch."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from pagetable.replay.trace import TraceError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}


def bytes_per_token(model: str, dtype: str) -> int:
    """Bytes of K and V of one token over all layers of a model: folder, .gguf file, hub id or alias.

    Any model with plain attention whose configuration has the usual names will do, whether or not it could be run here.
    """
    from pagetable.checkpoint import open_checkpoint
    from pagetable.text import resolve_model

    checkpoint = open_checkpoint(resolve_model(model))
    if checkpoint.kind == "gguf":
        prefix = f"{checkpoint.metadata.get('general.architecture')}."
        settings = {name.removeprefix(prefix): value for name, value in checkpoint.metadata.items()}
        names = ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length")
        head_dim = settings.get("attention.key_length")
    else:
        settings = checkpoint.json("config.json") or {}
        inner = settings.get("text_config")  # of a model that sees as well
        settings = inner if isinstance(inner, dict) else settings
        names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
        head_dim = settings.get("head_dim")
    values: list[Any] = [settings.get(name) for name in names]
    layers, heads, kv_heads, hidden = values
    kv_heads = heads if kv_heads is None else kv_heads
    if head_dim is None and _is_count(hidden) and _is_count(heads):
        head_dim = hidden // heads
    if not all(map(_is_count, (layers, heads, kv_heads, head_dim))):
        raise TraceError(f"{model}: its configuration does not say {', '.join(names)}; give --bytes-per-token")
    size: int = 2 * layers * kv_heads * head_dim * DTYPE_BYTES[dtype]
    return size


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def parse_capacity(text: str, num_blocks: int, block_bytes: int | None) -> int:
    """Blocks meant by "5%" (of the blocks of the trace), "2000" (blocks) or "4GiB" (of blocks of `block_bytes`)."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(%|[a-z]*)\s*", text, re.IGNORECASE | re.ASCII)
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit != "%" and unit not in _UNITS):
        raise TraceError(f"capacity {text!r}: give a share (5%), blocks (2000) or bytes (4GiB)")
    value = Fraction(match[1])
    if unit == "%":
        value = value * num_blocks / 100
    elif unit and block_bytes is None:
        raise TraceError(f"capacity {text!r} is in bytes: say with --model or --bytes-per-token what a block takes")
    elif unit:
        value = value * _UNITS[unit] / Fraction(block_bytes or 1)
    elif value.denominator != 1:
        raise TraceError(f"capacity {text!r}: a number of blocks is a whole number; a share ends with %")
    blocks = max(round(value), 1 if value else 0) if unit == "%" else int(value)
    if not 1 <= blocks < 1 << 27:
        raise TraceError(f"capacity {text!r} means {blocks} blocks: at least 1 is needed, and at most 134 million")
    return blocks


def format_bytes(size: float) -> str:
    """Bytes for people: "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.lower()]:
            return f"{size / _UNITS[unit.lower()]:.2f} {unit}"
    return f"{size:.0f} B"


def seconds_for_people(seconds: float | None) -> str:
    """Three digits and a unit, from "250 ms" to "41.7 d"; "-" for None and NaN."""
    if seconds is None or math.isnan(seconds):
        return "-"
    for limit, divisor, unit in ((0.9995, 0.001, "ms"), (119.5, 1, "s"), (7170, 60, "min"), (172_000, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.3g} {unit}"
    days = seconds / 86_400
    return f"{days:.3g} d" if days < 999 else f"{days:,.0f} d"
