"""Threads that run one function together: barriers, failures, forks, their end, and how many there should be."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.team import MAX_THREADS, Team, barrier, claim, default_threads

SIZES = pytest.mark.parametrize("threads", [1, 2, 3, 5])
PATIENCE = 30.0  # seconds; a fault here is a thread that waits for ever

pytestmark = pytest.mark.timeout(120)


@compiled
def count_and_meet(thread, threads, sync, counters, rounds, seen):
    for number in range(rounds):
        claim(counters, 0, 1)
        barrier(sync, threads)
        seen[thread, number] = claim(counters, 0, 0)
        barrier(sync, threads)


@compiled
def pass_on(thread, threads, sync, counters, rounds, values, wrong):
    """Each thread adds to its neighbour's number, which it must find as the neighbour left it."""
    for number in range(rounds):
        values[thread] = thread + number
        barrier(sync, threads)
        neighbour = (thread + 1) % threads
        if values[neighbour] != neighbour + number:
            wrong[thread] += 1
        barrier(sync, threads)


@compiled
def claim_all(thread, threads, sync, counters, units, amount, owners):
    while True:
        first = claim(counters, 1, amount)
        if first >= units:
            break
        for unit in range(first, min(first + amount, units)):
            owners[unit] += 1
    barrier(sync, threads)


def count(team: Team, rounds: int) -> None:
    """Run `count_and_meet`, and see that each round was complete before the next began."""
    seen = np.zeros((team.threads, rounds), np.int64)
    team.run(count_and_meet, np.full(1, 99, np.int64), rounds, seen)
    assert (seen == (np.arange(rounds) + 1) * team.threads).all()


def within_patience(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# ------------------------------------------------------------------------------------------------------------- running


@SIZES
def test_no_thread_passes_a_barrier_before_all_are_there(threads: int) -> None:
    team = Team(threads)
    for rounds in (1, 200, 0, 7):
        count(team, rounds)


@SIZES
def test_what_a_thread_wrote_before_a_barrier_is_seen_after_it(threads: int) -> None:
    values, wrong = np.zeros((2, threads), np.int64)
    Team(threads).run(pass_on, np.zeros(1, np.int64), 200, values, wrong)
    assert not wrong.any()


@SIZES
@pytest.mark.parametrize("amount", [1, 7])
def test_each_unit_of_work_is_claimed_once(threads: int, amount: int) -> None:
    owners = np.zeros(1000, np.int64)
    Team(threads).run(claim_all, np.full(2, 5, np.int64), len(owners), amount, owners)
    assert (owners == 1).all()


def test_a_run_keeps_no_array_alive() -> None:
    team = Team(3)
    seen = np.zeros((3, 2), np.int64)
    team.run(count_and_meet, np.zeros(1, np.int64), 2, seen)
    gone = weakref.ref(seen)
    del seen
    assert within_patience(lambda: gone() is None)


def test_two_teams_run_at_once_from_two_threads() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            team = Team(2)
            for _ in range(20):
                count(team, 20)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()
    assert not failures


# ------------------------------------------------------------------------------------------------------------ failures


class Boom(Exception):
    pass


@SIZES
@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_a_failure_in_any_thread_is_raised_and_the_team_goes_on(threads: int, kind: type[BaseException]) -> None:
    team = Team(threads)
    for failing in range(threads):

        def work(thread: int, *_: object, failing: int = failing) -> None:
            if thread == failing:
                raise kind(f"thread {thread}")

        with pytest.raises(kind, match=f"thread {failing}"):
            team.run(work, np.zeros(1, np.int64))
        count(team, 5)


@pytest.mark.parametrize("threads", [2, 3])
def test_others_do_not_wait_at_a_barrier_for_a_thread_that_failed(threads: int) -> None:
    team = Team(threads)
    count(team, 1)
    for failing in range(threads):
        passed = []

        def work(thread: int, size: int, sync: np.ndarray, _: object, failing: int = failing) -> None:
            barrier(sync, size)
            if thread == failing:
                raise Boom
            for _ in range(3):
                barrier(sync, size)
            passed.append(thread)  # noqa: B023

        with pytest.raises(Boom):
            team.run(work, np.zeros(1, np.int64))
        assert sorted(passed) == [thread for thread in range(threads) if thread != failing]
        count(team, 5)


def test_when_all_fail_one_failure_is_raised_and_none_is_left_over() -> None:
    team = Team(3)

    def work(thread: int, *_: object) -> None:
        raise Boom(thread)

    with pytest.raises(Boom):
        team.run(work, np.zeros(1, np.int64))
    count(team, 5)


def test_arguments_that_do_not_compile_are_an_error_and_not_a_wait() -> None:
    team = Team(2)
    with pytest.raises(Exception, match="(?i)typing|argument"):
        team.run(count_and_meet, np.zeros(1, np.int64), "three")
    count(team, 5)


# --------------------------------------------------------------------------------------------------- forks and the end


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    team = Team(3)
    count(team, 3)  # compiled, and its threads started, before the fork
    child = os.fork()
    if child == 0:
        code = 1
        try:
            count(team, 50)
            count(Team(2), 50)
            code = 0
        finally:
            os._exit(code)
    statuses: list[int] = []

    def has_ended() -> bool:
        ended, status = os.waitpid(child, os.WNOHANG)
        statuses.append(status)
        return ended == child

    if not within_patience(has_ended):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child waits for ever")
    assert os.waitstatus_to_exitcode(statuses[-1]) == 0
    count(team, 3)


def test_threads_begin_with_the_first_run_and_end_with_the_team() -> None:
    before = set(threading.enumerate())
    team = Team(4)
    assert set(threading.enumerate()) <= before
    count(team, 3)
    count(team, 3)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3
    assert all(thread.daemon for thread in mine)
    del team
    gc.collect()
    assert within_patience(lambda: not any(thread.is_alive() for thread in mine))


def test_a_team_that_failed_ends_as_well() -> None:
    before = set(threading.enumerate())
    team = Team(3)

    def work(*_: object) -> None:
        raise Boom

    with pytest.raises(Boom):
        team.run(work, np.zeros(1, np.int64))
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del team
    gc.collect()
    assert within_patience(lambda: not any(thread.is_alive() for thread in mine))


# ---------------------------------------------------------------------------------------------------- how many threads


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use logical processors 0 to 7."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def siblings(lists: list[str]) -> dict[str, str]:
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {path.format(cpu): text + "\n" for cpu, text in enumerate(lists)}


def version_1(group: str, quota: int, period: int = 100_000) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu/{group}"
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": f"{period}\n"}


V1 = {"proc/self/cgroup": "12:memory:/docker/a\n5:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n"}
V2 = {"proc/self/cgroup": "0::/a/b\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8, id="nothing there"),
        pytest.param(V2, 8, id="v2 without limits"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1, id="v2 one and a half"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "299999 100000\n"}, 2, id="v2 nearly three"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3, id="v2 three"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8, id="v2 unlimited"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1, id="v2 a fifth"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8, id="v2 more than there are"),
        pytest.param(
            {**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "400000 100000\n"},
            4,
            id="v2 the group above",
        ),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": ""}, 8, id="v2 an empty file"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "many 0\n"}, 8, id="v2 nonsense"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "100000 0\n"}, 8, id="v2 a period of nothing"),
        pytest.param({**V1, **version_1("docker/a/", 250_000)}, 2, id="v1 two and a half"),
        pytest.param({**V1, **version_1("", 500_000)}, 5, id="v1 in a container, only the top"),
        pytest.param({**V1, **version_1("docker/a/", -1)}, 8, id="v1 unlimited"),
        pytest.param({**V1, **version_1("docker/a/", 50_000)}, 1, id="v1 half"),
        pytest.param({**V1, **version_1("docker/a/", -1), **version_1("docker/", 300_000)}, 3, id="v1 the group above"),
        pytest.param({"proc/self/cgroup": "nonsense\n\n::\n"}, 8, id="nonsense"),
        pytest.param(siblings(["0,4", "1,5", "2,6", "3,7"] * 2), 4, id="two threads a core"),
        pytest.param(siblings(["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]), 6, id="two kinds of cores"),
        pytest.param(siblings(["0-3"] * 4 + ["4-7"] * 4), 2, id="four threads a core"),
        pytest.param(
            {**siblings(["0,4", "1,5", "2,6", "3,7"] * 2), **V2, "sys/fs/cgroup/cpu.max": "300000 100000\n"},
            3,
            id="cores and a limit",
        ),
    ],
)
@pytest.mark.usefixtures("eight")
def test_threads_are_the_cores_within_the_containers_limit(tmp_path: Path, files: dict, expected: int) -> None:
    assert default_threads(write(tmp_path, files)) == expected


@pytest.mark.usefixtures("eight")
def test_only_processors_that_the_process_may_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path, siblings(["0,4", "1,5", "2,6", "3,7"] * 2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    assert default_threads(root) == 2


def test_where_the_system_tells_nothing_each_logical_processor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert default_threads(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads(tmp_path) == 1
    monkeypatch.setattr(os, "cpu_count", lambda: 100_000)
    assert default_threads(tmp_path) == MAX_THREADS


def test_this_machine_has_at_least_one_thread() -> None:
    assert 1 <= default_threads() <= min(MAX_THREADS, os.cpu_count() or 1)
