"""Opening a model: what is taken, what is refused, and in which words."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import pytest

from pagetable.checkpoint import ModelError, open_checkpoint
from tests.model.tiny_models import save_hf, tiny_llama, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hf/ and tiny.gguf."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = tiny_llama()
    save_hf(model, folder / "hf")
    metadata = {
        "tokenizer.ggml.tokens": ["<s>", "a", "Ġé", "名"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, -1.5],
        "general.name": "Tiny",
    }
    write_gguf(model, folder / "tiny.gguf", metadata=metadata)
    return folder


def test_a_folder(tiny: Path) -> None:
    checkpoint = open_checkpoint(str(tiny / "hf"))
    assert (checkpoint.kind, checkpoint.name, checkpoint.path) == ("hf", "hf", (tiny / "hf").resolve())
    assert checkpoint.gguf is None
    assert dict(checkpoint.metadata) == {}
    config = checkpoint.json("config.json")
    assert config is not None
    assert config["model_type"] == "llama"
    assert checkpoint.json("tokenizer_config.json") is None


def test_a_gguf_file_gives_the_values_that_the_reference_reader_gives(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny / "tiny.gguf")
    assert (checkpoint.kind, checkpoint.name) == ("gguf", "tiny")
    assert checkpoint.json("config.json") is None
    reader = gguf.GGUFReader(tiny / "tiny.gguf")
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert dict(checkpoint.metadata) == expected
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["<s>", "a", "Ġé", "名"]
    assert checkpoint.metadata["tokenizer.ggml.tokens"] is checkpoint.metadata["tokenizer.ggml.tokens"], "decoded twice"
    assert checkpoint.metadata.get("no.such.key") is None
    assert checkpoint.gguf is not None
    for tensor in reader.tensors:
        ours = checkpoint.gguf.tensors[tensor.name]
        assert ours.type_name == tensor.tensor_type.name
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.data.tobytes() == tensor.data.tobytes()


def test_the_fingerprint_stays_until_a_file_changes(tiny: Path) -> None:
    for path, touched in ((tiny / "hf", tiny / "hf/model.safetensors"), (tiny / "tiny.gguf", tiny / "tiny.gguf")):
        before = open_checkpoint(path).fingerprint()
        assert isinstance(before, bytes)
        assert open_checkpoint(path).fingerprint() == before
        os.utime(touched, ns=(1, 1))
        assert open_checkpoint(path).fingerprint() != before
    assert open_checkpoint(tiny / "hf").fingerprint() != open_checkpoint(tiny / "tiny.gguf").fingerprint()


def test_the_fingerprint_is_that_of_the_file_behind_a_link(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(tiny / "tiny.gguf")
    assert open_checkpoint(tmp_path / "link.gguf").fingerprint() == open_checkpoint(tiny / "tiny.gguf").fingerprint()


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model at .*nothing"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_impossible_paths(path: str) -> None:
    with pytest.raises(ModelError):
        open_checkpoint(path)


def test_a_special_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="regular file"):
        open_checkpoint(tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no config.json"),
        (["model.safetensors"], "no config.json"),
        (["model.Q4_0.gguf"], r"give that file"),
        (["config.json"], r"no \*.safetensors"),
        (["config.json", "pytorch_model.bin"], r"pickle \(pytorch_model.bin\)"),
        (["config.json", "consolidated.00.pth"], "pickle"),
        (["config.json", "model.pt"], "pickle"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_weights_without_their_folder(tiny: Path) -> None:
    with pytest.raises(ModelError, match="give its folder"):
        open_checkpoint(tiny / "hf/model.safetensors")


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", '{"a": ' + "[" * 100_000, '{"a": ' + "9" * 10_000 + "}", "\ud800"], ids=range(7)
)
def test_broken_json_names_the_file(tiny: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogatepass")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(tmp_path).json("config.json")


def header(magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, fields: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, fields) + rest + b"\0" * 64


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", kind, offset)


HUGE = 2**63
BAD_GGUF = {
    "empty": (b"", "too short: *0|too short.* 0 bytes"),
    "other": (b"PK\x03\x04" * 20, "not a GGUF"),
    "lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\n" * 3, "not a GGUF"),
    "version_1": (header(version=1), "version 1"),
    "version_99": (header(version=99), "version 99"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 64, "big-endian"),
    "many_fields": (header(fields=HUGE), "claims"),
    "many_tensors": (header(tensors=HUGE), "claims"),
    "long_key": (header(fields=1, rest=struct.pack("<Q", HUGE)), "needs"),
    "long_string": (header(fields=1, rest=field(b"k", 8, struct.pack("<Q", HUGE))), "needs"),
    "long_array": (header(fields=1, rest=field(b"k", 9, struct.pack("<IQ", 0, HUGE))), "needs"),
    "long_string_array": (header(fields=1, rest=field(b"k", 9, struct.pack("<IQ", 8, HUGE))), "claims"),
    "runaway_string_array": (header(fields=1, rest=field(b"k", 9, struct.pack("<IQQ", 8, 2, HUGE))), "past the end"),
    "array_of_arrays": (header(fields=1, rest=field(b"k", 9, struct.pack("<IQ", 9, 1))), "array of type 9"),
    "value_type": (header(fields=1, rest=field(b"k", 77, b"")), "value type 77"),
    "key_twice": (header(fields=2, rest=field(b"k", 0, b"1") * 2), "twice"),
    "key_not_utf8": (header(fields=1, rest=field(b"\xff", 0, b"1")), "UTF-8"),
    "alignment": (header(fields=1, rest=field(b"general.alignment", 4, struct.pack("<I", 12))), "alignment"),
    "alignment_kind": (header(fields=1, rest=field(b"general.alignment", 8, struct.pack("<Q", 1) + b"x")), "alignment"),
    "split": (header(fields=1, rest=field(b"split.count", 2, struct.pack("<H", 3))), "one part of 3"),
    "dims": (header(tensors=1, rest=tensor(b"t", [2] * 5)), "5 dimensions"),
    "no_dims": (header(tensors=1, rest=tensor(b"t", [])), "0 dimensions"),
    "zero_dim": (header(tensors=1, rest=tensor(b"t", [0])), "shape"),
    "huge_shape": (header(tensors=1, rest=tensor(b"t", [HUGE, HUGE, HUGE])), "cut short"),
    "far_offset": (header(tensors=1, rest=tensor(b"t", [4], offset=HUGE)), "cut short"),
    "off_alignment": (header(tensors=1, rest=tensor(b"t", [4], offset=4)), "alignment"),
    "overlap": (header(tensors=2, rest=tensor(b"t", [4]) + tensor(b"u", [4])), "inside another"),
    "tensor_twice": (header(tensors=2, rest=tensor(b"t", [4]) * 2), "twice"),
    "tensor_type": (header(tensors=1, rest=tensor(b"t", [4], kind=250)), "unknown type 250"),
    "block_shape": (header(tensors=1, rest=tensor(b"t", [33], kind=8)), "Q8_0"),
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_bad_gguf_files_are_named_with_their_fault(tmp_path: Path, name: str) -> None:
    content, message = BAD_GGUF[name]
    file = tmp_path / f"{name}.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(file)
    assert str(file) in str(caught.value)


def test_a_broken_string_that_nobody_asks_for_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(header(fields=1, rest=field(b"k", 8, struct.pack("<Q", 2) + b"\xff\xfe")))
    checkpoint = open_checkpoint(file)
    with pytest.raises(ModelError, match="UTF-8"):
        checkpoint.metadata["k"]
