"""`@compiled`: Numba with the machine code kept on disk, in a folder that is ours and never stale.

Numba looks only at the file a function stands in to tell whether its code on disk is stale; ours call each other
across files. So the folder's name is a digest of all their sources, of Numba's version and of the processor's features,
and a change of any starts an empty one. Compiled code may therefore take constants from this package only. What Numba
finds there it runs: a folder that others may write is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import njit
from numba.core.caching import FunctionCache

logger = logging.getLogger(__name__)


def _features() -> dict[str, bool]:
    """What this processor can do; nothing where LLVM cannot tell, as on some ARM systems."""
    try:
        return dict(binding.get_host_cpu_features())
    except RuntimeError:
        return {}


FEATURES = _features()


def compiled(function: Callable[..., Any]) -> Any:
    """`numba.njit` without the GIL, dividing by zero as NumPy does, compiled at the first call and kept on disk."""
    folder = cache_folder()
    # Numba takes the folder from its settings when a function is decorated.
    previous, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder or "")
    try:
        dispatcher = njit(nogil=True, error_model="numpy")(function)
        if folder is not None:
            dispatcher._cache = _ForgivingCache(function)  # what `cache=True` sets
        return dispatcher
    finally:
        numba.config.CACHE_DIR = previous


class _ForgivingCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, for which a damaged file or a full disk costs time and nothing else."""

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The machine code on disk, or None; a damaged index is emptied."""
        try:
            return super().load_overload(signature, target_context)
        except Exception as error:
            logger.warning("a compiled kernel could not be read (%s): compiling it again", error)
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        """Keep machine code, if that can be."""
        try:
            super().save_overload(signature, data)
        except Exception as error:
            logger.warning("a compiled kernel could not be kept: %s", error)


@cache
def cache_folder() -> Path | None:
    """Where machine code is kept, made if need be: below PAGETABLE_CACHE_DIR or the user's cache folder.

    None, after a log line, where no folder can be written: then each process compiles for itself.
    """
    try:
        folder = _base() / f"kernels-{_digest()}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise PermissionError(f"{folder} belongs to, or can be written by, someone else")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is read-only")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        logger.warning("compiled kernels are not kept (%s): set PAGETABLE_CACHE_DIR to a folder of yours", error)
        return None
    return folder


def announce(variant: str) -> None:
    """Say that the first use of a variant of the kernels (a type of numbers) will take long, where it will."""
    folder = cache_folder()
    known = folder and folder / f"{variant}.used"
    if known is not None and known.exists():
        return
    once = "" if known is None else ", once"
    logger.warning("compiling %s kernels for this processor: some seconds to half a minute%s", variant, once)
    if known is not None:
        with suppress(OSError):
            known.touch()


def _base() -> Path:
    if given := os.environ.get("PAGETABLE_CACHE_DIR"):
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path("~/Library/Caches/pagetable").expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~")).expanduser() / "pagetable"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagetable"


def _digest() -> str:
    processor = f"{binding.get_host_cpu_name()} {sorted(FEATURES.items())}"
    digest = hashlib.sha256(f"{numba.__version__} {sys.version} {processor}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
