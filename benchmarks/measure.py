"""How the benchmarks here measure and report: medians with their spread, a noise canary, text tables or JSON."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from time import perf_counter, thread_time
from typing import Any

NOISY = 1.5  # times the quiet canary: figures taken then are not to be quoted


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of `values`, at least one."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


def number(value: float) -> str:
    """A figure with about three digits that mean something."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def seconds(act: Callable[[], object]) -> float:
    """How long `act` takes."""
    start = perf_counter()
    act()
    return perf_counter() - start


class Canary:
    """The same small work on two threads: it takes longer as soon as anything else wants one of the two cores.

    Its quiet value needs no quiet moment: it is the least processor time that any thread of this run spent on it.
    """

    def __init__(self) -> None:
        self._work = bytes(4_000_000)  # hashed outside the interpreter lock
        self._threads = ThreadPoolExecutor(2)
        self.quiet_ms = float("inf")
        self.medians_ms: list[float] = []

    def sample(self, rounds: int = 40) -> None:
        """Run it now; called before, between and after the measurements."""
        times = [seconds(self._round) * 1e3 for _ in range(rounds)]
        self.medians_ms.append(statistics.median(times))

    def _round(self) -> None:
        cpu_ms = [future.result() for future in [self._threads.submit(self._spin) for _ in range(2)]]
        self.quiet_ms = min(self.quiet_ms, *cpu_ms)

    def _spin(self) -> float:
        start = thread_time()
        hashlib.sha256(self._work).digest()
        return (thread_time() - start) * 1e3

    def worst(self, samples: int = 0) -> float:
        """The slowest of the last `samples` samples (0: of all), as a multiple of the quiet value."""
        return max(self.medians_ms[-samples:]) / self.quiet_ms

    def __str__(self) -> str:
        samples = ", ".join(number(ms) for ms in self.medians_ms)
        return f"canary {samples} ms, quiet {number(self.quiet_ms)} ms, worst {number(self.worst())} times that"


@dataclass
class Table:
    """A title that says what is measured and in which unit, columns, and rows of texts, figures and spreads."""

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    note: str = ""
    noise: float = 1.0  # the canary beside it, as a multiple of its quiet value

    def __str__(self) -> str:
        cells = [self.columns] + [[_text(cell) for cell in row] for row in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)])
            for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        noise = f"*** NOISY: the canary took {number(self.noise)} times its quiet value. Do not quote. ***"
        notes = [self.note] * bool(self.note) + [noise] * (self.noise > NOISY)
        return "\n".join([f"## {self.title}", "", *lines, *notes, ""])


def _text(cell: Any) -> str:
    return "-" if cell is None else number(cell) if isinstance(cell, float) else str(cell)


class Report:
    """Prints each table as it is done, or everything as JSON at the end.

    With `timed`, the canary runs before, between and after the tables, and one that was taken next to noise says so.
    """

    def __init__(self, as_json: bool, packages: Iterable[str], *, timed: bool = True) -> None:
        self.tables: list[Table] = []
        self._canary = Canary() if timed else None
        self._as_json = as_json
        self._environment = environment(packages)
        if self._canary:
            self._canary.sample()
        self._say("\n".join(f"{key}: {value}" for key, value in self._environment.items()) + "\n")

    def add(self, table: Table) -> None:
        """Report a table that was just measured."""
        if self._canary:
            self._canary.sample()
            table.noise = self._canary.worst(samples=2)
        self.tables.append(table)
        self._say(str(table))

    def close(self) -> None:
        """Say how quiet it was, and in JSON mode everything else too."""
        self._environment["load average after"] = load_average()
        self._say(f"load average after: {load_average()}")
        if self._canary:
            self._environment["canary"] = str(self._canary)
            self._say(str(self._canary))
            if self._canary.worst() > NOISY:
                print("*** NOISY MACHINE: do not quote the marked tables ***", file=sys.stderr)
        if self._as_json:
            tables = [asdict(table) for table in self.tables]
            print(json.dumps({"environment": self._environment, "tables": tables}, indent=1))

    def _say(self, text: str) -> None:
        if not self._as_json:
            print(text, flush=True)


def environment(packages: Iterable[str]) -> dict[str, str]:
    """What a reader needs to judge the figures or to take them again."""
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{_processor()}, {os.cpu_count()} logical cores, {platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}, {versions}",
        "load average before": load_average(),
    }


def load_average() -> str:
    """Of the last 1, 5 and 15 minutes; this process counts too."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from source"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
