"""Text to tokens and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from pagetable.checkpoint import Checkpoint
from pagetable.text.gguf_vocabulary import gguf_vocabulary
from pagetable.text.hf_vocabulary import hf_vocabulary
from pagetable.text.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of an opened checkpoint: tokenizer.json of a folder, or the metadata of a GGUF file.

    Raises `ModelError` when there is none, when its kind is not supported, or when its data do not fit together.
    """
    return Tokenizer(hf_vocabulary(checkpoint) if checkpoint.kind == "hf" else gguf_vocabulary(checkpoint))


class Tokenizer:
    """A model's tokenizer. Get one from `load_tokenizer`. It never changes, so threads may share it.

    Special tokens written out in a text (`<|im_end|>`) become those tokens, also inside what a user typed: the default
    of Hugging Face's tokenizers. Whoever serves strangers and minds must look for them in the text first.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids  # every end token the model declares
        self.special_tokens: Mapping[str, str] = vocabulary.special_tokens  # "bos_token" -> "<s>", and so on
        self.chat_templates: Mapping[str, str] = vocabulary.chat_templates  # by name
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_fallback = _has_byte_fallback(self._backend.decoder)

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < 1 << 32 and self._backend.id_to_token(token_id) is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. The model's output may have more columns (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The default chat template, as Jinja source; None when the model has none."""
        return self.chat_templates.get("default")

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token of the vocabulary: a text of so many times n has more than n tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With `add_special_tokens`, what the model declares is added (most often a begin token).

        Raises `TypeError` when `text` is no string, `ValueError` when it holds lone surrogates.
        """
        if not isinstance(text, str):
            raise TypeError(f"text to encode must be a string, not {type(text).__name__}")
        text.encode()  # a lone surrogate is named here; the library would say that this is no string
        # `encode` would keep every other thread of the process waiting; this lets them run, and leaves offsets out.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; what is not UTF-8 becomes U+FFFD. An id above the vocabulary (padding columns) gives no text.

        Byte tokens (`<0xE4>`) are put together as SentencePiece does: a bad byte costs itself only, where the
        `tokenizers` library gives up the whole run of byte tokens. So text once complete never changes.

        Raises `ValueError` for a negative id.
        """
        id_list = [int(token_id) for token_id in ids]
        try:
            if not self._byte_fallback:
                return self._backend.decode(id_list, skip_special_tokens=skip_special_tokens)
            skipped = self.special_token_ids if skip_special_tokens else frozenset()
            tokens = (self._backend.id_to_token(i) for i in id_list if i not in skipped)
            assert self._backend.decoder is not None  # byte fallback is one of its parts
            text: str = self._backend.decoder.decode(list(_join_bytes(token for token in tokens if token is not None)))
            return text
        except OverflowError as error:
            raise ValueError(f"token ids must be from 0 to 2**32 - 1, not {min(id_list)} to {max(id_list)}") from error

    def token_text(self, token_id: int) -> str:
        """The text that this token stands for inside a text, its leading space included; special ones as written.

        Half a character reads U+FFFD. Raises `ValueError` for an id that is not in the vocabulary.
        """
        if token_id not in self:
            raise ValueError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens")
        # After some other text: at the very beginning, many decoders drop a leading space.
        before, text = self._anchor
        return self.decode([*before, token_id], skip_special_tokens=False)[len(text) :]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self.encode("a", add_special_tokens=False)
        return ids, self.decode(ids)


def _has_byte_fallback(decoder: Any) -> bool:
    if decoder is None:
        return False
    spec = json.loads(decoder.__getstate__())
    return any(part.get("type") == "ByteFallback" for part in [spec, *spec.get("decoders", [])])


def _join_bytes(tokens: Iterable[str]) -> Iterator[str]:
    """`tokens`, with each run of byte tokens replaced by the text that their bytes make."""
    run = bytearray()
    for token in tokens:
        if match := _BYTE_TOKEN.fullmatch(token):
            run.append(int(match[1], 16))
            continue
        if run:
            yield run.decode("utf-8", "replace")
            run.clear()
        yield token
    if run:
        yield run.decode("utf-8", "replace")
