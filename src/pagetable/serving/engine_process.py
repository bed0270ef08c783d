"""The engine process: a model, its page table and the step loop, at the end of two sockets.

The front starts it as `python -m pagetable.serving.engine_process` and writes an `EngineConfig` to its standard input,
which then stays open: when it ends, the front is gone, and so is this process. Signals that a terminal or a service
manager sends to the whole group are the front's business.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from pagetable.engine import RequestError
from pagetable.memory import Cleared
from pagetable.outputs import Logprob
from pagetable.request import Answer, Request
from pagetable.serving.kv_events import KVEventPublisher
from pagetable.serving.logs import configure_logging, flush_logs
from pagetable.serving.messages import (
    IDLE_REPORT_SECONDS,
    Abort,
    Delta,
    Done,
    EndSession,
    EngineConfig,
    EngineStats,
    Failed,
    Message,
    Ready,
    Refused,
    Report,
    ResetPrefixCache,
    Shutdown,
    Submit,
    ToEngine,
    TokenChoice,
    TokenChoices,
)

if TYPE_CHECKING:
    from pagetable.llm import LLM

logger = logging.getLogger(__name__)


class EngineProcess:
    """Takes messages between steps, runs steps, reports each."""

    def __init__(
        self, llm: LLM, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], publisher: KVEventPublisher | None = None
    ) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._inbox, self._outbox = inbox, outbox
        self._publisher = publisher
        self._requests: dict[str, list[Request]] = {}  # unfinished, by the front's request_id: one a prompt
        self._homes: dict[Request, tuple[str, int]] = {}  # whose it is, and the index of its first answer
        self._news: dict[Request, None] = {}  # those that have something to tell
        self._refused: list[Refused] = []
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        """Serve until told to end."""
        if self._publisher is not None:
            self._publisher(Cleared())  # for those who follow the engine that this one may replace
            self._publisher.flush()
        self._send(self._ready())
        while self._receive():
            began = time.perf_counter()
            self._engine.step()
            self._send(self._report(time.perf_counter() - began))
            if self._publisher is not None:
                self._publisher.flush()

    # ---------------------------------------------------------------- in

    def _receive(self) -> bool:
        """Carry out what has arrived; with nothing to compute, wait for something. False: it was the last."""
        if not self._engine.has_unfinished_requests:
            self._inbox.poll(int(IDLE_REPORT_SECONDS * 1000))
        while self._inbox.poll(0):
            message = self._decoder.decode(self._inbox.recv())
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self._abort(message.request_id)
                case ResetPrefixCache():
                    self._llm.reset_prefix_cache()
                    self._send(Done(message.call_id))
                case EndSession():
                    num_blocks = self._llm.end_session(message.session_id, message.cache_salt)
                    self._send(Done(message.call_id, num_blocks))
                case Shutdown():
                    return False
        return True

    def _submit(self, message: Submit) -> None:
        """Queue all prompts of a request, or none."""
        requests: list[Request] = []
        try:
            for data in message.prompts:
                prompt = {"prompt_token_ids": np.frombuffer(data, "<i4"), "cache_salt": message.cache_salt}
                request = self._engine.make_request(
                    prompt, message.params, priority=message.priority, cache_hints=message.cache_hints
                )
                self._engine.add_request(request)
                request.news = self._news
                requests.append(request)
        except Exception as error:  # one request must not take all others along
            for request in requests:
                self._engine.abort_request(request)
            if isinstance(error, RequestError):
                refused = Refused(message.request_id, str(error), error.param)
            else:
                logger.exception("request %s could not be queued", message.request_id)
                refused = Refused(message.request_id, repr(error), is_our_fault=True)
            self._refused.append(refused)
            return
        self._requests[message.request_id] = requests
        self._homes |= {request: (message.request_id, i * message.params.n) for i, request in enumerate(requests)}

    def _abort(self, request_id: str) -> None:
        for request in self._requests.pop(request_id, ()):  # some may have ended meanwhile, or all
            self._engine.abort_request(request)
            self._homes.pop(request, None)
            self._news.pop(request, None)

    # ---------------------------------------------------------------- out

    def _report(self, seconds: float) -> Report:
        """What the requests have gained in a step of so many seconds, and how the engine stands."""
        deltas = [delta for request in self._news for delta in self._deltas(request, *self._homes[request])]
        for request in self._news:
            if request.is_finished:
                self._forget(request)
        self._news.clear()
        refused, self._refused = self._refused, []
        return Report(self._stats(), deltas, refused, self._engine.engine.step_stats, seconds)

    def _deltas(self, request: Request, request_id: str, first_index: int) -> list[Delta]:
        return [_delta(request, request_id, first_index, answer) for answer in request.answers if answer.has_news]

    def _forget(self, request: Request) -> None:
        request_id, _ = self._homes.pop(request)
        self._requests[request_id].remove(request)
        if not self._requests[request_id]:
            del self._requests[request_id]

    def _stats(self) -> EngineStats:
        scheduler = self._engine.engine.scheduler
        return EngineStats(len(scheduler.running), len(scheduler.waiting), self._llm.stats())

    def _ready(self) -> Ready:
        llm, scheduler = self._llm, self._engine.engine.scheduler
        return Ready(
            description=repr(llm),
            num_blocks=len(llm.block_manager.blocks),
            block_size=llm.block_manager.block_size,
            max_model_len=llm.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
        )

    def _send(self, message: Message) -> None:
        self._outbox.send(self._encoder.encode(message))


def _delta(request: Request, request_id: str, first_index: int, answer: Answer) -> Delta:
    prompt_logprobs = request.prompt_logprobs if answer.num_told == 0 else None
    new = answer.next_delta()
    return Delta(
        request_id=request_id,
        index=first_index + new.index,
        text=new.text,
        token_ids=new.token_ids,
        logprobs=None if new.logprobs is None else [_choices(entry) for entry in new.logprobs],
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
        error=new.error,
        num_cached_tokens=request.num_cached_tokens or 0,
        first_scheduled_time=request.metrics.first_scheduled_time,
        prompt_logprobs=None
        if prompt_logprobs is None
        else [None if e is None else _choices(e) for e in prompt_logprobs],
    )


def _choices(entry: dict[int, Logprob]) -> TokenChoices:
    return [
        TokenChoice(token_id, choice.logprob, choice.rank, choice.decoded_token or "")
        for token_id, choice in entry.items()
    ]


def _end_with_the_front() -> None:
    """Wait for the end of the standard input, in a thread: nobody needs this process any more then."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


def _read_config() -> EngineConfig:
    size = int.from_bytes(sys.stdin.buffer.read(4), "big")
    return msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=EngineConfig)


def main() -> None:
    """Load the model, say how that went, and serve."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config = _read_config()
    threading.Thread(target=_end_with_the_front, daemon=True).start()
    configure_logging(config.log_level, config.log_format)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, config.inbox), (outbox, config.outbox)):
        socket.set_hwm(0)  # nothing may be lost; the front bounds what it lets in
        socket.connect(address)
    try:
        publisher = KVEventPublisher(config.kv_events) if config.kv_events else None
        # Late, for it takes seconds: subscribers find the publisher again before its first batch.
        from pagetable.llm import LLM

        llm = LLM(**config.arguments, events=publisher, progress=False)
    except Exception as error:
        logger.debug("the engine cannot start", exc_info=True)
        reason = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        outbox.send(msgspec.msgpack.encode(Failed(reason)))
        context.destroy(linger=5000)
        sys.exit(1)
    gc.collect()
    gc.freeze()  # blocks live as long as the process: no collection needs to walk them
    EngineProcess(llm, inbox, outbox, publisher).run()
    llm.close()  # it writes what the eviction policy has learned
    if publisher is not None:
        publisher.close()
    context.destroy(linger=1000)
    flush_logs()
    os._exit(0)  # taking torch and Numba apart takes a second or two, and serves nobody


if __name__ == "__main__":
    main()
