"""What a checkpoint says about its tokens, in one shape whichever format it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a tokenizer. Built by `hf_vocabulary` or `gguf_vocabulary`, used by `Tokenizer`."""

    backend: tokenizers.Tokenizer  # splits, merges, decodes; adds the begin token in its post-processor
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # every declared end token, once each, the main one first
    special_tokens: Mapping[str, str]  # as templates name them: "bos_token" -> "<s>"
    chat_templates: Mapping[str, str]  # by name; "default" is the usual one


def add_begin_and_end(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put `bos` before and `eos` after each text it encodes, and nothing else; None leaves one out.

    Both must be tokens of the vocabulary.
    """
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    named = [(token, backend.token_to_id(token)) for token in {bos, eos} if token]
    backend.post_processor = TemplateProcessing(single=parts, special_tokens=named)
