"""pagetable: an LLM inference engine whose KV cache is an open book.

    from pagetable import LLM, SamplingParams

Names are imported when they are first used, so that `pagetable.memory`, `pagetable.engine` and the command line neither
need torch nor load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagetable.checkpoint import ModelError
    from pagetable.engine import RequestError, SamplingParams
    from pagetable.llm import LLM
    from pagetable.memory import CacheHints
    from pagetable.outputs import CompletionOutput, Logprob, RequestOutput
    from pagetable.text import ChatTemplateError

__version__ = "0.1.0"

_HOMES = {
    "LLM": "pagetable.llm",
    "CacheHints": "pagetable.memory",
    "ChatTemplateError": "pagetable.text",
    "CompletionOutput": "pagetable.outputs",
    "Logprob": "pagetable.outputs",
    "ModelError": "pagetable.checkpoint",
    "RequestError": "pagetable.engine",
    "RequestOutput": "pagetable.outputs",
    "SamplingParams": "pagetable.engine",
}

__all__ = [
    "LLM",
    "CacheHints",
    "ChatTemplateError",
    "CompletionOutput",
    "Logprob",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagetable' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("pagetable"):
            raise
        raise ModuleNotFoundError(
            f"pagetable.{name} needs {error.name}: install pagetable with its extra 'llm'", name=error.name
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
