"""A team of threads that run one compiled function together, meet at barriers, and share out work by claiming it.

A step of a small model takes milliseconds and has hundreds of phases, so a phase must begin and end in less than a
microsecond: threads wait for each other inside the compiled code, and Python starts them once a step.

* Work is claimed, one unit after another, from a counter. Nothing is divided beforehand, so a thread that the system
  has taken off its processor holds up one unit and not half of a phase.
* At a barrier a thread spins for up to a tenth of a millisecond, which is all it takes on a quiet machine. Then it
  sleeps: with other processes about, a spinner would keep the very processor that the missing thread needs.
"""

from __future__ import annotations

import os
import platform
import threading
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagetable.model.cgroups import control_groups
from pagetable.model.kernels.compile import compiled

MAX_THREADS = 256
_SPINS = 2000  # 30 to 100 microseconds where there is a pause instruction
_NAP_MICROSECONDS = 20  # to which Linux's timer slack adds some 50

# Fields of `Team.sync`, each on a cache line of its own.
_ARRIVED, _BROKEN = 0, 8
_SYNC_SIZE = 16


class Team:
    """`threads` threads, the caller's among them, that run a compiled function at the same time.

    Such a function takes `(thread, threads, sync, counters, ...)`: its number in the team, the team's size, and what
    `barrier` and `claim` need. All threads must pass the same barriers. One run at a time.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sync = np.zeros(_SYNC_SIZE, np.int64)
        self._process = 0  # threads do not survive a fork
        self._orders: list[SimpleQueue[Callable[[], None] | None]] = []
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, function: Callable[..., Any], counters: np.ndarray, *args: Any) -> None:
        """Run `function(thread, threads, sync, counters, *args)` on every thread, and wait for all.

        `counters` is set to zero first.
        """
        if self._process != os.getpid():
            self._start()
        counters[:] = 0
        self.sync[:] = 0
        failures: list[BaseException | None] = []
        ordered = 0
        try:
            for thread, orders in enumerate(self._orders, 1):
                orders.put(lambda thread=thread: function(thread, self.threads, self.sync, counters, *args))  # type: ignore[misc]
                ordered = thread
            function(0, self.threads, self.sync, counters, *args)
        except BaseException as error:  # the others must not wait for this thread at a barrier
            self.sync[_BROKEN] = 1
            failures.append(error)
        reported = 0
        while reported < ordered:  # all of them, even when Ctrl-C comes: they use the arrays
            try:
                failures.append(self._reports.get())
                reported += 1
            except BaseException as error:
                self.sync[_BROKEN] = 1
                failures.append(error)
        for failure in failures:
            if failure is not None:
                raise failure

    def _start(self) -> None:
        self._orders = [SimpleQueue() for _ in range(self.threads - 1)]
        self._reports = SimpleQueue()
        for orders in self._orders:
            args = (orders, self._reports, self.sync)
            threading.Thread(target=_work, args=args, daemon=True, name="pagetable-team").start()
        self._process = os.getpid()
        weakref.finalize(self, _dismiss, self._orders)


def _work(orders: SimpleQueue[Any], reports: SimpleQueue[Any], sync: np.ndarray) -> None:
    while (order := orders.get()) is not None:
        try:
            order()
        except BaseException as error:
            sync[_BROKEN] = 1
            reports.put(error)
        else:
            reports.put(None)
        del order  # it holds the arrays of the step


def _dismiss(orders: list[SimpleQueue[Any]]) -> None:
    for order in orders:
        order.put(None)


# ---------------------------------------------------------------------------------------------- inside compiled code


@intrinsic
def _fetch_add(typing, array, index, amount):
    """array[index] += amount, at once for all threads; what was there before."""

    def generate(context, builder, signature, args):
        array, index, amount = args
        data = context.make_array(signature.args[0])(context, builder, array).data
        return builder.atomic_rmw("add", builder.gep(data, [index]), amount, "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def _read(typing, array, index):
    """array[index] as other threads have left it."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(array, types.intp), generate


_CAN_NAP = os.name == "posix"  # elsewhere a thread only spins
_HAS_PAUSE = platform.machine().lower() in ("x86_64", "amd64")


@intrinsic
def _pause(typing):
    """A hint to the processor that this loop waits; nothing where there is none."""

    def generate(context, builder, signature, args):
        if _HAS_PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _nap(typing):
    """Sleep for a moment, so that the system may run another thread here."""

    def generate(context, builder, signature, args):
        if _CAN_NAP:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
            usleep = cgutils.get_or_insert_function(builder.module, kind, "usleep")
            builder.call(usleep, [ir.Constant(ir.IntType(32), _NAP_MICROSECONDS)])
        return context.get_dummy_value()

    return types.void(), generate


@compiled
def barrier(sync, threads):
    """Wait until all threads are here. What any of them wrote before is then visible to all."""
    if threads == 1:
        return
    arrived = _fetch_add(sync, _ARRIVED, 1)
    goal = (arrived // threads + 1) * threads
    spins = 0
    while _read(sync, _ARRIVED) < goal:
        _pause()
        spins += 1
        if spins >= _SPINS:
            if _read(sync, _BROKEN):
                return
            _nap()


@compiled
def share(rows, threads):
    """Rows of little work to claim at a time, an eighth of a thread's part: a claim costs as much as a row."""
    return max(1, rows // (threads * 8))


@compiled
def claim(counters, phase, amount):
    """The first of `amount` units of work of this phase that no thread has claimed yet; may be past the last."""
    return _fetch_add(counters, phase, amount)


# --------------------------------------------------------------------------------------------------- how many threads


def default_threads(root: Path = Path("/")) -> int:
    """One for each processor core that this process may use, within what its container is allowed.

    Two threads on the halves of one core (SMT) share its arithmetic and come out slower than one. `root` is where /sys
    is looked for; where the system does not tell, each logical processor counts.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min(len(cores), _cpu_quota(root), MAX_THREADS))


def _siblings(root: Path, cpu: int) -> str:
    """What the logical processors of one core have in common."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_quota(root: Path) -> int:
    """Processors' worth of time that a container may use, rounded down, at least 1; MAX_THREADS if unlimited."""
    limits = [MAX_THREADS]
    for _, group in control_groups(root, "cpu"):
        try:
            if (group / "cpu.max").exists():  # version 2: "quota period" or "max period"
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota = (group / "cpu.cfs_quota_us").read_text().strip()
                period = (group / "cpu.cfs_period_us").read_text().strip()
            if quota not in ("max", "-1"):
                limits.append(int(Fraction(int(quota), int(period))))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return max(1, min(limits))
