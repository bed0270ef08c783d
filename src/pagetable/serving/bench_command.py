"""`pagetable bench serve`: put load on an OpenAI-compatible server and print its figures."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # the command line starts without aiohttp
    from pagetable.serving.load import Target
    from pagetable.serving.load_data import Data
    from pagetable.serving.load_report import Measurement, Run

_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_INPUT_LEN = {"random": 1024, "multi-turn": 128}
_NUM_PROMPTS = 1000


def _above_zero(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and not value > 0:  # NaN is refused as well
        raise click.BadParameter(f"{value} is not above 0")
    return value


def _names(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    from pagetable.serving.load_report import METRICS

    names = [name.strip() for name in value.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise click.BadParameter(f"no {', '.join(unknown)}: there are {', '.join(METRICS)}")
    return names


def _percents(_: click.Context, __: click.Parameter, value: str) -> list[float]:
    try:
        percents = [float(text) for text in value.split(",")]
    except ValueError:
        percents = [math.nan]
    if not all(0 <= percent <= 100 for percent in percents):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 0 to 100, such as 50,90,99")
    return percents


def _limits(values: tuple[str, ...]) -> dict[str, float]:
    """`("ttft:200", "tpot:50")` as milliseconds by name."""
    limits = {}
    for name, _, milliseconds in (text.partition(":") for value in values for text in value.split()):
        if name not in ("ttft", "tpot", "e2el") or not milliseconds.replace(".", "", 1).isdigit():
            raise click.BadParameter(
                f"{name}:{milliseconds} is not ttft, tpot or e2el with milliseconds, such as ttft:200",
                param_hint="--goodput",
            )
        limits[name] = float(milliseconds)
    return limits


@click.group()
def bench() -> None:
    """Measure a server, or what a step of a model costs."""


@bench.command()
@click.option(
    "--backend", type=click.Choice([*_ENDPOINTS]), help="Which API.  [default: that of --endpoint, or openai]"
)
@click.option("--base-url", help="Address of the server, instead of --host and --port.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, default=8000, show_default=True)
@click.option("--endpoint", help="Path of the API.  [default: /v1/completions or /v1/chat/completions]")
@click.option("--model", help="Model to ask for.  [default: the first of /v1/models]")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as a bearer token.  [env: OPENAI_API_KEY]")
@click.option("--timeout", type=float, default=3600, show_default=True, callback=_above_zero, help="Seconds a request.")
@click.option(
    "--request-rate",
    type=float,
    default=math.inf,
    show_default=True,
    callback=_above_zero,
    help="Arrivals (of conversations) a second, a Poisson process. inf is all at once.",
)
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    callback=_above_zero,
    help="Shape of the gaps between arrivals: 1 is Poisson, less comes in bursts, more is steadier.",
)
@click.option(
    "--max-concurrency", type=click.IntRange(1), help="Most requests at once; of conversations, also while they think."
)
@click.option("--num-prompts", type=click.IntRange(1), help="Requests in all.  [default: 1000; once through a file]")
@click.option(
    "--duration",
    type=float,
    callback=_above_zero,
    help="Send nothing new after so many seconds; without --num-prompts, go on until then.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of data and arrivals. What a server still has cached from a run with this seed, it finds again.",
)
@click.option(
    "--dataset-name",
    type=click.Choice(["random", "shared-prefix", "prefix_repetition", "multi-turn", "custom"]),
    default="random",
    show_default=True,
    help="Random words, a few prefixes with many suffixes (two names), conversations, or a file.",
)
@click.option(
    "--dataset-path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines for custom: prompt or messages, and max_tokens.",
)
@click.option(
    "--random-input-len",
    "--multi-turn-input-len",
    "--input-len",
    "input_len",
    type=click.IntRange(1),
    help="Words a prompt or a message, about a token each.  [default: 1024, multi-turn 128]",
)
@click.option(
    "--output-len",
    "--random-output-len",
    "--prefix-repetition-output-len",
    "--custom-output-len",
    "output_len",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Longest answer in tokens, unless the line of a file names its own.",
)
@click.option(
    "--random-range-ratio",
    "--range-ratio",
    "range_ratio",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Lengths vary by this share up and down.",
)
@click.option("--prefix-repetition-num-prefixes", "num_prefixes", type=click.IntRange(1), default=10, show_default=True)
@click.option("--prefix-repetition-prefix-len", "prefix_len", type=click.IntRange(1), default=256, show_default=True)
@click.option("--prefix-repetition-suffix-len", "suffix_len", type=click.IntRange(1), default=256, show_default=True)
@click.option(
    "--multi-turn-num-turns", "num_turns", type=click.IntRange(1), default=4, show_default=True, help="A conversation."
)
@click.option(
    "--multi-turn-think-time",
    "think_time",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds from an answer to the next turn.",
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of the full length.")
@click.option(
    "--percentile-metrics",
    default="ttft,tpot,itl,e2el",
    show_default=True,
    callback=_names,
    help="Latencies to report.",
)
@click.option("--metric-percentiles", default="90,99", show_default=True, callback=_percents, help="Beside the median.")
@click.option(
    "--goodput", multiple=True, metavar="METRIC:MS ...", help="Count requests within limits: ttft:200 tpot:50, or e2el."
)
@click.argument("more_goodput", nargs=-1, metavar="")
@click.option(
    "--save-result", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="JSON file to write."
)
@click.option("--save-detailed", is_flag=True, help="Put each request into the JSON too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
@click.option("--allow-failures", is_flag=True, help="Exit with 0 even if requests failed.")
def serve(**options: Any) -> None:
    """Put load on a server that speaks OpenAI's API: pagetable's, vLLM's, llama.cpp's.

    Names of options and figures are those of `vllm bench serve`. Exit status 1 if any request failed.
    """
    try:
        from pagetable.serving import load_report
        from pagetable.serving.load_data import Data
    except ModuleNotFoundError as error:
        raise click.ClickException(f"bench serve needs the package {error.name}: pip install {error.name}") from None
    _check(options)
    report = load_report.ReportOptions(
        metrics=options["percentile_metrics"],
        percentiles=options["metric_percentiles"],
        goodput=_limits((*options["goodput"], *options["more_goodput"])),
        is_open_loop=not math.isinf(options["request_rate"]),
    )
    data = Data(**{name: options[name] for name in Data.__dataclass_fields__})
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            target, run = runner.run(_measure(options, data))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    result = {**_settings(options, target), **load_report.summarise(run, report)}
    click.echo(_as_json(result, run, options) if options["as_json"] else load_report.table(result))
    if options["save_result"]:
        options["save_result"].write_text(_as_json(result, run, options) + "\n")
    if result["failed"] and not options["allow_failures"]:
        sys.exit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one: a client that shares its machine with the server is to take little of it."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _check(options: dict[str, Any]) -> None:
    """Refuse options that contradict each other, and fill in those that follow from others."""
    if options["more_goodput"] and not options["goodput"]:
        raise click.UsageError(f"unexpected argument {options['more_goodput'][0]!r}")
    if options["save_result"] and not options["save_result"].parent.is_dir():
        raise click.UsageError(f"--save-result: there is no folder {options['save_result'].parent}")
    options["backend"] = options["backend"] or ("openai-chat" if "chat" in (options["endpoint"] or "") else "openai")
    options["endpoint"] = options["endpoint"] or _ENDPOINTS[options["backend"]]
    if options["endpoint"].rstrip("/").endswith("/chat/completions") != (options["backend"] == "openai-chat"):
        raise click.UsageError(f"--backend {options['backend']} does not speak with {options['endpoint']}")
    if options["dataset_name"] == "prefix_repetition":
        options["dataset_name"] = "shared-prefix"
    options["input_len"] = options["input_len"] or _INPUT_LEN.get(options["dataset_name"], 0)
    is_paced = options["max_concurrency"] or not math.isinf(options["request_rate"])
    if options["duration"] and not options["num_prompts"] and not is_paced:
        raise click.UsageError("--duration without --num-prompts needs --request-rate or --max-concurrency")


async def _measure(options: dict[str, Any], data: Data) -> tuple[Target, Run]:
    from pagetable.serving.load import run_load
    from pagetable.serving.load_data import arrival_times, make_sessions, take

    total = _num_requests(options, data)
    sessions = make_sessions(data, options["backend"] == "openai-chat")
    target = await _target(options)
    click.echo(f"{'Requests' if total is None else f'{total} requests'} to {target.url} ...", err=True)
    run = await run_load(
        target,
        sessions if total is None else list(take(sessions, total)),  # a list: made before the clock starts
        arrival_times(options["request_rate"], options["burstiness"], options["seed"]),
        max_concurrency=options["max_concurrency"],
        duration=options["duration"] or math.inf,
        on_record=_progress(total),
    )
    if sys.stderr.isatty():
        click.echo(err=True)
    return target, run


def _num_requests(options: dict[str, Any], data: Data) -> int | None:
    """How many requests to make at most; None for as many as --duration allows."""
    from pagetable.serving.load_data import read_custom

    if options["num_prompts"] or options["duration"]:
        given: int | None = options["num_prompts"]
        return given
    if data.dataset_name == "custom":
        return len(read_custom(data.dataset_path, data.output_len, options["backend"] == "openai-chat"))
    return _NUM_PROMPTS


async def _target(options: dict[str, Any]) -> Target:
    from pagetable.serving.load import Target, first_model

    base_url = _base_url(options)
    headers = {"Authorization": f"Bearer {options['api_key']}"} if options["api_key"] else {}
    model = options["model"]
    try:
        first = await first_model(base_url, headers)  # also if --model is given: it shows that somebody is there
    except ValueError:
        if not model:
            raise
        first = model
    parameters = {"temperature": options["temperature"], **({"ignore_eos": True} if options["ignore_eos"] else {})}
    is_chat = options["backend"] == "openai-chat"
    return Target(base_url + options["endpoint"], model or first, is_chat, headers, parameters, options["timeout"])


def _base_url(options: dict[str, Any]) -> str:
    host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
    url: str = options["base_url"] or f"http://{host}:{options['port']}"
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--base-url {url} does not begin with http:// or https://")
    return url.rstrip("/").removesuffix(
        "/v1"
    )  # clients of OpenAI's API are given it with /v1, the endpoint has it here


def _progress(total: int | None) -> Callable[[Measurement], None]:
    """Counts finished requests on a terminal, ten times a second at most."""
    done = failed = tokens = 0
    began = shown = time.perf_counter()

    def count(record: Measurement) -> None:
        nonlocal done, failed, tokens, shown
        done, failed, tokens = done + 1, failed + bool(record.failure), tokens + record.completion_tokens
        now = time.perf_counter()
        if now - shown > 0.1 or done == total:
            shown, of = now, "" if total is None else f" of {total}"
            click.echo(
                f"\r{done}{of} requests, {failed} failed, {tokens / (now - began):.0f} tok/s ", nl=False, err=True
            )

    return count if sys.stderr.isatty() else lambda record: None


def _settings(options: dict[str, Any], target: Target) -> dict[str, Any]:
    """What was asked for, for the head of the result; no keys, and nothing that JSON has no word for."""
    kept = (
        "backend",
        "dataset_name",
        "num_prompts",
        "max_concurrency",
        "burstiness",
        "seed",
        "temperature",
        "ignore_eos",
    )
    rate = options["request_rate"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": target.url,
        "model_id": target.model,
        "request_rate": None if math.isinf(rate) else rate,
        **{name: options[name] for name in kept},
    }


def _as_json(result: dict[str, Any], run: Run, options: dict[str, Any]) -> str:
    from pagetable.serving.load_report import detail

    details = {"requests": [detail(record) for record in run.records]} if options["save_detailed"] else {}
    return json.dumps({**result, **details})
