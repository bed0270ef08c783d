"""Who may know whom: the arrows between the rooms, held by reading every import and by importing without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "pagetable"

# Room: rooms that it may import. A room is a folder, or a module of the top level.
ARROWS = {
    "memory": set(),
    "engine": {"memory"},
    "checkpoint": set(),
    "model": {"engine.step", "checkpoint"},
    "text": {"checkpoint"},
    "replay": {"engine", "memory", "text", "checkpoint"},
    "outputs": set(),
    "prompts": {"engine", "text"},
    "request": {"engine", "outputs", "text"},
    "vllm_options": set(),
    "llm_engine": {"engine", "memory", "prompts", "request", "text"},
    "llm": {
        "checkpoint",
        "engine",
        "llm_engine",
        "memory",
        "model",
        "outputs",
        "prompts",
        "request",
        "text",
        "vllm_options",
    },
    "serving": {"", "checkpoint", "engine", "llm", "memory", "outputs", "request", "text"},
    "info": {"checkpoint", "memory", "model", "text"},
    "demo": {"engine", "llm", "memory", "outputs"},
    "calibrate": {"engine", "llm", "replay"},
    "cli": {"", "calibrate", "engine", "llm", "outputs", "demo", "info", "replay", "serving"},
}
WITHOUT_TORCH = ("memory", "engine", "checkpoint", "text", "replay")
ONLY_IN_MEMORY = {"numpy", "xxhash"}  # beside the standard library


def rooms() -> list[str]:
    found = [path.stem for path in PACKAGE.glob("*.py")] + [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted(set(found) - {"__init__", "__main__"})


def imports_of(room: str) -> set[str]:
    """Full names of all modules that a room imports, wherever in its files."""
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else sorted((PACKAGE / room).rglob("*.py"))
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: imports are absolute here"
                names.add(node.module or "")
    return names


def test_every_room_is_on_the_map():
    assert set(rooms()) == set(ARROWS)


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_a_room_knows_only_whom_it_may(room: str):
    for name in imports_of(room):
        top, _, inner = name.partition(".")
        if top != "pagetable" or inner.split(".")[0] == room:
            continue
        allowed = any(inner == target or (target and inner.startswith(f"{target}.")) for target in ARROWS[room])
        assert allowed, f"{room} imports {name}"


def test_memory_needs_no_more_than_numpy_and_a_hash():
    foreign = {name.split(".")[0] for name in imports_of("memory")} - set(sys.stdlib_module_names) - {"pagetable"}
    assert foreign <= ONLY_IN_MEMORY


def test_the_front_of_the_server_does_not_load_torch():
    code = "import sys; sys.modules['torch'] = None; import pagetable.serving.server"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_a_room_without_torch_neither_needs_nor_loads_it(room: str):
    code = (
        "import importlib, pkgutil, sys; sys.modules['torch'] = None\n"
        f"room = importlib.import_module('pagetable.{room}')\n"
        "for module in pkgutil.walk_packages(getattr(room, '__path__', []), room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_imports_lazily_and_says_what_is_missing():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pagetable; pagetable.SamplingParams\n"
        "try: pagetable.LLM\n"
        "except ModuleNotFoundError as error: assert \"with its extra 'llm'\" in str(error), error\n"
        "else: raise SystemExit('LLM came without torch')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_shows_its_help_without_torch():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['pagetable', '--help']; import pagetable.__main__"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "demo" in run.stdout
