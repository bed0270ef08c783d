"""How fast does the whole engine serve, beside its peers and beside what the machine allows?

    python benchmarks/engine.py [--quick] [--json] [--rounds 3] [--only W1,W4]
        [--peer-openvino PYTHON] [--peer-llama-cpp PYTHON] [--peer-transformers]

A peer is given as the Python of an environment that has it: openvino-genai, llama-cpp-python; transformers is looked
for in our own. Needs the default model (`make venv` brings it). A quarter of an hour with all peers.

What each part does:

    W1      32 requests at once, prompts of 64 to 512 tokens, answers of 32 to 128
    W2      64 requests, 1,024 shared and 32 own tokens, 16 out: the first alone, then 63 at once; also without a cache
    W3      4 conversations of 6 turns, 64 tokens in and 48 out; the history is sent again each turn, one at a time
    W4      one request, 512 tokens in, 128 out
    start   a fresh process to its first token, and its peak of memory
    growth  ours only: decoding against batch and context, and the time of a step that is not the model's

Prompts are token ids of natural text (the manual inside Python, so they differ between Python versions). Greedy, past
end tokens, float32 weights (openvino: from float16) and arithmetic. Contestants take turns, each in its own process,
with empty prefix caches, and only one computes at a time. "ours / it" above 1 is good in rates, below 1 in times.

The roofline. A step that computes n new tokens of a sequence, the last of them seeing c tokens, takes at least

    max((W + K x sum(c)) / bandwidth, sum(2 x P x n + 2 x H + 4 x A x (n x c - n(n-1)/2)) / speed)

W bytes of weights, K bytes of K and V a token (what sequences share counted once), P and H the weights of the layers
and of the output head, A heads x head size x layers; sums over sequences. Both rates are measured here. A workload is
one step for all prompts given at once, without what a perfect cache would hold, and then a step for each further token,
all requests decoding together while they last. This is no strict bound: a step that mixes prompts and decodes can hide
the reading of the weights behind arithmetic.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from contestants import in_turns
from engine_contest import INVARIANT, OURS, SETTLE_S, Bench, Contest, Figure, Results, compared, share
from engine_peers import Contestant, ContestantError, Process, write_gguf
from engine_workloads import FULL, QUICK, W2_OUT, W2_OWN, W3_IN, W3_OUT, Workloads
from measure import Report, Spread, Table
from pagetable.checkpoint import open_checkpoint
from pagetable.model.config import load_config
from pagetable.text import resolve_model
from roofline import PROBE, Memory, Roofline

PARTS = ("W1", "W2", "W3", "W4", "start", "growth")
GROWTH_CACHE_GIB = 3
GROWTH_CONTEXT = 400  # tokens, where the batch grows
HOST_CONTEXT = 64  # tokens, where the number of running sequences grows
GROWTH_STEPS = 16


def w1(bench: Bench) -> None:
    """Throughput, and whether the answers are those of transformers."""
    requests = bench.workloads.w1
    tokens = sum(length for _, length in requests)

    def act(process: Process) -> dict[str, Any]:
        found = process.ask("answer", requests=requests)
        return {"rate": tokens / found["seconds"], "answers": found["answers"]}

    with bench.contest("W1") as contest:
        results = contest.play(bench.rounds, act)
    roofline = bench.roofline()
    floor = sum(roofline.serve_s([(len(prompt), 0, length) for prompt, length in requests]))
    prompts = sum(len(prompt) for prompt, _ in requests)
    title = f"W1: {len(requests)} requests at once, {prompts:,} tokens in and {tokens:,} out"
    figure = Figure("output tok/s", "rate", tokens / floor, is_rate=True)
    table = compared(title, results, contest.failed, [figure], roofline.note)
    equal = equal_to_judge(bench, {name: found[0]["answers"] for name, found in results.items()})
    table.columns.append("equal to transformers")
    for row in table.rows:
        row.append(equal.get(row[0]))
    bench.report.add(table)


def equal_to_judge(bench: Bench, answers: dict[str, list[list[int]]]) -> dict[str, str]:
    """How many answers to W1 are transformers' own, token by token, by contestant; empty where it is not installed."""
    if bench.judge is None:
        return {}
    prompts = [prompt for prompt, _ in bench.workloads.w1]
    pairs = {(tuple(p), tuple(a)): None for given in answers.values() for p, a in zip(prompts, given, strict=True)}
    with Process(bench.judge) as process:
        truths = process.ask("check", pairs=list(pairs))["equal"]
    equal = dict(zip(pairs, truths, strict=True))
    counts = {
        name: sum(equal[tuple(p), tuple(a)] for p, a in zip(prompts, given, strict=True))
        for name, given in answers.items()
    }
    return {name: f"{count}/{len(prompts)}" for name, count in counts.items()}


def w2(bench: Bench) -> None:
    """A shared prefix, with and without prefix caching."""
    requests, shared = bench.workloads.w2, bench.scale.w2_shared

    def act(process: Process) -> dict[str, Any]:
        alone = process.ask("answer", requests=requests[:1])
        others = process.ask("answer", requests=requests[1:])
        return {"seconds": alone["seconds"] + others["seconds"]}

    title = f"W2: {len(requests)} requests, {shared:,} shared and {W2_OWN} own tokens in, {W2_OUT} out"
    for caching, rounds, of_title in ((True, bench.rounds, ""), (False, 1, ", without prefix caching, once")):
        with bench.contest("W2", enable_prefix_caching=caching) as contest:
            results = contest.play(rounds, act)
        roofline = bench.roofline()
        cached = shared if caching else 0
        lengths = [(len(prompt), cached, length) for prompt, length in requests[1:]]
        floor = sum(roofline.serve_s([(shared + W2_OWN, 0, W2_OUT)])) + sum(roofline.serve_s(lengths, cached))
        figure = Figure("total, s", "seconds", floor)
        bench.report.add(compared(title + of_title, results, contest.failed, [figure], roofline.note))


def w3(bench: Bench) -> None:
    """Conversations whose history is sent again at each turn."""
    conversations, turns = bench.workloads.w3, range(bench.scale.w3_turns)

    def act(process: Process) -> dict[str, Any]:
        histories: list[list[int]] = [[] for _ in conversations]
        total, ttft = 0.0, []
        for turn in turns:
            firsts = []
            for history, said in zip(histories, conversations, strict=True):
                history += said[turn]
                found = process.ask("answer", requests=[(history, W3_OUT)])
                history += found["answers"][0]
                total += found["seconds"]
                firsts.append(found["ttft"][0] * 1e3)
            ttft.append(statistics.median(firsts))
        return {"seconds": total, **{f"turn {turn + 1}": ms for turn, ms in enumerate(ttft)}}

    with bench.contest("W3") as contest:
        results = contest.play(bench.rounds, act)
    roofline = bench.roofline()
    floors = []
    for turn in turns:
        before = turn * (W3_IN + W3_OUT)  # the last token of an answer is in no cache yet
        floors.append(roofline.serve_s([(before + W3_IN, max(before - 1, 0), W3_OUT)]))
    floor = sum(map(sum, floors)) * len(conversations)
    title = f"W3: {len(conversations)} conversations of {len(turns)} turns, {W3_IN} tokens in and {W3_OUT} out"
    figure = Figure("total, s", "seconds", floor)
    bench.report.add(compared(title, results, contest.failed, [figure], roofline.note))
    table = Table("W3: time to first token, ms", ["", *(f"turn {turn + 1}" for turn in turns)])
    for name, found in results.items():
        table.rows.append([name, *(Spread.of(each[f"turn {turn + 1}"] for each in found) for turn in turns)])
    table.rows.append(["roofline", *(prefill * 1e3 for prefill, _ in floors)])
    bench.report.add(table)


def w4(bench: Bench) -> None:
    """One request alone."""
    requests = bench.workloads.w4
    ((prompt, length),) = requests

    def act(process: Process) -> dict[str, Any]:
        found = process.ask("answer", requests=requests)
        (ttft,) = found["ttft"]
        return {"ttft": ttft * 1e3, "rate": (length - 1) / (found["seconds"] - ttft)}

    with bench.contest("W4") as contest:
        results = contest.play(bench.rounds, act)
    roofline = bench.roofline()
    prefill, decode = roofline.serve_s([(len(prompt), 0, length)])
    figures = [
        Figure("first token, ms", "ttft", prefill * 1e3),
        Figure("decode tok/s", "rate", (length - 1) / decode, is_rate=True),
    ]
    title = f"W4: one request, {len(prompt)} tokens in, {length} out"
    bench.report.add(compared(title, results, contest.failed, figures, roofline.note))


def start(bench: Bench) -> None:
    """From nothing to the first token, compiled kernels on disk and files in the page cache; then the memory."""
    contestants = [c for c in bench.contestants if "start" in c.workloads]
    first = bench.workloads.prompts(1, 8)

    def started(process: Process) -> dict[str, Any]:
        process.ask("answer", requests=first)
        return {"seconds": perf_counter() - process.started}

    def grown(process: Process) -> dict[str, Any]:
        work = bench.workloads.w1 if "W1" in process.contestant.workloads else bench.workloads.w4
        process.ask("answer", requests=work)
        return {"gb": process.ask("memory")["bytes"] / 1e9}

    results, failed = in_fresh_processes(contestants, bench.rounds, started)
    title = "Start of a process to its first token, compiled kernels and files at hand"
    bench.report.add(compared(title, results, failed, [Figure("s", "seconds")]))
    results, failed = in_fresh_processes(contestants, 1, grown)
    title = "Peak of resident memory with a KV cache of 1 GiB, once"
    note = "After W1, or W4 where one request is served at a time; llama.cpp's cache is 8,192 tokens, 0.4 GB."
    bench.report.add(compared(title, results, failed, [Figure("GB", "gb")], note))


def in_fresh_processes(
    contestants: list[Contestant], rounds: int, act: Callable[[Process], dict[str, Any]]
) -> tuple[Results, dict[str, str]]:
    """What `act` found for each contestant in each round, and the last words of those that failed."""
    results: Results = {contestant.name: [] for contestant in contestants}
    failed: dict[str, str] = {}
    for contestant in in_turns(contestants, rounds):
        sleep(SETTLE_S)
        with Process(contestant) as process:
            try:
                results[contestant.name].append(act(process))
            except ContestantError as error:
                failed[contestant.name] = str(error)
    return {name: found for name, found in results.items() if name not in failed}, failed


def growth(bench: Bench) -> None:
    """Ours alone: decoding as batch and context grow, and what of a step is not the model's."""
    options = {"cache_gib": GROWTH_CACHE_GIB, "max_num_seqs": max(bench.scale.running)}
    with Process(replace(bench.contestants[0], options=options)) as process:
        process.ask("answer", requests=bench.warm_up(8, 100))
        bench.report.add(growth_with_batch(bench, process))
        bench.report.add(growth_with_context(bench, process))
        bench.report.add(host_time(bench, process))


def growth_with_batch(bench: Bench, process: Process) -> Table:
    """More and more sequences, which share nothing."""
    title = f"Growth with batch, contexts of {GROWTH_CONTEXT} tokens: decoded tokens a second"
    table = Table(title, ["batch", "tok/s", "ms a step", "roofline tok/s", "of roofline"])
    for batch in bench.scale.batches:
        table.rows.append([batch, *decode_cells(bench, process, batch, GROWTH_CONTEXT)])
    return table


def growth_with_context(bench: Bench, process: Process) -> Table:
    """One sequence, longer and longer."""
    title = "Growth with context, batch 1: decoded tokens a second"
    table = Table(title, ["context", "tok/s", "ms a step", "roofline tok/s", "of roofline"])
    for context in bench.scale.contexts:
        table.rows.append([f"{context:,}", *decode_cells(bench, process, 1, context)])
    return table


def decode_cells(bench: Bench, process: Process, batch: int, context: int) -> list[Any]:
    """Rate, time of a step, and the roofline beside them."""
    bench.memory.read()
    runs = decode_steps(bench, process, batch, context)
    bench.memory.read()
    steps = [statistics.median(run["step"]) for run in runs]
    rate = Spread.of(batch / step for step in steps)
    limit = batch / bench.roofline().step_s([(1, context + GROWTH_STEPS // 2)] * batch)
    return [rate, statistics.median(steps) * 1e3, limit, share(rate.median, limit, is_rate=True)]


def decode_steps(bench: Bench, process: Process, batch: int, context: int) -> list[dict[str, list[float]]]:
    """Times of the steps in which all of the batch decodes, in each round. Prompts are in the cache beforehand."""
    prompts = bench.workloads.prompts(batch, context)
    process.ask("answer", requests=prompts)
    admission = batch // 16  # some have begun to decode while others are let in
    requests = [(prompt, GROWTH_STEPS + admission) for prompt, _ in prompts]
    return [process.ask("steps", requests=requests) for _ in range(bench.rounds)]


def host_time(bench: Bench, process: Process) -> Table:
    """Everything outside the runner's `execute`: scheduling, building the batch, committing, text, outputs."""
    table = Table(
        f"Growth with running sequences, contexts of {HOST_CONTEXT} tokens: a decode step outside the model",
        ["running", "µs a step", "µs a sequence", "ms of the whole step", "share of it"],
        note="Schedule, build, commit, turn tokens into text and hand out each request's output.",
    )
    for running in bench.scale.running:
        runs = decode_steps(bench, process, running, HOST_CONTEXT)
        whole = statistics.median(statistics.median(run["step"]) for run in runs)
        host = Spread.of(
            statistics.median(step - execute for step, execute in zip(run["step"], run["execute"], strict=True)) * 1e6
            for run in runs
        )
        table.rows.append([running, host, host.median / running, whole * 1e3, f"{host.median / whole / 1e6:.1%}"])
    return table


# ----------------------------------------------------------------------------------------------------------- main


def find_contestants(options: argparse.Namespace, model: Path, folder: Path) -> list[Contestant]:
    """Ours first. Peers' GGUF files are written into `folder`."""
    own = sys.executable
    found = [
        Contestant(OURS, own, "pagetable", model, PARTS),
        Contestant(INVARIANT, own, "pagetable", model, ("W1",), {"batch_invariant": True}),
        Contestant("pagetable, lru", own, "pagetable", model, ("W1", "W2", "W3"), {"eviction_policy": "lru"}),
    ]
    if python := options.peer_openvino:
        write_gguf(model, folder / "float16.gguf", "float16")
        name = peer_name(python, "openvino-genai")
        found.append(Contestant(name, python, "openvino", folder / "float16.gguf", PARTS[:-1]))
    if python := options.peer_llama_cpp:
        write_gguf(model, folder / "float32.gguf", "float32")
        name = peer_name(python, "llama-cpp-python")
        found.append(Contestant(name, python, "llama-cpp", folder / "float32.gguf", ("W3", "W4", "start")))
    if options.peer_transformers:
        found.append(Contestant(peer_name(own, "transformers"), own, "transformers", model, ("W4",)))
    return found


def peer_name(python: str, package: str) -> str:
    """The package and its version in that environment."""
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return f"{package} {told.stdout.strip() or 'not installed'}"


def probe(ours: Contestant, prompt: list[int], memory: Memory) -> float:
    """Seconds that we take for the first token of this prompt; compiled kernels are on disk afterwards."""
    with Contest([ours], [(prompt[:8], 8)], memory) as contest:
        results = contest.play(5, lambda process: process.ask("answer", requests=[(prompt, 1)]))
    return statistics.median(found["seconds"] for found in results[OURS])


def chosen_parts(text: str) -> list[str]:
    """The names in a list with commas. ValueError for one that is none."""
    parts = text.split(",")
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    return parts


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes, less of everything; not to be quoted")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contestant has its turn")
    parser.add_argument("--only", type=chosen_parts, default=list(PARTS), metavar="PARTS", help=",".join(PARTS))
    parser.add_argument("--peer-openvino", metavar="PYTHON", help="the Python of an environment with openvino-genai")
    parser.add_argument("--peer-llama-cpp", metavar="PYTHON", help="the same with llama-cpp-python")
    parser.add_argument("--peer-transformers", action="store_true", help="our own environment has it")
    return parser.parse_args()


def main() -> None:
    """Measure and report."""
    asked = options()
    model = resolve_model("smollm2")
    scale = QUICK if asked.quick else FULL
    workloads = Workloads.make(model, scale)
    judge = None
    if importlib.util.find_spec("transformers"):
        judge = Contestant("transformers", sys.executable, "transformers", model, ())
    with tempfile.TemporaryDirectory() as folder:
        contestants = find_contestants(asked, model, Path(folder))
        report = Report(asked.json, ("pagetable", "torch", "numba", *(["transformers"] if judge else [])))
        memory = Memory()
        probe_s = probe(contestants[0], workloads.rest[:PROBE], memory)
        roofline = Roofline.measure(load_config(open_checkpoint(model)), probe_s, memory)
        report.add(roofline.table())
        rounds = 1 if asked.quick else asked.rounds
        bench = Bench(report, scale, rounds, contestants, workloads, roofline, memory, judge)
        for part in asked.only:
            {"W1": w1, "W2": w2, "W3": w3, "W4": w4, "start": start, "growth": growth}[part](bench)
        report.close()


if __name__ == "__main__":
    main()
