"""The bodies of requests and answers, as in the OpenAI API, with vLLM's extras where they mean something here.

What a client may send is a pydantic model: it is checked strictly, and a field that is not listed is refused by name.
What goes back are typed dictionaries.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from pagetable.engine.sampling_params import MAX_INT32, MAX_LOGPROBS
from pagetable.memory.hints import HIGHEST_PRIORITY, LONGEST_SESSION_ID, LONGEST_TIME

_MAX_FIELDS = 100
_FIRST_FAULT = Field(fail_fast=True)

Text = Annotated[str, Field(max_length=1 << 24)]  # a str with a limit may not hold half of a surrogate pair
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], _FIRST_FAULT, Field(max_length=1 << 20)]
JsonObjects = Annotated[list[dict[str, Any]], _FIRST_FAULT]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
SessionId = Annotated[str, Field(min_length=1, max_length=LONGEST_SESSION_ID)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_TIME, allow_inf_nan=False)]

_MAX_PROMPTS = Field(max_length=4096)

# Only announced in the API's description: who breaks these is told by the code behind, which has better words.
_NOT_EMPTY = Field(json_schema_extra={"minItems": 1})

_StopText = Annotated[Text, Field(json_schema_extra={"minLength": 1})]


def _off(value: Any) -> Any:
    """A field that may be left out or have the value that means "off"; only announced, as above."""
    text = f"Not supported: {json.dumps(value)} only."
    return Field(None, description=text, json_schema_extra={"enum": [value, None]})


class _Body(BaseModel):
    """Every fault in a body is an object of its own, many times as large as what is at fault.

    So lists fail at their first wrong element, and a body has only as many unknown fields as its model sees.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, data: Any) -> Any:
        """No more than `_MAX_FIELDS` fields. No model has so many, so one of them is unknown, and that is said."""
        many = isinstance(data, dict) and len(data) > _MAX_FIELDS
        return dict(islice(data.items(), _MAX_FIELDS)) if many else data


class StreamOptions(_Body):
    """What a stream tells besides the text."""

    include_usage: bool = Field(False, description="A last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(False, description="The usage so far in every chunk.")


class GenerationRequest(_Body):
    """What both kinds of completion have in common."""

    model: str | None = Field(None, description="A served model's name; the first one if left out.")
    n: int | None = Field(1, ge=1, description="Answers to each prompt.")
    temperature: float | None = Field(None, ge=0, le=1e6, description="0 is greedy; 1 by default.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="The same seed gives the same answer.")
    stop: _StopText | Annotated[list[_StopText], _FIRST_FAULT] | None = Field(
        None, description="Texts that end the answer; not part of it."
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    # vLLM's
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32, description="Keep the k likeliest tokens; 0 or -1 all.")
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int = Field(0, ge=0, le=MAX_INT32, description="No end token before this many.")
    ignore_eos: bool = False
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: CacheSalt | None = Field(None, description="Cached prefixes are shared only with equal salts.")
    priority: int = Field(0, ge=-(2**31), le=MAX_INT32, description="Lower goes first, under the policy `priority`.")

    # Ours: hints to the cache.
    session_id: SessionId | None = Field(
        None, description="Requests with the same one and the same salt belong together."
    )
    end_session: bool | None = Field(None, description="Nothing will follow this request in its session.")
    expected_idle_s: Seconds | None = Field(None, description="Seconds until the session's next request, about.")
    cache_priority: int | None = Field(
        None,
        ge=0,
        le=HIGHEST_PRIORITY,
        description="Worth of what is cached next to the same salt's other requests; 50 is normal.",
    )
    ttl_s: Seconds | None = Field(None, description="Seconds after which nothing will follow any more.")

    # Allowed at the value that means "off" only.
    presence_penalty: float | None = _off(0)
    frequency_penalty: float | None = _off(0)
    repetition_penalty: float | None = _off(1)
    logit_bias: dict[str, Any] | None = _off({})

    # Without a meaning here: accepted and ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[str], _FIRST_FAULT, _NOT_EMPTY, _MAX_PROMPTS]
        | Annotated[TokenIds, _NOT_EMPTY]
        | Annotated[list[Annotated[TokenIds, _NOT_EMPTY]], _FIRST_FAULT, _NOT_EMPTY, _MAX_PROMPTS]
    ) = Field(description="A text, token ids, or a list of either.")
    max_tokens: int | None = Field(16, ge=0, le=MAX_INT32, description="0 only together with echo.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives to report at each token.")
    echo: bool | None = Field(False, description="The prompt, too, with its log-probabilities if they are asked for.")
    add_special_tokens: bool = Field(True, description="Begin a text with what the model declares.")

    # Allowed at the value that means "off" only.
    best_of: int | None = Field(None, description="Not supported: the same as n only.")
    suffix: str | None = _off("")


class ConversationMessage(BaseModel):
    """One message of a conversation. Other fields are handed to the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | JsonObjects | None = Field(None, description="A text, or parts of type `text`.")


Messages = Annotated[list[ConversationMessage], _FIRST_FAULT, Field(min_length=1, max_length=10_000)]


class ResponseFormat(_Body):
    """How the answer is to be formed."""

    type: Literal["text"] = Field(description="Guided decoding is not supported: `text` only.")


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="Default: as many as fit.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="The older name of the same.")
    logprobs: bool | None = Field(False, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives at each; needs logprobs.")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")

    # Allowed at the value that means "off" only.
    response_format: ResponseFormat | None = None
    tools: JsonObjects | None = _off([])
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class EndSessionRequest(_Body):
    """Body of POST /v1/sessions/{session_id}/end."""

    cache_salt: CacheSalt | None = Field(None, description="The salt of the session's requests.")


class TokenizeRequest(_Body):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: yes for a prompt, no for messages.")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


# ---------------------------------------------------------------------------------------------------- what goes back


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One answer, or in a stream what it has gained."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(TypedDict):
    """Answer of /v1/completions; with `stream`, each chunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TopLogprob(TypedDict):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of the answer and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry a token."""

    content: list[ChatLogprob]


class ChatMessage(TypedDict):
    """An answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(TypedDict):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(TypedDict):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class EndedSession(TypedDict):
    """Answer of /v1/sessions/{session_id}/end."""

    id: str
    object: Literal["session"]
    ended_blocks: int


class Tokens(TypedDict):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    """Answer of /detokenize."""

    prompt: str


class ErrorDetail(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Answer to whatever could not be done."""

    error: ErrorDetail
