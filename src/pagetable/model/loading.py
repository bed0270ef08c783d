"""From a checkpoint to a model that can run: pick type and device, check, take memory, fill."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from pagetable.checkpoint import Checkpoint, ModelError
from pagetable.model.config import ModelConfig, load_config
from pagetable.model.llama import Llama
from pagetable.model.runner import Decoder
from pagetable.model.weights import Loadable, Progress, check_weights, load_weights, open_weights

logger = logging.getLogger(__name__)


class LoadableDecoder(Decoder, Loadable, Protocol):
    """A model before it has weights."""

    def allocate(self, device: torch.device) -> None:
        """Take memory for the weights."""


KERNELS = ("auto", "numba", "torch")

_DTYPES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    kernels: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Read the model in `checkpoint` onto `device`, ready to run and without gradients.

    `kernels` "numba" is the compiled decoder, for the CPU; "torch" the plain PyTorch one, for any device; "auto" the
    former where it can be had. `threads` are those of the compiled decoder, by default one a processor core.
    `dtype` "auto" is float32 on the CPU; on a GPU it is the checkpoint's own, or bfloat16 where that is float16 or
    quantised. `progress(done, total)` hears the bytes read. Raises `ModelError` for whatever is not supported.
    """
    config = load_config(checkpoint)
    target = resolve_device(device)
    kind = resolve_dtype(dtype, config, target)
    source = open_weights(checkpoint, config)
    model = _make_model(config, kind, kernels, target, threads)
    check_weights(model, source, tied=config.tie_word_embeddings)  # shapes only, before any memory is taken
    try:
        model.allocate(target)
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        raise ModelError(f"{checkpoint.path} does not fit into the memory of {target}: {error}") from error
    with torch.inference_mode():
        load_weights(model, source, progress)
    return model


def _make_model(
    config: ModelConfig, dtype: torch.dtype, kernels: str, device: torch.device, threads: int | None
) -> LoadableDecoder:
    """The decoder for `kernels`, without memory for its weights. `load_config` has let Llamas only through."""
    if resolve_kernels(kernels, device) == "numba":
        from pagetable.model.kernels.decoder import CompiledLlama

        try:
            return CompiledLlama(config, dtype, threads)
        except ModelError as error:  # a shape that it cannot compute
            if kernels == "numba":
                raise
            logger.warning("%s: computing with plain PyTorch", error)
    with torch.device("meta"):
        return Llama(config, dtype).eval()


def resolve_kernels(kernels: str, device: torch.device) -> str:
    """Which decoder, "numba" or "torch". Raises `ModelError` for another name, or where the former cannot run."""
    if kernels not in KERNELS:
        raise ModelError(f"kernels {str(kernels)[:80]!r} are not known: use {', '.join(KERNELS)}")
    if kernels == "torch" or (kernels == "auto" and device.type != "cpu"):
        return "torch"
    if device.type != "cpu":
        raise ModelError(f"kernels 'numba' are for the CPU, not for {device}: use torch or auto")
    try:
        from pagetable.model.kernels.compile import FEATURES
    except ImportError as error:
        if kernels == "numba":
            raise ModelError(f"kernels 'numba' cannot be had: {error}; install numba or use 'torch'") from error
        logger.warning("numba cannot be had (%s): computing with plain PyTorch, several times slower", error)
        return "torch"
    if kernels == "auto" and FEATURES.get("sse2") and not FEATURES.get("fma"):
        logger.warning("this processor has no fused multiply-add: computing with plain PyTorch")
        return "torch"
    return "numba"


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type to compute in. Raises `ModelError` for a name or type other than those of `load_model`."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        own = config.checkpoint_dtype
        return torch.float32 if device.type == "cpu" or own == "float32" else torch.bfloat16
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported: use auto, float32 (float) or bfloat16")
    return _DTYPES[name]


def resolve_device(device: str | torch.device) -> torch.device:
    """`device` as torch has it. Raises `ModelError` when it is not there or not of a kind that is supported."""
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"{str(device)[:80]!r} is not a device: use cpu, cuda or cuda:<number>") from error
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelError(f"device {target} asked for, but torch {torch.__version__} sees no GPU: use device='cpu'")
        if target.index is not None and target.index >= torch.cuda.device_count():
            raise ModelError(f"device {target} asked for, but there are {torch.cuda.device_count()} GPUs, from cuda:0")
    elif target.type != "cpu":
        raise ModelError(f"device {target} is not supported: use cpu, cuda or cuda:<number>")
    return target
