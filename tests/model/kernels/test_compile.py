"""Where machine code is kept: in a folder that is ours, made anew when a source changes, or nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from pagetable.model.kernels import compile as kernels_compile

# Compiles something tiny, without importing torch, which takes longer than all the rest.
SCRIPT = """
import sys, types
import pagetable
package = types.ModuleType("pagetable.model")
package.__path__ = [pagetable.__path__[0] + "/model"]
sys.modules["pagetable.model"] = package

import numpy as np
from pagetable.model.kernels.compile import announce, cache_folder, compiled
from pagetable.model.kernels.vectors import LANES, exp, load, store

@compiled
def exp_all(x, out):
    for i in range(0, x.size, LANES):
        store(out, i, exp(load(x, i)))

announce("tiny")
x = np.linspace(-1, 1, 4 * LANES, dtype=np.float32)
out = np.empty_like(x)
exp_all(x, out)
assert np.allclose(out, np.exp(x), rtol=1e-6)
print(cache_folder())
"""


def run(cache: Path | str | None, script: Path, prelude: str = "", **environment: str) -> tuple[str, str]:
    """The folder that a new process used, and what it said."""
    script.write_text(prelude + SCRIPT)
    variables = {**os.environ, **environment}
    variables.pop("PAGETABLE_CACHE_DIR", None)
    if cache is not None:
        variables["PAGETABLE_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    statuses = {str(path): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: (status.st_mtime_ns, status.st_size) for name, status in statuses.items()}


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    cache, script = tmp_path / "not there yet" / "cache", tmp_path / "script.py"
    folder, said = run(cache, script)
    assert Path(folder).parent == cache
    assert Path(folder).stat().st_mode & 0o077 == 0
    assert "compiling tiny kernels" in said
    first = files_in(cache)
    assert any(name.endswith(".nbc") for name in first)
    again, said = run(cache, script)
    assert again == folder
    assert files_in(cache) == first
    assert said == ""


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("content", [b"", b"rubbish"], ids=["cut off", "rubbish"])
def test_damaged_files_are_compiled_again_and_mended(tmp_path: Path, kind: str, content: bytes) -> None:
    cache, script = tmp_path / "cache", tmp_path / "script.py"
    run(cache, script)
    for file in cache.rglob(kind):
        file.write_bytes(content)
    _, said = run(cache, script)
    assert "could not be read" in said
    _, said = run(cache, script)
    assert said == ""


def test_a_full_disk_costs_time_only(tmp_path: Path) -> None:
    small = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    small += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    _, said = run(tmp_path / "cache", tmp_path / "script.py", small)
    assert "could not be kept" in said


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / f"kernels-{kernels_compile._digest()}"
    folder.mkdir()
    folder.chmod(0o777)
    used, said = run(tmp_path, tmp_path / "script.py")
    assert used == "None"
    assert str(folder) in said
    assert "set PAGETABLE_CACHE_DIR to a folder of yours" in said
    assert not files_in(folder)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_someone_else_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / f"kernels-{kernels_compile._digest()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    used, said = run(tmp_path, tmp_path / "script.py")
    assert used == "None"
    assert "set PAGETABLE_CACHE_DIR" in said
    assert not files_in(folder)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / f"kernels-{kernels_compile._digest()}"
    folder.mkdir(mode=0o500)
    used, said = run(tmp_path, tmp_path / "script.py")
    assert used == "None"
    assert "set PAGETABLE_CACHE_DIR" in said


def test_where_no_folder_can_be_made_each_process_compiles_for_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    used, said = run(tmp_path / "file" / "cache", tmp_path / "script.py")
    assert used == "None"
    assert "set PAGETABLE_CACHE_DIR to a folder of yours" in said


@pytest.mark.skipif(os.name != "posix", reason="elsewhere homes are found in other ways")
def test_a_user_without_a_home_computes_as_well(tmp_path: Path) -> None:
    """As in a container that runs under a number that no user has."""
    prelude = (
        "import os, pwd\n"
        "def unknown(number): raise KeyError(number)\n"
        "pwd.getpwuid = unknown\n"
        "for name in ('HOME', 'XDG_CACHE_HOME'): os.environ.pop(name, None)\n"
    )
    used, said = run(None, tmp_path / "script.py", prelude)
    assert used == "None"
    assert "set PAGETABLE_CACHE_DIR" in said


def test_the_users_cache_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGETABLE_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert kernels_compile._base() == tmp_path / ".cache" / "pagetable"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernels_compile._base() == tmp_path / "xdg" / "pagetable"
    monkeypatch.setenv("PAGETABLE_CACHE_DIR", "~/mine")
    assert kernels_compile._base() == tmp_path / "mine"


def test_the_folder_changes_with_each_source_with_numba_and_with_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Path(kernels_compile.__file__).parent
    copy = tmp_path / "kernels"
    copy.mkdir()
    for source in sources.glob("*.py"):
        shutil.copy(source, copy)
    monkeypatch.setattr(kernels_compile, "__file__", str(copy / "compile.py"))
    digests = [kernels_compile._digest()]
    assert kernels_compile._digest() == digests[0]
    for source in sorted(copy.glob("*.py")):
        source.write_text(source.read_text() + "\n# changed\n")
        digests.append(kernels_compile._digest())
    (copy / "new.py").write_text("# new\n")
    digests.append(kernels_compile._digest())
    monkeypatch.setattr(numba, "__version__", "0.0.0")
    digests.append(kernels_compile._digest())
    monkeypatch.setattr(kernels_compile.binding, "get_host_cpu_name", lambda: "another")
    digests.append(kernels_compile._digest())
    assert len(set(digests)) == len(digests)
