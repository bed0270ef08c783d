"""The tokenizer of a GGUF file: byte-level BPE, built from the file's metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. How text is cut before merging is not in the file, only
its name (`tokenizer.ggml.pre`); the patterns below are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from pagetable.checkpoint import Checkpoint, ModelError
from pagetable.text.vocabulary import Vocabulary, add_begin_and_end

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types, as in llama.h

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    # Digits first: it also keeps the space before a number out of the number's piece.
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _words(numbers: str) -> PreTokenizer:
    pattern = Split(Regex(_WORDS % numbers), behavior="isolated")
    return Sequence([pattern, ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True)
class _Splitting:
    """How text is cut into pieces before merging, and what goes with it unless the metadata say otherwise."""

    build: Callable[[], PreTokenizer]
    nfc: bool = False  # compose characters first
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False


_GPT2 = _Splitting(_gpt2)
_LLAMA3 = _Splitting(lambda: _words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_SPLITTINGS = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _Splitting(_smollm),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Splitting(lambda: _words(r"\p{N}"), nfc=True),
}


def gguf_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Build the tokenizer of an opened GGUF file.

    Raises `ModelError` for a kind of tokenizer that is not supported (by name), and for metadata that do not agree.
    """
    fields = _Fields(checkpoint)
    splitting = _splitting(fields)
    fields.tokens = tokens = fields.strings("tokens")
    backend = _byte_level_bpe(fields, splitting)
    ids = {name: fields.token_id(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    ends = tuple(dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None))
    _add_special_tokens(fields, backend, {*ends, *([ids["bos"]] if ids["bos"] is not None else [])})
    add_bos, add_eos = fields.flag("add_bos_token", splitting.add_bos), fields.flag("add_eos_token", False)
    for name, wanted in (("bos", add_bos), ("eos", add_eos)):
        if wanted and ids[name] is None:
            fields.fail(f"{name}_token_id", f"is missing, but every text shall get this token (add_{name}_token)")
    text = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    add_begin_and_end(backend, text["bos"] if add_bos else None, text["eos"] if add_eos else None)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Vocabulary(
        backend=backend,
        bos_token_id=ids["bos"],
        eos_token_ids=ends,
        special_tokens={names[name]: text[name] for name in names if name in text},
        chat_templates=_chat_templates(checkpoint),
    )


@dataclass
class _Fields:
    """Typed access to the metadata under `tokenizer.ggml.`; what is wrong in them is named with its key."""

    checkpoint: Checkpoint
    tokens: list[str] = field(default_factory=list)  # set once read: ids are checked against it

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ModelError(f"{self.checkpoint.path}: tokenizer.ggml.{name} {problem}")

    def get(self, name: str) -> Any:
        return self.checkpoint.metadata.get(f"tokenizer.ggml.{name}")

    def string(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            self.fail(name, "is missing" if value is None else f"is {value!r}, not a string")
        return value

    def strings(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            self.fail(name, "is missing" if value is None else "is not a list of strings")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, f"is {value!r}, not true or false")
        return default if value is None else value

    def token_id(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            self.fail(name, f"is {value!r}, but the tokens are 0 to {len(self.tokens) - 1}")
        return value


def _splitting(fields: _Fields) -> _Splitting:
    model = fields.string("model")
    folder = "use the model's Hugging Face folder with tokenizer.json instead"
    if model != "gpt2":
        kind = "SentencePiece" if model == "llama" else "another kind"
        fields.fail("model", f"is {model!r} ({kind}): only 'gpt2' (byte-level BPE) is read from GGUF; {folder}")
    # A file without this field predates it, and a guess would give wrong tokens without a word.
    name = fields.string("pre")
    if name not in _SPLITTINGS:
        fields.fail("pre", f"is {name!r}: known are {', '.join(sorted(_SPLITTINGS))}; {folder}")
    return _SPLITTINGS[name]


def _byte_level_bpe(fields: _Fields, splitting: _Splitting) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(fields.tokens)}
    if len(vocab) != len(fields.tokens):
        twice = next(token for token_id, token in enumerate(fields.tokens) if vocab[token] != token_id)
        fields.fail("tokens", f"has {twice!r} more than once")
    merges = []
    for merge in fields.strings("merges"):
        left, _, right = merge.partition(" ")  # no byte-level token has a space in it
        # Checked here, not left to the library: it can panic on these, past every `except Exception`.
        if left not in vocab or right not in vocab or left + right not in vocab:
            fields.fail("merges", f"has {merge!r}, which does not join two known tokens to a third")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges))
    backend.pre_tokenizer = splitting.build()
    backend.decoder = ByteLevelDecoder()
    if splitting.nfc:
        backend.normalizer = NFC()
    return backend


def _add_special_tokens(fields: _Fields, backend: tokenizers.Tokenizer, always: set[int]) -> None:
    """Make control tokens (and the ids in `always`) special, and user-defined ones be matched whole."""
    types = fields.get("token_type")
    if types is None:
        types = []
    elif not isinstance(types, list) or len(types) != len(fields.tokens) or not all(type(t) is int for t in types):
        fields.fail("token_type", f"is not a list of {len(fields.tokens)} numbers, one for each token")
    special = always | {token_id for token_id, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)}
    plain = {token_id for token_id, kind in enumerate(types) if kind == _USER_DEFINED} - special
    backend.add_special_tokens([AddedToken(fields.tokens[i], special=True, normalized=False) for i in sorted(special)])
    backend.add_tokens([AddedToken(fields.tokens[i], special=False, normalized=False) for i in sorted(plain)])


def _chat_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """`tokenizer.chat_template`, and named ones as `tokenizer.chat_template.<name>`."""
    prefix = "tokenizer.chat_template"
    templates = {}
    for key in checkpoint.metadata:
        if key == prefix or key.startswith(prefix + "."):
            value = checkpoint.metadata[key]
            if not isinstance(value, str):
                raise ModelError(f"{checkpoint.path}: {key} is {value!r}, not a string")
            templates[key[len(prefix) + 1 :] or "default"] = value
    return templates
