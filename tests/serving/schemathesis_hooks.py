"""A check of ours for schemathesis, which loads this module: see test_schemathesis.py."""

import re
from typing import Any

import schemathesis
from schemathesis.generation.modes import GenerationMode

# What no schema can say: how fields go together, and what depends on the model and on the server's settings.
BEYOND_SCHEMAS = re.compile(
    r"top_logprobs needs logprobs|stream_options is allowed together with stream|min_tokens=\d+ is more than max_tokens"
    r"|max_tokens=0: it must be at least 1, unless echo|best_of=-?\d+ is not supported|stop has \d+ texts"
    r"|\d+ prompts with n=\d+ ask for|the prompt is too long|priority=-?\d+: this server answers in the order"
    r"|has no tokens|is not in the vocabulary|give either prompt or messages"
    r"|the chat template adds special tokens already|chat_template_kwargs may not set|messages\[\d+\]"
    r"|seed=-?92233720368547\d+: "  # an OpenAPI description's limits are floating-point numbers
    r"|=-?\d+\.0: Input should be a valid (integer|string)"  # to JSON Schema 16.0 is an integer, to the OpenAI API not
)


@schemathesis.check
def valid_requests_are_answered(ctx: Any, response: Any, case: Any) -> None:
    """The check `positive_data_acceptance` of schemathesis, with exceptions."""
    if case.meta.generation.mode == GenerationMode.POSITIVE and response.status_code == 400:
        message = response.json()["error"]["message"]
        assert BEYOND_SCHEMAS.search(message), f"refused, although it is as described: {message}"
