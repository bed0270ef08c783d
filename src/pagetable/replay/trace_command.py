"""`pagetable trace`: what a trace is like, and traces made by a seed."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import click

from pagetable.replay.blocks import Workload
from pagetable.replay.readers import Trace
from pagetable.replay.stats import describe_stats, trace_stats
from pagetable.replay.synth import SYNTH_FORMATS, TraceShape, synthesize
from pagetable.replay.tokenizing import encoder_of

Command = Callable[..., Any]


@click.group()
def trace() -> None:
    """Describe traces of requests, and make some."""


# -------------------------------------------------------------------- reading


def workload_options(command: Command) -> Command:
    """TRACE, and the options that say how it is read: see `workload_of`."""
    options = (
        click.argument("path", metavar="TRACE", type=click.Path(exists=True, path_type=Path)),
        click.option(
            "--block-size", type=click.IntRange(1), help="Tokens a block.  [default: the trace's, or 16 for tokens]"
        ),
        click.option(
            "--until", type=click.FloatRange(0), default=math.inf, show_default=True, help="End after so many seconds."
        ),
        click.option(
            "--sample",
            type=click.FloatRange(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            help="Keep this share of the sessions.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of sessions."),
        click.option("--skip-bad", is_flag=True, help="Leave out lines that cannot be read."),
        click.option("-m", "--model", help="Folder, .gguf file, hub id or alias; its tokenizer cuts texts."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def workload_of(
    path: Path, block_size: int | None, until: float, sample: float, seed: int, skip_bad: bool, model: str | None
) -> Workload:
    """The workload that `workload_options` ask for. ValueError or OSError if there is none."""
    read = Trace(path, skip_bad=skip_bad, encode=encoder_of(model) if model else None)
    return Workload(read, block_size, until=until, sample=sample, seed=seed)


@trace.command()
@workload_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
def stats(as_json: bool, **options: Any) -> None:
    """Requests, sessions, lengths and reuse of TRACE.

    TRACE is a file of JSON lines, plain, .gz or .zst, or a folder: Mooncake's, Qwen's, WEKA's, or tokens or texts.
    """
    found = trace_stats(workload_of(**options))
    click.echo(json.dumps(found) if as_json else describe_stats(found))


# -------------------------------------------------------------------- making


def _shape_options(command: Command) -> Command:
    """An option for each number of a shape, which checks them itself."""
    for each in reversed(fields(TraceShape)):
        command = click.option(
            f"--{each.name.replace('_', '-')}",
            type=int if each.type == "int" else float,
            default=each.default,
            show_default=True,
            help=each.metadata["bounds"].help,
        )(command)
    return command


@trace.command()
@_shape_options
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same trace.")
@click.option(
    "--format",
    type=click.Choice(SYNTH_FORMATS),
    default=SYNTH_FORMATS[0],
    show_default=True,
    help="Hashes of blocks, or the tokens themselves.",
)
@click.option(
    "--session-ends", is_flag=True, help="Say in each record whether its session ends there: a hint for the cache."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    default="-",
    help="File to write, packed if it ends in .gz or .zst.  [default: standard output]",
)
def synth(seed: int, format: str, session_ends: bool, output: Path, **numbers: Any) -> None:
    """Make a trace of chats and agents of a stated shape.

    Agents call tools in place of thinking, and some of their turns spawn sub-agents that go on side by side from all
    that the agent has so far. Lengths and times are log-normal, numbers of turns geometric.
    """
    records = synthesize(TraceShape(**numbers), seed, format, session_ends=session_ends)
    with _writer(output) as write:
        for record in records:
            write(json.dumps(record).encode() + b"\n")


@contextmanager
def _writer(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Something to write bytes with, which end up packed as the file's name says."""
    with click.open_file(path, "wb") as file, _packed(file, path) as packed:
        yield packed.write


def _packed(file: IO[Any], path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)  # the same bytes each time
    if path.suffix != ".zst":
        return nullcontext(file)
    try:
        import zstandard
    except ImportError:
        raise click.ClickException(f"{path}: to write .zst, pip install zstandard") from None
    return zstandard.ZstdCompressor(level=6).stream_writer(file, closefd=False)
