"""Words: finding a model, its tokenizer and chat template, and text out of a stream of tokens.

`resolve_model` turns a name into a local path, `load_tokenizer` reads the tokenizer of an opened checkpoint,
`render_chat` fills in a chat template, and a `Detokenizer` a request gives back text that is safe to show.
"""

from pagetable.text.chat_template import ChatTemplateError, render_chat
from pagetable.text.detokenizer import Detokenizer
from pagetable.text.resolve import resolve_model
from pagetable.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplateError",
    "Detokenizer",
    "Tokenizer",
    "load_tokenizer",
    "render_chat",
    "resolve_model",
]
