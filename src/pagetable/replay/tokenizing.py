"""A model's tokenizer for traces of text."""

from __future__ import annotations

import functools
from typing import Any

from pagetable.replay.readers import Encode


def encoder_of(model: str) -> Encode:
    """Turns a prompt, or the messages of a chat, into the tokens that an engine with this model would be given.

    `model` is a folder, a .gguf file, a hub id or an alias; no weights are read. Raises ModelError (a ValueError) for a
    model that cannot be used, ModuleNotFoundError where the packages for tokenizers are missing.
    """

    @functools.cache
    def load() -> Any:  # when the first text comes: a trace of hashes has no use for it
        from pagetable.checkpoint import open_checkpoint
        from pagetable.text import load_tokenizer, resolve_model

        return load_tokenizer(open_checkpoint(resolve_model(model)))

    def encode(prompt: str | list[Any]) -> list[int]:
        from pagetable.text import render_chat

        tokenizer = load()
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        return list(tokenizer.encode(render_chat(tokenizer, prompt), add_special_tokens=False))

    return encode
