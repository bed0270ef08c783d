"""Contestants for `engine.py`, each in a process of its own: both ends of the pipe.

A process loads its model once and then answers one JSON line on its standard input with one on its standard output:

    {"do": "answer", "requests": [[token ids of the prompt, output tokens], ...]}
                             all at once, greedy, past end tokens -> {"answers": token ids of each,
                             "seconds": until the last token, "ttft": seconds to the first token of each}
    {"do": "reset"}          forget cached prefixes -> {}
    {"do": "memory"}         -> {"bytes": the peak of resident memory}
    {"do": "steps", ...}     ours only: requests as above -> {"step": ..., "execute": ...}, seconds of decode steps
    {"do": "check", ...}     transformers only: pairs of a prompt and its answer -> {"equal": a truth value of each}

This file runs under each peer's own Python, so whatever is not in the standard library is imported where it is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

PATIENCE_S = 900.0  # for one answer; then the process is taken for hung
STEP_TOKENS = 512  # openvino's default is 256, with which it is slower on every workload here
CONTEXT = 8192  # tokens of llama.cpp's one context

Requests = list[tuple[list[int], int]]  # token ids of the prompt, number of output tokens


class ContestantError(RuntimeError):
    """A contestant's process ended or hung; the message is the last line it wrote on stderr."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part: a name for the tables, its Python, its class below, what that is made with, and in what."""

    name: str
    python: str
    kind: str
    model: Path
    workloads: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


class Process:
    """A contestant at work, seen from the benchmark. Use as a context manager."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.name = contestant.name
        self.started = perf_counter()
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        arguments = json.dumps({"model": str(contestant.model), **contestant.options})
        self._process = subprocess.Popen(
            [contestant.python, __file__, contestant.kind, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one command. ContestantError when none comes."""
        watchdog = threading.Timer(PATIENCE_S, self._process.kill)
        watchdog.start()
        try:
            self._in.write(json.dumps({"do": do, **arguments}) + "\n")
            self._in.flush()
            line = self._out.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise ContestantError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return lines[-1] if lines else f"ended with code {code} and said nothing"

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._in, self._out, self._stderr):
            with suppress(BrokenPipeError):  # it ended with a command unread
                stream.close()


def write_gguf(source: Path, target: Path, float_type: str) -> None:
    """Write the GGUF file `source` again with its matrices as "float16" or "float32"; vectors are float32 in both."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for entry in reader.fields.values():
        own = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
        if not entry.name.startswith(own):
            item = entry.types[1] if entry.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(entry.name, entry.contents(), entry.types[0], item)
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if float_type == "float16" else LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.astype(float_type if numbers.ndim > 1 else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------------------------------------ inside a process


class Watch:
    """Notes the tokens of some requests as they come, and when the first of each came."""

    def __init__(self, count: int) -> None:
        self.answers: list[list[int]] = [[] for _ in range(count)]
        self._ttft = [0.0] * count
        self._start = perf_counter()

    def note(self, index: int, tokens: list[int]) -> None:
        """All tokens so far of one request."""
        if tokens and not self.answers[index]:
            self._ttft[index] = perf_counter() - self._start
        self.answers[index] = tokens

    def result(self) -> dict[str, Any]:
        """What a process answers; to be called when the last token has come."""
        return {"answers": self.answers, "seconds": perf_counter() - self._start, "ttft": self._ttft}


class Pagetable:
    """Ours, through its public API."""

    def __init__(self, model: str, cache_gib: int = 1, **options: Any) -> None:
        from pagetable import LLM

        self._llm = LLM(model, dtype="float32", kv_cache_memory=f"{cache_gib}GiB", progress=False, **options)
        self._served = 0

    def answer(self, requests: Requests) -> dict[str, Any]:
        """Streamed."""
        from pagetable import SamplingParams

        prompts = [prompt for prompt, _ in requests]
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in requests]
        first_id = self._served  # request ids are counted from 0
        self._served += len(requests)
        watch = Watch(len(requests))
        for output in self._llm.stream(prompts, params):
            watch.note(int(output.request_id) - first_id, output.outputs[0].token_ids)
        return watch.result()

    def reset(self) -> dict[str, Any]:
        """The cache is emptied."""
        self._llm.reset_prefix_cache()
        return {}

    def steps(self, requests: Requests) -> dict[str, Any]:
        """Seconds of each step in which all requests were decoding: start to next start, and of that in `execute`."""
        engine = self._llm.engine
        runner, engine.runner = engine.runner, TimedRunner(engine.runner)
        try:
            self.answer(requests)
            return engine.runner.decode_steps(len(requests))
        finally:
            engine.runner = runner


class TimedRunner:
    """A runner of ours that notes of each step its start, its end, its sequences and its tokens."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._steps: list[tuple[float, float, int, int]] = []

    def execute(self, step: Any) -> Any:
        """Compute the step."""
        start = perf_counter()
        output = self._runner.execute(step)
        self._steps.append((start, perf_counter(), len(step.seqs), step.num_tokens))
        return output

    def decode_steps(self, running: int) -> dict[str, list[float]]:
        """Of the steps that decoded all of `running` sequences and were followed by another such step."""
        pairs = [
            (this, after)
            for this, after in zip(self._steps, self._steps[1:], strict=False)
            if this[2:] == after[2:] == (running, running)
        ]
        return {
            "step": [after[0] - this[0] for this, after in pairs],
            "execute": [this[1] - this[0] for this, _ in pairs],
        }


class OpenVINO:
    """openvino-genai's continuous batching. Its prefix cache has no reset: the pipeline is made anew."""

    def __init__(self, model: str, enable_prefix_caching: bool = True) -> None:
        self._model, self._enable_prefix_caching = model, enable_prefix_caching
        self._requests = 0
        self._pipeline = self._make()

    def _make(self) -> Any:
        from openvino_genai import ContinuousBatchingPipeline, SchedulerConfig

        config = SchedulerConfig()
        config.cache_size = 1  # GiB
        config.enable_prefix_caching = self._enable_prefix_caching
        config.dynamic_split_fuse = True
        config.max_num_batched_tokens = STEP_TOKENS
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        return ContinuousBatchingPipeline(self._model, config, "CPU", exact)

    def _add(self, prompt: list[int], length: int) -> Any:
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        self._requests += 1
        config = GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
        return self._pipeline.add_request(self._requests, Tensor(np.array([prompt], dtype=np.int64)), config)

    def answer(self, requests: Requests) -> dict[str, Any]:
        """Step by step, each handle read after each step."""
        watch = Watch(len(requests))
        handles = [self._add(*request) for request in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        watch.note(index, watch.answers[index] + output.generated_ids)
        return watch.result()

    def reset(self) -> dict[str, Any]:
        """A new pipeline."""
        del self._pipeline
        self._pipeline = self._make()
        return {}


class LlamaCpp:
    """llama-cpp-python, K and V in float32. It knows one sequence: the prefix of the request before is what it has."""

    def __init__(self, model: str) -> None:
        from llama_cpp import GGML_TYPE_F32, Llama

        self._llama = Llama(
            model,
            n_ctx=CONTEXT,
            n_batch=STEP_TOKENS,
            n_threads=os.cpu_count(),
            n_threads_batch=os.cpu_count(),
            type_k=GGML_TYPE_F32,
            type_v=GGML_TYPE_F32,
            verbose=False,
        )

    def answer(self, requests: Requests) -> dict[str, Any]:
        """One after another."""
        watch = Watch(len(requests))
        for index, (prompt, length) in enumerate(requests):
            for token in self._llama.generate(prompt, temp=0.0):
                watch.note(index, [*watch.answers[index], token])
                if len(watch.answers[index]) == length:
                    break
        return watch.result()

    def reset(self) -> dict[str, Any]:
        """Its own method."""
        self._llama.reset()
        return {}


class Transformers:
    """transformers' `generate`, which keeps nothing from request to request; and the judge of the others' answers."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        path = Path(model)
        self._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def answer(self, requests: Requests) -> dict[str, Any]:
        """One after another."""
        import torch

        watch = Watch(len(requests))
        for index, (prompt, length) in enumerate(requests):
            self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=length,
                min_new_tokens=length,
                streamer=TokenStreamer(watch, index),
            )
        return watch.result()

    def reset(self) -> dict[str, Any]:
        """There is nothing to forget."""
        return {}

    def check(self, pairs: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
        """Whether each answer is the greedy one: a forward pass over both, and the likeliest token at each place."""
        import torch

        equal = []
        for prompt, answer in pairs:
            with torch.inference_mode():
                logits = self._model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
            equal.append(logits.argmax(-1).tolist() == answer)
        return {"equal": equal}


class TokenStreamer:
    """What transformers calls with the prompt, and then with each new token."""

    def __init__(self, watch: Watch, index: int) -> None:
        self._watch, self._index = watch, index
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """The prompt first."""
        if self._prompt_seen:
            self._watch.note(self._index, self._watch.answers[self._index] + tokens.tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to do: the caller of `generate` knows."""


CONTESTANTS = {"pagetable": Pagetable, "openvino": OpenVINO, "llama-cpp": LlamaCpp, "transformers": Transformers}


def peak_memory() -> int:
    """Bytes. Not `getrusage`, whose peak may be that of the process that started this one."""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def serve(kind: str, options: dict[str, Any]) -> None:
    """Answer commands until there are no more."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get in between
    contestant = CONTESTANTS[kind](**options)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        answer = {"bytes": peak_memory()} if do == "memory" else getattr(contestant, do)(**command)
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
