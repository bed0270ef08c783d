"""What a model is and what its KV cache costs, read from the checkpoint's header alone."""

from __future__ import annotations

from typing import Any

import torch

from pagetable.checkpoint import open_checkpoint
from pagetable.memory import check_block_size
from pagetable.model import format_bytes, load_config, num_blocks_for, parse_memory
from pagetable.text import resolve_model


def model_info(model: str, memory: str, block_size: int) -> dict[str, Any]:
    """Facts about a model and how many tokens of K/V fit into `memory`, for each type. Raises ModelError."""
    check_block_size(block_size)
    checkpoint = open_checkpoint(resolve_model(model))
    config = load_config(checkpoint)
    num_bytes = parse_memory(memory)
    cache = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        num_blocks = num_blocks_for(config, num_bytes, block_size, dtype)
        cache[name] = {
            "bytes_per_token": config.kv_bytes_per_token(dtype),
            "bytes_per_block": config.kv_bytes_per_token(dtype) * block_size,
            "num_blocks": num_blocks,
            "num_tokens": num_blocks * block_size,
        }
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "format": "GGUF" if checkpoint.kind == "gguf" else "safetensors",
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_position_embeddings,
        "block_size": block_size,
        "memory": num_bytes,
        "kv_cache": cache,
    }


def describe_model(facts: dict[str, Any]) -> str:
    """The facts as a table for people."""
    lines = [
        f"{facts['name']}  ({facts['architecture']}, {facts['format']})",
        f"  {facts['path']}",
        f"  layers {facts['num_layers']}, hidden size {facts['hidden_size']}, heads {facts['num_heads']}, "
        f"KV heads {facts['num_kv_heads']} of size {facts['head_dim']}",
        f"  vocabulary {facts['vocab_size']:,}, longest sequence {facts['max_model_len']:,} tokens",
        "",
        f"  KV cache       bytes a token   a block of {facts['block_size']:<4} in {format_bytes(facts['memory'])}",
    ]
    for dtype, cache in facts["kv_cache"].items():
        lines.append(
            f"  {dtype:<13}{cache['bytes_per_token']:>15,}   {format_bytes(cache['bytes_per_block']):<15} "
            f"{cache['num_tokens']:,} tokens in {cache['num_blocks']:,} blocks"
        )
    return "\n".join(lines)
