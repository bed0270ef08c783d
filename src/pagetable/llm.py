"""The offline API: text, engine and model put together. Names as in vLLM's `LLM`."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from tqdm import tqdm

from pagetable.checkpoint import ModelError, open_checkpoint
from pagetable.engine import Engine, SamplingParams, Scheduler
from pagetable.llm_engine import LLMEngine
from pagetable.memory import (
    BlockManager,
    CacheHints,
    CacheStats,
    EventSink,
    check_block_size,
    load_eviction_state,
    save_eviction_state,
)
from pagetable.memory.hints import NO_HINTS
from pagetable.model import (
    ModelRunner,
    available_memory,
    format_bytes,
    load_model,
    num_blocks_for,
    parse_memory,
    resolve_device,
    resolve_kernels,
)
from pagetable.outputs import RequestOutput
from pagetable.prompts import Messages, Prompt, as_list, is_conversation, one_each
from pagetable.request import Request
from pagetable.text import Tokenizer, load_tokenizer, render_chat, resolve_model
from pagetable.vllm_options import refuse_options

logger = logging.getLogger(__name__)

MAX_THREADS = 1024  # torch does not survive a hundred thousand
DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
MAX_DEFAULT_CPU_CACHE = 4 << 30  # bytes; a desktop has other uses for its memory


class LLM:
    """A model and its paged KV cache, ready to answer.

    `model` is a local folder (Hugging Face layout), a `.gguf` file, a hub id or the alias `smollm2`.
    `kv_cache_memory` is bytes, a text like "2GiB", or a share of free memory (0.5); by default half of the machine's,
    at most 4 GiB, or on a GPU `gpu_memory_utilization` (a share of what is free; in vLLM of all there is).
    `max_num_batched_tokens` bounds a step: 512 on a CPU, where more rows make products hardly faster, 8192 on a GPU.
    `kernels` "auto" is the compiled decoder on a CPU where Numba is installed, else plain PyTorch; "numba" insists on
    the former, "torch" is PyTorch everywhere.
    `threads` compute, by default one a processor core that the process may use; given, PyTorch gets as many.
    `batch_invariant=True` insists on logits that are the same to the bit whatever was cached and whoever else is in
    the batch. The compiled decoder is so always, and at no cost; what is not is refused.
    `events` is called with each event of the page table. `eviction_state` is a file in which the policy `lhc` keeps
    what it has learned: read now, written by `close`.

    Raises `ModelError` for a model that cannot be used and `ValueError` or `TypeError` for arguments. Several threads
    may share one LLM: their requests are computed in the same steps.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        block_size: int = 16,
        kv_cache_memory: int | str | float | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        eviction_policy: str = "lhc",
        eviction_state: str | Path | None = None,
        scheduling_policy: str = "fcfs",
        seed: int = 0,
        threads: int | None = None,
        kernels: str = "auto",
        batch_invariant: bool = False,
        chat_template: str | None = None,
        events: EventSink | None = None,
        gpu_memory_utilization: float = 0.9,
        progress: bool | None = None,
        **vllm_options: Any,
    ) -> None:
        refuse_options(vllm_options)
        check_block_size(block_size)
        if not isinstance(batch_invariant, bool):
            raise TypeError(f"batch_invariant={batch_invariant!r}: it must be True or False")
        if threads is not None:
            if isinstance(threads, bool) or not isinstance(threads, int):
                raise TypeError(f"threads={threads!r}: it must be an integer")
            if not 1 <= threads <= MAX_THREADS:
                raise ValueError(f"threads={threads}: 1 to {MAX_THREADS} are allowed")
            torch.set_num_threads(threads)
        self.model_name = str(model)
        if batch_invariant and resolve_kernels(kernels, resolve_device(device)) != "numba":
            raise ModelError(
                f"batch_invariant=True: plain PyTorch on {device} does not compute the same bits in every batch. "
                "Use kernels='numba' on a CPU, or leave batch_invariant out"
            )
        kernels = "numba" if batch_invariant else kernels  # a model that they cannot compute is refused as well
        checkpoint = open_checkpoint(resolve_model(model))
        self.tokenizer: Tokenizer = load_tokenizer(checkpoint)
        with _loading_bar(checkpoint.name, progress) as report:
            loaded = load_model(
                checkpoint, dtype=dtype, device=device, kernels=kernels, threads=threads, progress=report
            )
        self.config = loaded.config
        self.dtype, self.device = loaded.dtype, loaded.device
        memory = _cache_bytes(kv_cache_memory, self.device, gpu_memory_utilization)
        num_blocks = num_blocks_for(self.config, memory, block_size, self.dtype)
        self.max_model_len = self._model_len(max_model_len, num_blocks * block_size)
        runner = ModelRunner(loaded, num_blocks, block_size)  # first, because it fails where memory cannot be had
        self.block_manager = BlockManager(  # the page table, to look at
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            eviction_policy=eviction_policy,
            namespace=checkpoint.fingerprint() + str(self.dtype).encode(),
            events=events,
        )
        self._eviction_state = None if eviction_state is None else Path(eviction_state)
        state, policy = self._eviction_state, self.block_manager.eviction_policy
        if state is not None and not load_eviction_state(policy, state):
            self._eviction_state = None  # somebody's file, not to be written over
        if max_num_batched_tokens is None:
            max_num_batched_tokens = DEFAULT_STEP_TOKENS[self.device.type]
        scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            scheduling_policy=scheduling_policy,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        runner.warm_up()
        self._llm_engine: LLMEngine | None = LLMEngine(
            Engine(scheduler, runner), self.tokenizer, self.config.vocab_size, seed
        )
        self._chat_template = chat_template
        self._lock = threading.RLock()
        self._abandoned: list[Request] = []  # to be ended as soon as nobody is at the books
        self._busy = False  # somebody is
        logger.debug("%r", self)

    def __repr__(self) -> str:
        num_blocks, block_size = len(self.block_manager.blocks), self.block_manager.block_size
        size = self.config.kv_bytes_per_token(self.dtype) * num_blocks * block_size
        return (
            f"LLM({self.model_name}, {str(self.dtype).removeprefix('torch.')} on {self.device}, KV cache "
            f"{format_bytes(size)} = {num_blocks:,} blocks of {block_size} = {num_blocks * block_size:,} tokens)"
        )

    def _model_len(self, asked: int | None, cache_tokens: int) -> int:
        longest = self.config.max_position_embeddings
        if asked is not None and not 1 <= asked <= longest:
            raise ValueError(f"max_model_len={asked}: this model allows 1 to {longest}")
        length = asked or longest
        if cache_tokens < length:
            warnings.warn(
                f"the KV cache holds {cache_tokens} tokens, less than max_model_len={length}: longer requests end "
                "with cache_full. Give kv_cache_memory more, or set max_model_len",
                stacklevel=3,
            )
        return length

    # ---------------------------------------------------------------- what people call

    def generate(
        self,
        prompts: Prompt | SequenceABC[Prompt],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: SequenceABC[int] | None = None,
        cache_hints: CacheHints | SequenceABC[CacheHints] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or a list of them; the outputs come in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids` and optionally
        `cache_salt`. One `sampling_params` serves all, or a list has one for each; so with `cache_hints`, which say how
        long what is cached is worth keeping. Raises RequestError for the first prompt that cannot be served; then none
        is.
        """
        return self._finish_all(as_list(prompts), sampling_params, priority, use_tqdm, cache_hints)

    def chat(
        self,
        messages: Messages | SequenceABC[Messages],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_hints: CacheHints | SequenceABC[CacheHints] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages with `role` and `content`) or a list of them."""
        conversations: list[Any] = [messages] if is_conversation(messages) else list(messages)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "chat_template": chat_template,
            **(chat_template_kwargs or {}),
        }
        prompts = [self._chat_prompt(conversation, **options) for conversation in conversations]
        return self._finish_all(prompts, sampling_params, None, use_tqdm, cache_hints)

    def stream(
        self,
        prompts: Prompt | SequenceABC[Prompt] | Messages,
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        cache_hints: CacheHints | SequenceABC[CacheHints] | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer a prompt, a conversation or a list of prompts, yielding an output whenever one of them has more.

        Each output holds all the text so far, and in `new_text` what is new. Closing the iterator ends the requests.
        """
        if is_conversation(prompts):
            prompts = self._chat_prompt(prompts)
        return self._start(as_list(prompts), sampling_params, None, cache_hints)

    def stats(self) -> CacheStats:
        """Counters and gauges of the page table."""
        with self._lock:
            return self.block_manager.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Running requests finish undisturbed."""
        with self._lock:
            self.block_manager.reset_prefix_cache()

    def end_session(self, session_id: str, cache_salt: str | None = None) -> int:
        """Nothing will follow in this session. Returns how many cached blocks are its own: see `CacheHints`."""
        with self._lock:
            return self.block_manager.end_session(session_id, cache_salt)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.tokenizer

    @property
    def engine(self) -> Engine:
        """The scheduler and the runner. RuntimeError after `close`."""
        return self.llm_engine.engine

    @property
    def llm_engine(self) -> LLMEngine:
        """The requests in flight, for one who drives the steps himself. RuntimeError after `close`."""
        if self._llm_engine is None:
            raise RuntimeError("this LLM is closed; make a new one")
        return self._llm_engine

    def close(self) -> None:
        """End all requests and let go of the weights and the cache. Calling it again does nothing."""
        with self._lock:
            if self._llm_engine is not None:
                self._llm_engine.abort_all_requests()
                self._llm_engine = None
                self._save_eviction_state()

    def _save_eviction_state(self) -> None:
        if self._eviction_state is not None:
            try:
                save_eviction_state(self.block_manager.eviction_policy, self._eviction_state)
            except OSError as error:
                logger.warning("the eviction state %s cannot be written: %s", self._eviction_state, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------- in

    def _chat_prompt(
        self, messages: Messages, *, chat_template: str | None = None, **options: Any
    ) -> Mapping[str, Any]:
        text = render_chat(self.tokenizer, messages, chat_template=chat_template or self._chat_template, **options)
        # A template writes every special token it wants, the begin token too.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def _start(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None,
        priority: SequenceABC[int] | None,
        cache_hints: CacheHints | SequenceABC[CacheHints] | None,
        only_finished: bool = False,
    ) -> Generator[RequestOutput, None, None]:
        """Check and queue all prompts, or none. Dropping the iterator ends what is unfinished."""
        given_params = SamplingParams() if sampling_params is None else sampling_params
        params = one_each(given_params, len(prompts), "sampling_params", SamplingParams)
        priorities = one_each(0 if priority is None else priority, len(prompts), "priority", int)
        hints = one_each(NO_HINTS if cache_hints is None else cache_hints, len(prompts), "cache_hints", CacheHints)
        requests: list[Request] = []
        news: dict[Request, None] = {}  # an ordered set: requests that have something to tell
        stream = self._stream(requests, news, only_finished)
        next(stream)  # into its `try`: from now on, closing or dropping it ends the requests
        try:
            with self._bookkeeping():
                engine = self.llm_engine
                requests += [
                    engine.make_request(prompt, wanted, priority=rank, cache_hints=hint)
                    for prompt, wanted, rank, hint in zip(prompts, params, priorities, hints, strict=True)
                ]
                for request in requests:
                    request.news = news
                    engine.add_request(request)
        except BaseException:  # one is refused, or Ctrl-C: then none is queued
            stream.close()
            raise
        return stream

    # ---------------------------------------------------------------- out

    def _finish_all(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None,
        priority: SequenceABC[int] | None,
        use_tqdm: bool,
        cache_hints: CacheHints | SequenceABC[CacheHints] | None,
    ) -> list[RequestOutput]:
        stream = self._start(prompts, sampling_params, priority, cache_hints, only_finished=True)
        outputs = []
        with closing(stream), _progress_bar(len(prompts), use_tqdm) as bar:
            for output in stream:
                outputs.append(output)
                bar.update(1)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _stream(
        self, requests: list[Request], news: dict[Request, None], only_finished: bool
    ) -> Generator[RequestOutput, None, None]:
        """The outputs of these requests as they come. What the first `next` returns is nothing yet."""
        try:
            yield None  # type: ignore[misc]
            pending = set(requests)
            while pending:
                with self._lock:
                    if not news and not self._step():  # a step for another caller may have brought some
                        news.update(dict.fromkeys(request for request in pending if request.is_finished))
                        if not news:
                            raise RuntimeError("the engine has nothing to do, but requests are unfinished")
                    told = [request for request in news if request.is_finished or not only_finished]
                    outputs = [request.next_output() for request in told]
                    pending.difference_update(request for request in told if request.is_finished)
                    news.clear()
                yield from outputs
        finally:  # an error, Ctrl-C, or nobody wants the rest
            with self._lock:
                self._abandoned += requests
                if not self._busy:  # else the garbage collector has dropped a stream in the middle of bookkeeping
                    self._end_abandoned()

    def _step(self) -> bool:
        """One step for everybody. False when there was nothing to do."""
        with self._bookkeeping():
            return self.llm_engine.step()

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """Hold the lock, and let Ctrl-C and the end of abandoned requests wait until scheduler and table are whole."""
        with self._lock, _deferred_interrupt():
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                self._end_abandoned()

    def _end_abandoned(self) -> None:
        """End what is unfinished of the requests that nobody waits for any more."""
        if self._llm_engine is not None:
            for request in self._abandoned:
                self._llm_engine.abort_request(request)
        self._abandoned.clear()


def _cache_bytes(asked: int | str | float | None, device: torch.device, gpu_share: float) -> int:
    """Size of the KV cache in bytes."""
    if isinstance(asked, float):
        if not 0 < asked <= 1:
            raise ModelError(f'kv_cache_memory={asked}: a share of free memory is from 0 to 1; or give bytes or "2GiB"')
        return int(asked * available_memory(device))
    if asked is not None:
        return parse_memory(asked)
    if not 0 < gpu_share <= 1:
        raise ValueError(f"gpu_memory_utilization={gpu_share}: it must be more than 0 and at most 1")
    if device.type == "cuda":
        return int(gpu_share * available_memory(device))
    return min(MAX_DEFAULT_CPU_CACHE, available_memory(device) // 2)


def _progress_bar(total: int, shown: bool) -> Any:
    return tqdm(total=total, desc="Answering", unit="prompt", disable=not shown or not sys.stderr.isatty())


@contextmanager
def _loading_bar(name: str, shown: bool | None) -> Iterator[Any]:
    """Yields a callback (bytes done, bytes in all); silent unless a person is watching."""
    hidden = not sys.stderr.isatty() if shown is None else not shown
    with tqdm(desc=f"Loading {name}", unit="B", unit_scale=True, disable=hidden, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until the step is whole: in the middle of bookkeeping it would leave a block without an owner."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    pending: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: pending.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            previous(*pending[-1])
