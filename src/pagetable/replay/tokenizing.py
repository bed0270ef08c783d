"""A model's tokenizer for traces of text."""

from __future__ import annotations

from typing import Any

from pagetable.replay.readers import Encode


def encoder_of(model: str) -> Encode:
    """Turns a prompt, or the messages of a chat, into the tokens that an engine with this model would be given.

    `model` is a folder, a .gguf file, a hub id or an alias; no weights are read. Raises ModelError (a ValueError) for a
    model that cannot be used, ModuleNotFoundError where the packages for tokenizers are missing.
    """
    from pagetable.checkpoint import open_checkpoint
    from pagetable.text import load_tokenizer, render_chat, resolve_model

    tokenizer = load_tokenizer(open_checkpoint(resolve_model(model)))

    def encode(prompt: str | list[Any]) -> list[int]:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return tokenizer.encode(render_chat(tokenizer, prompt), add_special_tokens=False)

    return encode
