"""The Python examples of the documentation run, and print what they say they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def examples(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name in ("README.md", "docs/guide.md") for i in range(len(examples(name)))]
)
def test_an_example_runs(name: str, number: int):
    assert run(examples(name)[number])


def test_the_lesson_prints_what_its_comments_say():
    (code,) = examples("docs/lesson.md")
    said = re.findall(r"^print\(.*\)  # ([^:\n]*)", code, re.MULTILINE)
    assert run(code).splitlines() == [text.strip() for text in said]
