"""The memory that blocks stand for: one tensor of K and V, and the arithmetic of how large it may be.

Block 7 of a page table is `data[layer, 0 or 1, 7]`. Slot s, the flat index a step writes by, is token s % block_size
of block s // block_size. The tensor is never cleared: a slot holds garbage, even NaN, until the step that fills it.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from pagetable.checkpoint import ModelError
from pagetable.model.cgroups import control_groups
from pagetable.model.config import ModelConfig

_UNITS = (
    {"B": 1}
    | {f"{p}iB": 1 << 10 * i for i, p in enumerate("KMGT", 1)}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
)
_UNITS_BY_LOWER = {name.lower(): size for name, size in _UNITS.items()}


class KVCache:
    """K and V of every layer, paged.

    `data` has shape (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim); index 0 of the second axis is K,
    1 is V. On the CPU the operating system hands out its pages when they are first written, so an oversized cache costs
    address space only.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises `ModelError` when the memory cannot be had."""
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.data = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's out-of-memory errors, on the CPU and on a GPU, are RuntimeErrors
            size = num_blocks * block_size * config.kv_bytes_per_token(dtype)
            raise ModelError(f"a KV cache of {format_bytes(size)} cannot be had on {device}: ask for less") from error
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored numbers, that of the model."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.data.device

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer by slot, views of shape (num_blocks * block_size, num_kv_heads, head_dim)."""
        keys, values = self.data[layer].flatten(1, 2)
        return keys, values


def num_blocks_for(config: ModelConfig, memory: int, block_size: int, dtype: torch.dtype) -> int:
    """How many blocks fit into `memory` bytes. Raises `ModelError` when not even one does."""
    block_bytes = config.kv_bytes_per_token(dtype) * block_size
    if memory < block_bytes:
        raise ModelError(
            f"KV cache memory of {format_bytes(memory)} holds no block: one block of {block_size} tokens takes "
            f"{format_bytes(block_bytes)} with this model. Give more memory or a smaller block size"
        )
    return memory // block_bytes


def parse_memory(value: int | str) -> int:
    """Bytes meant by a number of bytes or a text such as "2GiB", "512 MiB", "1.5GB".

    KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB powers of 1000. Raises `ModelError` for anything else.
    """
    allowed = 'give bytes, or a number with a unit: "512MiB", "2GiB", "1.5GB"'
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = (
            re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*", value)
            if isinstance(value, str)
            else None
        )
        unit = _UNITS_BY_LOWER.get(match[2].lower() or "b") if match else None
        if match is None or unit is None:
            raise ModelError(f"{str(value)[:80]!r} is not an amount of memory: {allowed}")
        size = int(Fraction(match[1]) * unit)
    if not 0 < size < 1 << 60:
        raise ModelError(f"{str(value)[:80]!r} is not a usable amount of memory: {allowed}")
    return size


def format_bytes(size: int) -> str:
    """`size` for people: "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f} {unit}"
    return f"{size} B"


def available_memory(device: torch.device | str = "cpu", *, root: Path = Path("/")) -> int:
    """Bytes that can still be had on `device`: free on a GPU; on the CPU the least of the system's and any cgroup's.

    A container's limit does not show in the system's figures, and passing it means being killed rather than refused.
    `root` is where /proc and /sys are looked for. Raises `ModelError` where the system does not tell.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    rooms = _cgroup_rooms(root)
    system = _system_available(root)
    if system is not None:
        rooms.append(system)
    if not rooms:
        raise ModelError("this system does not tell its free memory: give the size of the KV cache in bytes")
    return max(min(rooms), 0)


def _system_available(root: Path) -> int | None:
    """MemAvailable of Linux; elsewhere half of the physical memory, for want of a better figure."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        if match:
            return int(match[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


_CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _cgroup_rooms(root: Path) -> list[int]:
    """Limit minus use of each cgroup, v2 and v1, that this process is in, up to the top."""
    rooms = (_cgroup_room(group, *_CGROUP_FILES[version]) for version, group in control_groups(root, "memory"))
    return [room for room in rooms if room is not None]


def _cgroup_room(group: Path, limit_name: str, usage_name: str, cache_key: str) -> int | None:
    """What one cgroup still allows. Page cache not in use counts as free: the kernel drops it under pressure."""
    try:
        limit, usage = (group / limit_name).read_text().strip(), int((group / usage_name).read_text())
        if not limit.isdigit() or int(limit) >= 1 << 60:  # "max" in v2, nearly 2^63 in v1
            return None
        cache = re.search(rf"^{cache_key} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        return int(limit) - usage + (int(cache[1]) if cache else 0)
    except (OSError, ValueError):
        return None
