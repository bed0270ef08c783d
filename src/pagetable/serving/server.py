"""`pagetable serve`: opens the port, starts the engine, answers until told to stop, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.config import Config

from pagetable.checkpoint import open_checkpoint
from pagetable.memory.eviction_state import check_place
from pagetable.serving.app import build_app
from pagetable.serving.engine_client import EngineClient, EngineStartError
from pagetable.serving.front import Front
from pagetable.serving.gate import BoundedHttp
from pagetable.serving.kv_events import KVEventsConfig
from pagetable.serving.logs import configure_logging
from pagetable.serving.messages import EngineConfig, Ready
from pagetable.serving.metrics import ServerMetrics
from pagetable.serving.settings import ServerSettings
from pagetable.text import load_tokenizer, resolve_model

if TYPE_CHECKING:
    from pagetable.serving.tracing import Tracer

logger = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 40  # for the engine's sockets and pipes
LAG_SECONDS = 0.1  # how often the event loop's lag is measured
PARTING_SECONDS = 5.0  # for the last errors to reach their clients, when a drain is cut short


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided here."""

    def capture_signals(self):  # type: ignore[no-untyped-def]
        return nullcontext()


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT. ValueError or OSError for what keeps it from starting."""
    configure_logging(settings.log_level, settings.log_format)
    for warning in settings.warnings():
        logger.warning(warning)
    if settings.eviction_state is not None:
        check_place(Path(settings.eviction_state))
    _allow_many_connections()
    with _listener(settings.host, settings.port) as listener:  # a port that is taken is found before a model is loaded
        factory = Config(app="", loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_Server(settings, listener).run())


class _Server:
    """One life of the server, from start to end."""

    def __init__(self, settings: ServerSettings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._tracer = _tracer(settings.otlp_traces_endpoint)
        tokenizer = load_tokenizer(open_checkpoint(resolve_model(settings.model)))
        self._metrics = ServerMetrics(settings.model_names()[0])
        self._engine = EngineClient(
            EngineConfig(
                settings.engine_arguments(), settings.log_level, settings.log_format, kv_events=_kv_events(settings)
            ),
            max_queued_requests=settings.max_queued_requests,
            timeout=settings.engine_timeout,
            observer=self._metrics,
        )
        self._front = Front(settings, tokenizer, self._engine, self._metrics, self._tracer)
        self._http: _Uvicorn | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start, serve, drain, end."""
        app = build_app(self._front)  # before the engine: wrong keys or templates need not wait for it
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        try:
            starting = asyncio.ensure_future(self._engine.start())
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            await self._serve(app, starting.result())
        except EngineStartError as error:
            raise ValueError(str(error)) from error
        finally:
            await self._engine.close()
            self._front.close()
            if self._tracer is not None:
                self._tracer.close()

    async def _serve(self, app: object, ready: Ready) -> None:
        settings = self._settings
        server = self._http = _Uvicorn(
            Config(
                app,  # type: ignore[arg-type]
                http=_http_protocol(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level="warning",
                server_header=False,
                root_path=settings.root_path,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
                timeout_graceful_shutdown=int(settings.shutdown_timeout + PARTING_SECONDS) + 1,
            )
        )
        serving = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        lag = asyncio.ensure_future(self._measure_lag())
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if not serving.done():
            self._announce(ready)
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await self._drain(serving)
        lag.cancel()
        stopping.cancel()

    def _announce(self, ready: Ready) -> None:
        """Ready means ready: whoever reads this may send requests."""
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._settings.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        where = f"Ready: {scheme}://{shown}:{port}/v1  (documentation at /docs, metrics at /metrics)"
        if self._settings.log_format == "json":
            print(json.dumps({"message": where, "engine": ready.description}), file=sys.stderr, flush=True)
        else:
            print(ready.description, where, sep="\n", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        if self._stopping.is_set():  # asked twice: without waiting for anybody
            self._engine.refuse_all()
            if self._http is not None:
                self._http.force_exit = True
        self._stopping.set()

    async def _drain(self, serving: asyncio.Future[None]) -> None:
        """Let what runs end, for as long as it is given; what is left then is told so."""
        if self._engine.num_open:
            seconds = self._settings.shutdown_timeout
            logger.warning("stopping: %d answers are given %.0f s to end", self._engine.num_open, seconds)
        await asyncio.wait((serving,), timeout=self._settings.shutdown_timeout)
        self._engine.refuse_all()
        await serving

    async def _measure_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_SECONDS)
            self._metrics.event_loop_lag(max(0.0, time.perf_counter() - before - LAG_SECONDS))


def _tracer(endpoint: str | None) -> Tracer | None:
    if endpoint is None:
        return None
    try:
        from pagetable.serving.tracing import Tracer
    except ImportError as error:
        raise ValueError("otlp_traces_endpoint needs OpenTelemetry: pip install 'pagetable[otel]'") from error
    return Tracer(endpoint)


def _kv_events(settings: ServerSettings) -> KVEventsConfig | None:
    if settings.kv_events_config is None:
        return None
    config = KVEventsConfig.parse(settings.kv_events_config)
    return config if config.publishes else None


def _http_protocol(settings: ServerSettings) -> type[BoundedHttp]:
    """The protocol with the bounds of these settings, and of the file descriptors that this process may open."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounds = {"stream_timeout": settings.stream_timeout, "max_connections": max(8, descriptors - SPARE_DESCRIPTORS)}
    return type("Http", (BoundedHttp,), bounds)


def _allow_many_connections() -> None:
    """A connection is a file descriptor; many systems give a process 1,024 of them until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listener(host: str, port: int) -> socket.socket:
    """A socket bound to the address. OSError says what to do about it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = f"cannot listen at {host} port {port}: {error.strerror}"
        raise OSError(f"{reason}. Choose another --port or --host") from error
    return listener
