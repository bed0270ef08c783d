"""Real servers for tests: a process of its own, a free port, a tiny model with random weights."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.model.tiny_models import save_hf, tiny_llama
from tests.text.conftest import byte_level_backend, write_folder

CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """A Llama of two layers whose answers are nonsense, and different for each prompt; with tokenizer and template."""
    backend = byte_level_backend()
    save_hf(tiny_llama(vocab_size=backend.get_vocab_size(), max_position_embeddings=2048), folder)
    config = {"eos_token": "<|end|>", "pad_token": None, "chat_template": CHAT_TEMPLATE}
    return write_folder(folder, backend, tokenizer_config=config)


class RunningServer:
    """A server process and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.url = ""
        self._reads = threading.Event()
        self._reads.set()

    def stop_reading(self) -> None:
        """Leave what the server says where it is."""
        self._reads.clear()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._reads.wait()
            self.lines.append(line)
            self._said.put(line)
        self._said.put(None)

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """The first line from here on in which `pattern` is found."""
        end = time.monotonic() + timeout
        while (line := self._said.get(timeout=max(0.01, end - time.monotonic()))) is not None:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the server ended without saying {pattern!r}:\n{''.join(self.lines)}")

    def engine_pid(self) -> int:
        """The process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(c) for c in children if "engine_process" in Path(f"/proc/{c}/cmdline").read_text()]
        return pid

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values that have these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def wait_until_idle(self, timeout: float = 10) -> None:
        """Until no block is in use and nothing runs or waits, as the metrics tell."""
        end = time.monotonic() + timeout
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while self.metric("pagetable:kv_blocks", state="in_use") or any(self.metric(name) for name in names):
            assert time.monotonic() < end, "blocks are still in use"
            time.sleep(0.05)

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextmanager
def running_server(model: str | Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """`pagetable serve` with these arguments at a free port, ready."""
    command = [sys.executable, "-m", "pagetable", "serve", str(model), "--port", "0", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    ) as process:
        server = RunningServer(process)
        try:
            server.url = server.wait_for(r"Ready: (https?://\S+)/v1")[1]
            yield server
            server.stop()
        finally:
            process.kill()


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`pagetable serve` with these arguments, which do not let it start."""
    command = [sys.executable, "-m", "pagetable", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
