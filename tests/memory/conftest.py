"""Hashes that collide on purpose."""

from collections.abc import Callable

import pytest
import xxhash

from pagetable.memory import BlockManager


@pytest.fixture
def weak_hash(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replace the hash by one with so few values that strangers collide all the time."""

    def install(num_values: int) -> None:
        def compute_hash(token_bytes: bytes, prefix: bytes) -> bytes:
            return bytes([(sum(token_bytes) + sum(prefix)) % num_values])

        monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(compute_hash))

    return install


@pytest.fixture
def short_hash(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replace the hash by one with so few values, but of 16 bytes, as a policy that keeps hashes may expect."""

    def install(num_values: int) -> None:
        def compute_hash(token_bytes: bytes, prefix: bytes) -> bytes:
            return (1 + xxhash.xxh3_64_intdigest(prefix + token_bytes) % num_values).to_bytes(8, "little") * 2

        monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(compute_hash))

    return install
