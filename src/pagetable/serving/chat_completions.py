"""POST /v1/chat/completions: a conversation, written out by the model's chat template, and its next message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagetable.engine import SamplingParams
from pagetable.serving.errors import ApiError
from pagetable.serving.front import Front, Job
from pagetable.serving.generation import Choice, Generation, finish_reason
from pagetable.serving.logprobs import chat_logprobs
from pagetable.serving.messages import Delta
from pagetable.serving.sampling import chat_params
from pagetable.serving.schema import ChatCompletionRequest, ConversationMessage

_OURS = {"messages", "tools", "add_generation_prompt", "chat_template"}  # a body's variables do not replace these


class ChatAnswer(Generation[ChatCompletionRequest]):
    """One chat request, from its body to what goes back."""

    ENDPOINT = "/v1/chat/completions"
    ID_PREFIX = "chatcmpl"
    OBJECT = "chat.completion"
    CHUNK_OBJECT = "chat.completion.chunk"
    PARAM = "messages"

    async def _read(self) -> tuple[list[list[int]], SamplingParams, Sequence[Any]]:
        front, body = self._front, self._body
        self._begun: set[int] = set()  # answers that have named their role
        params = chat_params(body, front.settings)
        text, tokens = await conversation_tokens(
            front, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
        return [tokens], params, [text]

    def _parts(self, job: Job, deltas: Sequence[Delta]) -> list[Choice]:
        parts = []
        for delta in deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                parts.append(_part(delta.index, {"role": "assistant", "content": ""}))
            if delta.text or delta.logprobs or delta.finish_reason:
                logprobs = delta.logprobs and {"content": chat_logprobs(delta.logprobs, self._body.top_logprobs or 0)}
                reason = finish_reason(delta)
                parts.append(_part(delta.index, {"content": delta.text}, logprobs, reason, delta.stop_reason))
        return parts

    def _empty_choice(self, index: int) -> Choice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": {"content": []} if self._body.logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _add(self, choice: Choice, part: Choice) -> None:
        choice["message"]["content"] += part["delta"]["content"]
        choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
        if part["logprobs"]:
            choice["logprobs"]["content"] += part["logprobs"]["content"]


def _part(
    index: int,
    delta: dict[str, str],
    logprobs: Any = None,
    reason: str | None = None,
    stop_reason: int | str | None = None,
) -> Choice:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs or None,
        "finish_reason": reason,
        "stop_reason": stop_reason,
    }


async def conversation_tokens(
    front: Front, messages: list[ConversationMessage], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> tuple[str, list[int]]:
    """A conversation as the model's chat template writes it, and its tokens."""
    taken = _OURS & (variables or {}).keys()
    if taken:
        names = ", ".join(sorted(taken))
        raise ApiError(400, f"chat_template_kwargs may not set {names}", param="chat_template_kwargs")
    text = await front.render(
        [message.model_dump() for message in messages],
        add_generation_prompt=add_generation_prompt,
        **(variables or {}),
    )
    # A template writes every special token it wants, the begin token too.
    return text, await front.encode(text, param="messages", add_special_tokens=False)
