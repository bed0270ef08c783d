"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the files beside it declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pagetable.checkpoint import Checkpoint, ModelError
from pagetable.text.vocabulary import Vocabulary, add_begin_and_end

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def hf_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Read the tokenizer of a local Hugging Face folder.

    Raises `ModelError` when there is no tokenizer.json, or when a file contradicts it.
    """
    backend = _read_backend(checkpoint.path)
    config = checkpoint.json("tokenizer_config.json") or {}
    special = _special_tokens(checkpoint, config, backend)
    _honour_begin_and_end(config, special, backend)
    bos = special.get("bos_token")
    return Vocabulary(
        backend=backend,
        bos_token_id=backend.token_to_id(bos) if bos else None,
        eos_token_ids=_eos_token_ids(checkpoint, special, backend),
        special_tokens=special,
        chat_templates=_chat_templates(checkpoint.path, config),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: the tokenizer is read from that file only. Convert the model's tokenizer "
            "(transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        # The library raises plain Exception for most faults in a file; on some it panics, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{file} is not a tokenizer that can be read: {error}") from error
    # Both are sometimes left in the file by whoever trained with them; a prompt must never be cut or filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(checkpoint: Checkpoint, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Named special tokens that the vocabulary has, and make the backend treat them as special."""
    declared = {**(checkpoint.json("special_tokens_map.json") or {}), **config}
    special = {}
    for name in _NAMED:
        token = declared.get(name)
        if isinstance(token, Mapping):  # an AddedToken, written out
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str):
            raise ModelError(f"{checkpoint.path}: {name} in tokenizer_config.json is {token!r}, not a string")
        if backend.token_to_id(token) is not None:
            special[name] = token
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([token for token in dict.fromkeys(special.values()) if token not in known])
    return special


def _honour_begin_and_end(config: Mapping[str, Any], special: Mapping[str, str], backend: tokenizers.Tokenizer) -> None:
    """Follow add_bos_token and add_eos_token, which overrule tokenizer.json where one of them is given."""
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if add_bos is None and add_eos is None:
        return
    add_begin_and_end(
        backend,
        special.get("bos_token") if add_bos else None,
        special.get("eos_token") if add_eos else None,
    )


def _eos_token_ids(
    checkpoint: Checkpoint, special: Mapping[str, str], backend: tokenizers.Tokenizer
) -> tuple[int, ...]:
    ids: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        declared = (checkpoint.json(name) or {}).get("eos_token_id")
        for token_id in declared if isinstance(declared, list) else [declared]:
            if token_id is not None and not _is_token_id(token_id, backend):
                raise ModelError(f"{checkpoint.path}: eos_token_id {token_id!r} in {name} is no token of its tokenizer")
            ids.append(token_id)
    if "eos_token" in special:
        ids.append(backend.token_to_id(special["eos_token"]))
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _is_token_id(value: Any, backend: tokenizers.Tokenizer) -> bool:
    return type(value) is int and 0 <= value < 1 << 31 and backend.id_to_token(value) is not None


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A file chat_template.jinja goes before the entry in tokenizer_config.json."""
    templates = dict(_declared_templates(folder, config.get("chat_template")))
    for file in [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if file.is_file():
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
            templates["default" if file.stem == "chat_template" else file.stem] = text
    return templates


def _declared_templates(folder: Path, declared: Any) -> Iterator[tuple[str, str]]:
    """One string, or a list of {"name": ..., "template": ...}."""
    if declared is None:
        return
    entries = [{"name": "default", "template": declared}] if isinstance(declared, str) else declared
    if not isinstance(entries, list):
        raise ModelError(f"{folder}: chat_template in tokenizer_config.json is neither a string nor a list")
    for entry in entries:
        pair = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(pair[0], str) or not isinstance(pair[1], str):
            raise ModelError(f"{folder}: a chat_template in tokenizer_config.json has no name or no template")
        yield pair[0], pair[1]
