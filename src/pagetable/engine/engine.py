"""The step loop: schedule, execute, commit; and roll back when executing fails."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from pagetable.engine.scheduler import Scheduler
from pagetable.engine.sequence import Sequence
from pagetable.engine.step import Step, StepOutput

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a step. May raise: then none of the step is used.

    An exception with an attribute `rows` says which places of the batch are at fault.
    """

    def execute(self, step: Step) -> StepOutput:
        """One token for each sequence whose `needs_logits` is true, in batch order."""


@dataclass(slots=True)
class StepStats:
    """What was in one step, and what its parts took in seconds."""

    num_seqs: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0  # the latest tokens of answers; all others are prefill
    schedule: float = 0.0
    execute: float = 0.0
    commit: float = 0.0


class Engine:
    """A scheduler and the runner that computes its steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.last_error: Exception | None = None  # what the latest failed step raised
        self.step_stats: StepStats | None = None  # of the latest step; None when there was none, or it failed

    def step(self) -> tuple[Step | None, list[Sequence]]:
        """Run one step. Returns it (None: nothing to do, or it failed) and the sequences that finished.

        An exception of the runner, or an output that does not fit, ends the step, not the engine. What is not an error
        of the runner, such as Ctrl-C, passes through with the step rolled back.
        """
        began, self.step_stats = time.perf_counter(), None
        step = self.scheduler.schedule()
        if step is None:
            return None, []
        num_decodes = sum(seq.num_scheduled_tokens == 1 and seq.num_output_tokens > 0 for seq in step.seqs)
        try:
            scheduled = time.perf_counter()
            output = self.runner.execute(step)
            executed = time.perf_counter()
            finished = self.scheduler.commit(step, output)
            self.step_stats = StepStats(
                num_seqs=len(step.seqs),
                num_prefill_tokens=step.num_tokens - num_decodes,
                num_decode_tokens=num_decodes,
                schedule=scheduled - began,
                execute=executed - scheduled,
                commit=time.perf_counter() - executed,
            )
            return step, finished
        except BaseException as error:
            if self.scheduler.step_in_flight is not step:  # the commit itself broke: not the runner's fault
                raise
            finished = self.scheduler.rollback(step, _rows_at_fault(error))
            if not isinstance(error, Exception):
                raise
            logger.exception("a step of %d sequences failed", len(step.seqs))
            self.last_error = error
            return None, finished


def _rows_at_fault(error: BaseException) -> list[int] | None:
    rows = getattr(error, "rows", None)
    return [row for row in rows if isinstance(row, int)] if isinstance(rows, list | tuple | set) else None
