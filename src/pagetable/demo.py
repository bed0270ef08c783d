"""The demonstration: prompts that share a system prompt, their block tables, and what sharing saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagetable.engine import Runner, SamplingParams, Step, StepOutput
from pagetable.llm import LLM
from pagetable.memory import BlockManager
from pagetable.outputs import RequestOutput

SYSTEM_PROMPT = (
    "You are a teacher who answers the questions of curious children. Give a short and correct answer of one "
    "or two sentences. Use simple words that everybody knows. Explain what a thing is before you say what it "
    "does. Never use a formula, and never answer with a list. A good answer is friendly, true and easy to "
    "remember. If there is more than one answer, give the best known one. If a question is about nature, name "
    "an animal or a plant that children have seen. If a question is about a place, say in which part of the "
    "world it lies. If a question is about a machine, say what people use it for. Do not repeat the question."
)

QUESTIONS = (
    "What is the capital of France?",
    "What do bees make?",
    "What is the largest ocean?",
    "Why is the sky blue?",
    "What is the Moon?",
)


@dataclass(frozen=True)
class Run:
    """One batch through one engine."""

    answers: list[str]
    block_tables: list[list[int]]  # of each prompt, at its last step
    shared_blocks: list[int]  # named by several tables at once
    num_cached_tokens: list[int]  # of each prompt
    prompt_tokens: int
    computed_tokens: int  # of the prompts; the rest was found in the cache
    seconds_to_first_tokens: float  # until every prompt had its first token
    seconds: float


@dataclass(frozen=True)
class Report:
    """The same batch with prefix caching on and off."""

    model: str
    block_size: int
    cache_tokens: int
    questions: list[str]
    cached: Run
    uncached: Run


def compare(model: str, max_tokens: int, engine_arguments: dict[str, Any], say: Callable[[str], None]) -> Report:
    """Run the batch with and without prefix caching, each on an engine of its own."""
    runs = []
    for enable_prefix_caching in (True, False):
        say(f"Answering {len(QUESTIONS)} questions, prefix caching {'on' if enable_prefix_caching else 'off'} ...")
        with LLM(model, enable_prefix_caching=enable_prefix_caching, **engine_arguments) as llm:
            llm.generate([[0] * 8], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)  # warm up
            runs.append(_run(llm, max_tokens))
            name, block_size = llm.model_name, llm.block_manager.block_size
            cache_tokens = llm.block_manager.stats().num_blocks * block_size
    return Report(name, block_size, cache_tokens, list(QUESTIONS), *runs)


class _Watch:
    """A runner that notes the block tables of each step before it is computed."""

    def __init__(self, runner: Runner, block_manager: BlockManager) -> None:
        self.tables: dict[int, list[int]] = {}  # by seq_id, so in the order of the prompts
        self.shared: set[int] = set()  # blocks that several tables named at once
        self._runner = runner
        self._blocks = block_manager.blocks

    def execute(self, step: Step) -> StepOutput:
        for seq in step.seqs:
            self.tables[seq.seq_id] = list(seq.block_table)
            self.shared.update(block_id for block_id in seq.block_table if self._blocks[block_id].ref_count > 1)
        return self._runner.execute(step)


def _run(llm: LLM, max_tokens: int) -> Run:
    conversations = [
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    before, began = llm.stats(), time.perf_counter()
    llm.engine.runner = watch = _Watch(llm.engine.runner, llm.block_manager)
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    seconds, after = time.perf_counter() - began, llm.stats()
    query_tokens = after.query_tokens - before.query_tokens
    return Run(
        answers=[_text(output) for output in outputs],
        block_tables=[table for _, table in sorted(watch.tables.items())],
        shared_blocks=sorted(watch.shared),
        num_cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
        prompt_tokens=query_tokens,
        computed_tokens=query_tokens - (after.hit_tokens - before.hit_tokens),
        seconds_to_first_tokens=max(output.metrics.time_to_first_token or 0.0 for output in outputs),
        seconds=seconds,
    )


def _text(output: RequestOutput) -> str:
    answer = output.outputs[0]
    return " ".join(answer.text.split()) + (" …" if answer.finish_reason == "length" else "")


def describe(report: Report) -> str:
    """The report for people."""
    on, off = report.cached, report.uncached
    lines = [
        f"{report.model}: {len(report.questions)} prompts that share one system prompt, blocks of "
        f"{report.block_size} tokens, a cache of {report.cache_tokens:,} tokens.",
        "",
    ]
    for question, answer in zip(report.questions, on.answers, strict=True):
        lines += [f"  Q  {question}", f"  A  {answer}", ""]
    lines += ["Block tables (a block in [brackets] is shared: computed once, named by several tables at once)", ""]
    for i, table in enumerate(on.block_tables):
        lines.append(f"  prompt {i + 1}  {_marked(table, set(on.shared_blocks))}")
    lines += [
        "",
        f"{'':22}{'prefix caching on':>20}{'off':>12}",
        f"{'prompt tokens asked':<22}{on.prompt_tokens:>20,}{off.prompt_tokens:>12,}",
        f"{'prompt tokens computed':<22}{on.computed_tokens:>20,}{off.computed_tokens:>12,}",
        f"{'different blocks used':<22}{_distinct(on):>20,}{_distinct(off):>12,}",
        f"{'s to all first tokens':<22}{on.seconds_to_first_tokens:>20.2f}{off.seconds_to_first_tokens:>12.2f}",
        f"{'s in all':<22}{on.seconds:>20.2f}{off.seconds:>12.2f}",
        "",
        f"The answers are {'the same' if on.answers == off.answers else 'NOT the same'} with the cache on and off.",
    ]
    return "\n".join(lines)


def _marked(table: list[int], shared: set[int]) -> str:
    """A table with its runs of consecutive blocks drawn together: [0-9] 10 11."""
    runs: list[tuple[int, int, bool]] = []
    for block_id in table:
        if runs and runs[-1][1] == block_id - 1 and runs[-1][2] == (block_id in shared):
            runs[-1] = (runs[-1][0], block_id, runs[-1][2])
        else:
            runs.append((block_id, block_id, block_id in shared))
    texts = [(f"{first}" if first == last else f"{first}-{last}", marked) for first, last, marked in runs]
    return " ".join(f"[{text}]" if marked else text for text, marked in texts)


def _distinct(run: Run) -> int:
    return len({block_id for table in run.block_tables for block_id in table})
