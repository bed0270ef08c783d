"""A list of messages to the one text a model was trained on, by the model's own Jinja template.

Templates come with checkpoints, so from strangers: they run in Jinja's sandbox, see plain data only, and may neither
loop nor write without end. The environment is the one that `apply_chat_template` of transformers gives them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from pagetable.text.tokenizer import Tokenizer

MAX_CHARS = 1 << 26  # of a rendered chat; a million tokens are about 4 million characters
MAX_LOOP_STEPS = 5_000_000  # of all loops of one rendering together: a second or so

_loop_steps: ContextVar[list[int]] = ContextVar("loop_steps")


class ChatTemplateError(ValueError):
    """These messages cannot be rendered: they are malformed, or the template is missing, faulty or refuses them."""


def render_chat(
    template: Tokenizer | str,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **kwargs: Any,
) -> str:
    """The text of a chat.

    `template`: a tokenizer, whose template and special tokens are used, or Jinja source. `chat_template` overrides the
    tokenizer's own: Jinja source, or the name of one of its `chat_templates`. With `tools` (JSON schemas), a template
    named `tool_use` is taken where there is one. `kwargs` are variables for the template; they may be plain data only.

    A message is a dict with `role` and `content`; content is a string or a list of text parts as in OpenAI's API, which
    are joined by line breaks. Other keys are passed on, those that are None left out.

    Raises `ChatTemplateError`.
    """
    variables: dict[str, Any] = {"documents": None}
    if isinstance(template, str):
        templates: Mapping[str, str] = {"default": template}
    else:
        templates = template.chat_templates
        variables |= template.special_tokens
    variables |= {name: _plain(value, name) for name, value in kwargs.items()}
    variables |= {
        "messages": [_message(message, index) for index, message in enumerate(_as_list(messages))],
        "tools": _plain(tools, "tools") or None,
        "add_generation_prompt": add_generation_prompt,
    }
    return _render(_compile(_choose(templates, chat_template, tools)), variables)


def _choose(templates: Mapping[str, str], wanted: str | None, tools: object) -> str:
    if wanted is not None:
        return templates.get(wanted, wanted)
    if tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        named = f" It has {', '.join(sorted(templates))}: name one of them." if templates else ""
        raise ChatTemplateError(
            "this model has no default chat template: use plain completion, or give the text of a template as "
            f"chat_template.{named}"
        )
    return templates["default"]


# ------------------------------------------------------------------------------------------------------------ messages


def _as_list(messages: object) -> list[Any]:
    if not isinstance(messages, (list, tuple)):
        raise ChatTemplateError(f"messages must be a list of dicts, not {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages must not be empty")
    return list(messages)


def _message(message: object, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be a dict with role and content, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"{where} must have a role, a string such as 'user'; got {message.get('role')!r}")
    plain = {key: _plain(value, f"{where}.{key}") for key, value in message.items() if value is not None}
    # An answer that only calls tools has no content; templates add strings to it, so it gets an empty one.
    plain["content"] = _content(message.get("content", None), where, may_lack="tool_calls" in plain)
    return plain


def _content(content: object, where: str, may_lack: bool) -> str:
    if isinstance(content, str):
        return str(content)
    if content is None and may_lack:
        return ""
    if not isinstance(content, (list, tuple)):
        raise ChatTemplateError(
            f"{where} must have content, a string or a list of text parts; got {type(content).__name__}"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise ChatTemplateError(f"{where}.content[{index}] is of type {kind!r}: only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where}.content[{index}] is a text part with no string under 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of `value` in which there is nothing but JSON: an object's methods would be open to the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > 64:
        raise ChatTemplateError(f"{where} is nested too deeply (or contains itself)")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)
    raise ChatTemplateError(f"{where} must be plain data (strings, numbers, lists, dicts), not {type(value).__name__}")


# ----------------------------------------------------------------------------------------------------------- rendering


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    token = _loop_steps.set([MAX_LOOP_STEPS])
    pieces, size = [], 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise ChatTemplateError(f"the chat template writes more than {MAX_CHARS} characters")
    except ChatTemplateError:
        raise
    except Exception as error:  # a template is a program: it can fail with anything
        raise ChatTemplateError(f"the chat template failed on these messages: {_reason(error)}") from error
    finally:
        _loop_steps.reset(token)
    return "".join(pieces)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _environment()
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
        code = environment.compile(tree)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template is faulty, line {error.lineno}: {error.message}") from error
    except Exception as error:  # nested beyond what Python can compile, for one
        raise ChatTemplateError(f"the chat template cannot be compiled: {_reason(error)}") from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters.update(tojson=_tojson, counted=_counted)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with an upper bound on what one operator can build."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for many, times in ((left, right), (right, left)):
            too_long = isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > MAX_CHARS
            if too_long or (operator == "**" and isinstance(times, (int, float)) and abs(times) > 1024):
                raise jinja2.exceptions.SecurityError(f"a chat template may not compute so large a {operator!r}")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on. There is no training here: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without attributes that mean something to Python itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")
        super().__setitem__(name, value)


@pass_context  # which keeps the compiler from running it ahead of time
def _counted(_: Context, items: Iterable[Any]) -> Iterator[Any]:
    left = _loop_steps.get()
    for item in items:
        left[0] -= 1
        if left[0] < 0:
            raise ChatTemplateError(f"the chat template loops more than {MAX_LOOP_STEPS} times")
        yield item


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
