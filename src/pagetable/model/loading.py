"""From a checkpoint to a model that can run: pick type and device, check, take memory, fill."""

from __future__ import annotations

import torch

from pagetable.checkpoint import Checkpoint, ModelError
from pagetable.model.config import ModelConfig, load_config
from pagetable.model.llama import Llama
from pagetable.model.weights import Progress, check_weights, load_weights, open_weights

ARCHITECTURES = {"llama": Llama}  # ModelConfig.architecture -> class

_DTYPES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Llama:
    """Read the model in `checkpoint` onto `device`, ready to run and without gradients.

    `dtype` "auto" is float32 on the CPU; on a GPU it is the checkpoint's own, or bfloat16 where that is float16 or
    quantised. `progress(done, total)` hears the bytes read. Raises `ModelError` for whatever is not supported.
    """
    config = load_config(checkpoint)
    target = resolve_device(device)
    kind = resolve_dtype(dtype, config, target)
    source = open_weights(checkpoint, config)
    with torch.device("meta"):  # shapes without memory, to be compared first
        model = ARCHITECTURES[config.architecture](config, kind)
    check_weights(model, source, tied=config.tie_word_embeddings)
    try:
        model = model.to_empty(device=target)
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        raise ModelError(f"{checkpoint.path} does not fit into the memory of {target}: {error}") from error
    with torch.inference_mode():
        load_weights(model, source, progress)
    return model.eval()


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
