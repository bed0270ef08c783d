"""One server with a tiny model for all tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from pagetable import LLM
from tests.serving.running import RunningServer, running_server, write_tiny_model

CACHE = ("--kv-cache-memory", "2MiB")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_llm(tiny_model: Path) -> Iterator[LLM]:
    """The same model in this process, to compare answers with."""
    with LLM(tiny_model, kv_cache_memory="2MiB") as llm:
        yield llm


@pytest.fixture(scope="session")
def session_server(tiny_model: Path) -> Iterator[RunningServer]:
    with running_server(tiny_model, "--served-model-name", "tiny", "--enable-request-id-headers", *CACHE) as server:
        yield server


@pytest.fixture
def server(session_server: RunningServer) -> Iterator[RunningServer]:
    """The session's server; afterwards every block must be free again."""
    yield session_server
    session_server.wait_until_idle()


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
