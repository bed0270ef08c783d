"""Truncated and bit-flipped checkpoints load or end in `ModelError`, never in anything else. The seed is printed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pagetable.model import ModelError, load_model, open_checkpoint
from tests.model.tiny_models import TYPES, save_hf, tiny_llama, write_gguf

ROUNDS = 120


def opens_or_is_refused(path: Path) -> bool:
    """Load everything that a user's run would; true when it loaded."""
    try:
        checkpoint = open_checkpoint(path)
        for key in checkpoint.metadata:
            checkpoint.metadata[key]
        load_model(checkpoint)
    except ModelError as error:
        message = str(error)
    else:
        return True
    assert path.name in message
    assert len(message) < 1000
    return False


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    words = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(160)], "tokenizer.ggml.token_type": [1] * 160}
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(tiny_llama(num_hidden_layers=1), path, TYPES.Q4_0, metadata=words).read_bytes()


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tiny_llama(num_hidden_layers=1), tmp_path_factory.mktemp("hf"), max_shard_size="60KB")


def flip(content: bytes, rng: random.Random, within: int) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(within)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def test_truncated_gguf_files(gguf_bytes: bytes, tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "m.gguf"
    data_end = len(gguf_bytes) - 32  # the last tensor may be followed by up to 31 bytes of padding
    for _ in range(ROUNDS):
        # Half of the cuts within the first kilobytes, where the structure is.
        length = rng.randrange(rng.choice((6000, data_end)))
        path.write_bytes(gguf_bytes[:length])
        assert not opens_or_is_refused(path), f"loaded although cut at {length}"


def test_bit_flips_in_gguf_files(gguf_bytes: bytes, tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "m.gguf"
    results = set()
    for _ in range(2 * ROUNDS):
        path.write_bytes(flip(gguf_bytes, rng, rng.choice((200, 8000, len(gguf_bytes)))))
        results.add(opens_or_is_refused(path))
    assert results == {True, False}


@pytest.mark.parametrize("damage", ["cut", "flip"])
@pytest.mark.parametrize("pattern", ["*.safetensors", "*.index.json", "config.json"])
def test_damaged_folders(hf_folder: Path, tmp_path: Path, rng: random.Random, pattern: str, damage: str) -> None:
    ways: dict[str, Callable[[bytes], bytes]] = {
        # Not just the line break at the end of JSON: what is left without it is whole.
        "cut": lambda content: content[: rng.randrange(len(content.rstrip()))],
        "flip": lambda content: flip(content, rng, min(len(content), rng.choice((64, 1200, len(content))))),
    }
    for number in range(ROUNDS // 3):
        folder = shutil.copytree(hf_folder, tmp_path / f"m{number}")
        file = rng.choice(sorted(folder.glob(pattern)))
        file.write_bytes(ways[damage](file.read_bytes()))
        loaded = opens_or_is_refused(folder)
        assert not (loaded and damage == "cut" and pattern != "config.json")
