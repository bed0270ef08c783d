"""The server from outside: memory, files, lag; and the report of a trial."""

from __future__ import annotations

import asyncio
import os
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from pagetable.serving.metrics import STEP_SECONDS
from tests.serving.running import RunningServer
from tests.serving.soak.load import Load

# From the end of the first quarter to the end memory may grow by this share or by so many bytes, whichever is more.
# In chaos by a larger one: bursts of all sizes leave holes behind. No part of it grows when repeated alone.
GROWTH_SHARE, GROWTH_SHARE_IN_CHAOS, GROWTH_BYTES = 0.10, 0.25, 20 << 20


class Watch:
    """Memory and open files of the front and of its first engine, and the lag of the front's event loop."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.pids = {"front": server.process.pid, "engine": server.engine_pid()}
        self.memory: dict[str, list[int]] = {name: [] for name in self.pids}
        self.files = {name: num_files(pid) for name, pid in self.pids.items()}
        self.lag = self._lag_counts()

    async def run(self, interval: float) -> None:
        """Sample memory for ever."""
        while True:
            for name, pid in self.pids.items():
                with suppress(OSError):  # it has gone
                    self.memory[name].append(resident(pid))
            await asyncio.sleep(interval)

    def lag_p99(self) -> str:
        """Since the watch began: the bucket of the histogram in which it lies."""
        counts = [now - then for now, then in zip(self._lag_counts(), self.lag, strict=True)]
        bounds = (*STEP_SECONDS, float("inf"))
        return next(f"at most {b * 1000:g} ms" for b, n in zip(bounds, counts, strict=True) if n >= 0.99 * counts[-1])

    def _lag_counts(self) -> list[float]:
        bounds = [*(str(float(bound)) for bound in STEP_SECONDS), "+Inf"]
        return [self.server.metric("pagetable:event_loop_lag_seconds_bucket", le=bound) for bound in bounds]


def resident(pid: int) -> int:
    """Bytes of memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_files(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def growth(samples: list[int]) -> tuple[int, int]:
    """Memory at the first quarter's end and at the end: medians of some samples before either."""
    quarter, few = max(1, len(samples) // 4), max(1, len(samples) // 20)
    return int(statistics.median(samples[max(0, quarter - few) : quarter])), int(statistics.median(samples[-few:]))


def is_flat(then: int, now: int, share: float = GROWTH_SHARE) -> bool:
    """Whether memory has grown by less than what is allowed."""
    return now - then < max(share * then, GROWTH_BYTES)


@dataclass
class Report:
    """What happened, and what should not have."""

    title: str
    rows: list[tuple[str, object]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"  {name:<34} {value}" for name, value in self.rows]
        faults = [f"  FAULT: {fault}" for fault in self.faults[:20]]
        verdict = f"  FAILED, {len(self.faults)} faults" if self.faults else "  passed"
        return "\n".join([self.title, *rows, *faults, verdict])

    def require(self, holds: bool, fault: str) -> None:
        """Note the fault unless it holds."""
        if not holds:
            self.faults.append(fault)

    def add_load(self, load: Load, seconds: float) -> None:
        """What the clients saw."""
        self.rows += [("requests", load.num_asked), *((f"  {name}", n) for name, n in load.outcomes.most_common())]
        self.rows.append(
            ("right answers", f"{load.outcomes['ok'] / seconds:.0f}/s, {load.tokens / seconds:.0f} tokens/s")
        )
        self.rows.append(("longest wait", f"{load.longest:.1f} s of {load.bound:.0f} s allowed"))
        self.faults += load.faults
        self.require(load.outcomes["ok"] > 0, "nobody had an answer")

    def add_memory(self, watch: Watch, name: str, share: float = GROWTH_SHARE) -> None:
        """Flat or not."""
        then, now = growth(watch.memory[name])
        shown = " -> ".join(f"{size / 2**20:.1f}" for size in (watch.memory[name][0], then, now))
        self.rows.append((f"memory of the {name}", f"{shown} MiB at first, after a quarter, at the end"))
        self.require(is_flat(then, now, share), f"memory of the {name} grew: {shown} MiB")

    async def add_rest(self, server: RunningServer, watch: Watch) -> None:
        """With the clients gone, everything is as it was at the start."""
        try:
            await asyncio.to_thread(server.wait_until_idle, 30)
        except AssertionError as error:
            self.faults.append(str(error))
        async with aiohttp.ClientSession(server.url) as http, http.post("/v1/cache/reset") as response:
            self.require(response.status == 200, f"/v1/cache/reset: HTTP {response.status}")
        await asyncio.sleep(1.5)  # an idle engine reports once a second
        states = ("in_use", "cached_idle", "empty")
        blocks = {state: int(server.metric("pagetable:kv_blocks", state=state)) for state in states}
        self.rows.append(("blocks", blocks))
        self.require(blocks["in_use"] == blocks["cached_idle"] == 0 < blocks["empty"], f"not all free: {blocks}")
        self.rows.append(("event loop lag p99", watch.lag_p99()))
        files = {"front": num_files(server.process.pid), "engine": num_files(server.engine_pid())}
        self.rows.append(("open files", f"{watch.files} -> {files}"))
        self.require(all(files[name] <= watch.files[name] for name in files), f"open files: {watch.files} -> {files}")
        self.add_log(server)

    def add_log(self, server: RunningServer) -> None:
        """No exception that nobody foresaw."""
        bad = [i for i, line in enumerate(server.lines) if "Traceback" in line or "never retrieved" in line]
        for i in bad[:1]:
            self.faults.append(f"{len(bad)} tracebacks in the log: {''.join(server.lines[max(0, i - 1) : i + 60])}")
