"""What docs/serving.md says is so."""

import re
import subprocess
import sys
from pathlib import Path

import httpx

from pagetable.serving.schema import ChatCompletionRequest, CompletionRequest
from tests.serving.running import RunningServer

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_the_example_runs(server: RunningServer):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cached_tokens" in done.stdout


def test_every_path_and_field_is_named(server: RunningServer):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    for path in paths:
        assert re.sub(r"/\{.*", "", path) in PAGE
    for name in {**CompletionRequest.model_fields, **ChatCompletionRequest.model_fields}:
        assert f"`{name}`" in PAGE, name
