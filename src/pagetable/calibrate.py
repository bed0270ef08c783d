"""`pagetable bench calibrate`: what a step of a real model costs here, as a `CostModel` for timed replays."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagetable.engine import SamplingParams, Sequence
from pagetable.llm import LLM
from pagetable.replay.cost import CostModel, features, fit

BATCHES = (1, 2, 4, 8, 16, 32)  # sequences at once
LENGTHS = (8, 64, 256, 1024, 4096)  # tokens of their prompts
NUM_DECODES = 12  # steps after a prompt
DOUBTFUL = 0.2  # error at the median
MOST_TOKENS = 8192  # of all prompts of a case, so that it takes seconds and not minutes


def calibrate(llm: LLM, rounds: int, say: Callable[[str], None]) -> CostModel:
    """Run prompts of several lengths in batches of several sizes, time every step, and fit.

    The first of `rounds` + 1 rounds only warms up. What is timed is a step of the engine: scheduling, computing,
    publishing. Making text of tokens is not in it.
    """
    samples: list[tuple[Any, float]] = []
    cases = list(_cases(llm))
    for number in range(rounds + 1):
        for batch, length in cases:
            say(f"{f'round {number} of {rounds}' if number else 'warming up'}: {batch} prompts of {length} tokens")
            steps = list(_steps(llm, batch, length, np.random.default_rng((number, batch, length))))
            if number:
                samples += steps
    about = {
        "model": repr(llm),
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "max_num_batched_tokens": llm.engine.scheduler.max_num_batched_tokens,
        "block_size": llm.block_manager.block_size,
    }
    if not samples:
        raise ValueError("the KV cache is too small for any of the prompts; give it more memory")
    return fit(samples, about)


def _cases(llm: LLM) -> Iterator[tuple[int, int]]:
    manager = llm.block_manager
    room = min(MOST_TOKENS, len(manager.blocks) * manager.block_size)
    for length in LENGTHS:
        for batch in BATCHES:
            fits = batch * (length + NUM_DECODES + manager.block_size) <= room
            if fits and length + NUM_DECODES < llm.max_model_len and batch <= llm.engine.scheduler.max_num_seqs:
                yield batch, length


def _steps(llm: LLM, batch: int, length: int, rng: np.random.Generator) -> Iterator[tuple[Any, float]]:
    """Features and seconds of each step of a case. Its prompts are random, so that nothing is found in the cache."""
    llm.reset_prefix_cache()
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODES, ignore_eos=True)
    for _ in range(batch):
        prompt = rng.integers(0, llm.config.vocab_size, length)
        engine.scheduler.add(Sequence(prompt, params, block_size=llm.block_manager.block_size))
    while engine.scheduler.has_unfinished:
        began = time.perf_counter()
        step, _ = engine.step()
        seconds = time.perf_counter() - began
        if step is None:
            raise RuntimeError(f"a step failed: {engine.last_error!r}")
        yield features(step), seconds


def describe_cost(cost: CostModel, path: Path) -> str:
    """The costs for people."""
    about = cost.about
    doubt = "\n  Too far for timed replays to mean much: was something else running here?" * (
        about["median_error"] > DOUBTFUL
    )
    return (
        f"{about['model']}\n"
        f"  a step                     {cost.step * 1e3:9.3f} ms\n"
        f"  a token of a prompt        {cost.prefill_token * 1e6:9.3f} us, and {cost.prefill_context * 1e9:.3f} ns "
        "for each token it attends to\n"
        f"  a sequence that decodes    {cost.decode * 1e6:9.3f} us, and {cost.decode_context * 1e9:.3f} ns "
        "for each token it attends to\n"
        f"  off by {about['median_error']:.1%} at the median, {about['p90_error']:.1%} at the 90th percentile "
        f"of {about['samples']} steps{doubt}\n"
        f"{path} written"
    )
