"""`pagetable replay`: the options, the table for people, the JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.sizing import DTYPE_BYTES, bytes_per_token, format_bytes, seconds_for_people
from pagetable.replay.trace_command import workload_of, workload_options

OVERLOADED = 0.98  # of the time computing

Progress = Callable[[str, int], None]  # what is going on, requests so far


def _list(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


@click.command()
@workload_options
@click.option(
    "--capacity",
    "capacities",
    default="1%,2%,5%,10%,20%",
    show_default=True,
    callback=_list,
    help="Sizes of the cache: shares of the blocks of the trace (5%), blocks (2000), bytes (4GiB).",
)
@click.option(
    "--policy",
    "policies",
    default="lru",
    show_default=True,
    callback=_list,
    help=f"Eviction policies: {', '.join(EVICTION_POLICIES)}; or all.",
)
@click.option("--bytes-per-token", type=click.IntRange(1), help="Bytes of K and V, if not those of --model.")
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    default="bfloat16",
    show_default=True,
    help="With --model.",
)
@click.option("--timed", is_flag=True, help="In time, under the real scheduler.")
@click.option(
    "--cost-model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What a step costs: a file of `pagetable bench calibrate`.  [default: the default model on two cores]",
)
@click.option(
    "--speed", type=float, default=1.0, show_default=True, help="With --timed; 2: requests arrive twice as fast."
)
@click.option(
    "--max-num-seqs", type=click.IntRange(1), default=128, show_default=True, help="With --timed: that run at once."
)
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True, help="With --timed: of a step."
)
@click.option("--check", is_flag=True, help="Verify the page table's invariants after each request; slow.")
@click.option("--report", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="HTML page to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
def replay(as_json: bool, report: Path | None, **options: Any) -> None:
    """Replay TRACE on the page table that serves, and compare with the best that was possible.

    TRACE is a file of Mooncake, Qwen-Bailian, WEKA agent sessions, or JSONL with tokens or texts; plain, .gz or .zst.
    """
    if report is not None:
        from pagetable.replay.report import plotly_js

        plotly_js()  # what is missing is said before the work, not after it
        if not report.absolute().parent.is_dir():
            raise click.UsageError(f"--report: there is no folder {report.absolute().parent}")
        if report.exists() and report.samefile(options["path"]):
            raise click.UsageError(f"--report: {report} is the trace itself")
    with _progress() as progress:
        result = _run(options, progress)
    click.echo(json.dumps(result) if as_json else describe(result))
    if report is not None:
        from pagetable.replay.report import write_report

        write_report(result, report)
        click.echo(f"{report} written", err=True)


def _run(options: dict[str, Any], progress: Progress) -> dict[str, Any]:
    from pagetable.replay.cost import DEFAULT_COST, CostModel
    from pagetable.replay.replay import replay_cache, replay_timed
    from pagetable.replay.timed_replay import Limits

    _check(options)
    names = ("path", "block_size", "until", "sample", "seed", "skip_bad", "model")
    workload, token_bytes = workload_of(**{name: options[name] for name in names}), _token_bytes(options)
    policies = list(EVICTION_POLICIES) if "all" in options["policies"] else list(dict.fromkeys(options["policies"]))
    block_bytes = None if token_bytes is None else token_bytes * workload.block_size
    common: dict[str, Any] = {"block_bytes": block_bytes, "progress": progress}
    if not options["timed"]:
        return replay_cache(workload, policies, options["capacities"], check=options["check"], **common)
    cost = DEFAULT_COST if options["cost_model"] is None else CostModel.load(options["cost_model"])
    limits = Limits(options["max_num_seqs"], options["max_num_batched_tokens"])
    return replay_timed(workload, policies, options["capacities"], cost, limits, speed=options["speed"], **common)


def _check(options: dict[str, Any]) -> None:
    """Refuse options that say nothing together."""
    for name in _ONLY_TIMED:
        if not options["timed"] and _is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is for --timed")
    if _is_given("kv_cache_dtype") and options["model"] is None:
        raise click.UsageError("--kv-cache-dtype is for --model")
    if options["timed"] and options["check"]:
        raise click.UsageError("--check is for a replay without --timed")
    if not 1e-6 <= options["speed"] <= 1e6:
        raise click.UsageError(f"--speed {options['speed']} is not a number from 0.000001 to 1000000")


_ONLY_TIMED = ("cost_model", "speed", "max_num_seqs", "max_num_batched_tokens")


def _is_given(name: str) -> bool:
    """Whether somebody has said so, and it is not the default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _token_bytes(options: dict[str, Any]) -> int | None:
    given: int | None = options["bytes_per_token"]
    if given is None and options["model"] is not None:
        return bytes_per_token(options["model"], options["kv_cache_dtype"])
    return given


@contextmanager
def _progress() -> Iterator[Progress]:
    """Shows how far it is on a terminal, a few times a second, and nothing of it afterwards."""
    shown = time.perf_counter()

    def show(what: str, count: int) -> None:
        nonlocal shown
        if time.perf_counter() - shown > 0.2:
            shown = time.perf_counter()
            click.echo(f"\r\x1b[K{what}: {count:,} requests ", nl=False, err=True)

    if not sys.stderr.isatty():
        yield lambda what, count: None
        return
    try:
        yield show
    finally:
        click.echo("\r\x1b[K", nl=False, err=True)


def describe(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    trace, memory = result["trace"], result["memory"]
    bytes_needed = ""
    if memory["bytes"] is not None:
        bytes_needed = f", {format_bytes(memory['bytes'])} at {memory['bytes_per_token']:,} bytes a token"
    about = "about " if trace["sessions_are_guessed"] else ""
    lines = [
        f"{trace['path']}  ({trace['format']}, {trace['block_size']} tokens a block)",
        f"  {trace['requests']:,} requests of {about}{trace['sessions']:,} sessions "
        f"in {seconds_for_people(trace['seconds'])}, {trace['accesses']:,} block accesses, "
        f"{trace['unique_blocks']:,} blocks",
        f"  infinite cache: {trace['infinite_block_hit_rate']:.2%} of blocks, "
        f"{trace['infinite_token_hit_rate']:.2%} of tokens; the rest was never there before",
        f"  {memory['goal']:.0%} of what an infinite cache hits takes LRU {memory['blocks']:,} blocks, "
        f"{memory['share']:.1%} of all{bytes_needed}",
    ]
    if trace["until_s"] is not None or trace["sample"] < 1:
        until = "" if trace["until_s"] is None else f", the first {seconds_for_people(trace['until_s'])}"
        lines.append(f"  of this trace {trace['sample']:.3g} of the sessions, seed {trace['seed']}{until}")
    if trace["skipped_lines"] or trace["out_of_order"] or trace["inconsistent_lengths"]:
        lines.append(
            f"  {trace['skipped_lines']} lines skipped, {trace['out_of_order']} requests out of order, "
            f"{trace['inconsistent_lengths']} with a number of hashes that does not fit their length"
        )
    lines += ["", *(_timed_table if result["mode"] == "timed" else _cache_table)(result["rows"])]
    if result["mode"] == "timed":
        lines.append(f"\nA step costs what it costs {result['cost_model']['about'].get('model', 'an unnamed model')}.")
        if any(row["busy_s"] > OVERLOADED * row["clock_s"] for row in result["rows"]):
            lines.append("It computes all the time: the requests come faster than they can be served (see --speed).")
    refused = max(row["refused_requests"] for row in result["rows"])
    if refused:
        lines.append(f"\nUp to {refused:,} requests need more blocks than there are, and missed everything.")
    lines += [
        "\nhit: share of block accesses found. MIN: the best that any policy can do with so many blocks (Belady)"
        + (", each request whole." if result["mode"] == "timed" else "."),
        "Times are those of the median and the 99th percentile; wait is for a place in the batch."
        if result["mode"] == "timed"
        else "prefill: blocks computed, over those of MIN. lived: median time from a block's filling to its eviction.",
    ]
    return "\n".join(lines)


def _cache_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{_HEAD} {'prefill':>8} {'evictions':>10} {'lived':>8} {'took':>7}"]
    for row in rows:
        lived = row["block_lifetime_s"] and row["block_lifetime_s"]["p50"]
        lines.append(
            f"{_rates(row)} {row['prefill_amplification']:>7.2f}x {row['evictions']:>10,} "
            f"{seconds_for_people(lived):>8} {row['seconds']:>6.1f}s"
        )
    return lines


def _timed_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{_HEAD} {'wait':>15} {'TTFT':>17} {'ITL':>17} {'preempted':>9} {'tok/s':>7} {'took':>7}"]
    for row in rows:
        times = [
            "-" if row[name] is None else " / ".join(seconds_for_people(row[name][p]) for p in ("p50", "p99"))
            for name in ("queue_s", "ttft_s", "itl_s")
        ]
        rate = row["output_tokens"] / row["clock_s"] if row["clock_s"] else 0.0
        lines.append(
            f"{_rates(row)} {times[0]:>15} {times[1]:>17} {times[2]:>17} {row['preemptions']:>9,} {rate:>7,.0f} "
            f"{row['seconds']:>6.1f}s"
        )
    return lines


_HEAD = f"{'capacity':>10} {'blocks':>9}  {'policy':<8} {'hit':>7} {'MIN':>7} {'of MIN':>7} {'tokens':>7}"


def _rates(row: dict[str, Any]) -> str:
    of_min = "-" if row["share_of_min"] is None else f"{row['share_of_min']:.1%}"
    return (
        f"{row['capacity_share']:>10.2%} {row['capacity_blocks']:>9,}  {row['policy']:<8} "
        f"{row['block_hit_rate']:>7.2%} {row['min_block_hit_rate']:>7.2%} {of_min:>7} {row['token_hit_rate']:>7.2%}"
    )
