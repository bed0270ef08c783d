"""The trials: steady load, chaos, and the end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.serving.running import RunningServer, running_server
from tests.serving.soak.load import Load
from tests.serving.soak.questions import Question
from tests.serving.soak.troubles import MAX_REQUEST_BYTES, Troubles, Work
from tests.serving.soak.watch import GROWTH_SHARE_IN_CHAOS, Report, Watch


@dataclass(frozen=True)
class Trial:
    """How much, for how long, of what. The questions are shared out among the streams."""

    model: Path
    questions: list[Question]
    streams: int = 1000
    seconds: float = 300.0
    seed: int = 1

    @property
    def is_short(self) -> bool:
        return self.seconds < 60

    def report(self, name: str) -> Report:
        return Report(f"{name}: {self.streams} streams, {self.seconds:g} s, seed {self.seed}")

    @contextmanager
    def server(self, queue: int, *arguments: str) -> Iterator[RunningServer]:
        """A server with a cache so small that blocks are evicted and sequences preempted all the time."""
        common = ("--kv-cache-memory", "4MiB", "--batch-invariant", "--threads", "1", "--no-log-requests")
        with running_server(self.model, *common, "--max-queued-requests", str(queue), *arguments) as server:
            yield server

    @asynccontextmanager
    async def under_load(self, load: Load, *others: Work) -> AsyncIterator[None]:
        """While all clients ask; they are waited for. What the others do is given up."""
        aside = [asyncio.create_task(other) for other in others]
        shares = [self.questions[i % len(self.questions) :: self.streams] for i in range(self.streams)]
        clients = [asyncio.create_task(load.client(mine)) for mine in shares]
        try:
            yield
        finally:
            load.is_over = True
            for task in aside:
                task.cancel()
            results = [*await asyncio.gather(*clients), *await asyncio.gather(*aside, return_exceptions=True)]
            load.faults += [repr(result) for result in results if isinstance(result, Exception)]


async def steady(trial: Trial) -> Report:
    """Nothing but load: every answer right, memory flat, everything given back."""
    report = trial.report("steady")
    with trial.server(8 * trial.streams) as server:
        async with Load(server.url, trial.questions, trial.seed, bound=60) as load:
            await load.ask(trial.questions[0])
            watch = Watch(server)
            async with trial.under_load(load, watch.run(trial.seconds / 300), _scrape(load)):
                await asyncio.sleep(trial.seconds)
        report.add_load(load, trial.seconds)
        await report.add_rest(server, watch)
        report.add_memory(watch, "front")
        report.add_memory(watch, "engine")
        for name in ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "pagetable:evictions_total"):
            report.rows.append((name, int(server.metric(name))))
        report.require(load.outcomes.total() == load.num_asked, "requests were lost")
        counted = int(server.metric("vllm:request_success_total")), int(server.metric("vllm:generation_tokens_total"))
        right = load.num_asked, load.tokens
        report.require(counted == right, f"the server counted {counted} requests and tokens, its clients {right}")
    return report


async def chaos(trial: Trial) -> Report:
    """Everything at random: a right answer or a clean error for everyone in time, and a whole server afterwards."""
    report = trial.report("chaos")
    bound, engine_timeout = (30.0, 2.0) if trial.is_short else (60.0, 4.0)
    limits = ("--max-request-bytes", str(MAX_REQUEST_BYTES), "--stream-timeout", "2")
    with trial.server(2 * trial.streams, *limits, "--engine-timeout", str(engine_timeout)) as server:
        codes = ("engine_unavailable", "queue_full")
        load = Load(server.url, trial.questions, trial.seed, bound, codes)
        load.keeps_connections = False  # a front that stood still may close one just when a request comes
        async with load:
            await load.ask(trial.questions[0])
            watch = Watch(server)
            troubles = Troubles(trial, server, load, engine_timeout)
            async with trial.under_load(load, watch.run(trial.seconds / 300), _scrape(load), *troubles.all()):
                await asyncio.sleep(trial.seconds)
            await troubles.until_up()
            load.allowed.clear()
            for question in trial.questions[:50]:
                await load.ask(question)
        report.add_load(load, trial.seconds)
        report.rows += sorted(troubles.counts.items())
        await report.add_rest(server, watch)
        # In a short one the first bursts come after the first quarter.
        report.add_memory(watch, "front", share=float("inf") if trial.is_short else GROWTH_SHARE_IN_CHAOS)
        restarts = server.metric("pagetable:engine_restarts_total")
        report.rows.append(("restarts", int(restarts)))
        report.require(restarts == troubles.num_deaths, f"{troubles.num_deaths} engines were to end, {restarts} did")
        report.require("HTTP 429 queue_full" in load.outcomes, "nobody was told that the queue is full")
    return report


async def sigterm(trial: Trial, grace: float) -> Report:
    """SIGTERM in the midst of load: what is in flight ends within `grace` seconds with its answer, or with an error.

    With little grace there are also clients that would never end.
    """
    report = trial.report(f"sigterm, {grace:g} s to end")
    before = min(3.0, trial.seconds / 2)
    with trial.server(8 * trial.streams, "--shutdown-timeout", str(grace)) as server:
        engine = server.engine_pid()
        codes = ("engine_unavailable",) if grace < 5 else ()
        async with Load(server.url, trial.questions, trial.seed, 60, codes) as load:
            troubles = Troubles(trial, server, load, 120)
            stuck = [troubles.read_nothing(), troubles.trickle("a slow body")] if codes else []
            async with trial.under_load(load, *stuck):
                await asyncio.sleep(before)
                right, began = load.outcomes["ok"], time.monotonic()
                load.gone_since = began - 1.0  # the youngest may meet a connection that is being closed
                server.process.send_signal(signal.SIGTERM)
                status = await asyncio.to_thread(server.process.wait, 120)
                seconds = time.monotonic() - began
        report.add_load(load, before)
        report.rows.append(("answers after SIGTERM", load.outcomes["ok"] - right))
        report.rows.append(("exit", f"status {status} after {seconds:.1f} s"))
        most = grace + 5 + 5 + 3  # parting, the engine's end, and some for a busy machine
        report.require(status == 0 and seconds < most, f"status {status}, {seconds:.1f} s of {most:.1f} s allowed")
        report.require(not Path(f"/proc/{engine}").exists(), "the engine lives on")
        report.add_log(server)
    return report


async def _scrape(load: Load) -> None:
    """As Prometheus and probes do."""
    while True:
        await asyncio.sleep(1)
        for path in ("/metrics", "/health", "/v1/models"):
            async with asyncio.timeout(load.bound), load.http.get(path) as response:
                await response.read()
                if response.status != 200 and not (response.status == 503 and load.allowed and path != "/metrics"):
                    load.faults.append(f"{path}: HTTP {response.status}")


TRIALS: dict[str, list[Callable[[Trial], Coroutine[Any, Any, Report]]]] = {
    "steady": [steady],
    "chaos": [chaos],
    "sigterm": [partial(sigterm, grace=30), partial(sigterm, grace=0.5)],
}
