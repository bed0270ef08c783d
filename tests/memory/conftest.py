"""A hash that collides on purpose."""

from collections.abc import Callable

import pytest

from pagetable.memory import BlockManager


@pytest.fixture
def weak_hash(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replace the hash by one with so few values that strangers collide all the time."""

    def install(num_values: int) -> None:
        def compute_hash(token_bytes: bytes, prefix: bytes) -> bytes:
            return bytes([(sum(token_bytes) + sum(prefix)) % num_values])

        monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(compute_hash))

    return install
