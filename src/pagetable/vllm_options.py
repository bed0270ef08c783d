"""Options of vLLM's `LLM` that scripts pass and that mean nothing here, as long as they have a harmless value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Each with a test of the values at which it means nothing here.
_HARMLESS_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "tensor_parallel_size": lambda value: value == 1,
    "pipeline_parallel_size": lambda value: value == 1,
    "data_parallel_size": lambda value: value == 1,
    "enforce_eager": lambda value: isinstance(value, bool),
    "disable_log_stats": lambda value: isinstance(value, bool),
    "trust_remote_code": lambda value: isinstance(value, bool),  # no model brings code here
    "enable_lora": lambda value: value is False,
    "download_dir": lambda value: value is None,
    "hf_overrides": lambda value: not value,
    "generation_config": lambda value: value == "vllm",
    "limit_mm_per_prompt": lambda value: not value,
    "tokenizer_revision": lambda value: value is None,
    "tokenizer": lambda value: value is None,
    "tokenizer_mode": lambda value: value in ("auto", "hf"),
    "quantization": lambda value: value is None,
    "revision": lambda value: value is None,
    "swap_space": lambda value: isinstance(value, int | float),
    "cpu_offload_gb": lambda value: value == 0,
    "kv_cache_dtype": lambda value: value == "auto",
    "enable_chunked_prefill": lambda value: value in (None, True),
    "skip_tokenizer_init": lambda value: value is False,
    "load_format": lambda value: value in ("auto", "safetensors", "gguf"),
    "task": lambda value: value in (None, "auto", "generate"),
    "runner": lambda value: value in ("auto", "generate"),
}


def refuse_options(options: Mapping[str, Any]) -> None:
    """TypeError for an option that nobody knows, ValueError for one that would have to mean something."""
    for name, value in options.items():
        if name not in _HARMLESS_OPTIONS:
            raise TypeError(f"LLM() has no option {name!r}")
        if not _HARMLESS_OPTIONS[name](value):
            raise ValueError(f"{name}={value!r} is not supported by pagetable; leave it out")
