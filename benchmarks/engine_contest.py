"""Contestants of benchmarks/engine.py take turns, and their figures become a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import sleep
from typing import Any, Self

from contestants import in_turns
from engine_peers import Contestant, ContestantError, Process, Requests
from engine_workloads import W3_IN, Scale, Workloads
from measure import Report, Spread, Table
from roofline import Memory, Roofline

Results = dict[str, list[dict[str, Any]]]  # by contestant and round
OURS = "pagetable"
INVARIANT = "pagetable, batch_invariant"
SETTLE_S = 0.3  # before each turn: threads of the one before go to sleep


class Contest:
    """Processes of contestants that take turns. One that fails is left out from then on; ours must not fail."""

    def __init__(self, contestants: list[Contestant], warm_up: Requests, memory: Memory) -> None:
        self.failed: dict[str, str] = {}  # contestant -> its last words
        self._warm_up, self._memory = warm_up, memory
        self._stack = ExitStack()
        self._processes = [self._load(contestant) for contestant in contestants]

    def play(self, rounds: int, act: Callable[[Process], dict[str, Any]]) -> Results:
        """What `act` found for each contestant in each round, its cache emptied and its code warm.

        The memory's bandwidth is taken before each turn.
        """
        results: Results = {process.name: [] for process in self._processes}
        for process in in_turns(self._processes, rounds):
            self._memory.read()
            if found := self._try(process, lambda process: self._ready(process) or act(process)):
                results[process.name].append(found)
        return {name: found for name, found in results.items() if name not in self.failed}

    def _load(self, contestant: Contestant) -> Process:
        process = self._stack.enter_context(Process(contestant))
        self._try(process, self._ready)  # its first answer means that it has loaded the model
        return process

    def _ready(self, process: Process) -> None:
        process.ask("reset")
        process.ask("answer", requests=self._warm_up)
        sleep(SETTLE_S)

    def _try(self, process: Process, act: Callable[[Process], Any]) -> Any:
        if process.name in self.failed:
            return None
        try:
            return act(process)
        except ContestantError as error:
            if process.contestant.kind == "pagetable":
                raise
            self.failed[process.name] = str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Figure:
    """A column of a comparison: its key in the results and the roofline's value."""

    name: str
    key: str
    roofline: float | None = None
    is_rate: bool = False  # more is better

    def cells(self, name: str, results: Results) -> list[Any]:
        """Its spread, ours as a multiple of it, and how near it is to the roofline."""
        its, ours = ([found[self.key] for found in results[who]] for who in (name, OURS))
        ratio = statistics.median(ours) / statistics.median(its)
        value = Spread.of(its) if len(its) > 1 else its[0]
        return [value, f"{ratio:.2f}", share(statistics.median(its), self.roofline, self.is_rate)]


def share(value: float, roofline: float | None, is_rate: bool) -> str | None:
    """How much of what the machine allows is reached."""
    if roofline is None:
        return None
    return f"{value / roofline if is_rate else roofline / value:.0%}"


def compared(title: str, results: Results, failed: dict[str, str], figures: list[Figure], note: str = "") -> Table:
    """A row for each contestant, three columns for each figure."""
    columns = [column for figure in figures for column in (figure.name, "ours / it", "of roofline")]
    rows = [[name, *(cell for figure in figures for cell in figure.cells(name, results))] for name in results]
    if any(figure.roofline for figure in figures):
        rows.append(["roofline", *(cell for figure in figures for cell in (figure.roofline, None, None))])
    rows += [[name, *[None] * len(columns)] for name in failed]
    notes = [note] * bool(note) + [f"{name} failed: {words}" for name, words in failed.items()]
    return Table(title, ["", *columns], rows, "\n".join(notes))


# ------------------------------------------------------------------------------------------------------ the parts


@dataclass(frozen=True)
class Bench:
    """What all parts need."""

    report: Report
    scale: Scale
    rounds: int
    contestants: list[Contestant]
    workloads: Workloads
    at_start: Roofline
    memory: Memory
    judge: Contestant | None  # transformers, where it is installed

    def contest(self, workload: str, **options: Any) -> Contest:
        """Those who take part in this workload, made with further `options`."""
        chosen = [c for c in self.contestants if workload in c.workloads]
        chosen = [replace(c, options={**c.options, **options}) for c in chosen]
        count, length = {"W3": (1, W3_IN), "W4": (1, self.scale.w4[0])}.get(workload, (8, 100))
        return Contest(chosen, self.warm_up(count, length), self.memory)

    def roofline(self) -> Roofline:
        """With the bandwidth of the contest just played."""
        return replace(self.at_start, bandwidth=self.memory.bandwidth())

    def warm_up(self, count: int, length: int) -> Requests:
        """Requests whose times nobody looks at, and whose prompts are in no workload."""
        return [(prompt, 8) for prompt, _ in self.workloads.prompts(count, length)]
