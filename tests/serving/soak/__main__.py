"""`python -m tests.serving.soak`."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import click

from pagetable import LLM
from tests.serving.running import write_tiny_model
from tests.serving.soak.questions import write_questions
from tests.serving.soak.trials import TRIALS, Trial


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(TRIALS)))
@click.option("--streams", default=1000, show_default=True)
@click.option("--seconds", default=300.0, show_default=True)
@click.option("--seed", type=int, help="By default another one each time.")
def main(names: tuple[str, ...], streams: int, seconds: float, seed: int | None) -> None:
    """Run some of the trials, by default all."""
    seed = random.randrange(10**6) if seed is None else seed
    print(f"seed {seed}", flush=True)
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        with LLM(model, kv_cache_memory="64MiB", batch_invariant=True) as llm:
            trial = Trial(model, write_questions(llm, seed, 4 * streams), streams, seconds, seed)
        for run in [run for name in names or TRIALS for run in TRIALS[name]]:
            reports.append(asyncio.run(run(trial)))
            print(reports[-1], flush=True)
    sys.exit(any(report.faults for report in reports))


if __name__ == "__main__":
    main()
