"""Traces through the page table: readers, replay, the offline optimum, reports. No torch."""

from pagetable.replay.blocks import Workload
from pagetable.replay.cost import CostModel
from pagetable.replay.hinting import with_ends, with_last_uses
from pagetable.replay.readers import Trace
from pagetable.replay.replay import replay_cache, replay_timed
from pagetable.replay.stats import trace_stats
from pagetable.replay.synth import TraceShape, synthesize
from pagetable.replay.timed_replay import Limits
from pagetable.replay.trace import TraceError

__all__ = [
    "CostModel",
    "Limits",
    "Trace",
    "TraceError",
    "TraceShape",
    "Workload",
    "replay_cache",
    "replay_timed",
    "synthesize",
    "trace_stats",
    "with_ends",
    "with_last_uses",
]
