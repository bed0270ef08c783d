"""What LHC believes of the page table, verified from scratch against the page table: slow and plain."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from pagetable.memory import BlockManager
from pagetable.memory.lhc import GHOSTS, LHC, Run


def check_structure(manager: BlockManager) -> None:
    """AssertionError unless runs, branches, ghosts, candidates and records are what the blocks and requests imply."""
    policy = manager.eviction_policy
    assert isinstance(policy, LHC)
    here = list(dict.fromkeys(run for run in policy._run_of if run is not None))
    known = list(dict.fromkeys([*here, *policy._by_head.values(), *policy._with_ghosts]))
    _check_blocks(manager, policy, here)
    _check_branches(policy, here)
    _check_ghosts(policy, known)
    _check_candidates(policy, here, known)
    _check_records(policy, known)


def _check_blocks(manager: BlockManager, policy: LHC, here: list[Run]) -> None:
    """Every registered block lies in one run, behind its parent; the idle ones are those of the page table."""
    places = Counter(block_id for run in here for block_id in run.block_ids)
    assert places == Counter(block.block_id for block in manager.blocks if block.hash is not None)
    for run in here:
        before = run.parent
        assert (before < 0) == (run.start == 0)
        for block_id in run.block_ids:
            assert policy._run_of[block_id] is run
            parent = manager.blocks[block_id].parent
            assert before == (parent if isinstance(parent, int) else -1)
            before = block_id
    idle = [block.block_id for block in manager.blocks if block.hash is not None and not block.ref_count]
    assert [block_id for block_id in range(len(manager.blocks)) if block_id in policy] == idle
    assert len(policy) == len(idle)


def _check_branches(policy: LHC, here: list[Run]) -> None:
    """A run counts the other runs that go on from its blocks."""
    branches: dict[Run, dict[int, int]] = {run: {} for run in here}
    for run in here:
        if run.parent >= 0:
            above = policy._run_of[run.parent]
            assert above is not None
            assert above is not run
            assert above.block_ids[run.start - above.start - 1] == run.parent
            branches[above][run.start] = branches[above].get(run.start, 0) + 1
    assert all((run.branches or {}) == branches[run] for run in here)


def _check_ghosts(policy: LHC, known: list[Run]) -> None:
    """Ghosts are counted, bounded, and in line to be forgotten; no run is left without blocks and ghosts."""
    assert all(run.length > 0 and run.num_ghosts >= 0 for run in known)
    assert list(dict.fromkeys(policy._with_ghosts)) == list(policy._with_ghosts)
    assert set(policy._with_ghosts) == {run for run in known if run.num_ghosts}
    assert policy._num_ghosts == sum(run.num_ghosts for run in known) <= GHOSTS * policy._num_blocks


def _check_candidates(policy: LHC, here: list[Run], known: list[Run]) -> None:
    """All that can leave is a candidate, protected exactly while its request runs."""
    candidates = policy._candidates
    taken = {slot: run for slot, run in enumerate(candidates._runs) if run is not None}
    assert taken == {run.slot: run for run in known if run.slot >= 0}
    assert np.flatnonzero(candidates._is_taken).tolist() == sorted(taken)
    assert sorted(candidates._free) == sorted(set(range(len(candidates._runs))) - set(taken))
    for run in here:
        if policy._is_idle[run.block_ids[-1]] and not run.num_branches(run.start + len(run.block_ids)):
            assert run.slot >= 0 or (run is policy._victim and policy._quota)
            assert (candidates._factor[run.slot] == math.inf) == run.last.is_running


def _check_records(policy: LHC, known: list[Run]) -> None:
    """Every record that waits is one of a run that is shared or of the latest request to use a run, and of one only."""
    hazards = policy.hazards
    waiting = sorted(set(range(len(hazards._row))) - set(hazards._free))
    assert len(waiting) == hazards.num_waiting
    uses = Counter(run.last for run in known)
    held = [run.record for run in known] + [record for use in uses for record in (use.new_record, use.prefix_record)]
    assert sorted(record for record in held if record >= 0) == waiting
    for use, num_runs in uses.items():
        assert use.num_runs == num_runs
        assert not use.is_running or use.new_record == use.prefix_record == -1
    for run in known:
        assert run.is_shared == (run.record >= 0)
