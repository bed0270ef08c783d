"""Log-probabilities in the two shapes that the OpenAI API has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagetable.serving.messages import TokenChoice, TokenChoices
from pagetable.serving.schema import ChatLogprob, CompletionLogprobs, TopLogprob

_LEAST = -9999.0  # JSON has no infinity


def completion_logprobs(
    entries: Sequence[TokenChoices | None], num_alternatives: int, offset: int, first_token: str
) -> CompletionLogprobs:
    """The shape of /v1/completions. The first token of a prompt, which nothing goes before, has None for an entry.

    `offset` is the place in the answer's text, in characters, at which the first of these tokens begins.
    """
    shown: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choices in entries:
        text = first_token if choices is None else choices[0].text
        shown["tokens"].append(text)
        shown["token_logprobs"].append(None if choices is None else _finite(choices[0].logprob))
        shown["top_logprobs"].append(None if choices is None else _by_text(_likeliest(choices, num_alternatives)))
        shown["text_offset"].append(offset)
        offset += len(text)
    return shown


def _by_text(choices: Iterable[TokenChoice]) -> dict[str, float]:
    by_text: dict[str, float] = {}
    for choice in choices:  # several tokens may read the same: the likeliest stands
        by_text.setdefault(choice.text, _finite(choice.logprob))
    return by_text


def _likeliest(choices: TokenChoices, count: int) -> TokenChoices:
    """The `count` likeliest, and the token that is there even if it is none of them, as the OpenAI API has it."""
    ordered = sorted(choices, key=lambda choice: choice.rank)
    return [choice for choice in ordered if choice.rank <= count or choice is choices[0]]


def chat_logprobs(entries: Sequence[TokenChoices], num_alternatives: int) -> list[ChatLogprob]:
    """The shape of /v1/chat/completions."""
    return [
        {
            **_top(choices[0]),
            "top_logprobs": [
                _top(choice) for choice in sorted(choices, key=lambda c: c.rank) if choice.rank <= num_alternatives
            ],
        }
        for choices in entries
    ]


def _top(choice: TokenChoice) -> TopLogprob:
    return {
        "token": choice.text,
        "logprob": _finite(choice.logprob),
        "bytes": list(choice.text.encode("utf-8", "replace")),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
