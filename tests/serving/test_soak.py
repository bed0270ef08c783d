"""The trials of soak.py, short; and that they would notice what they are there to notice."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagetable import LLM
from tests.serving.running import RunningServer
from tests.serving.soak.load import Gained, Load, Wrong
from tests.serving.soak.questions import Question, write_questions
from tests.serving.soak.trials import Trial, chaos, sigterm, steady
from tests.serving.soak.watch import GROWTH_BYTES, Report, growth, is_flat

SEED = random.randrange(10**6)


@pytest.fixture(scope="module")
def questions(tiny_llm: LLM) -> list[Question]:
    return write_questions(tiny_llm, SEED, 300)


def run(trial: Callable[[Trial], Coroutine[Any, Any, Report]], size: Trial) -> None:
    report = asyncio.run(trial(size))
    print(report)
    assert not report.faults, str(report)


def test_three_hundred_streams_get_their_own_answers_and_all_is_given_back(tiny_model: Path, questions: list[Question]):
    run(steady, Trial(tiny_model, questions, streams=300, seconds=8, seed=SEED))


def test_in_chaos_everyone_gets_an_answer_or_a_clean_error(tiny_model: Path, questions: list[Question]):
    run(chaos, Trial(tiny_model, questions, streams=200, seconds=12, seed=SEED))


@pytest.mark.parametrize("grace", [30, 0.5])
def test_sigterm_ends_a_busy_server_in_time(tiny_model: Path, questions: list[Question], grace: float):
    run(partial(sigterm, grace=grace), Trial(tiny_model, questions, streams=200, seconds=4, seed=SEED))


def test_what_is_not_the_right_answer_is_noticed(server: RunningServer, questions: list[Question]):
    async def ask_all() -> Load:
        async with Load(server.url, questions, SEED, bound=30) as load:
            for question in questions[:40]:
                assert await load.ask(question) == "ok"
            for question in questions[:40]:
                *others, last = question.texts
                for changes in (
                    {"texts": (*others, last[:-1])},
                    {"texts": (last + "x", *others)},
                    {"reasons": ("abort", *question.reasons[1:])},
                    {"usage": (question.usage[0], question.usage[1] + 1)},
                ):
                    assert await load.ask(replace(question, **changes)) == "WRONG"
        return load

    load = asyncio.run(ask_all())
    assert load.outcomes == {"ok": 40, "WRONG": 160}
    assert len(load.faults) == 160


def test_the_beginning_of_another_answer_is_noticed_before_an_error():
    gained, question = Gained(1), Question({"prompt": ["a"]}, ("abc",), ("length",), (1, 3))
    gained.add({"choices": [{"index": 0, "text": "ab", "finish_reason": None}]})
    gained.check(question, is_whole=False)
    gained.add({"choices": [{"index": 0, "text": "d", "finish_reason": None}]})
    with pytest.raises(Wrong):
        gained.check(question, is_whole=False)


def test_memory_that_grows_is_noticed():
    noise = random.Random(SEED)
    warm = [80_000_000 + 500_000 * min(i, 60) for i in range(300)]  # grows in the first quarter, as it may
    leak = [size + i * GROWTH_BYTES // 200 + noise.randrange(1_000_000) for i, size in enumerate(warm)]
    assert is_flat(*growth(warm))
    assert not is_flat(*growth(leak))
