"""Weights from disk into a model, tensor by tensor, from either kind of checkpoint.

Inside the package a tensor has its Hugging Face name, shape and row order; a source translates. Files are mapped, and
each tensor goes straight to its place in the model, so the peak is one model plus a few megabytes. Names and shapes
are compared before the model's memory is taken: a configuration that claims a million layers costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagetable.checkpoint import Checkpoint, GGUFTensor, ModelError
from pagetable.model.config import ModelConfig

Progress = Callable[[int, int], None]  # bytes read, bytes in all

# Written by some converters, computed by us: nothing is lost by passing over them.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?(attn_rot_embd|rope_freqs)(\.weight)?")


class WeightSource(Protocol):
    """Tensors of one checkpoint under canonical names."""

    @property
    def where(self) -> Path:
        """The file or folder, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by canonical name, known before any data is read."""

    def nbytes(self, name: str) -> int:
        """Bytes that the tensor takes in the file."""

    def read_into(self, name: str, place: Place) -> None:
        """Fill `place`, which has the tensor's shape."""


class Place(Protocol):
    """Where a tensor goes in a model's memory, in whatever layout and type that has."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's, not the layout's."""

    def fill(self, begin: int, values: Tensor) -> None:
        """Write rows `begin`, `begin + 1`, … of the tensor, converting to the type and device of the memory."""


class TensorPlace:
    """A parameter, or rows of a fused one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def fill(self, begin: int, values: Tensor) -> None:
        """See `Place.fill`."""
        target = self.tensor[begin : begin + len(values)]
        target.copy_(values.view_as(target))


class Loadable(Protocol):
    """What a model offers so that it can be filled."""

    def placements(self) -> Iterable[tuple[str, Place]]:
        """Each canonical tensor name and the place for it."""


def open_weights(checkpoint: Checkpoint, config: ModelConfig) -> WeightSource:
    """The weights of `checkpoint`, headers read and checked, data not yet."""
    if checkpoint.kind == "gguf":
        return GGUFWeights(checkpoint, config)
    return SafetensorsWeights(checkpoint)


def check_weights(model: Loadable, source: WeightSource, *, tied: bool) -> None:
    """Raise `ModelError` unless `source` has exactly what `model` needs. The model may be on the meta device."""
    wanted = {name: place.shape for name, place in model.placements()}
    missing = [name for name in wanted if name not in source.shapes]
    if missing:
        raise ModelError(
            f"{source.where} lacks {_some(missing)}: the download is incomplete, or config and weights differ"
        )
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            given = list(source.shapes[name])
            raise ModelError(f"{source.where}: {name} has shape {given}, the configuration asks for {list(shape)}")
    known = {*wanted, "lm_head.weight"} if tied else set(wanted)
    extra = [name for name in source.shapes if name not in known and not _HARMLESS.fullmatch(name)]
    if extra:
        # A tensor without a use means another architecture than the one we would compute.
        raise ModelError(f"{source.where} holds {_some(extra)}, which this architecture has no use for")


def load_weights(model: Loadable, source: WeightSource, progress: Progress | None = None) -> None:
    """Fill `model` from `source`; call `check_weights` first. `progress` hears after each tensor."""
    places = list(model.placements())
    total = sum(source.nbytes(name) for name, _ in places)
    done = 0
    for name, place in places:
        source.read_into(name, place)
        done += source.nbytes(name)
        if progress is not None:
            progress(done, total)


def _some(names: list[str]) -> str:
    return ", ".join(name[:80] for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --------------------------------------------------------------------------------------------------------- safetensors

_SAFE_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsWeights:
    """One or more safetensors files in a folder. Names are canonical already."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.where = checkpoint.path
        self._handles: dict[str, Any] = {}  # tensor -> the open file it is in
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._nbytes: dict[str, int] = {}
        index = checkpoint.json("model.safetensors.index.json")
        if index is not None:
            self._open_shards(index)
        else:
            self._open_file(_single_file(self.where), None)

    def nbytes(self, name: str) -> int:
        """Bytes that the tensor takes in the file."""
        return self._nbytes[name]

    def read_into(self, name: str, place: Place) -> None:
        """See `WeightSource.read_into`."""
        try:
            place.fill(0, self._handles[name].get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.where}: {name} cannot be read: {error}") from error

    def _open_shards(self, index: dict[str, Any]) -> None:
        weight_map = index.get("weight_map")
        where = self.where / "model.safetensors.index.json"
        if not isinstance(weight_map, dict):
            raise ModelError(f"{where} has no weight_map: download it again")
        by_file: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            # Plain names only: an index must not lead out of its folder.
            if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
                raise ModelError(
                    f"{where} sends {name[:80]} to {str(file)[:80]!r}: only *.safetensors beside it are read"
                )
            by_file.setdefault(file, set()).add(name)
        for file, names in by_file.items():
            self._open_file(self.where / file, names)

    def _open_file(self, path: Path, names: set[str] | None) -> None:
        """Note the tensors of one file: those that the index put there, or all."""
        if not path.is_file():
            raise ModelError(f"{path} is missing: the index names it, the folder does not have it")
        try:
            handle: Any = safe_open(path, framework="pt", device="cpu")
            held = set(handle.keys())
            for name in sorted(held if names is None else names):
                if name not in held:
                    raise ModelError(f"{path} lacks {name[:80]}, which the index promises there")
                self._note(path, handle, name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file: {error}; download it again") from error

    def _note(self, path: Path, handle: Any, name: str) -> None:
        tensor = handle.get_slice(name)
        dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
        if dtype not in _SAFE_DTYPES and not _HARMLESS.fullmatch(name):
            raise ModelError(f"{path}: {name[:80]} has type {dtype}, supported: {', '.join(_SAFE_DTYPES)}")
        self._handles[name], self.shapes[name] = handle, shape
        self._nbytes[name] = _SAFE_DTYPES.get(dtype, 0) * int(np.prod(shape, dtype=np.int64))


def _single_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if folder / "model.safetensors" in files:
        return folder / "model.safetensors"
    if len(files) != 1:
        names = _some([file.name for file in files]) or "no *.safetensors"
        raise ModelError(f"{folder} holds {names} and no model.safetensors.index.json that says what is where")
    return files[0]


# ---------------------------------------------------------------------------------------------------------------- GGUF

_GGUF_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GGUF_QUANTISED = ("Q8_0", "Q4_0", "Q4_1")
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROWS_AT_ONCE = 2048  # dequantised rows held besides the model; small enough to stay in the cache


class GGUFWeights:
    """The tensors of a GGUF file, renamed, dequantised and with the rows of q and k put back in order."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        assert checkpoint.gguf is not None
        self.where = checkpoint.path
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in checkpoint.gguf.tensors.values():
            name = canonical_name(tensor.name)
            if tensor.type_name not in (*_GGUF_PLAIN, *_GGUF_QUANTISED) and not _HARMLESS.fullmatch(name):
                supported = ", ".join((*_GGUF_PLAIN, *_GGUF_QUANTISED))
                raise ModelError(
                    f"{self.where}: {tensor.name[:80]} has type {tensor.type_name}, supported: {supported}"
                )
            if tensor.type_name in _GGUF_QUANTISED and len(tensor.shape) != 2:
                raise ModelError(f"{self.where}: {tensor.name[:80]} is quantised but no matrix: {list(tensor.shape)}")
            self._tensors[name] = tensor
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def nbytes(self, name: str) -> int:
        """Bytes that the tensor takes in the file."""
        return self._tensors[name].data.nbytes

    def read_into(self, name: str, place: Place) -> None:
        """See `WeightSource.read_into`; dequantises a slice of rows at a time."""
        tensor = self._tensors[name]
        rows = tensor.data.reshape(tensor.shape[0], -1)  # bytes; a quantised block never crosses a row
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None:
            rows = _unpermute(rows, heads)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            place.fill(begin, _decode(rows[begin : begin + _ROWS_AT_ONCE], tensor.type_name))


def canonical_name(name: str) -> str:
    """The Hugging Face name of a llama tensor in a GGUF file; an unknown name comes back as it is."""
    if (layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and layer[2] in _GGUF_LAYER:
        return f"model.layers.{layer[1]}.{_GGUF_LAYER[layer[2]]}.{layer[3]}"
    return _GGUF_TOP.get(name, name)


def _unpermute(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Undo the row order that llama.cpp's converter gives q and k (`LlamaModel.permute` in convert_hf_to_gguf.py).

    It rotates neighbours (2i, 2i + 1) where Hugging Face rotates halves (i, i + head_dim / 2), so the converter moves
    row (head, half, i) to (head, i, half). Whole rows move, hence it is done on the bytes, quantised or not.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _decode(rows: NDArray[np.uint8], type_name: str) -> Tensor:
    """Rows of bytes to numbers, (rows, columns); float32 where the file is quantised."""
    rows = np.ascontiguousarray(rows)
    if type_name in _GGUF_PLAIN:
        return torch.from_numpy(rows).view(_GGUF_PLAIN[type_name])
    from gguf import GGMLQuantizationType, quants

    with np.errstate(all="ignore"):  # a damaged scale may be infinite; that shows in the logits, not as a warning here
        return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[type_name]))
