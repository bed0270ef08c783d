"""Numbers: weights, the decoder, attention back-ends, KV tensors, the sampler, and the runner that puts them together.

    checkpoint -> load_model -> a Decoder -> ModelRunner(model, num_blocks, block_size) -> execute(step) -> StepOutput

A decoder is `Llama`, in plain PyTorch, or `kernels.decoder.CompiledLlama`, for the CPU.

Knows the records in `pagetable.engine.step` and nothing of queues or requests.
"""

from pagetable.checkpoint import Checkpoint, ModelError, open_checkpoint
from pagetable.model.attention import AttentionBackend, TorchAttention
from pagetable.model.config import ModelConfig, RopeScaling, load_config
from pagetable.model.kv_cache import KVCache, available_memory, format_bytes, num_blocks_for, parse_memory
from pagetable.model.llama import Llama
from pagetable.model.loading import load_model, resolve_device, resolve_dtype, resolve_kernels
from pagetable.model.runner import Decoder, ModelRunner
from pagetable.model.sampler import LogitsError, sample

__all__ = [
    "AttentionBackend",
    "Checkpoint",
    "Decoder",
    "KVCache",
    "Llama",
    "LogitsError",
    "ModelConfig",
    "ModelError",
    "ModelRunner",
    "RopeScaling",
    "TorchAttention",
    "available_memory",
    "format_bytes",
    "load_config",
    "load_model",
    "num_blocks_for",
    "open_checkpoint",
    "parse_memory",
    "resolve_device",
    "resolve_dtype",
    "resolve_kernels",
    "sample",
]
