"""Draws what LHC has learned from a trace: the hazard of its blocks by age, and the index that follows from it.

python benchmarks/hazard_curve.py TRACE docs/hazard.svg     # the picture in docs/eviction.md: Mooncake's conversations
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from pagetable.memory.hazard import (
    EDGES,
    NEW,
    NUM_BUCKETS,
    NUM_CLASSES,
    PREFIX,
    PRIOR_EVENTS,
    PRIOR_HAZARD,
    Floats,
    look_ahead,
)
from pagetable.memory.lhc import LHC
from pagetable.replay.blocks import Workload
from pagetable.replay.cache_replay import CacheReplay
from pagetable.replay.readers import Trace
from pagetable.replay.replay import analyse

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 70, 30, 690, 345  # pixels, of the picture and of the axes
AGES, HAZARDS = (1.0, 3600.0), (1e-5, 1e-1)  # what the axes show: seconds, chance a second


def learned(path: Path) -> tuple[Floats, Floats]:
    """Events and time at risk, blocks that requests added and blocks that they found, each by age."""
    workload = Workload(Trace(path))
    replay = CacheReplay(workload, "lhc", analyse(workload).reuse.num_nodes)
    for request, access in workload:
        replay.serve(request, access)
    policy = replay._manager.eviction_policy
    assert isinstance(policy, LHC)
    state = policy.state()
    tables = np.zeros((2, NUM_CLASSES, NUM_BUCKETS))
    for row, columns in state["rows"].items():
        if int(row) < NUM_CLASSES:
            tables[:, int(row)] = columns
    events, at_risk = tables.reshape(2, 2, -1, NUM_BUCKETS).sum(axis=2)
    return events, at_risk


def x(age: float) -> float:
    """Where an age is drawn."""
    low, high = map(math.log, AGES)
    return LEFT + (math.log(age) - low) / (high - low) * (RIGHT - LEFT)


def y(hazard: float) -> float:
    """Where a hazard is drawn."""
    low, high = map(math.log, HAZARDS)
    return BOTTOM - (math.log(min(max(hazard, HAZARDS[0]), HAZARDS[1])) - low) / (high - low) * (BOTTOM - TOP)


def line(values: Floats, style: str) -> str:
    """A curve through the middles of the buckets that the picture shows."""
    middles = np.sqrt(EDGES[1:-1] * EDGES[2:])
    points = [f"{x(age):.1f},{y(value):.1f}" for age, value in zip(middles, values[1:], strict=True) if age < AGES[1]]
    return f'<polyline points="{" ".join(points)}" fill="none" stroke-width="2" {style}/>'


def text(at_x: float, at_y: float, words: str, anchor: str = "middle") -> str:
    """Words in the picture."""
    return f'<text x="{at_x:.0f}" y="{at_y:.0f}" text-anchor="{anchor}">{words}</text>'


def draw(events: Floats, at_risk: Floats) -> str:
    """The picture, as SVG."""
    hazard = (events + PRIOR_EVENTS) / (at_risk + PRIOR_EVENTS / PRIOR_HAZARD)
    index = look_ahead(hazard)
    found, added, ahead = 'stroke="#1f77b4"', 'stroke="#d62728"', 'stroke="#d62728" stroke-dasharray="6 4"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        ' font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for age, name in {1: "1 s", 5: "5 s", 15: "15 s", 60: "1 min", 300: "5 min", 900: "15 min", 3600: "1 h"}.items():
        parts.append(f'<path d="M{x(age):.1f} {TOP}V{BOTTOM}" stroke="#ddd"/>{text(x(age), BOTTOM + 18, name)}')
    for value in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
        label = text(LEFT - 6, y(value) + 4, f"{value:g}", "end")
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{RIGHT}" stroke="#ddd"/>{label}')
    parts += [line(hazard[PREFIX], found), line(hazard[NEW], added), line(index[NEW], ahead)]
    legend = (
        (found, "hazard: blocks that the last request found"),
        (added, "hazard: blocks that it added"),
        (ahead, "index of these: the best that waiting can promise"),
    )
    for row, (style, words) in enumerate(legend):
        at = TOP + 18 + 20 * row
        parts.append(
            f'<path d="M{LEFT + 12} {at}h30" stroke-width="2" {style}/>{text(LEFT + 50, at + 4, words, "start")}'
        )
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 12, "idle for"))
    parts.append(text(LEFT - 6, TOP - 6, "chance a second", "start"))
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    options.picture.write_text(draw(*learned(options.trace)))


if __name__ == "__main__":
    main()
