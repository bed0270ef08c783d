"""The step loop: schedule, execute, commit; and roll back when executing fails."""

from __future__ import annotations

import logging
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


class Engine:
    """A scheduler and the runner that computes its steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.last_error: Exception | None = None  # what the latest failed step raised

    def step(self) -> tuple[Step | None, list[Sequence]]:
        """Run one step. Returns it (None: nothing to do, or it failed) and the sequences that finished.

        An exception of the runner ends the step, not the engine. What is not an error, such as Ctrl-C, passes through
        with the step rolled back.
        """
        step = self.scheduler.schedule()
        if step is None:
            return None, []
        try:
            output = self.runner.execute(step)
            return step, self.scheduler.commit(step, output)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(step.seqs))
            self.last_error = error
            return None, self.scheduler.rollback(step, getattr(error, "rows", None))
        except BaseException:
            self.scheduler.rollback(step)
            raise
