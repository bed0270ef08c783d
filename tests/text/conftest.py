"""Tokenizers of three families: the default model's (byte-level BPE in GGUF), and two small Hugging Face folders."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagetable.checkpoint import Checkpoint, open_checkpoint
from pagetable.text import Tokenizer, load_tokenizer, resolve_model

SAMPLE = """The quick brown fox jumps over the lazy dog. It's 12,345.67 o'clock, isn't it? naïve café Ærøskøbing
def f(x):\n    return {"a": x ** 2}\n\n\tif x:\n\t\tpass  # why  not
你好，世界！ こんにちは 안녕하세요 Привет мир 😀 👩‍👩‍👧‍👦 ŝ"""


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def smollm2(smollm2_checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(smollm2_checkpoint)


def folder_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint of a folder, weights or not: text/ asks for none."""
    return Checkpoint(path=folder, kind="hf", name=folder.name)


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    """A model folder: tokenizer.json, and `files` (name without .json -> content)."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|turn|>"],
    )
    backend.train_from_iterator([SAMPLE], trainer)
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """As Llama 2's: spaces are a character of their own, and what the vocabulary lacks becomes byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("i", "n"), ("▁▁", "▁▁"), ("▁", "a"), ("é", "e")]
    for token in [*"▁abcdefghijklmnopqrstuvwxyzTI.,!?'é世", *(left + right for left, right in merges)]:
        vocab.setdefault(token, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_folder(
        tmp_path_factory.mktemp("text") / "byte-level",
        byte_level_backend(),
        tokenizer_config={"eos_token": "<|end|>", "pad_token": None},
        generation_config={"eos_token_id": [1, 0]},
        config={"eos_token_id": 0},
    )
    return load_tokenizer(folder_checkpoint(folder))


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_folder(
        tmp_path_factory.mktemp("text") / "metaspace",
        metaspace_backend(),
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"},
    )
    return load_tokenizer(folder_checkpoint(folder))


@pytest.fixture(params=["smollm2", "byte_level", "metaspace"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer
