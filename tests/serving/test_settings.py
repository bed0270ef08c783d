"""The settings of `pagetable serve`, and the ways in which they are given."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagetable.cli import cli
from pagetable.serving.command import read_config
from pagetable.serving.settings import ABOUT, DEFAULTS, GROUPS, ServerSettings, parse_bytes

SECRET = "sk-aB3-x_9.~+/=="
Serve = Callable[..., ServerSettings]


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*ABOUT, "config"]:
        monkeypatch.delenv(f"PAGETABLE_{name.upper()}", raising=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, list[ServerSettings]]]:
    """`pagetable serve ...` with a server that only notes its settings."""
    served: list[ServerSettings] = []
    server: Any = ModuleType("pagetable.serving.server")
    server.serve = served.append
    monkeypatch.setitem(sys.modules, server.__name__, server)

    def run(*arguments: str) -> tuple[Result, list[ServerSettings]]:
        return CliRunner().invoke(cli, ["serve", *arguments]), served

    return run


@pytest.fixture
def serve(run: Callable[..., tuple[Result, list[ServerSettings]]]) -> Serve:
    def serve(*arguments: str) -> ServerSettings:
        result, served = run(*arguments)
        if result.exception:
            raise result.exception if isinstance(result.exception, ValueError) else ValueError(result.output)
        return served[-1]

    return serve


# -------------------------------------------------------------------- defaults and help


def test_with_nothing_given_the_command_has_the_defaults(serve: Serve):
    assert serve() == ServerSettings()


def test_the_engine_gets_arguments_that_llm_has_with_the_same_defaults():
    from pagetable.llm import LLM

    of_llm = inspect.signature(LLM.__init__).parameters
    arguments = ServerSettings().engine_arguments()
    assert arguments == {name: of_llm[name].default for name in arguments}
    apart = {"self", "vllm_options", "events", "progress", "chat_template"}  # the front renders chats
    assert set(arguments) == set(of_llm) - apart


def test_every_setting_is_an_option_but_the_one_that_the_command_tells():
    assert {item.name for item in fields(ServerSettings)} - set(ABOUT) == {"keys_on_command_line"}


def test_help_shows_all_groups_settings_and_defaults():
    text = " ".join(CliRunner().invoke(cli, ["serve", "--help"], terminal_width=1000).output.split())
    for group in GROUPS:
        assert f" {group}: " in text
    text = text[text.index(f" {GROUPS[0]}: ") :]
    assert "MODEL Folder, .gguf file, hub id or alias. [default: smollm2]" in text
    for name, about in ABOUT.items():
        if name == "model":
            continue
        flag = name.replace("_", "-")
        default = DEFAULTS[name]
        shown = (flag if default else f"no-{flag}") if isinstance(default, bool) else str(default)
        start = text.index(f" --{flag} ")
        assert text[start:].split("[default: ")[1].startswith(f"{about.default or shown}]"), name


def test_help_does_not_show_keys_of_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGETABLE_ADMIN_API_KEY", SECRET)
    (tmp_path / "s.yaml").write_text(f"api-key: {SECRET}")
    result = CliRunner().invoke(cli, ["serve", "--config", str(tmp_path / "s.yaml"), "--help"])
    assert result.exit_code == 0
    assert SECRET not in result.output


BASE_INSTALL = "import sys; sys.modules.update(dict.fromkeys(('torch', 'fastapi', 'uvicorn', 'yaml', 'msgspec')))\n"


def without_extras(*arguments: str) -> subprocess.CompletedProcess:
    code = f"{BASE_INSTALL}sys.argv = {['pagetable', *arguments]!r}; import pagetable.__main__"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_needs_no_extra():
    assert "serve" in without_extras("--help").stdout
    assert "--max-queued-requests" in without_extras("serve", "--help").stdout


def test_a_missing_extra_is_one_line(tmp_path: Path):
    (tmp_path / "s.yaml").write_text("port: 1")
    run = without_extras("serve", "--config", str(tmp_path / "s.yaml"))
    assert run.returncode == 1
    assert "'serve'" in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 1


# -------------------------------------------------------------------- command line, environment, file


def test_the_command_line_goes_before_the_environment_before_the_file_before_the_default(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "s.yaml").write_text("model: of-file\nport: 1\nmax-n: 2\nlog_prompts: true\napi-key: of-file")
    file = ("--config", str(tmp_path / "s.yaml"))
    settings = serve(*file)
    assert (settings.model, settings.port, settings.max_n, settings.log_prompts) == ("of-file", 1, 2, True)
    assert (settings.api_key, settings.host) == (("of-file",), DEFAULTS["host"])

    for name, value in {"MODEL": "of-env", "PORT": "3", "LOG_PROMPTS": "false", "API_KEY": "of-env"}.items():
        monkeypatch.setenv(f"PAGETABLE_{name}", value)
    settings = serve(*file)
    assert (settings.model, settings.port, settings.max_n, settings.log_prompts) == ("of-env", 3, 2, False)
    assert settings.api_key == ("of-env",)

    settings = serve("given", *file, "--port", "4", "--log-prompts", "--api-key", "given")
    assert (settings.model, settings.port, settings.max_n, settings.log_prompts) == ("given", 4, 2, True)
    assert settings.api_key == ("given",)


def test_the_environment_takes_several_values_with_commas(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGETABLE_API_KEY", f"one, {SECRET}")
    monkeypatch.setenv("PAGETABLE_SERVED_MODEL_NAME", "a b,c")
    settings = serve()
    assert settings.api_key == ("one", SECRET)
    assert settings.served_model_name == ("a b", "c")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("API_KEY", ""),
        ("API_KEY", " "),
        ("API_KEY", "a,,b"),
        ("API_KEY", "a,"),
        ("ADMIN_API_KEY", ""),
        ("ADMIN_API_KEY", " "),
    ],
)
def test_an_empty_key_in_the_environment_does_not_open_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str, given: str
):
    monkeypatch.setenv(f"PAGETABLE_{name}", given)
    with pytest.raises(ValueError, match=r"(?i)api_key.*(empty|no client)"):
        serve()


def test_a_wrong_value_in_the_environment_is_refused_by_name(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGETABLE_PORT", "tcp://10.0.0.1:8000")  # what Kubernetes sets for a service of our name
    with pytest.raises(ValueError, match="PAGETABLE_PORT|--port"):
        serve()


def test_every_setting_can_stand_in_a_file(tmp_path: Path):
    lines = [f"{name.replace('_', '-')}: {_as_yaml(DEFAULTS[name])}" for name in ABOUT]
    (tmp_path / "s.yaml").write_text("\n".join(lines))
    assert ServerSettings(**read_config(tmp_path / "s.yaml")) == ServerSettings()


def _as_yaml(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return "" if value is None else f"'{value}'" if isinstance(value, str) else str(value).lower()


def test_the_environment_can_name_the_file(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "s.yaml").write_text("max-request-bytes: 1MiB\nserved-model-name: [a, b]\nkv-cache-memory: 0.5\n")
    monkeypatch.setenv("PAGETABLE_CONFIG", str(tmp_path / "s.yaml"))
    settings = serve()
    assert settings.max_request_bytes == 1 << 20
    assert settings.model_names() == ("a", "b")
    assert settings.kv_cache_memory == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "no setting 'prot'; did you mean port"),
        ("max-num-seq: 1", "did you mean max-num-seqs"),
        ("gibberish-qqq: 1", "no setting 'gibberish-qqq'$"),
        ("keys-on-command-line: true", "no setting"),
        ("1: 2", "no setting '1'"),
        ("port: '8000'", "port='8000': it must be a whole number"),
        ("port: true", "port='True': it must be a whole number"),
        ("port: 8000.0", "port="),
        ("port:", "port='None'"),
        ("api-key:", "api_key: it must be a list of texts"),
        ("api-key: 12345", "api_key: it must be a list of texts$"),
        ("api-key: [a, {b: c}]", "api_key: it must be a list of texts$"),
        ("log-prompts: 1", "log_prompts='1': it must be true or false"),
        ("log-prompts: 'yes'", "log_prompts="),
        ("host: [a]", "host="),
        ("stream-timeout: soon", "stream_timeout='soon': it must be a number"),
        ("max-request-bytes: 8 apples", "8 apples"),
        ("max-n: 1\nmax_n: 2", "given twice"),
        ("[1, 2]", "one setting a line"),
        ("just text", "one setting a line"),
        ("a: b: c", "line 1 is not valid YAML"),
        ("seed: 2020-13-45", "not valid YAML"),
        ("seed: 2020-12-24", "seed='2020-12-24'"),
        ("host: \x00", "not valid YAML"),
        ("port: 1\nhost: !!python/object/apply:os.system [id]", "not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_refused_by_name(serve: Serve, tmp_path: Path, text: str, says: str):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        serve("--config", str(tmp_path / "s.yaml"))
    assert "s.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"api-key: *{SECRET}", f"api-key: !{SECRET}", f"api-key: {SECRET}: x", f"api-key: '{SECRET}"]
)
def test_a_mistake_in_the_file_does_not_show_the_key(tmp_path: Path, text: str):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match="line 1") as caught:
        read_config(tmp_path / "s.yaml")
    assert SECRET[:6] not in str(caught.value)


def test_an_empty_file_changes_nothing(serve: Serve, tmp_path: Path):
    (tmp_path / "s.yaml").write_text("# nothing yet\n")
    assert serve("--config", str(tmp_path / "s.yaml")) == ServerSettings()


def test_sizes_on_the_command_line(serve: Serve):
    settings = serve("--kv-cache-memory", "2GiB", "--max-request-bytes", "512 KiB")
    assert (settings.kv_cache_memory, settings.max_request_bytes) == ("2GiB", 512 << 10)
    assert serve("--kv-cache-memory", ".5").kv_cache_memory == 0.5
    assert serve("--kv-cache-memory", "1073741824").kv_cache_memory == "1073741824"
    with pytest.raises(ValueError, match="'lots' is not a size"):
        serve("--kv-cache-memory", "lots")


def test_a_size_is_read_as_the_model_room_reads_it():
    from pagetable.model import parse_memory

    for text in ("1", "512MiB", " 1.5 gb ", "3TB", "2TiB", "7b", "4kb"):
        assert parse_bytes(text) == parse_memory(text)
    for text in ("", "MiB", "-1", "1e3", "1PiB", "0x10", "1.", "٣"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(text)


# -------------------------------------------------------------------- keys


def test_keys_are_never_shown():
    settings = ServerSettings(api_key=(SECRET,), admin_api_key=SECRET)
    assert SECRET not in repr(settings) + str(settings) + "".join(settings.warnings())
    assert SECRET not in str(settings.engine_arguments())


@pytest.mark.parametrize("key", ["", " ", "my pass", "schlüssel", "tab\t", "new\nline", "\x7f", "a\x00b", "😀"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str):
    for given in ({"api_key": (SECRET, key)}, {"admin_api_key": key}):
        with pytest.raises(ValueError, match="api_key: a key") as caught:
            ServerSettings(**given)
        assert len(key) < 3 or key not in str(caught.value)
        assert SECRET not in str(caught.value)


def test_keys_from_a_file_join_the_others(tmp_path: Path):
    (tmp_path / "keys").write_bytes(f"\ufeff# ours\r\n\r\n  first \r\n#second\n{SECRET}\nfirst".encode())
    settings = ServerSettings(api_key=("given", "first"), api_key_file=str(tmp_path / "keys"))
    assert settings.load_api_keys() == ("given", "first", SECRET)
    assert ServerSettings().load_api_keys() == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no key"),
        (b"\n# only this\n", "no key"),
        (f"ok\n\n{SECRET} two".encode(), "line 3 of api_key_file"),
        (b"key\xff", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_key_file_without_use_is_refused(tmp_path: Path, content: bytes | None, says: str):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        ServerSettings(api_key_file=str(tmp_path / "keys")).load_api_keys()
    assert "api_key_file" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_isolation_needs_keys():
    with pytest.raises(ValueError, match="isolate_keys"):
        ServerSettings(isolate_keys=True)
    ServerSettings(isolate_keys=True, api_key=("a",))
    ServerSettings(isolate_keys=True, api_key_file="keys")


# -------------------------------------------------------------------- warnings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost", "LocalHost"])
def test_an_address_of_this_machine_alone_needs_no_key(host: str):
    assert ServerSettings(host=host).warnings() == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org"])
def test_a_public_address_without_a_key_warns(host: str):
    (warning,) = ServerSettings(host=host).warnings()
    assert "ANYONE" in warning
    assert host in warning
    assert ServerSettings(host=host, admin_api_key="a").warnings() == [warning]
    assert ServerSettings(host=host, api_key=("a",)).warnings() == []
    assert ServerSettings(host=host, api_key_file="keys").warnings() == []


def test_all_origins_without_a_key_warn():
    assert "web page" in ServerSettings(allowed_origins=("*",)).warnings()[0]
    assert ServerSettings(allowed_origins=("*",), api_key=("a",)).warnings() == []
    assert ServerSettings(allowed_origins=("https://example.org",)).warnings() == []


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key"])
def test_a_key_on_the_command_line_warns(serve: Serve, option: str):
    assert "list of processes" in serve(option, SECRET).warnings()[0]


def test_a_key_in_the_environment_or_a_file_does_not_warn(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "s.yaml").write_text(f"api-key: {SECRET}")
    assert serve("--config", str(tmp_path / "s.yaml")).warnings() == []
    monkeypatch.setenv("PAGETABLE_API_KEY", SECRET)
    assert serve().warnings() == []


# -------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"port": -1}, "port=-1: 0 to 65535 are allowed"),
        ({"port": 65_536}, "port=65536"),
        ({"port": True}, "port="),
        ({"port": None}, "port="),
        ({"host": ""}, "host="),
        ({"host": "a b"}, "host="),
        ({"model": " "}, "name of a model"),
        ({"model": "a\nb"}, "name of a model"),
        ({"served_model_name": ("",)}, "name of a model"),
        ({"served_model_name": "a"}, "served_model_name='a': it must be a list of texts"),
        ({"api_key": SECRET}, "api_key: it must be a list of texts$"),
        ({"admin_api_key": (SECRET,)}, "admin_api_key: it must be a text$"),
        ({"allowed_origins": ("example.org",)}, "allowed_origins"),
        ({"allowed_origins": ("https://example.org/",)}, "allowed_origins"),
        ({"allowed_origins": ('["*"]',)}, "allowed_origins"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"ssl_keyfile": "key.pem"}, "ssl_certfile"),
        ({"ssl_certfile": "cert.pem"}, "ssl_keyfile"),
        ({"max_request_bytes": 0}, "max_request_bytes=0: it must be 1 or more"),
        ({"max_request_bytes": "8MiB"}, "max_request_bytes="),
        ({"max_n": 0}, "max_n"),
        ({"max_stop": -1}, "max_stop"),
        ({"max_logprobs": -1}, "max_logprobs"),
        ({"max_queued_requests": 0}, "max_queued_requests"),
        ({"shutdown_timeout": -0.1}, "shutdown_timeout"),
        ({"engine_timeout": float("nan")}, "engine_timeout"),
        ({"stream_timeout": float("inf")}, "stream_timeout"),
        ({"log_level": "loud"}, "log_level='loud': choose one of debug, info"),
        ({"log_format": "xml"}, "log_format"),
        ({"log_requests": 1}, "log_requests"),
        ({"block_size": 3}, "block_size=3"),
        ({"kv_cache_memory": -1}, "kv_cache_memory"),
        ({"kv_cache_memory": 0}, "kv_cache_memory"),
        ({"kv_cache_memory": "0MiB"}, "kv_cache_memory"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory"),
        ({"kv_cache_memory": float("nan")}, "kv_cache_memory"),
        ({"kv_cache_memory": "lots"}, "lots"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"threads": 0}, "threads"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"eviction_policy": "whim"}, "eviction_policy"),
        ({"eviction_state": "file", "eviction_policy": "lru"}, "eviction_state='file' is for the policy lhc.*='lru'"),
        ({"eviction_state": "file", "eviction_policy": "arc"}, "eviction_policy='arc'"),
        ({"eviction_state": "", "eviction_policy": "lhc"}, "eviction_state=''"),
        ({"eviction_state": 5, "eviction_policy": "lhc"}, "eviction_state='5': it must be a text"),
        ({"scheduling_policy": "whim"}, "scheduling_policy"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(given: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says) as caught:
        ServerSettings(**given)
    assert SECRET not in str(caught.value)


def test_the_ends_of_the_ranges_are_allowed():
    ServerSettings(port=0, shutdown_timeout=0, max_stop=0, max_logprobs=0, gpu_memory_utilization=1)
    ServerSettings(port=65_535, max_request_bytes=1, kv_cache_memory=1.0, root_path="/a/b")
    ServerSettings(ssl_keyfile="key.pem", ssl_certfile="cert.pem", allowed_origins=("*", "null", "http://[::1]:3000"))


def test_a_chat_template_is_a_file_or_the_text_itself(tmp_path: Path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert ServerSettings().load_chat_template() is None
    assert ServerSettings(chat_template=str(tmp_path / "chat.jinja")).load_chat_template() == "{{ messages }}"
    assert ServerSettings(chat_template="{% x %}").load_chat_template() == "{% x %}"
    with pytest.raises(ValueError, match="chat_template='chta.jinja' cannot be read"):
        ServerSettings(chat_template="chta.jinja").load_chat_template()
