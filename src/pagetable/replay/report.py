"""A replay's result as one HTML page, for people who size KV caches. The page holds all it needs and fetches nothing.

Whatever came with a trace is escaped; besides, the page's own security policy lets no script run but its two, and
nothing be fetched. So the name of a trace cannot do harm.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template

from pagetable.replay.report_figures import (
    DASHES,
    Json,
    block_bytes,
    bytes_for_people,
    capacities,
    dash_of,
    distance_figure,
    hit_rate_figure,
    interval_figure,
    over_time_figure,
    policies,
    policy_number,
    rate_for_people,
    share_for_people,
)
from pagetable.replay.report_page import (
    COLOUR_STYLE,
    COLOURS,
    GLOSSARY,
    GLOSSARY_OF_MODES,
    MISSES_ABOUT,
    PAGE,
    SCRIPT,
    STYLE,
)
from pagetable.replay.sizing import seconds_for_people
from pagetable.replay.trace import TraceError

_Columns = dict[str, Callable[[Json], str]]  # of a table, by their heads: the cell of a row, as HTML

_MISSES = {
    "evicted": "seen before, no longer there",
    "partial_tail": "last block of a prompt",
    "in_flight": "being computed for another",
    "disabled": "to be computed in any case",
    "reset": "before a reset of the cache",
    "never_seen": "never seen before",
}
_TROUBLES = {
    "skipped_lines": "lines skipped",
    "out_of_order": "requests out of order",
    "inconsistent_lengths": "lengths that do not fit",
}
_STROKES = dict(zip(DASHES, ("none", "8 4", "2 3", "13 4 2 4", "8 4 2 4", "13 4"), strict=True))  # the same in SVG


def write_report(result: Json, path: Path) -> None:
    """Write the page of a result of `replay_cache`. Without plotly, a TraceError says what to install."""
    path.write_bytes(report_html(result).encode())


def report_html(result: Json) -> str:
    """The page as a text. Without plotly, a TraceError says what to install."""
    plotly = plotly_js()
    mode = "timed" if _is_timed(result) else "cache"
    figures = {
        "hit-rate": hit_rate_figure(result),
        "over-time": over_time_figure(result),
        "distance": distance_figure(result),
        "interval": interval_figure(result),
    }
    return Template(PAGE).substitute(
        security=_security(plotly, SCRIPT),
        colours=COLOUR_STYLE,
        style=STYLE,
        name=_text(Path(result["trace"]["path"]).name),
        about=_about(result),
        answer=_answer(result),
        facts=_facts(result),
        policies_legend=_policies_legend(result),
        rows_legend=_rows_legend(result),
        misses_about=MISSES_ABOUT[mode],
        misses=_misses_table(result),
        rows=_rows_table(result),
        glossary=GLOSSARY + GLOSSARY_OF_MODES[mode],
        figures=_json_for_script({"colours": COLOURS, "figures": figures}),
        plotly=plotly,
        script=SCRIPT,
    )


def plotly_js() -> str:
    """The source of plotly.js, from the Python package. A TraceError says what to install if there is none."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise TraceError("--report needs plotly: pip install 'pagetable[replay]'") from None
    return str(get_plotlyjs())


def _security(*scripts: str) -> str:
    """The content security policy of a page with these scripts: no others, and no network."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src {allowed}"
    )


def _json_for_script(data: Json) -> str:
    """JSON that stays inside of a <script>, whatever texts are in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _text(text: str) -> str:
    """A text in HTML. The name of a file may have bytes that are no text."""
    return escape(text.encode(errors="replace").decode())


# -------------------------------------------------------------------- what is said


def _is_timed(result: Json) -> bool:
    return bool(result["mode"] == "timed")


def _about(result: Json) -> str:
    """What was replayed, and how."""
    trace = result["trace"]
    facts = [trace["path"], f"format {trace['format']}", f"{trace['block_size']:,} tokens a block"]
    if _is_timed(result):
        limits = result["limits"]
        facts += [
            f"in time at speed {limits['speed']:g}",
            f"at most {limits['max_num_seqs']:,} requests and {limits['max_num_batched_tokens']:,} tokens in a step",
        ]
    return _text(", ".join(facts))


def _answer(result: Json) -> str:
    """How much memory takes most of what is possible."""
    memory, infinite = result["memory"], result["trace"]["infinite_block_hit_rate"]
    if not infinite:
        return "<b>No block of this trace is used twice</b>: a cache of any size finds nothing."
    size = "" if memory["bytes"] is None else f", <b>{bytes_for_people(memory['bytes'])}</b>"
    return (
        f"<b>{share_for_people(memory['goal'])} of what is possible takes {memory['blocks']:,} blocks</b> with LRU: "
        f"{share_for_people(memory['share'])} of all distinct blocks, {memory['tokens']:,} tokens{size}. That finds "
        f"{rate_for_people(memory['block_hit_rate'])} of the block accesses; an infinite cache finds "
        f"{rate_for_people(infinite)}."
    )


def _facts(result: Json) -> str:
    trace, bytes_of_one = result["trace"], block_bytes(result)
    facts = {
        "requests": f"{trace['requests']:,}",
        "sessions": f"{trace['sessions']:,}",
        "time": seconds_for_people(trace["seconds"]),
        "prompt tokens": f"{trace['prompt_tokens']:,}",
        "output tokens": f"{trace['output_tokens']:,}",
        "block accesses": f"{trace['accesses']:,}",
        "distinct blocks": f"{trace['unique_blocks']:,}",
    }
    if bytes_of_one is not None:
        facts["all distinct blocks"] = bytes_for_people(trace["unique_blocks"] * bytes_of_one)
        facts["one block"] = bytes_for_people(bytes_of_one)
    facts |= {
        "infinite cache, blocks": rate_for_people(trace["infinite_block_hit_rate"]),
        "infinite cache, tokens": rate_for_people(trace["infinite_token_hit_rate"]),
        "empty in partial blocks": rate_for_people(trace["waste"]),
    }
    facts |= {name: f"{trace[key]:,}" for key, name in _TROUBLES.items() if trace[key]}
    return "\n".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())


def _policies_legend(result: Json) -> str:
    """Of the chart over capacity: its curves, and the policies, which can be hidden."""
    lines = (
        ("dot", "--soft", "infinite cache"),
        ("dash", "--ink", "best possible (MIN)"),
        ("solid", "--policy-0", "LRU at every capacity"),
    )
    curves = (f'<span class="line">{_stroke(dash, colour)}{name}</span>' for dash, colour, name in lines)
    ticks = (_tick("policy", policy, _swatch(policy), is_on=True) for policy in policies(result))
    return f"<fieldset>{''.join(curves)}</fieldset>\n<fieldset>{''.join(ticks)}</fieldset>"


def _rows_legend(result: Json) -> str:
    """Of the chart over time, which shows the rows that are chosen: at first all policies at the middle capacity."""
    sizes, blocks = capacities(result), result["trace"]["unique_blocks"]
    ticks = [_tick("policy", policy, _swatch(policy), is_on=True) for policy in policies(result)]
    lines = [
        _tick(
            "capacity",
            str(number),
            f"{_stroke(dash_of(result, number))}{share_for_people(size / blocks)}",
            is_on=number == len(sizes) // 2,
        )
        for number, size in enumerate(sizes)
    ]
    return f"<fieldset>{''.join(ticks)}</fieldset>\n<fieldset>{''.join(lines)}</fieldset>"


def _stroke(dash: str, colour: str = "--ink") -> str:
    return (
        f'<svg width="32" height="8" aria-hidden="true"><path d="M0 4h32" stroke="var({colour})" stroke-width="2" '
        f'stroke-dasharray="{_STROKES[dash]}"/></svg>'
    )


def _tick(name: str, value: str, label: str, *, is_on: bool) -> str:
    checked = " checked" if is_on else ""
    return f'<label><input type="checkbox" name="{name}" value="{escape(value)}"{checked}>{label}</label>'


def _swatch(policy: str) -> str:
    return f"{_square(f'--policy-{policy_number(policy)}')}{escape(policy)}"


def _square(colour: str) -> str:
    return f'<i class="swatch" style="background:var({colour})"></i>'


# -------------------------------------------------------------------- tables


def _table(result: Json, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table with a line for each row of the result: capacity and policy, then `cells`. All are HTML."""
    is_sized = block_bytes(result) is not None
    heads = ["policy", "capacity", "blocks", *["bytes"] * is_sized, *heads]
    lines, before = [], None
    for row, others in zip(result["rows"], cells, strict=True):
        size = [bytes_for_people(row["capacity_bytes"])] if is_sized else []
        own = [_swatch(row["policy"]), share_for_people(row["capacity_share"]), f"{row['capacity_blocks']:,}", *size]
        rule = "" if row["capacity_blocks"] == before else ' class="rule"'  # above each capacity
        lines.append(f"<tr{rule}>{''.join(f'<td>{cell}</td>' for cell in [*own, *others])}</tr>")
        before = row["capacity_blocks"]
    head = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return "\n".join(["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *lines, "</tbody>", "</table>"])


def _misses_table(result: Json) -> str:
    """Why blocks were missed: bars and shares of all block accesses; in time, of admissions by their first miss."""
    rows, is_timed = result["rows"], _is_timed(result)
    reasons = [reason for reason in _MISSES if any(row["misses"].get(reason) for row in rows)]
    lines = []
    for row in rows:
        total = max(1, sum(row["misses"].values())) if is_timed else result["trace"]["accesses"]
        shares = {_MISSES[reason]: (row["misses"].get(reason, 0) / total, f"--{reason}") for reason in reasons}
        if not is_timed:
            shares = {"found": (row["block_hit_rate"], f"--policy-{policy_number(row['policy'])}"), **shares}
        bar = "".join(
            f'<i style="width:{100 * share:.2f}%;background:var({colour})" title="{name}"></i>'
            for name, (share, colour) in shares.items()
        )
        lines.append([f'<div class="bar">{bar}</div>', *(rate_for_people(share) for share, _ in shares.values())])
    heads = [f"{_square(f'--{reason}')}{_MISSES[reason]}" for reason in reasons]
    return _table(result, ["", *["found"] * (not is_timed), *heads], lines)


def _rows_table(result: Json) -> str:
    """Every figure of every row; the best policy of each capacity is in bold."""
    best = {
        size: max(row["block_hit_rate"] for row in result["rows"] if row["capacity_blocks"] == size)
        for size in capacities(result)
    }

    def found(row: Json) -> str:
        rate = rate_for_people(row["block_hit_rate"])
        return f"<b>{rate}</b>" if row["block_hit_rate"] == best[row["capacity_blocks"]] else rate

    columns: _Columns = {
        "blocks found": found,
        "tokens found": lambda row: rate_for_people(row["token_hit_rate"]),
        "MIN": lambda row: rate_for_people(row["min_block_hit_rate"]),
        **(_TIMED_COLUMNS if _is_timed(result) else _CACHE_COLUMNS),
        "took": lambda row: f"{row['seconds']:.1f}&nbsp;s",
    }
    if any(row["refused_requests"] for row in result["rows"]):
        columns["refused"] = lambda row: f"{row['refused_requests']:,}"
    return _table(result, list(columns), [[cell(row) for cell in columns.values()] for row in result["rows"]])


def _times(percentiles: dict[str, float] | None, *small: str) -> str:
    """The median, and others of the percentiles in small letters."""
    if percentiles is None:
        return "&ndash;"
    others = " &ndash; ".join(seconds_for_people(percentiles[name]) for name in small)
    return f"{seconds_for_people(percentiles['p50'])} <small>{others}</small>"


_CACHE_COLUMNS: _Columns = {
    "of MIN": lambda row: rate_for_people(row["share_of_min"]),
    "prefill": lambda row: f"{row['prefill_amplification']:.2f}&nbsp;&times;",
    "evictions": lambda row: f"{row['evictions']:,}",
    "a block lived": lambda row: _times(row["block_lifetime_s"], "p10", "p90"),
}
_TIMED_COLUMNS: _Columns = {
    "evictions": lambda row: f"{row['evictions']:,}",
    "waited": lambda row: _times(row["queue_s"], "p99"),
    "TTFT": lambda row: _times(row["ttft_s"], "p99"),
    "ITL": lambda row: _times(row["itl_s"], "p99"),
    "end to end": lambda row: _times(row["e2e_s"], "p99"),
    "preempted": lambda row: f"{row['preemptions']:,}",
    "tokens/s": lambda row: f"{row['output_tokens'] / row['clock_s'] if row['clock_s'] else 0.0:,.0f}",
}
