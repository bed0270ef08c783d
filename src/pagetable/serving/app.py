"""The HTTP application: every path, and what hangs together behind it."""

from __future__ import annotations

import functools
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Path, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from pagetable import __version__
from pagetable.serving import session_hints
from pagetable.serving.access import Access, caller_of
from pagetable.serving.chat_completions import ChatAnswer, conversation_tokens
from pagetable.serving.completions import CompletionAnswer
from pagetable.serving.errors import ApiError, from_validation, json_response
from pagetable.serving.front import Front
from pagetable.serving.gate import Gate, path_of
from pagetable.serving.generation import Generation
from pagetable.serving.metrics import CONTENT_TYPE
from pagetable.serving.responses import EventStream, WholeAnswer
from pagetable.serving.schema import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizedText,
    DetokenizeRequest,
    EndedSession,
    EndSessionRequest,
    ErrorBody,
    ModelCard,
    ModelList,
    SessionId,
    TokenizeRequest,
    Tokens,
)

_FAULTS: dict[int | str, str] = {
    400: "The request is at fault: the message says what was given, what is allowed and what to do.",
    401: "No API key, or a wrong one.",
    403: "Not allowed to this caller.",
    404: "No such model, or path.",
    408: "The body took too long to come.",
    413: "The body is too large.",
    429: "Too many requests wait.",
    500: "A fault of the server.",
    503: "The engine is being restarted.",
    "4XX": "Whatever else is wrong with a request.",  # without this one FastAPI would announce a 422 of its own
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _FAULTS.items()
}


class _AnyText(PathConvertor):
    """A part of a path that may hold anything: slashes, like `path`, and line breaks as well."""

    regex = "(?s:.*)"


register_url_convertor("any_text", _AnyText())


def build_app(front: Front) -> FastAPI:
    """The application over a started engine."""
    docs = not front.settings.disable_fastapi_docs
    access = Access(front.settings)
    bearer = [Security(HTTPBearer(auto_error=False))] if access.needs_key else []
    app = FastAPI(
        title="pagetable",
        version=__version__,
        description="OpenAI-compatible API of an engine whose KV cache is an open book.",
        openapi_url="/openapi.json" if docs else None,
        responses=_ERRORS,
        dependencies=bearer,
    )
    _add_generation(app, front, access)
    _add_sessions(app, front, access)
    _add_text(app, front)
    _add_models(app, front)
    _add_operations(app, front, access)
    app.add_exception_handler(RequestValidationError, functools.partial(_invalid, front))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, front=front, access=access)  # it asks for keys; what FastAPI knows of them is for the docs
    if front.settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(front.settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


def _add_generation(app: FastAPI, front: Front, access: Access) -> None:
    def answer(work: Generation[Any], stream: bool | None) -> Response:
        if stream:
            return EventStream(work.chunks(), front.refuse)
        return WholeAnswer(work.whole(), front.refuse)

    streamed: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
    hints = {"parameters": session_hints.PARAMETERS}

    @app.post("/v1/completions", response_model=Completion, responses=streamed, openapi_extra=hints)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on from one prompt or many."""
        salt = access.cache_salt(request, body.cache_salt)
        return answer(CompletionAnswer(front, body, salt, request.headers), body.stream)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=streamed, openapi_extra=hints)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        salt = access.cache_salt(request, body.cache_salt)
        return answer(ChatAnswer(front, body, salt, request.headers), body.stream)


def _add_sessions(app: FastAPI, front: Front, access: Access) -> None:
    @app.post("/v1/sessions/{session_id:any_text}/end", response_model=EndedSession)
    async def end_session(
        session_id: Annotated[SessionId, Path()], request: Request, body: EndSessionRequest | None = None
    ) -> Response:
        """Nothing will follow in this session. Answers how many cached blocks are its own; an unknown one has none."""
        try:
            unquote_to_bytes(request.scope["raw_path"]).decode()
        except UnicodeDecodeError:  # what stands in its place would be one id for many
            raise ApiError(400, "session_id is not UTF-8 when its %XX are read", param="session_id") from None
        salt = access.cache_salt(request, None if body is None else body.cache_salt)
        num_blocks = await front.engine.end_session(session_id, salt)
        return json_response({"id": session_id, "object": "session", "ended_blocks": num_blocks})


def _add_text(app: FastAPI, front: Front) -> None:
    @app.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation."""
        front.served_model(body.model)
        return json_response(await _tokens(front, body))

    @app.post("/detokenize", response_model=DetokenizedText)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        front.served_model(body.model)
        largest = max(body.tokens, default=0)
        if largest >= front.tokenizer.vocab_size:
            raise ApiError(400, f"token id {largest} is not in the vocabulary of the tokenizer", param="tokens")
        return json_response({"prompt": await front.in_thread(front.tokenizer.decode, body.tokens, False)})


async def _tokens(front: Front, body: TokenizeRequest) -> Tokens:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise ApiError(400, "the chat template adds special tokens already", param="add_special_tokens")
        _, tokens = await conversation_tokens(
            front, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
    else:
        add = body.add_special_tokens is not False
        tokens = await front.encode(body.prompt or "", param="prompt", add_special_tokens=add)
    texts = None
    if body.return_token_strs:
        texts = await front.in_thread(lambda: [front.tokenizer.token_text(token) for token in tokens])
    return {"count": len(tokens), "max_model_len": front.ready.max_model_len, "tokens": tokens, "token_strs": texts}


def _add_models(app: FastAPI, front: Front) -> None:
    def card(name: str) -> ModelCard:
        return {
            "id": name,
            "object": "model",
            "created": front.started,
            "owned_by": "pagetable",
            "root": front.settings.model,
            "parent": None,
            "max_model_len": front.ready.max_model_len,
        }

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """The names under which the model can be asked."""
        return json_response({"object": "list", "data": [card(name) for name in front.model_names]})

    @app.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model(model: str) -> Response:
        """One of them."""
        return json_response(card(front.served_model(model)))


def _add_operations(app: FastAPI, front: Front, access: Access) -> None:
    async def health() -> Response:
        """200 when requests are answered, 503 while the engine is not there."""
        _ = front.ready
        return Response()

    app.get("/health", response_class=Response)(health)
    for path in ("/health", "/ping"):  # some load balancers ask so
        app.head(path, response_class=Response, include_in_schema=False)(health)
    app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)(health)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(front.metrics.render(), media_type=CONTENT_TYPE)

    @app.post("/v1/cache/reset", response_model=dict[str, str])
    async def reset(request: Request) -> Response:
        """Forget every cached prefix; running requests finish undisturbed. For administrators."""
        access.check_admin(caller_of(request))
        await front.engine.reset_prefix_cache()
        return json_response({"status": "ok"})


# ---------------------------------------------------------------------------------------------------- what goes wrong


async def _invalid(front: Front, request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    refused = from_validation(error.errors())
    front.note_refusal(path_of(request.scope), refused)
    return refused.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths, methods that a path has not."""
    assert isinstance(error, HTTPException)
    message = error.detail if error.status_code != 404 else f"there is nothing at {request.url.path}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response
