"""Byte-level BPE in plain Python, written from its description (GPT-2's encoder): slow, sharing nothing with ours."""

from functools import lru_cache
from itertools import pairwise

import regex

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_characters() -> list[str]:
    """The printable character that stands for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


class ReferenceBPE:
    def __init__(self, tokens, merges, pattern, *, digits_first=False, specials=(), ignore_merges=False):
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.pattern = regex.compile(pattern)
        self.digits_first = digits_first
        self.ignore_merges = ignore_merges
        self.specials = regex.compile("|".join(map(regex.escape, specials)) or r"(?!)")
        self.characters = byte_characters()
        self.merge = lru_cache(100_000)(self._merge)

    def encode(self, text):
        ids, at = [], 0
        for special in self.specials.finditer(text):
            ids += [*self._plain(text[at : special.start()]), self.ids[special[0]]]
            at = special.end()
        return ids + self._plain(text[at:])

    def _plain(self, text):
        parts = [part for part in regex.split(r"(\p{N})", text) if part] if self.digits_first else [text]
        return [token for part in parts for piece in self.pattern.findall(part) for token in self.merge(piece)]

    def _merge(self, piece):
        word = [self.characters[byte] for byte in piece.encode()]
        if self.ignore_merges and "".join(word) in self.ids:
            return [self.ids["".join(word)]]
        # A byte that the vocabulary lacks is dropped before merging, as Hugging Face's BPE does.
        word = [character for character in word if character in self.ids]
        while len(word) > 1:
            rank, at = min((self.ranks.get(pair, 1 << 30), at) for at, pair in enumerate(pairwise(word)))
            if rank == 1 << 30:
                break
            word[at : at + 2] = [word[at] + word[at + 1]]
        return [self.ids[token] for token in word]
