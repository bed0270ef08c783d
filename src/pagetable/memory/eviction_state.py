"""What an eviction policy has learned, in a file, so that a restart need not begin with nothing."""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from pathlib import Path

from pagetable.memory.eviction import EvictionPolicy
from pagetable.memory.lhc import LHC

logger = logging.getLogger(__name__)

LARGEST = 16 << 20  # bytes; a state has some hundred kB


def load_eviction_state(policy: EvictionPolicy, path: Path) -> bool:
    """Let a policy go on from a saved state. False, with a warning, if the file holds none, so that it is not replaced.

    No file yet is no fault. ValueError for a policy that does not learn.
    """
    learner = _learner(policy)
    check_place(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        state = json.loads(data)
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
        learner.restore(state)
    except FileNotFoundError:
        return True
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        logger.warning(
            "%s is no state that lhc can go on from, and is left as it is (remove it, or name another): %s", path, error
        )
        return False
    return True


def check_place(path: Path) -> None:
    """ValueError where no state could be written: better now than when all is learned."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"eviction_state={str(path)[:200]!r} cannot be written: give a file in a folder that exists")


def save_eviction_state(policy: EvictionPolicy, path: Path) -> None:
    """Write what a policy has learned, whole or not at all. OSError if that cannot be done."""
    data = json.dumps(_learner(policy).state())
    path = path.resolve()  # of a link, what it leads to
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _learner(policy: EvictionPolicy) -> LHC:
    if not isinstance(policy, LHC):
        raise ValueError(f"an eviction state is for lhc, the only policy that learns, not for {type(policy).__name__}")
    return policy
