"""The command line: one sub-command a verb, each thin. What takes torch is imported when a command needs it."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagetable import __version__
from pagetable.engine import SamplingParams
from pagetable.replay.command import replay
from pagetable.replay.trace_command import trace
from pagetable.serving.bench_command import bench
from pagetable.serving.command import serve

if TYPE_CHECKING:
    from pagetable.llm import LLM
    from pagetable.outputs import CompletionOutput, RequestOutput

Command = Callable[..., Any]


def _options(*options: Command) -> Callable[[Command], Command]:
    """Several options as one decorator, listed in `--help` in the given order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_option = click.option(
    "-m", "--model", default="smollm2", show_default=True, help="Folder, .gguf file, hub id or alias."
)
engine_options = _options(
    click.option("--dtype", default="auto", show_default=True, help="auto, float32 or bfloat16."),
    click.option("--device", default="cpu", show_default=True, help="cpu or cuda."),
    click.option("--block-size", type=int, default=16, show_default=True, help="Tokens a block, a power of two."),
    click.option(
        "--kv-cache-memory",
        callback=lambda _, __, value: float(value) if value and re.fullmatch(r"0?\.\d+|1\.0*", value) else value,
        help="Size of the KV cache: 2GiB, bytes, or a share of free memory (0.5).  [default: by free memory]",
    ),
    click.option("--max-num-seqs", type=int, default=128, show_default=True, help="Sequences that run at once."),
    click.option("--max-num-batched-tokens", type=int, help="Tokens a step.  [default: 512 on a CPU, 8192 on a GPU]"),
    click.option("--max-model-len", type=int, help="Longest prompt plus answer.  [default: the model's]"),
    click.option("--threads", type=int, help="Threads to compute with.  [default: one a core]"),
    click.option("--kernels", default="auto", show_default=True, help="auto, numba (compiled, CPU) or torch."),
)
caching_option = click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True, help="Share equal prefixes."
)
sampling_options = _options(
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Longest answer."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps the whole vocabulary."),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--seed", type=int, help="The same seed gives the same answer."),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the model's end token."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Print the page table's counters at the end.")

_SAMPLING = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pagetable")
def cli() -> None:
    """An LLM inference engine whose KV cache is an open book."""


@cli.command()
@click.argument("prompts", nargs=-1)
@model_option
@click.option("--chat", "as_chat", is_flag=True, help="Put each prompt into the model's chat template.")
@click.option("-n", "n", type=int, default=1, show_default=True, help="Answers to each prompt.")
@json_option
@verbose_option
@sampling_options
@engine_options
@caching_option
def generate(prompts: tuple[str, ...], model: str, as_chat: bool, as_json: bool, verbose: bool, **options: Any) -> None:
    """Continue PROMPTS; without any, each line of the standard input is one."""
    if not prompts and sys.stdin and sys.stdin.isatty():
        click.secho("One prompt a line, Ctrl-D ends:", dim=True, err=True)
    texts = list(prompts) or [line.rstrip("\r\n") for line in sys.stdin or () if line.strip()]
    params, engine_arguments = _split(options)
    with _load(model, engine_arguments) as llm:
        outputs = llm.chat([_user(text) for text in texts], params) if as_chat else llm.generate(texts, params)
        for text, output in zip(texts, outputs, strict=True):
            if as_json:
                click.echo(json.dumps({"prompt": text, **_as_dict(output)}))
            else:
                _print_answers(text, output, as_chat)
        if verbose:
            _print_stats(llm)


@cli.command()
@model_option
@click.option("--system", help="System prompt.")
@json_option
@verbose_option
@sampling_options
@engine_options
@caching_option
def chat(model: str, system: str | None, as_json: bool, verbose: bool, **options: Any) -> None:
    """Talk with the model. Each turn shows how much of the conversation was found in the cache.

    Ctrl-C ends an answer, Ctrl-D or /exit the conversation.
    """
    params, engine_arguments = _split(options)
    messages = [{"role": "system", "content": system}] if system else []
    with _load(model, engine_arguments) as llm:
        if sys.stdin.isatty():
            click.secho("Ctrl-C ends an answer, /exit or Ctrl-D the conversation.", dim=True)
        while (text := _ask()) is not None:
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(llm, messages, params, as_json)
            except ValueError as error:
                click.echo(f"{error}", err=True)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
        if verbose:
            _print_stats(llm)


@cli.command()
@model_option
@click.option("--max-tokens", type=int, default=48, show_default=True, help="Longest answer.")
@json_option
@engine_options
def demo(model: str, max_tokens: int, as_json: bool, **options: Any) -> None:
    """Answer a handful of prompts that share a system prompt, and show the page table at work."""
    from pagetable.demo import compare, describe

    report = compare(model, max_tokens, _given(options), say=lambda text: click.echo(text, err=True))
    click.echo(json.dumps(asdict(report)) if as_json else describe(report))


@cli.command()
@click.argument("model", default="smollm2")
@click.option("--memory", default="1GiB", show_default=True, help="How many tokens fit into this much?")
@click.option("--block-size", type=int, default=16, show_default=True)
@json_option
def info(model: str, memory: str, block_size: int, as_json: bool) -> None:
    """What MODEL is, what a token of its KV cache costs, and how many fit."""
    from pagetable.info import describe_model, model_info

    facts = model_info(model, memory, block_size)
    click.echo(json.dumps(facts) if as_json else describe_model(facts))


@bench.command()
@model_option
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, writable=True), default="cost-model.json", show_default=True
)
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Of all cases.")
@engine_options
def calibrate(model: str, output: str, rounds: int, **options: Any) -> None:
    """Time the steps of MODEL here, and write what they cost: for `pagetable replay --timed --cost-model`."""
    from pagetable.calibrate import calibrate as measure
    from pagetable.calibrate import describe_cost

    with _load(model, _given(options)) as llm:
        cost = measure(llm, rounds, say=lambda text: click.echo(text, err=True))
    cost.save(Path(output))
    click.echo(describe_cost(cost, Path(output)))


cli.add_command(serve)
cli.add_command(bench)
cli.add_command(replay)
cli.add_command(trace)

# -------------------------------------------------------------------- what the commands share


def _split(options: dict[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """Sampling parameters, and the arguments of LLM that were given."""
    params = SamplingParams(**{name: options[name] for name in _SAMPLING if name in options})
    return params, _given({name: value for name, value in options.items() if name not in _SAMPLING})


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _load(model: str, engine_arguments: dict[str, Any]) -> LLM:
    from pagetable.llm import LLM

    llm = LLM(model, **engine_arguments)
    if sys.stderr.isatty():
        click.secho(repr(llm), dim=True, err=True)
    return llm


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _as_dict(output: RequestOutput) -> dict[str, Any]:
    return {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [
            {"text": out.text, "token_ids": out.token_ids, "finish_reason": out.finish_reason} for out in output.outputs
        ],
    }


def _print_answers(prompt: str, output: RequestOutput, as_chat: bool) -> None:
    for answer in output.outputs:
        click.secho(prompt, nl=as_chat, dim=True)
        click.echo(answer.text)
        _print_end(answer)


def _print_end(answer: CompletionOutput) -> None:
    """Why an answer ended, unless the model wanted it so."""
    if answer.finish_reason != "stop":
        click.secho(f"[{answer.finish_reason}{f': {answer.error}' if answer.error else ''}]", dim=True, err=True)


def _ask() -> str | None:
    """The next line of a person or of a pipe; None at its end."""
    try:
        text = input("> ") if sys.stdin.isatty() else next(iter(sys.stdin.readline, ""), None)
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None
    return None if text is None or text.strip() == "/exit" else text


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, as_json: bool) -> str:
    """Stream one answer to the terminal; Ctrl-C ends it, and what there is of it is kept."""
    began, output = time.perf_counter(), None
    try:
        for output in llm.stream(messages, params):
            if not as_json:
                click.echo(output.outputs[0].new_text, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    if output is None:
        return ""
    answer, seconds = output.outputs[0], time.perf_counter() - began
    if as_json:
        click.echo(json.dumps(_as_dict(output)))
    else:
        cached, prompt = output.num_cached_tokens or 0, len(output.prompt_token_ids)
        rate = len(answer.token_ids) / seconds
        click.secho(f"\n[{cached} of {prompt} prompt tokens cached, {rate:.0f} tokens/s]\n", dim=True)
        _print_end(answer)
    return answer.text


def _print_stats(llm: LLM) -> None:
    stats = llm.stats()
    for name, value in [*asdict(stats).items(), ("hit_rate", f"{stats.hit_rate:.3f}")]:
        click.echo(f"{name:>20}  {value}", err=True)


def main() -> None:
    """Entry point of the `pagetable` command. A user's mistake ends in one line, not in a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        click.echo(f"Error: {error}. The command line needs pagetable with its extra 'llm'", err=True)
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
