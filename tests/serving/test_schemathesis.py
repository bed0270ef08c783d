"""The description at /openapi.json is true: schemathesis makes requests from it, right and wrong ones.

It is narrowed a little for that: most requests would ask for a model that is not here, or for too many answers.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.running import RunningServer, running_server

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

EXAMPLES = int(os.environ.get("EXAMPLES", "40"))  # of each operation
SEED = 1
HOOKS = "tests.serving.schemathesis_hooks"


@pytest.fixture(scope="module")
def bounded_server(tiny_model: Path) -> Iterator[RunningServer]:
    """The model's length bounds the tokens of any request. Afterwards nothing has failed, and every block is free."""
    options = ("--max-model-len", "64", "--scheduling-policy", "priority", "--kv-cache-memory", "2MiB")
    with running_server(tiny_model, "--served-model-name", "tiny", *options) as server:
        yield server
        server.wait_until_idle()
        assert not any(status.startswith("5") for _, status in _responses(server)), _responses(server)


def test_wrong_requests_are_refused_as_described(bounded_server: RunningServer, tmp_path: Path):
    run_schemathesis("negative", bounded_server, _description(bounded_server), tmp_path)


def test_right_requests_are_answered_as_described(bounded_server: RunningServer, tmp_path: Path):
    before = _responses(bounded_server)
    run_schemathesis("positive", bounded_server, _narrowed(_description(bounded_server)), tmp_path)
    answered = _responses(bounded_server) - before
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert answered[path, "200"] > EXAMPLES / 2, answered


def run_schemathesis(mode: str, server: RunningServer, description: dict[str, Any], folder: Path) -> None:
    """All of its checks but one, for which one of ours stands."""
    (folder / "openapi.json").write_text(json.dumps(description))
    command = f"run openapi.json --url {server.url} --mode {mode} --max-examples {EXAMPLES} --seed {SEED} --no-color"
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *command.split(), "--exclude-checks", "positive_data_acceptance"],
        env={**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 3 * EXAMPLES, done.stdout


def _responses(server: RunningServer) -> Counter[tuple[str, str]]:
    """How many, by path and status."""
    with server.client() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    name = "pagetable:http_responses_total"
    return Counter({(s.labels["path"], s.labels["status"]): int(s.value) for s in samples if s.name == name})


def _description(server: RunningServer) -> dict[str, Any]:
    with server.client() as http:
        return http.get("/openapi.json").json()


def _narrowed(description: dict[str, Any]) -> dict[str, Any]:
    """Of a right request most are refused: the model is not here, or fields do not go together. These are not."""
    bodies = description["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
        bodies[name]["properties"]["model"] = {"enum": ["tiny", None]}
    completion, chat = bodies["CompletionRequest"]["properties"], bodies["ChatCompletionRequest"]["properties"]
    completion["n"] = chat["n"] = {"enum": [1, 2, 3, None]}
    chat["logprobs"] = {"const": True}
    bodies["ChatCompletionRequest"]["required"].append("logprobs")  # top_logprobs needs it
    text, texts, *_ = completion["prompt"]["anyOf"]
    text["minLength"] = texts["items"]["minLength"] = 1  # the tiny model has no begin token
    part = {"type": "object", "properties": {"type": {"const": "text"}, "text": text}, "required": ["type", "text"]}
    bodies["ConversationMessage"]["properties"]["content"] = {"anyOf": [text, {"type": "array", "items": part}]}
    bodies["ConversationMessage"]["required"].append("content")
    return description
