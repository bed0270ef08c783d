"""A model on disk: what model/ reads for numbers and text/ for words.

Two shapes are read: a local folder as Hugging Face lays it out (config.json beside *.safetensors), and one GGUF file.
Both come from strangers. Every length and offset is checked against the size of the file before it is used, so that a
truncated or hostile file ends in a `ModelError` that names it, never in a hang, a huge allocation or an IndexError.

GGUF is read here rather than by `gguf.GGUFReader`: that reader makes an array object for each string of the vocabulary
(2.0 s for 49k tokens, where the walk below takes 0.01 s), and trusts counts. Format: ggml's docs/gguf.md, versions
2 and 3.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use is about 40 MB
MAX_DIMS = 4  # GGML_MAX_DIMS
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelError(ValueError):
    """A model that cannot be used. The message says what was given, what is allowed and what to do."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a local model: a folder with config.json and *.safetensors, or a GGUF file. Weights are not read yet.

    Raises `ModelError` when there is no such path, when it is neither of the two, or when it is damaged.
    """
    try:
        # resolve(): two spellings of one file are one model; the hub's cache, a folder of links, works too.
        where = Path(os.path.expanduser(path)).resolve()
        if where.is_dir():
            _check_folder(where)
            return Checkpoint(path=where, kind="hf", name=where.name)
        exists = where.exists()
    except ModelError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a loop of links, a NUL in the path
        raise ModelError(f"{os.fspath(path)!r} cannot be opened as a model: {error}") from error
    if not exists:
        raise ModelError(f"no model at {path}: give a folder with config.json and *.safetensors, or a .gguf file")
    if not where.is_file():
        raise ModelError(f"{where} is neither a folder nor a regular file")
    if where.suffix == ".safetensors":
        raise ModelError(f"{where} holds weights only: give its folder, which must have config.json as well")
    return Checkpoint(path=where, kind="gguf", name=where.stem, gguf=GGUFFile.open(where))


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model. Get one from `open_checkpoint`."""

    path: Path  # absolute
    kind: Literal["hf", "gguf"]
    name: str  # short, for people: the folder's name, or the file's without .gguf
    gguf: GGUFFile | None = None  # parsed once, shared by model/ and text/

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF metadata as plain Python values, each decoded when first asked for; empty for a folder."""
        return self.gguf.metadata if self.gguf is not None else {}

    def json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in file `name` of a folder; None when there is no such file, and always for GGUF."""
        file = self.path / name
        if self.kind != "hf" or not file.is_file():
            return None
        return read_json(file)

    def fingerprint(self) -> bytes:
        """Identity of the weights, 16 bytes, without reading them: names, sizes and times of change, hashed.

        Stable from run to run while the files stay. The KV cache uses it as its namespace.
        """
        files = [self.path] if self.kind == "gguf" else _identity_files(self.path)
        digest = hashlib.blake2b(digest_size=16)
        for file in files:
            resolved = file.resolve()
            try:
                stat = resolved.stat()
            except OSError as error:
                raise ModelError(f"{file} is gone since the model was opened: {error}") from error
            digest.update(f"{resolved}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.digest()


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, or `ModelError` when it is too large, broken, or not an object."""
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{file} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        value = json.loads(file.read_bytes())
    except ModelError:
        raise
    except (OSError, RecursionError, ValueError) as error:
        raise ModelError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}, not an object: download it again")
    return value


def _check_folder(folder: Path) -> None:
    """Raise unless `folder` has a configuration and weights that are safe to read."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"to use {ggufs[0].name}, give that file" if ggufs else "is it a model's folder?"
        raise ModelError(f"{folder} has no config.json: {hint}")
    if not any(folder.glob("*.safetensors")) and not (folder / "model.safetensors.index.json").is_file():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise ModelError(
                f"{folder} holds its weights as pickle ({pickles[0]}), which can run any code when loaded: "
                "only *.safetensors are read. Get or convert a safetensors version of this model"
            )
        raise ModelError(f"{folder} has no *.safetensors: the weights are missing")


def _identity_files(folder: Path) -> list[Path]:
    # The configuration belongs to the identity: another rope base makes other keys of the same weights.
    return [folder / "config.json", *sorted(folder.glob("*.safetensors"))]


# ---------------------------------------------------------------------------------------------------------------- GGUF

_SCALARS = {  # metadata value type -> struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """One tensor as stored. `shape` is in PyTorch's order (rows first); `data` are its bytes, mapped, not read."""

    name: str
    type_name: str  # ggml's: "F32", "Q4_1", …
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # (bytes,)


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A parsed GGUF file: `metadata` (lazily decoded) and `tensors` by name, in the order of the file."""

    path: Path
    metadata: GGUFMetadata
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map `path` and walk its header. Raises `ModelError` that names the file and the fault."""
        try:
            if path.stat().st_size < 24:
                raise ModelError(f"{path} is too short for a GGUF file: {path.stat().st_size} bytes")
            # Copy on write: the arrays look writable to torch, the file never changes.
            mapped = np.memmap(path, dtype=np.uint8, mode="c")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(path, mapped)
        num_tensors, num_fields = _read_header(cursor)
        metadata = GGUFMetadata(cursor, _read_fields(cursor, num_fields))
        if (parts := metadata.get("split.count", 0)) not in (0, 1):
            raise ModelError(f"{path} is one part of {parts}: merge them first (llama-gguf-split --merge)")
        return cls(path, metadata, _read_tensors(cursor, num_tensors, _alignment(path, metadata)))


@dataclass(eq=False)
class GGUFMetadata(Mapping[str, Any]):
    """Metadata by key. The walk of the file notes where a value lies; decoding waits until it is asked for."""

    _cursor: _Cursor
    _where: dict[str, tuple[int, int]]  # key -> (value type, offset), bounds already checked
    _decoded: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            kind, offset = self._where[key]
            self._decoded[key] = self._cursor.decode(kind, offset, key)
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


class _Cursor:
    """Reads forward through the header; whatever would pass the end of the file is a `ModelError`."""

    def __init__(self, path: Path, mapped: NDArray[np.uint8]) -> None:
        self.path = path
        self.mapped = mapped
        self.view = mapped.data
        self.size = len(mapped)
        self.at = 0

    def fail(self, problem: str) -> NoReturn:
        # A name in a damaged file may be megabytes long.
        raise ModelError(f"{self.path} is damaged: {problem[:300]} (at byte {self.at}); download it again")

    def skip(self, count: int, what: str) -> int:
        """Step over `count` bytes; returns where they begin."""
        begin = self.at
        if count > self.size - begin:
            self.fail(f"{what} needs {count} bytes, the file has {self.size - begin} left")
        self.at = begin + count
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.view, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.view, self.skip(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        return self._text(self.skip(length, what), length, what)

    def _text(self, begin: int, length: int, what: str) -> str:
        try:
            return str(self.view[begin : begin + length], "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} is damaged: {what[:80]} is not UTF-8 ({error})") from error

    def skip_value(self, kind: int, key: str) -> None:
        """Step over a metadata value of type `kind`, checking every length in it."""
        if kind in _SCALARS:
            self.skip(struct.calcsize(_SCALARS[kind]), key)
        elif kind == _STRING:
            self.skip(self.u64(key), key)
        elif kind == _ARRAY:
            self._skip_array(key)
        else:
            self.fail(f"{key!r} has unknown value type {kind}")

    def _skip_array(self, key: str) -> None:
        kind, count = self.u32(key), self.u64(key)
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]), key)
            return
        if kind != _STRING:  # arrays of arrays are in the format's text, in no model we know
            self.fail(f"{key!r} is an array of type {kind}: only numbers and strings are read")
        if count * 8 > self.size - self.at:  # 8 bytes of length each: bounds the loop by the size of the file
            self.fail(f"{key!r} claims {count} strings")
        at, size, view, length_at = self.at, self.size, self.view, _U64.unpack_from
        for _ in range(count):
            if at + 8 > size:
                self.fail(f"{key!r} runs past the end of the file")
            at += 8 + length_at(view, at)[0]
        self.at = min(at, size)
        if at > size:
            self.fail(f"{key!r} runs past the end of the file")

    def decode(self, kind: int, at: int, key: str) -> Any:
        """The value that `skip_value` has walked over, as plain Python."""
        if kind in _SCALARS:
            return struct.unpack_from("<" + _SCALARS[kind], self.view, at)[0]
        if kind == _STRING:
            return self._text(at + 8, _U64.unpack_from(self.view, at)[0], key)
        item_kind = _U32.unpack_from(self.view, at)[0]
        count = _U64.unpack_from(self.view, at + 4)[0]
        at += 12
        if item_kind != _STRING:
            return list(struct.unpack_from(f"<{count}{_SCALARS[item_kind]}", self.view, at))
        items = []
        for _ in range(count):
            length = _U64.unpack_from(self.view, at)[0]
            items.append(self._text(at + 8, length, key))
            at += 8 + length
        return items


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts."""
    magic = bytes(cursor.view[cursor.skip(4, "magic") : 4])
    if magic != b"GGUF":
        raise ModelError(f"{cursor.path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = cursor.u32("version")
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise ModelError(f"{cursor.path} is a big-endian GGUF file: only little-endian ones are read")
        raise ModelError(f"{cursor.path} is GGUF version {version}: versions 2 and 3 are read. Convert it again")
    num_tensors, num_fields = cursor.u64("tensor count"), cursor.u64("field count")
    # The least a field (key length, type, value) and a tensor (name length, dimensions, type, offset) take.
    if num_fields * 13 + num_tensors * 24 > cursor.size - cursor.at:
        cursor.fail(f"it claims {num_fields} fields and {num_tensors} tensors in {cursor.size} bytes")
    return num_tensors, num_fields


def _read_fields(cursor: _Cursor, count: int) -> dict[str, tuple[int, int]]:
    where: dict[str, tuple[int, int]] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        if key in where:
            cursor.fail(f"metadata key {key!r} appears twice")
        kind = cursor.u32(key)
        where[key] = (kind, cursor.at)
        cursor.skip_value(kind, key)
    return where


def _alignment(path: Path, metadata: GGUFMetadata) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
        raise ModelError(f"{path} is damaged: general.alignment is {str(value)[:80]!r}, not a power of two from 8 up")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    """The table of tensors, each with its bytes mapped.

    Tensors that overlap are refused: a small file could make a huge model of them.
    """
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.string("a tensor's name")
        if name in entries:
            cursor.fail(f"tensor {name!r} appears twice")
        entries[name] = _read_tensor_entry(cursor, name)
    base = -(-cursor.at // alignment) * alignment
    tensors, end = {}, 0
    for name, (_, _, offset, size) in sorted(entries.items(), key=lambda entry: entry[1][2]):
        if offset < end or offset % alignment:
            cursor.fail(f"tensor {name!r} begins at {offset}, inside another or off the alignment of {alignment}")
        end = offset + size
        if base + end > cursor.size:
            cursor.fail(f"tensor {name!r} ends at byte {base + end}, the file has {cursor.size}: it was cut short")
    for name, (type_name, shape, offset, size) in entries.items():
        data = cursor.mapped[base + offset : base + offset + size]
        tensors[name] = GGUFTensor(name, type_name, shape, data)
    return tensors


def _read_tensor_entry(cursor: _Cursor, name: str) -> tuple[str, tuple[int, ...], int, int]:
    """(ggml type, shape rows first, offset from the start of the data, bytes) of the next entry."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # only who opens a GGUF file pays for it

    dims = cursor.u32(name)
    if not 1 <= dims <= MAX_DIMS:
        cursor.fail(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed([cursor.u64(name) for _ in range(dims)]))
    type_id, offset = cursor.u32(name), cursor.u64(name)
    try:
        ggml_type = GGMLQuantizationType(type_id)
    except ValueError:
        cursor.fail(f"tensor {name!r} has unknown type {type_id}")
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    elements = 1
    for dim in shape:
        elements *= dim
    if elements == 0 or shape[-1] % block:
        cursor.fail(f"tensor {name!r} of type {ggml_type.name} has shape {list(shape)}")
    return ggml_type.name, shape, offset, elements // block * block_bytes
