"""What the server costs: its throughput over the engine's own, and its front over the same front without an engine.

    python benchmarks/serving.py             # both questions; --only overhead, --only front
    python benchmarks/serving.py --json

overhead  32 answers at once from the default model: `LLM.generate` in this process against `pagetable serve`, loaded
          by `pagetable bench serve` from a third process. They take turns; the cache is cleared before each run.
front     requests a second with a tiny model, whole and streamed, against the same FastAPI application whose engine
          only echoes: what is left is the price of HTTP, JSON and tokenizing. The client takes a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tiny model of the tests

from measure import Report, Spread, Table

NUM_STREAMS, NUM_TOKENS = 32, 128
MEMORY = "1GiB"
PACKAGES = ["pagetable", "torch", "numba", "fastapi", "uvicorn", "pyzmq", "aiohttp"]


@contextmanager
def server(command: list[str]) -> Iterator[str]:
    """A server process that says "Ready: URL"; yields the URL."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if ready := re.search(r"Ready: (\S+?)(/v1)?\s", line):
                    break
            else:
                sys.exit(f"the server did not start: {command}")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield ready[1]
        finally:
            process.terminate()
            process.wait(30)


def load(url: str, *arguments: str) -> dict[str, Any]:
    """The figures of one run of `pagetable bench serve`."""
    command = [sys.executable, "-m", "pagetable", "bench", "serve", "--base-url", url, "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def reset_cache(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/cache/reset", method="POST")).read()


def event_loop_lag_ms(url: str) -> str:
    """The bound of the histogram bucket that the 99th percentile of the event loop's lag falls into."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    buckets = re.findall(r'^pagetable:event_loop_lag_seconds_bucket\{.*le="(\S+?)".*\} (\S+)$', text, re.MULTILINE)
    total = float(buckets[-1][1])
    bound = next(float(bound) for bound, count in buckets if float(count) >= 0.99 * total)
    return f"<= {bound * 1000:g}"


# ---------------------------------------------------------------------------------------------------------- overhead


def overhead(report: Report, rounds: int) -> None:
    from pagetable import LLM, SamplingParams

    rng = random.Random(5)
    words = ["the", "a", "cache", "block", "of", "prefix", "table", "page", "hit", "miss", "and", "to", "is", "river"]
    prompts = [" ".join(rng.choices(words, k=rng.randint(48, 80))) for _ in range(NUM_STREAMS)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    rates: dict[str, list[float]] = {"LLM.generate": [], "pagetable serve, streams": []}
    with tempfile.TemporaryDirectory() as folder, LLM("smollm2", kv_cache_memory=MEMORY) as llm:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = [sys.executable, "-m", "pagetable", "serve", "--port", "0", "--kv-cache-memory", MEMORY]
        with server(command) as url:

            def in_process() -> float:
                llm.reset_prefix_cache()
                began = perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                return NUM_STREAMS * NUM_TOKENS / (perf_counter() - began)

            def served() -> float:
                reset_cache(url)
                options = ["--dataset-name", "custom", "--dataset-path", str(data), "--output-len", str(NUM_TOKENS)]
                result = load(url, *options, "--ignore-eos", "--max-concurrency", str(NUM_STREAMS))
                assert result["total_output_tokens"] == NUM_STREAMS * NUM_TOKENS
                return result["output_throughput"]

            acts = list(zip(rates, (in_process, served), strict=True))
            for number in range(rounds + 1):
                for name, act in acts if number % 2 else acts[::-1]:
                    rate = act()
                    if number:  # the first round only warms up
                        rates[name].append(rate)
            lag = event_loop_lag_ms(url)
    alone, through = rates.values()
    table = Table(
        f"{NUM_STREAMS} streams of {NUM_TOKENS} tokens, default model, greedy: output tok/s",
        ["", "tok/s", "ratio"],
        note=f"event-loop lag p99 of the server: {lag} ms. Ratios are of the runs that stood side by side.",
    )
    table.rows.append(["LLM.generate, no server", Spread.of(alone), ""])
    ratio = Spread.of(b / a for a, b in zip(alone, through, strict=True))
    table.rows.append(["pagetable serve, streams", Spread.of(through), ratio])
    report.add(table)


# ------------------------------------------------------------------------------------------------------------- front


def front(report: Report, rounds: int) -> None:
    from tests.serving.running import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "tiny"))
        served = [sys.executable, "-m", "pagetable", "serve", model, "--port", "0", "--kv-cache-memory", "64MiB"]
        echoed = [sys.executable, __file__, "--echo", model]
        with server([*served, "--log-level", "warning"]) as engine, server(echoed) as echo:
            for tokens in (1, 16):
                report.add(_front_table(engine, echo, tokens, rounds))


def _front_table(engine: str, echo: str, num_tokens: int, rounds: int) -> Table:
    options = ["--input-len", "32", "--output-len", str(num_tokens), "--ignore-eos", "--max-concurrency", "64"]
    rates: dict[str, list[float]] = {engine: [], echo: []}
    for number in range(rounds + 1):
        for url in rates if number % 2 else reversed(rates):
            result = load(url, *options, "--num-prompts", "1500", "--seed", str(number))
            if number:
                rates[url].append(result["request_throughput"])
    table = Table(
        f"64 clients, 32 words in, {num_tokens} tokens streamed out, tiny model: requests/s",
        ["", "requests/s", "ratio"],
        note=f"event-loop lag p99: {event_loop_lag_ms(engine)} ms with the engine, {event_loop_lag_ms(echo)} ms echo",
    )
    table.rows.append(["front with an echo for an engine", Spread.of(rates[echo]), ""])
    ratio = Spread.of(a / b for a, b in zip(rates[engine], rates[echo], strict=True))
    table.rows.append(["pagetable serve", Spread.of(rates[engine]), ratio])
    return table


def serve_echo(model: str) -> None:
    """The application of `pagetable serve` over an engine that answers at once, with the first tokens of the prompt."""
    import uvicorn

    from pagetable.checkpoint import open_checkpoint
    from pagetable.engine import SamplingParams
    from pagetable.serving.app import build_app
    from pagetable.serving.engine_client import EngineClient, Stream
    from pagetable.serving.front import Front
    from pagetable.serving.gate import BoundedHttp
    from pagetable.serving.messages import Delta, EngineConfig, Ready
    from pagetable.serving.metrics import ServerMetrics
    from pagetable.serving.settings import ServerSettings
    from pagetable.text import load_tokenizer

    running: set[Any] = set()

    class Echo(EngineClient):
        def submit(self, request_id: str, prompts: Any, params: SamplingParams, **_: Any) -> Stream:
            stream = Stream(request_id, len(prompts) * params.n)
            task = asyncio.ensure_future(self._answer(stream, prompts, params))
            running.add(task)
            task.add_done_callback(running.discard)
            return stream

        async def _answer(self, stream: Stream, prompts: Any, params: SamplingParams) -> None:
            last = (params.max_tokens or 1) - 1
            for number in range(last + 1):
                await asyncio.sleep(0)  # a step
                for index, prompt in enumerate(prompts):
                    token = prompt[number % len(prompt)]
                    reason = "length" if number == last else None
                    stream.put(Delta(stream.request_id, index, tokenizer.token_text(token), [token], None, reason))

    async def run() -> None:
        echo = Echo(EngineConfig({}))
        echo.ready = Ready("an echo", num_blocks=1024, block_size=16, max_model_len=2048, max_num_seqs=1024)
        app = build_app(Front(settings, tokenizer, echo, ServerMetrics("echo")))
        config = uvicorn.Config(app, port=0, http=BoundedHttp, ws="none", lifespan="off", log_level="warning")
        http = uvicorn.Server(config)
        serving = asyncio.ensure_future(http.serve())
        while not http.started:
            await asyncio.sleep(0.01)
        port = http.servers[0].sockets[0].getsockname()[1]
        print(f"Ready: http://127.0.0.1:{port} ", file=sys.stderr, flush=True)
        await serving

    settings = ServerSettings(model=model, log_requests=True)
    tokenizer = load_tokenizer(open_checkpoint(Path(model)))
    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["overhead", "front"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--echo", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        serve_echo(options.echo)
        return
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    report = Report(options.json, PACKAGES)
    for part in (overhead, front):
        if options.only in (None, part.__name__):
            part(report, options.rounds)
    report.close()


if __name__ == "__main__":
    main()
