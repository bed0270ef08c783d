"""The forms in which prompts come: text, token ids, dicts, conversations, one or many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any, TypeGuard

from pagetable.engine import RequestError
from pagetable.engine.sampling_params import is_integer
from pagetable.text import Tokenizer

Prompt = str | SequenceABC[int] | Mapping[str, Any]
Messages = SequenceABC[Mapping[str, Any]]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def is_conversation(value: Any) -> TypeGuard[Messages]:
    """Whether this is one list of messages."""
    return (
        isinstance(value, SequenceABC)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(item, Mapping) for item in value)
        and any("role" in item or "content" in item for item in value)
    )


def as_list(prompts: Any) -> list[Any]:
    """One prompt, in any of its forms, or a list of them, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | set | frozenset):
        raise RequestError(f"a prompt or a list of prompts is expected, not {prompts!r}")
    prompts = list(prompts)
    is_token_ids = bool(prompts) and all(is_integer(item) for item in prompts)
    return [prompts] if is_token_ids else prompts


def one_each(given: Any, wanted: int, name: str, kind: type) -> list[Any]:
    """A setting for each prompt, given once for all or as a list. RequestError when the numbers differ."""
    if isinstance(given, kind):
        return [given] * wanted
    if (
        isinstance(given, str)
        or not isinstance(given, SequenceABC)
        or not all(isinstance(item, kind) for item in given)
    ):
        raise RequestError(f"{name}: one {kind.__name__} or a list of them is expected, not {type(given).__name__}")
    if len(given) != wanted:
        raise RequestError(f"{name} has {len(given)} entries for {wanted} prompts; give one, or one for each prompt")
    return list(given)


def tokens_of(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, Any, str | None]:
    """Text (None when tokens were given), token ids and cache salt of one prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, _encode(prompt, tokenizer), None
    if not isinstance(prompt, Mapping):
        return None, prompt, None
    if set(prompt) - set(_KEYS) or not ("prompt" in prompt or "prompt_token_ids" in prompt):
        raise RequestError(
            "a prompt given as a dict has 'prompt' or 'prompt_token_ids', and may have 'cache_salt': "
            f"not {sorted(map(str, prompt))}"
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is None:
        token_ids = _encode(text, tokenizer)
    return text, token_ids, prompt.get("cache_salt")


def _encode(text: Any, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(text)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error
