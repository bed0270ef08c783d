"""The figures of a report, as plotly.js wants them, and its numbers for people.

Colours have names here ("--policy-0"): the page's script puts in those of the light or the dark scheme. A policy has
the same colour everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate, pairwise
from typing import Any

from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.sizing import format_bytes, seconds_for_people

Json = dict[str, Any]

DASHES = ("solid", "dash", "dot", "longdashdot", "dashdot", "longdash")  # by capacity, from the middle one on
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagram", "hexagon")  # by policy
_SPANS = ((180, 1, "seconds"), (3 * 3600, 60, "minutes"), (4 * 86400, 3600, "hours"), (math.inf, 86400, "days"))
_TIMES = {0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 86400: "1 d", 864000: "10 d"}

# -------------------------------------------------------------------- numbers for people


def rate_for_people(rate: float) -> str:
    """ "12.3 %"."""
    return f"{100 * rate:.1f}\u00a0%"


def share_for_people(share: float) -> str:
    """A share that may be small: "0.0996 %", "5 %", "17.2 %"."""
    return (f"{100 * share:,.0f}" if share >= 1 else f"{100 * share:.3g}") + "\u00a0%"


def bytes_for_people(size: float) -> str:
    """ "1.5 GiB", "345 GiB"."""
    number, unit = format_bytes(size).split(" ")
    return (f"{float(number):.0f}" if float(number) >= 100 else f"{float(number):.3g}") + f"\u00a0{unit}"


def block_bytes(result: Json) -> float | None:
    """Bytes of a block, if they are known."""
    row = result["rows"][0]
    return None if row["capacity_bytes"] is None else row["capacity_bytes"] / row["capacity_blocks"]


def capacities(result: Json) -> list[int]:
    """In blocks, as they were asked for."""
    return list(dict.fromkeys(row["capacity_blocks"] for row in result["rows"]))


def policies(result: Json) -> list[str]:
    """By name, as they were asked for."""
    return list(dict.fromkeys(row["policy"] for row in result["rows"]))


def dash_of(result: Json, number: int) -> str:
    """Of the lines of a capacity. The middle one, which is shown at first, has solid lines."""
    return DASHES[(number - len(capacities(result)) // 2) % len(DASHES)]


def policy_number(policy: str) -> int:
    """Of a policy's colour and symbol: the same in every report."""
    names = list(EVICTION_POLICIES)
    return min(names.index(policy) if policy in names else len(names), len(_SYMBOLS) - 1)


# -------------------------------------------------------------------- figures


def hit_rate_figure(result: Json) -> Json:
    """Hit rate against capacity: LRU and MIN at every capacity, each policy where it was replayed."""
    curve, infinite = result["curve"], result["trace"]["infinite_block_hit_rate"]
    sizes = [point["capacity_blocks"] for point in curve]
    lru, best = ([point[key] for point in curve] for key in ("lru", "min"))
    ends = [min(sizes + capacities(result)), max(sizes + capacities(result))]
    look: Json = {"hoverinfo": "text", "hovertext": f"<b>infinite cache</b>: {rate_for_people(infinite)}"}
    traces = [
        _line("infinite cache", ends, [infinite, infinite], "--soft", dash="dot", **look),
        _line("best possible (MIN)", sizes, best, "--ink", dash="dash", **_hover(result, "MIN", sizes, best)),
        _line("LRU at every capacity", sizes, lru, "--policy-0", **_hover(result, "LRU", sizes, lru)),
    ]
    for policy in policies(result):
        rows = [row for row in result["rows"] if row["policy"] == policy]
        blocks, rates = ([row[key] for row in rows] for key in ("capacity_blocks", "block_hit_rate"))
        number = policy_number(policy)
        marker = {"symbol": _SYMBOLS[number], "size": 9, "line": {"width": 1, "color": "--page"}}
        look = {"mode": "lines+markers", "marker": marker, "meta": {"policy": policy}}
        look |= _hover(result, policy, blocks, rates)
        traces.append(_line(policy, blocks, rates, f"--policy-{number}", width=1, dash="dot", **look))
    x = _axis("capacity, as a share of all distinct blocks", type="log", **_share_ticks(result, *ends))
    x["range"] = [math.log10(ends[0]) - 0.05, math.log10(ends[1]) + 0.05]
    return {"traces": traces, "layout": _layout(x, _axis("block accesses found", tickformat=".0%"), **_goal(result))}


def _goal(result: Json) -> Json:
    """A mark in the figure of hit rates: where LRU finds most of what is possible."""
    memory = result["memory"]
    if not memory["blocks"]:
        return {}
    line = {"x0": memory["blocks"], "x1": memory["blocks"], "y0": 0, "y1": memory["block_hit_rate"]}
    # On a logarithmic axis a shape stands at its value, but a text at its logarithm.
    text = {"x": math.log10(memory["blocks"]), "y": 0, "yanchor": "bottom", "showarrow": False, "align": "left"}
    text |= {
        "text": f"{share_for_people(memory['goal'])} of<br>possible",
        "xanchor": "left" if memory["share"] < 0.5 else "right",
    }
    look = {"color": "--soft", "width": 1, "dash": "dot"}
    return {
        "shapes": [{"type": "line", **line, "line": look}],
        "annotations": [{**text, "font": {"color": "--soft", "size": 11}}],
    }


def over_time_figure(result: Json) -> Json:
    """Hit rate in each stretch of the trace. The page's script shows the rows whose `meta` was chosen."""
    edges = result["over_time"]["edges_s"]
    scale, unit = next((scale, unit) for limit, scale, unit in _SPANS if edges[-1] - edges[0] < limit)
    middles = [(a + b) / 2 / scale for a, b in pairwise(edges)]
    look: Json = {"hovertemplate": "%{y:.1%}"}
    filled: Json = {"fill": "tozeroy", "fillcolor": "--shade", **look}
    traces = [_line("infinite cache", middles, result["over_time"]["infinite"], "--soft", width=1, **filled)]
    look |= {"mode": "lines+markers", "marker": {"size": 2}}  # marks for stretches that have no neighbours
    for row, rates in zip(result["rows"], result["over_time"]["rows"], strict=True):
        number = capacities(result).index(row["capacity_blocks"])
        name = f"{row['policy']}, {share_for_people(row['capacity_share'])}"
        colour, dash = f"--policy-{policy_number(row['policy'])}", dash_of(result, number)
        chosen = {"policy": row["policy"], "capacity": str(number)}
        traces.append(_line(name, middles, rates, colour, dash=dash, meta=chosen, **look))
    x = _axis(f"{unit} since the trace began", spikecolor="--soft", spikethickness=1, spikedash="solid")
    x |= {"hoverformat": ".1f", "unifiedhovertitle": {"text": f"%{{x:.1f}} {unit}"}}
    y = _axis("block accesses found", tickformat=".0%")
    return {"traces": traces, "layout": _layout(x, y, hovermode="x unified")}


def distance_figure(result: Json) -> Json:
    """Block accesses by how many blocks were used since the use before; a line at each capacity."""
    edges, counts = (result["reuse"]["distance_blocks"][key] for key in ("edges", "counts"))
    names = [f"distance {a + 1:,}" + (f" to {b:,}" if b > a + 1 else "") for a, b in pairwise(edges)]
    ticks = {10.0**power: f"{10**power:,}" for power in range(10)}
    figure = _histogram(result, [edge + 0.5 for edge in edges], counts, names, ticks)
    layout: Json = figure["layout"]
    place = {"xref": "x", "yref": "paper"}
    layout["xaxis"] |= _axis("distinct blocks used since its last use")
    line: Json = {"type": "line", "y0": 0, "y1": 1, "line": {"color": "--soft", "width": 1, "dash": "dot"}, **place}
    text: Json = {"y": 1, "yanchor": "bottom", "xanchor": "center", "textangle": -90, "showarrow": False, **place}
    at = {share_for_people(size / result["trace"]["unique_blocks"]): math.log10(size) for size in capacities(result)}
    layout["margin"]["t"] = 40  # for the texts
    layout["shapes"] = [{**line, "x0": x, "x1": x} for x in at.values()]
    layout["annotations"] = [{**text, "x": x, "text": share, "font": {"color": "--soft"}} for share, x in at.items()]
    return figure


def interval_figure(result: Json) -> Json:
    """Block accesses by the time since the use before."""
    edges, counts = (result["reuse"]["interval_s"][key] for key in ("edges", "counts"))
    names = [f"{seconds_for_people(a)} to {seconds_for_people(b)}" for a, b in pairwise(edges)]
    names[0] = f"less than {seconds_for_people(edges[1])}"
    edges = [edges[1] ** 2 / edges[2], *edges[1:]]  # 0 is nowhere on this axis: as wide as the next
    figure = _histogram(result, edges, counts, names, _TIMES)
    figure["layout"]["xaxis"] |= _axis("time since its last use")
    return figure


# -------------------------------------------------------------------- what they are made of


def _axis(title: str, **more: Any) -> Json:
    look = {"gridcolor": "--line", "linecolor": "--line", "zeroline": False, "automargin": True}
    return {"title": {"text": title, "font": {"color": "--soft"}}, **look, **more}


def _layout(x: Json, y: Json, **more: Any) -> Json:
    font = {"family": "system-ui, sans-serif", "size": 12, "color": "--ink"}
    return {
        "xaxis": x,
        "yaxis": {"rangemode": "tozero", **y},
        "font": font,
        "paper_bgcolor": "--page",
        "plot_bgcolor": "--page",
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "hoverlabel": {"bgcolor": "--page", "bordercolor": "--line", "font": font, "align": "left"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "--soft", "activecolor": "--ink"},
        "showlegend": False,  # the page has its own, which fit on a phone
        "uirevision": "kept",  # a zoom stays when the page draws anew
        **more,
    }


def _line(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    colour: str,
    *,
    width: int = 2,
    dash: str = "solid",
    **more: Any,
) -> Json:
    line = {"color": colour, "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": escape(name), "x": list(x), "y": list(y), "line": line, **more}


def _hover(result: Json, name: str, sizes: Sequence[int], rates: Sequence[float]) -> Json:
    """What is told of a point: its rate, and its capacity in all units that are known."""
    trace, bytes_of_one, texts = result["trace"], block_bytes(result), []
    for size, rate in zip(sizes, rates, strict=True):
        lines = [
            f"<b>{escape(name)}</b>: {rate_for_people(rate)}",
            f"{size:,} blocks",
            f"{share_for_people(size / trace['unique_blocks'])} of all distinct ones",
            f"{size * trace['block_size']:,} tokens",
        ]
        texts.append("<br>".join(lines + ([] if bytes_of_one is None else [bytes_for_people(size * bytes_of_one)])))
    return {"hoverinfo": "text", "hovertext": texts}


def _share_ticks(result: Json, first: int, last: int) -> Json:
    """Ticks at 1, 2, 5, 10 ... percent of the blocks of the trace, on an axis of blocks."""
    shares = [digit * 10.0**power for power in range(-8, 6) for digit in (1, 2, 5)]
    ticks = {share * result["trace"]["unique_blocks"]: share_for_people(share) for share in shares}
    ticks = {blocks: text for blocks, text in ticks.items() if 0.99 * first <= blocks <= 1.01 * last}
    return {"tickvals": list(ticks), "ticktext": list(ticks.values())}


def _histogram(
    result: Json, edges: Sequence[float], counts: Sequence[int], names: Sequence[str], ticks: dict[float, str]
) -> Json:
    """Bars between edges, on an axis of their logarithms: on plotly's own, bars are not as wide as their bins."""
    logs = [math.log10(edge) for edge in edges]
    total = result["trace"]["accesses"]
    texts = [
        f"<b>{name}</b><br>{count:,} block accesses, {rate_for_people(count / total)}"
        f"<br>{rate_for_people(up_to_here / total)} with all to the left"
        for name, count, up_to_here in zip(names, counts, accumulate(counts), strict=True)
    ]
    bars = {
        "type": "bar",
        "x": [(a + b) / 2 for a, b in pairwise(logs)],
        "width": [b - a for a, b in pairwise(logs)],
        "y": list(counts),
        "marker": {"color": "--bars", "line": {"width": 1, "color": "--page"}},
        "hoverinfo": "text",
        "hovertext": texts,
        "textposition": "none",
    }
    shown = {math.log10(value): text for value, text in ticks.items() if edges[0] <= value <= edges[-1]}
    x = {"tickvals": list(shown), "ticktext": list(shown.values()), "showgrid": False}
    return {"traces": [bars], "layout": _layout(x, _axis("block accesses", tickformat="~s"))}
