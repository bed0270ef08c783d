"""How much memory an object takes, with all that hangs on it."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping

import numpy as np

from tests.memory.timed_requests import Clock

NOT_ITS_OWN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, Clock)


def deep_size(root: object) -> int:
    """Bytes, each object once: in containers, attributes, slots and arrays. Code and clocks do not count."""
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, NOT_ITS_OWN):
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            todo += value
        elif isinstance(value, np.ndarray) and value.base is not None:
            todo.append(value.base)
        todo += [vars(value)] if hasattr(value, "__dict__") else []
        slots = (slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ()))
        todo += [getattr(value, slot) for slot in slots if hasattr(value, slot)]
    return sum(map(sys.getsizeof, seen.values()))
