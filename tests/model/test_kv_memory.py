"""Sizes of memory: parsing them, finding out what is free, and how many blocks that makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagetable.model import KVCache, ModelError, available_memory, format_bytes, num_blocks_for, parse_memory
from tests.model.test_attention_backends import make_config

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        (" 2GiB ", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("0.1GB", 100_000_000),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_memory_sizes(text: int | str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "2G", "two", "2 gigs", "-1GiB", "0", 0, -5, "0.0000000001KB", "1e9", "inf", "nan", "1,5GB", "٣GiB",
     "9" * 40, "9" * 18 + "TiB", 10**30, True, 0.5, None, [1]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_memory_size_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ModelError, match=r'"512MiB", "2GiB", "1.5GB"') as caught:
        parse_memory(text)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_sizes_for_people() -> None:
    assert [format_bytes(size) for size in (7, 2048, 3 << 29)] == ["7 B", "2.00 KiB", "1.50 GiB"]


def test_blocks_that_fit() -> None:
    config = make_config(kv_heads=3, group=3, head_dim=64)  # two layers
    block = 2 * 2 * 3 * 64 * 4 * 16
    assert num_blocks_for(config, 10 * block + block - 1, 16, torch.float32) == 10
    assert num_blocks_for(config, 10 * block, 16, torch.bfloat16) == 20
    with pytest.raises(ModelError, match=r"holds no block.*48\.00 KiB.*smaller block size"):
        num_blocks_for(config, block - 1, 16, torch.float32)


def test_the_cache_has_the_shape_that_slots_index() -> None:
    cache = KVCache(make_config(2, 2, 16), num_blocks=5, block_size=4, dtype=torch.bfloat16)
    assert cache.data.shape == (2, 2, 5, 4, 2, 16)
    keys, values = cache.slots(1)
    keys[4 * 3 + 2] = 7.0
    values[0] = 8.0
    assert cache.data[1, 0, 3, 2].eq(7).all()
    assert cache.data[1, 1, 0, 0].eq(8).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_large_cache_takes_memory_only_where_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    config = make_config(8, 1, 128)
    cache = KVCache(config, num_blocks_for(config, 2 * GIB, 16, torch.float32), 16)
    assert cache.data.nbytes > 1.9 * GIB
    assert resident() - before < GIB // 10


def test_more_than_can_be_had_is_a_clear_error() -> None:
    with pytest.raises(ModelError, match=r"KV cache of .* TiB cannot be had on cpu"):
        KVCache(make_config(8, 1, 128), 1 << 40, 16)


def fake_root(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:  8388608 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{group}".rstrip("/")
    stat = f"anon 5\ninactive_file {inactive}\nactive_file 1\n"
    return {f"{base}/memory.max": limit, f"{base}/memory.current": str(usage), f"{base}/memory.stat": stat}


def v1(group: str, limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
    names = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(usage), "memory.stat": stat}
    return {f"{base}/{name}": text for name, text in names.items()}


OWN_V2 = {"proc/self/cgroup": "0::/a/b\n"}
OWN_V1 = {"proc/self/cgroup": "12:cpu,cpuacct:/d\n5:memory:/d\n1:name=systemd:/d\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),  # no cgroups
        ({**OWN_V2, **v2("a/b", "max\n", 5)}, 8 * GIB),
        ({**OWN_V2, **v2("a/b", f"{4 * GIB}\n", GIB)}, 3 * GIB),
        ({**OWN_V2, **v2("a/b", f"{4 * GIB}\n", 2 * GIB, GIB)}, 3 * GIB),
        ({**OWN_V2, **v2("a/b", "max\n", 5), **v2("a", f"{2 * GIB}\n", GIB)}, GIB),  # the parent's limit binds as well
        ({**OWN_V2, **v2("", f"{3 * GIB}\n", GIB)}, 2 * GIB),  # in a container the path is not there, the top is ours
        ({**OWN_V2, **v2("a/b", f"{GIB}\n", 2 * GIB)}, 0),
        ({**OWN_V2, **v2("a/b", "rubbish\n", 5)}, 8 * GIB),
        ({**OWN_V1, **v1("d", 2 * GIB, GIB, GIB // 2)}, 3 * GIB // 2),
        ({**OWN_V1, **v1("d", 2**63 - 4096, GIB)}, 8 * GIB),
        ({**OWN_V1, **v1("", GIB, 0)}, GIB),
        ({"proc/self/cgroup": "nonsense\n0::/../../etc\n"}, 8 * GIB),
    ],
)
def test_free_memory_is_the_least_of_the_systems_and_the_containers(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert available_memory("cpu", root=fake_root(tmp_path, files)) == expected


def test_without_proc_the_physical_memory_is_asked_for(tmp_path: Path) -> None:
    assert available_memory(root=tmp_path) > 0


def test_this_machine_tells() -> None:
    assert 0 < available_memory() < 1 << 50
