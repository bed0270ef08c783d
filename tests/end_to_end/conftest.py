"""The real default model, once for all tests, and prompts from Python's own documentation."""

import random
from collections.abc import Iterator
from pydoc_data.topics import topics

import pytest

from pagetable import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", kv_cache_memory="1GiB") as engine:
        yield engine


@pytest.fixture(scope="session")
def prompts(llm: LLM) -> list[list[int]]:
    """32 prompts of 64 to 512 tokens."""
    rng = random.Random(7)
    texts = [topics[name] for name in sorted(topics)]
    found: list[list[int]] = []
    while len(found) < 32:
        tokens = llm.tokenizer.encode(rng.choice(texts))
        length = rng.randint(64, 512)
        if len(tokens) > length:
            start = rng.randrange(len(tokens) - length)
            found.append(tokens[start : start + length])
    return found


@pytest.fixture
def whole(llm: LLM) -> Iterator[LLM]:
    """The session's engine; afterwards its page table must be consistent and every block free."""
    yield llm
    llm.block_manager.check()
    assert llm.stats().blocks_in_use == 0
