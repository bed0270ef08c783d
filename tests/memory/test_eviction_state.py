"""What LHC has learned survives a restart, and no file, however hostile, does more than leave a warning."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetable.memory import EVICTION_POLICIES, load_eviction_state, save_eviction_state
from pagetable.memory.eviction_state import LARGEST
from pagetable.memory.hazard import NUM_BUCKETS, NUM_ROWS
from pagetable.memory.lhc import LHC
from tests.memory.test_lhc_fuzz import hinted_stream, policy_of


def experienced(seed: int = 0) -> LHC:
    """One that has seen some requests; some still run, some wait."""
    stream = hinted_stream(seed)
    for _ in stream.acts(400):
        pass
    return policy_of(stream.manager)


def fresh() -> LHC:
    return LHC(16, 1, lambda: 0.0)


def learned(policy: LHC) -> tuple[dict[str, Any], list[list[float]]]:
    return policy.state(), policy.hazards.index.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_what_was_saved_is_there_after_a_restart(seed: int, tmp_path: Path):
    path, old, new = tmp_path / "state.json", experienced(seed), fresh()
    save_eviction_state(old, path)
    assert load_eviction_state(new, path)
    assert new.state() == old.state()
    old.hazards.refresh(old._now)
    np.testing.assert_allclose(new.hazards.index, old.hazards.index)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_a_policy_at_work_may_take_over_a_state_too(tmp_path: Path):
    path, stream = tmp_path / "state.json", hinted_stream(5)
    save_eviction_state(experienced(), path)
    for i, _ in enumerate(stream.acts(200)):
        if i == 100:
            assert load_eviction_state(policy_of(stream.manager), path)
        stream.manager.check()


def test_a_state_saved_again_replaces_the_old_one_and_one_that_cannot_be_saved_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "state.json"
    path.write_text("old")
    policy = experienced()

    def fail(source: str, target: Path) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr("os.replace", fail)
        with pytest.raises(OSError, match="the disk is full"):
            save_eviction_state(policy, path)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
    assert path.read_text() == "old"
    save_eviction_state(policy, path)
    assert json.loads(path.read_text()) == policy.state()
    with pytest.raises(OSError, match="No such file"):
        save_eviction_state(policy, tmp_path / "nowhere" / "state.json")


@pytest.mark.parametrize("name", [name for name in EVICTION_POLICIES if name != "lhc"])
def test_a_policy_that_does_not_learn_has_no_state(name: str, tmp_path: Path):
    policy = EVICTION_POLICIES[name](16, 1, lambda: 0.0)
    for act in (load_eviction_state, save_eviction_state):
        with pytest.raises(ValueError, match="the only policy that learns"):
            act(policy, tmp_path / "state.json")


def test_no_file_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert load_eviction_state(fresh(), tmp_path / "none.json")
    assert not caplog.records


# ---------------------------------------------------------------- files that are none


def with_value(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Put a value at a place in a state."""

    def change(state: dict[str, Any]) -> None:
        *above, last = path
        for name in above:
            state = state[name]
        state[last] = value

    return change


def with_number(value: Any) -> Callable[[dict[str, Any]], None]:
    """Put a value in the middle of a row."""

    def change(state: dict[str, Any]) -> None:
        next(iter(state["rows"].values()))[1][7] = value

    return change


ZEROS = [0.0] * NUM_BUCKETS
deep: list[Any] = []
for _ in range(500):
    deep = [deep]

FOREIGN_STATES = {
    "version, a later one": with_value("version", value=2),
    "version, none": with_value("version", value=None),
    "version, nan": with_value("version", value=math.nan),
    "policy, another": with_value("policy", value="lru"),
    "policy, a list": with_value("policy", value=["lhc"]),
    "shape, more rows": with_value("shape", value=[NUM_ROWS + 1, NUM_BUCKETS]),
    "shape, a number": with_value("shape", value=NUM_ROWS),
    "share, nan": with_value("last_block_share", value=math.nan),
    "share, negative": with_value("last_block_share", value=-0.1),
    "share, above one": with_value("last_block_share", value=1e308),
    "share, a text": with_value("last_block_share", value="0.5"),
    "share, none": with_value("last_block_share", value=None),
    "opened, negative": with_value("num_opened", value=-1),
    "opened, nan": with_value("num_opened", value=math.nan),
    "opened, infinite": with_value("num_opened", value=math.inf),
    "opened, 400 digits": with_value("num_opened", value=10**400),
    "opened, a list": with_value("num_opened", value=[1]),
    "opened, more than blocks": with_value("num_opened", value=10**17),
    "opened, none but blocks": with_value("num_opened", value=0),
    "blocks, none but opened": with_value("sum_blocks", value=0),
    "blocks, nan": with_value("sum_blocks", value=math.nan),
    "blocks, huge": with_value("sum_blocks", value=1e308),
    "blocks, a text": with_value("sum_blocks", value="many"),
    "number, nan": with_number(math.nan),
    "number, infinite": with_number(math.inf),
    "number, negative": with_number(-1e-9),
    "number, huge": with_number(1e308),
    "number, too large": with_number(1e19),
    "number, 400 digits": with_number(10**400),
    "number, none": with_number(None),
    "number, a text": with_number("one"),
    "number, a list": with_number([1.0]),
    "number, deep": with_number(deep),
    "rows, a list": with_value("rows", value=[ZEROS]),
    "rows, a text": with_value("rows", value="0"),
    "row, negative": with_value("rows", "-1", value=[ZEROS, ZEROS]),
    "row, too large": with_value("rows", str(NUM_ROWS), value=[ZEROS, ZEROS]),
    "row, a word": with_value("rows", "first", value=[ZEROS, ZEROS]),
    "row, a very long number": with_value("rows", "9" * 5000, value=[ZEROS, ZEROS]),
    "row, empty": with_value("rows", "0", value=[]),
    "row, none": with_value("rows", "0", value=None),
    "row, two numbers": with_value("rows", "0", value=[1.0, 2.0]),
    "row, two columns": with_value("rows", "0", value=[[1.0], [2.0]]),
    "row, too short": with_value("rows", "0", value=[ZEROS[1:], ZEROS[1:]]),
    "row, ragged": with_value("rows", "0", value=[ZEROS, ZEROS[1:]]),
    "row, three": with_value("rows", "0", value=[ZEROS] * 3),
    "row, deep": with_value("rows", "0", value=deep),
} | {
    f"no {name}": lambda state, name=name: state.pop(name)
    for name in ("policy", "version", "shape", "rows", "num_opened", "sum_blocks", "last_block_share")
}

FOREIGN_BYTES = {
    "empty": b"",
    "zeros": bytes(1000),
    "no text": b"\xff\xfe{}",
    "a list": b"[]",
    "null": b"null",
    "a number of 5,000 digits": b"9" * 5000,
    "a hundred thousand lists": b"[" * 100_000,
    "a hundred thousand dicts": b'{"rows":' * 100_000,
    "twenty megabytes": b" " * (20 << 20),
}


def assert_ignored(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file changes nothing in a policy with a past, and leaves one warning that names it and fits on a screen."""
    policy = experienced()
    before = learned(policy)
    with caplog.at_level(logging.WARNING):
        assert not load_eviction_state(policy, path)
    assert learned(policy) == before
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(path) in record.getMessage()
    assert len(record.getMessage()) < 600


@pytest.mark.parametrize("what", FOREIGN_STATES)
def test_a_state_of_another_kind_is_ignored_with_a_warning(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    state, path = experienced(3).state(), tmp_path / "state.json"
    FOREIGN_STATES[what](state)
    path.write_text(json.dumps(state))
    assert_ignored(path, caplog)


@pytest.mark.parametrize("what", FOREIGN_BYTES)
def test_a_file_that_is_no_state_is_ignored_with_a_warning(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "state.json"
    path.write_bytes(FOREIGN_BYTES[what])
    assert_ignored(path, caplog)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_state_cut_short_is_ignored_with_a_warning(share: float, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "state.json"
    save_eviction_state(experienced(3), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert_ignored(path, caplog)


def test_a_valid_state_in_a_file_too_large_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "state.json"
    path.write_text(json.dumps(experienced(3).state()) + " " * LARGEST)
    assert_ignored(path, caplog)


def test_a_place_where_no_file_can_be_is_refused_at_once(tmp_path: Path):
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ValueError, match="give a file in a folder that exists"):
            load_eviction_state(fresh(), path)


@pytest.mark.parametrize("seed", range(40))
def test_a_state_with_any_one_byte_changed_is_taken_or_ignored_as_a_whole(seed: int, tmp_path: Path):
    rng, path, policy = np.random.default_rng(seed), tmp_path / "state.json", fresh()
    data = bytearray(json.dumps(experienced(3).state()).encode())
    data[rng.integers(len(data))] = rng.integers(256)
    path.write_bytes(data)
    before = learned(policy)
    if not load_eviction_state(policy, path):
        assert learned(policy) == before
    assert np.isfinite(policy.hazards.index).all()
    policy.begin([], 1)
