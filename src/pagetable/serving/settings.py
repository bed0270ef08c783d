"""The settings of `pagetable serve`: each with its default, what it may be and its line of help, in one place.

The command line is generated from this. Names are those of vLLM's flags where they mean the same.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pagetable.engine import SCHEDULING_POLICIES
from pagetable.memory import EVICTION_POLICIES, check_block_size

DAY = 86_400.0  # seconds
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
MODEL, CACHE, SERVER, ACCESS, LIMITS, LOGS = GROUPS = (
    "Model",
    "KV cache and scheduling",
    "Server",
    "Access",
    "Limits",
    "Logs and traces",
)


@dataclass(frozen=True)
class About:
    """What is known of a setting besides its type and default."""

    group: str
    help: str
    low: float | None = None  # the least and the most that it may be
    high: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None  # makes a value of the text that a person writes
    default: str | None = None  # the default, for people, where the value itself says nothing
    secret: bool = False
    for_engine: bool = False  # an argument of LLM


def parse_bytes(text: str) -> int:
    """Bytes meant by "8MiB", "1.5GB" or "4096". ValueError for another text."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)\s*", text, re.IGNORECASE | re.ASCII)
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {f"{letter}ib": 1024**power, f"{letter}b": 1000**power}
    if match is None or match[2].lower() not in units:
        raise ValueError(f'{text[:80]!r} is not a size: give bytes, or a number with a unit: "512KiB", "8MiB", "1.5GB"')
    return int(Fraction(match[1]) * units[match[2].lower()])


def parse_cache_size(text: str) -> str | float:
    """A share of free memory, such as "0.5", as a number; an amount, such as "2GiB", as it is. Or a ValueError."""
    if re.fullmatch(r"0?\.\d+|1\.0*", text, re.ASCII):
        return float(text)
    parse_bytes(text)
    return text


def _setting(group: str, default: Any, help_text: str, *, shown: str | None = None, **about: Any) -> Any:
    known = About(group, help_text, default=shown, **about)
    return field(default=default, repr=not known.secret, metadata={"about": known})


_model = partial(_setting, MODEL, for_engine=True)
_cache = partial(_setting, CACHE, for_engine=True)
_server = partial(_setting, SERVER)
_access = partial(_setting, ACCESS)
_limit = partial(_setting, LIMITS)
_log = partial(_setting, LOGS)


@dataclass(frozen=True)
class ServerSettings:
    """Everything that can be set about a server. ValueError for what is not allowed; no message shows a key.

    Plain data: nothing is read or opened until `load_api_keys` and `load_chat_template` are called.
    """

    model: str = _model("smollm2", "Folder, .gguf file, hub id or alias.")
    served_model_name: tuple[str, ...] = _setting(
        MODEL, (), "Name that clients use; repeat it for several, the first is shown.", shown="the model's"
    )
    chat_template: str | None = _setting(
        MODEL, None, "A file with a Jinja template, or the template itself.", shown="the model's"
    )
    dtype: str = _model("auto", "auto, float32 or bfloat16.")
    device: str = _model("cpu", "cpu or cuda.")
    max_model_len: int | None = _model(None, "Longest prompt plus answer, tokens.", low=1, shown="the model's")
    seed: int = _model(0, "For answers without a seed of their own.")
    threads: int | None = _model(None, "Threads to compute with.", low=1, shown="one a core")
    kernels: str = _model("auto", "auto, numba (compiled, CPU) or torch.")
    batch_invariant: bool = _model(False, "Insist on logits equal to the bit in any batch.")

    block_size: int = _cache(16, "Tokens a block, a power of two.")
    kv_cache_memory: int | str | float | None = _cache(
        None,
        "Size of the KV cache: 2GiB, bytes, or a share of free memory (0.5).",
        parse=parse_cache_size,
        shown="by free memory",
    )
    gpu_memory_utilization: float = _cache(
        0.9, "Share of a GPU's free memory for the KV cache, if its size is not given.", low=0.01, high=1
    )
    enable_prefix_caching: bool = _cache(True, "Share equal prefixes.")
    eviction_policy: str = _cache("lhc", "What is forgotten first.", choices=tuple(sorted(EVICTION_POLICIES)))
    eviction_state: str | None = _cache(
        None, "File in which the policy lhc keeps what it has learned, across restarts.", shown="not kept"
    )
    scheduling_policy: str = _cache("fcfs", "Who goes first.", choices=tuple(sorted(SCHEDULING_POLICIES)))
    max_num_seqs: int = _cache(128, "Sequences that run at once.", low=1)
    max_num_batched_tokens: int | None = _cache(None, "Tokens a step.", low=1, shown="512 on a CPU, 8192 on a GPU")

    host: str = _server("127.0.0.1", "Address to listen at; 0.0.0.0 is all of this machine's.")
    port: int = _server(8000, "0 takes any that is free.", low=0, high=65_535)
    root_path: str = _server("", "Path under which a proxy shows this server, such as /llm.", shown="none")
    ssl_keyfile: str | None = _server(None, "Private key for HTTPS.", shown="plain HTTP")
    ssl_certfile: str | None = _server(None, "Certificate for HTTPS.", shown="plain HTTP")
    shutdown_timeout: float = _server(
        30.0, "Seconds that requests in flight are given to end when the server is stopped.", low=0, high=DAY
    )
    engine_timeout: float = _server(
        120.0, "Seconds without a sign of life after which a busy engine is restarted.", low=1, high=DAY
    )
    stream_timeout: float = _server(
        60.0, "Seconds after which a client that takes nothing of its answer is dropped.", low=1, high=DAY
    )
    disable_fastapi_docs: bool = _server(False, "No pages at /docs and /redoc, no /openapi.json.")
    enable_request_id_headers: bool = _server(False, "Send X-Request-Id with each answer.")

    api_key: tuple[str, ...] = _access(
        (), "Key that clients must send; several may be given.", secret=True, shown="none, all are served"
    )
    api_key_file: str | None = _access(None, "File with a key a line; # begins a comment line.", shown="none")
    admin_api_key: str | None = _access(None, "Key for what only the operator may do.", secret=True, shown="none")
    isolate_keys: bool = _access(False, "Share cached prefixes only among requests of the same key.")
    allowed_origins: tuple[str, ...] = _access(
        (), "Origin whose pages may call this server (CORS), * for all; several may be given.", shown="none"
    )

    max_request_bytes: int = _limit(
        8 << 20, "Largest body of a request: 8MiB, or bytes.", low=1, parse=parse_bytes, shown="8MiB"
    )
    max_n: int = _limit(128, "Most answers that one request may ask for.", low=1)
    max_stop: int = _limit(16, "Most stop strings of a request.", low=0)
    max_logprobs: int = _limit(20, "Most log-probabilities a token that a request may ask for.", low=0)
    max_queued_requests: int = _limit(2048, "Answers that may wait; requests for more are refused with 429.", low=1)

    log_level: str = _log("info", "The least that is logged.", choices=LOG_LEVELS)
    log_format: str = _log("text", "For people or for machines.", choices=("text", "json"))
    log_requests: bool = _log(True, "One line a request.")
    log_prompts: bool = _log(False, "Prompts in the log, too.")
    kv_events_config: str | None = _log(None, "Where to publish events of the KV cache, as JSON.", shown="nowhere")
    otlp_traces_endpoint: str | None = _log(None, "Where to send OpenTelemetry traces.", shown="nowhere")

    keys_on_command_line: bool = False  # told by the command, no option

    def __post_init__(self) -> None:
        for name in ABOUT:
            check_type(name, getattr(self, name))
            _check_range(name, getattr(self, name))
        check_block_size(self.block_size)
        self._check_model()
        self._check_eviction_state()
        self._check_server()
        self._check_access()

    def _check_model(self) -> None:
        for name in (self.model, *self.served_model_name):
            if not name.strip() or not name.isprintable():
                raise ValueError(f"{name[:80]!r} cannot be the name of a model: give one without control characters")
        memory = self.kv_cache_memory
        if isinstance(memory, float) and not 0 < memory <= 1:
            raise ValueError(f"kv_cache_memory={memory}: a share of free memory is more than 0 and at most 1")
        if memory is not None and (parse_bytes(memory) if isinstance(memory, str) else memory) <= 0:
            raise ValueError(f"kv_cache_memory={memory!r}: it must be more than nothing")

    def _check_eviction_state(self) -> None:
        if self.eviction_state == "":
            raise ValueError("eviction_state='': it must name a file")
        if self.eviction_state is not None and self.eviction_policy != "lhc":
            raise ValueError(
                f"eviction_state={self.eviction_state[:80]!r} is for the policy lhc, the only one that learns, and "
                f"eviction_policy={self.eviction_policy!r}: set that to lhc, or leave eviction_state out"
            )

    def _check_server(self) -> None:
        if not re.fullmatch(r"[!-~]+", self.host):
            raise ValueError(f"host={self.host!r}: give an address or a name; 0.0.0.0 is all addresses")
        if not re.fullmatch(r"(/[^/\s?#]+)*", self.root_path):
            raise ValueError(f"root_path={self.root_path!r}: it must begin with / and not end with it, such as /llm")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile go together: give both or none")

    def _check_access(self) -> None:
        for key in self.api_key:
            _check_key(key, "api_key")
        if self.admin_api_key is not None:
            _check_key(self.admin_api_key, "admin_api_key")
        if self.isolate_keys and not self.api_key and self.api_key_file is None:
            raise ValueError("isolate_keys=True needs keys: give api_key or api_key_file")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
                raise ValueError(
                    f"allowed_origins={origin[:80]!r}: give * or an origin such as https://example.org, without "
                    "a path; for several the option several times"
                )

    def model_names(self) -> tuple[str, ...]:
        """Names by which clients may ask for the model; the first is the one that is shown."""
        return self.served_model_name or (self.model,)

    def engine_arguments(self) -> dict[str, str | int | float | bool | None]:
        """The keyword arguments of `LLM`: plain data, fit for another process."""
        return {name: getattr(self, name) for name, about in ABOUT.items() if about.for_engine}

    def load_api_keys(self) -> tuple[str, ...]:
        """Every key that clients may send, each once: those given and those in `api_key_file`.

        Raises ValueError for a file that cannot be read, holds no key or one that cannot be sent. Better no server than
        an open one.
        """
        keys = list(self.api_key)
        if self.api_key_file is not None:
            lines = [line.strip() for line in _read("api_key_file", self.api_key_file).splitlines()]
            in_file = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
            if not in_file:
                raise ValueError(f"api_key_file={self.api_key_file!r} holds no key: write one a line")
            for number, key in in_file:
                _check_key(key, f"line {number} of api_key_file")
            keys += [key for _, key in in_file]
        return tuple(dict.fromkeys(keys))

    def load_chat_template(self) -> str | None:
        """The Jinja source that `chat_template` is or names, None for the model's own. ValueError for no such file."""
        if self.chat_template is None or re.search(r"[{}\n]", self.chat_template):
            return self.chat_template
        return _read("chat_template", self.chat_template)

    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() != "localhost"

    def warnings(self) -> list[str]:
        """What is allowed, but rarely meant. A line each, to be shown when the server starts."""
        found = []
        needs_key = bool(self.api_key) or self.api_key_file is not None
        if self.is_public() and not needs_key:
            found.append(
                f"ANYONE WHO REACHES {self.host} PORT {self.port} CAN USE THIS SERVER: it has no api key. "
                "Set PAGETABLE_API_KEY or --api-key-file, or listen at 127.0.0.1"
            )
        if "*" in self.allowed_origins and not needs_key:
            found.append("allowed_origins=* without an api key: any web page that you open can use this server")
        if self.keys_on_command_line:
            found.append(
                "keys given on the command line can be seen in the list of processes: "
                "use --api-key-file, PAGETABLE_API_KEY and PAGETABLE_ADMIN_API_KEY"
            )
        return found


ABOUT: dict[str, About] = {
    item.name: item.metadata["about"] for item in fields(ServerSettings) if "about" in item.metadata
}
DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(ServerSettings)}
_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list of texts"}


@cache
def types_of(name: str) -> frozenset[type]:
    """The types that the values of a setting have; `tuple` stands for several texts."""
    hint = _hints()[name]
    return frozenset({tuple} if get_origin(hint) is tuple else get_args(hint) or {hint})


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(ServerSettings)


def check_type(name: str, value: object) -> None:
    """ValueError unless a value of this type can be the setting's. True is no number here, and 1 not true."""
    types = types_of(name)
    if isinstance(value, tuple) and tuple in types and all(isinstance(part, str) for part in value):
        return
    if not isinstance(value, tuple) and (type(value) in types or (float in types and type(value) is int)):
        return
    shown = name if ABOUT[name].secret else f"{name}={str(value)[:80]!r}"
    allowed = sorted(_TYPE_NAMES[kind] for kind in types - {NoneType})
    raise ValueError(f"{shown}: it must be {' or '.join(allowed)}")


def _check_range(name: str, value: Any) -> None:
    about = ABOUT[name]
    if about.choices and value not in about.choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(about.choices)}")
    if value is None or about.low is None:
        return
    if about.high is None and value < about.low:
        raise ValueError(f"{name}={value}: it must be {about.low:g} or more")
    if about.high is not None and not about.low <= value <= about.high:  # this way round it refuses nan as well
        raise ValueError(f"{name}={value}: {about.low:g} to {about.high:g} are allowed")


def _check_key(key: str, where: str) -> None:
    """Only what an Authorization header can carry. The message does not show the key, it goes into logs."""
    if not re.fullmatch(r"[!-~]+", key):
        wrong = "has a character other than ASCII letters, digits and signs, or a space" if key else "is empty"
        raise ValueError(f"{where}: a key {wrong}; no client could send it")


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:  # what it says would show a part of the file
        raise ValueError(f"{name}={path!r} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{name}={path[:200]!r} cannot be read: {error.strerror}") from error
