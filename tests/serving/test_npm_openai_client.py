"""The official `openai` package from npm, as programs in JavaScript use it, gets what the Python client gets."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.running import RunningServer
from tests.serving.test_openai_client import GREEDY, MESSAGES

PACKAGE = "openai@6"
SCRIPT = Path(__file__).with_name("npm_client.mjs")

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture(scope="module")
def seen(session_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script prints."""
    folder = tmp_path_factory.mktemp("npm")
    shutil.copy(SCRIPT, folder)  # Node looks for packages beside the script
    _run("npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", ".", PACKAGE, cwd=folder)
    aborts = _aborts(session_server)
    return {**json.loads(_run("node", SCRIPT.name, session_server.url, cwd=folder)), "aborts before": aborts}


def _aborts(server: RunningServer) -> float:
    return server.metric("vllm:request_success_total", finished_reason="abort")


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_models(seen: dict[str, Any]):
    assert [model["id"] for model in seen["models"]] == ["tiny"]
    assert seen["models"] == [seen["model"]]


def test_a_chat_is_what_the_python_client_gets(seen: dict[str, Any], client: openai.OpenAI):
    expected = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY).to_dict()
    answer = seen["chat"]
    assert answer["choices"] == expected["choices"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == 12
    assert seen["chatHelper"]["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]


def test_a_chat_stream_adds_up(seen: dict[str, Any]):
    (whole,) = seen["chat"]["choices"]
    *chunks, last = seen["chatStream"]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert parts[0]["delta"]["role"] == "assistant"
    assert "".join(part["delta"].get("content") or "" for part in parts) == whole["message"]["content"]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == seen["chat"]["usage"]["completion_tokens"]


def test_completions_and_their_streams_are_what_the_python_client_gets(seen: dict[str, Any], client: openai.OpenAI):
    cold, warm = seen["completions"]
    prompt = "A prompt of the npm client, long enough for some blocks of sixteen tokens, whatever they hold: " * 2
    expected = client.completions.create(prompt=prompt, logprobs=2, **GREEDY).to_dict()
    assert cold["choices"] == warm["choices"] == expected["choices"]
    (whole,) = cold["choices"]
    parts = [chunk["choices"][0] for chunk in seen["completionStream"] if chunk["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    streamed = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
    assert streamed == whole["logprobs"]["token_logprobs"]


def test_cached_tokens_are_told(seen: dict[str, Any]):
    cold, warm = (answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in seen["completions"])
    assert cold == 0
    assert warm >= 16
    assert seen["completionStream"][-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == warm


def test_an_aborted_stream_leaves_no_block_in_use(seen: dict[str, Any], server: RunningServer):
    assert seen["aborted"] == 3
    server.wait_until_idle()
    end = time.monotonic() + 10
    while _aborts(server) <= seen["aborts before"]:
        assert time.monotonic() < end, "the request was not aborted"
        time.sleep(0.05)


def test_errors_have_status_type_param_and_code(seen: dict[str, Any]):
    errors = seen["errors"]
    fields = {name: (e["class"], e["status"], e["type"], e["param"], e["code"]) for name, e in errors.items()}
    assert fields == {
        "model": ("NotFoundError", 404, "not_found_error", "model", "model_not_found"),
        "range": ("BadRequestError", 400, "invalid_request_error", "top_p", None),
        "length": ("BadRequestError", 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        "stream": ("BadRequestError", 400, "invalid_request_error", "best_of", None),
    }
    assert "there is tiny" in errors["model"]["message"]
