"""What a client says of its session reaches the page table, from the body or from headers, and ends nobody else's."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from pagetable import LLM, SamplingParams
from pagetable.memory import CacheHints
from pagetable.serving.app import build_app
from pagetable.serving.engine_client import QueueFullError
from pagetable.serving.engine_process import EngineProcess
from pagetable.serving.front import Front
from pagetable.serving.messages import Done, EndSession, Ready, Shutdown, Submit, ToFront
from pagetable.serving.metrics import ServerMetrics
from pagetable.serving.schema import ChatCompletionRequest, CompletionRequest
from pagetable.serving.settings import ServerSettings
from tests.serving.conftest import CACHE
from tests.serving.running import run_serve, running_server

SMALL = ("--kv-cache-memory", "320KiB", "--max-model-len", "512")  # 40 blocks
BODY = {"session_id": "s", "end_session": True, "expected_idle_s": 12.5, "cache_priority": 80, "ttl_s": 3600}
HEADERS = {
    "X-Session-Id": "h",
    "X-End-Session": "1",
    "X-Expected-Idle-S": "2.5e1",
    "X-Cache-Priority": "7",
    "X-Ttl-S": "0",
}
OF_BODY = CacheHints("s", True, 12.5, 80, 3600)
OF_HEADERS = CacheHints("h", True, 25, 7, 0)


def text_of(seed: int | str, num_blocks: int) -> list[int]:
    """Tokens that fill so many blocks and begin another one; with another seed they have nothing in common."""
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(16 * num_blocks + 1)]


def ask(http: httpx.Client, prompt: Any, headers: dict[str, str] | None = None, **body: Any) -> int:
    """How many tokens of a prompt were cached."""
    request = {"prompt": prompt, "max_tokens": 1, **body}
    response = http.post("/v1/completions", json=request, headers=headers or {})
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def end(http: httpx.Client, session_id: str, headers: dict[str, str] | None = None, **body: Any) -> int:
    """End a session. How many blocks it had."""
    path = f"/v1/sessions/{quote(session_id, safe='')}/end"
    response = http.post(path, headers=headers or {}, **({"json": body} if body else {}))
    assert response.status_code == 200, response.text
    num_blocks = response.json()["ended_blocks"]
    assert response.json() == {"id": session_id, "object": "session", "ended_blocks": num_blocks}
    return num_blocks


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


# -------------------------------------------------------------------- from the request to the engine


class NotingEngine:
    """Stands for the engine: notes what is submitted, and has no place for it."""

    ready = Ready("", num_blocks=40, block_size=16, max_model_len=512, max_num_seqs=4)

    def __init__(self) -> None:
        self.hints: list[CacheHints] = []

    def submit(self, *request: Any, cache_hints: CacheHints, **options: Any) -> None:
        self.hints.append(cache_hints)
        raise QueueFullError("full")


def noted_hints(llm: LLM, body: dict[str, Any], headers: Any) -> tuple[CacheHints | None, httpx.Response]:
    """The hints that a request hands to the engine, if it gets so far, and the answer."""
    engine: Any = NotingEngine()
    front = Front(ServerSettings(), llm.tokenizer, engine, ServerMetrics("tiny"))

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(front))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            return await http.post(path, json=body, headers=headers)

    try:
        response = asyncio.run(post())
    finally:
        front.close()
    return (engine.hints[0] if engine.hints else None), response


@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}])
@pytest.mark.parametrize(
    ("body", "headers", "hints"),
    [
        ({}, {}, CacheHints()),
        (BODY, {}, OF_BODY),
        ({}, HEADERS, OF_HEADERS),
        (BODY, HEADERS, OF_BODY),
        (dict.fromkeys(BODY.keys() - {"end_session"}), HEADERS, OF_HEADERS),
        ({"end_session": False}, HEADERS, CacheHints("h", False, 25, 7, 0)),
        ({"ttl_s": 5}, HEADERS, CacheHints("h", True, 25, 7, 5)),
        ({"ttl_s": 5}, {"X-Ttl-S": "soon"}, CacheHints(ttl_s=5)),  # what does not count is not looked at
        ({}, {"x-session-id": "a b/c%2F", "X-End-Session": "false"}, CacheHints("a b/c%2F")),
        ({}, {"X-End-Session": "true"}, CacheHints(end_session=True)),
        ({}, {"X-End-Session": "0", "X-Cache-Priority": "007"}, CacheHints(cache_priority=7)),
        ({"session_id": "\u00fc" * 256}, {}, CacheHints("\u00fc" * 256)),
    ],
)
def test_hints_reach_the_engine_and_the_body_goes_before_headers(
    tiny_llm: LLM, prompt: dict, body: dict, headers: dict, hints: CacheHints
):
    assert noted_hints(tiny_llm, prompt | body, headers)[0] == hints


LONG = "x" * 257


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("session_id", value) for value in ("", LONG, 5, ["s"], "\ud800")],
        *[("end_session", value) for value in (1, "true")],
        *[("expected_idle_s", value) for value in (-1, 1e9 + 1, "5", True, float("nan"), float("inf"), 10**400)],
        *[("cache_priority", value) for value in (-1, 101, 5.5, "5", True)],
        *[("ttl_s", value) for value in (-0.1, 2e9, {}, float("-inf"))],
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_field_is_refused_by_name(http: httpx.Client, path: str, name: str, value: Any):
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    content = json.dumps({**prompt, name: value})
    error = refused(http.post(path, content=content, headers={"Content-Type": "application/json"}))
    assert error["param"] == name
    assert name in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("header", "text", "says"),
    [
        ("X-Session-Id", "", "session_id='': it must be a text of 1 to 256 characters"),
        ("X-Session-Id", LONG, "it must be a text of 1 to 256 characters"),
        ("X-Session-Id", "\u00fc".encode(), "not ASCII; the body's session_id may be any text"),
        ("X-End-Session", "yes", "end_session='yes': it must be true or false"),
        ("X-End-Session", "", "end_session='': it must be true or false"),
        ("X-Expected-Idle-S", "-1", "expected_idle_s=-1.0: it must be a number of seconds from 0 to 1000000000"),
        ("X-Expected-Idle-S", "soon", "expected_idle_s='soon': it must be a number of seconds"),
        ("X-Expected-Idle-S", "nan", "expected_idle_s='nan': it must be a number of seconds"),
        ("X-Expected-Idle-S", "1_0", "expected_idle_s='1_0': it must be a number of seconds"),
        ("X-Ttl-S", "1e10", "ttl_s=10000000000.0: it must be a number of seconds from 0 to 1000000000"),
        ("X-Ttl-S", "9" * 5000, "ttl_s=inf: it must be a number of seconds"),
        ("X-Ttl-S", "1e9999", "ttl_s=inf: it must be a number of seconds"),
        ("X-Cache-Priority", "101", "cache_priority=101: it must be a whole number from 0 to 100"),
        ("X-Cache-Priority", "5.5", "cache_priority='5.5': it must be a whole number from 0 to 100"),
        ("X-Cache-Priority", "-1", "cache_priority='-1': it must be a whole number from 0 to 100"),
        ("X-Cache-Priority", "9" * 5000, "...: it must be a whole number from 0 to 100"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_header_is_refused_by_name(http: httpx.Client, stream: bool, header: str, text: Any, says: str):
    body = {"prompt": "x", "max_tokens": 1, "stream": stream}
    error = refused(http.post("/v1/completions", json=body, headers={header: text}))
    name = header.removeprefix("X-").replace("-", "_").lower()
    assert error["param"] == name
    assert error["message"].startswith(f"the header {header} is ")
    assert says in error["message"]
    assert len(error["message"]) < 200


def test_a_header_that_stands_twice_is_refused(tiny_llm: LLM):
    hints, response = noted_hints(tiny_llm, {"prompt": "x"}, [("X-Session-Id", "a"), ("X-Session-Id", "b")])
    assert hints is None
    assert refused(response)["message"] == "the header X-Session-Id stands 2 times; once is allowed"


def test_the_headers_are_announced(http: httpx.Client):
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        parameters = paths[path]["post"]["parameters"]
        assert {(parameter["name"], parameter["in"]) for parameter in parameters} == {
            (name, "header") for name in HEADERS
        }
    (parameter,) = paths["/v1/sessions/{session_id}/end"]["post"]["parameters"]
    assert (parameter["schema"]["minLength"], parameter["schema"]["maxLength"]) == (1, 256)
    for model in (CompletionRequest, ChatCompletionRequest):
        assert all(model.model_fields[name].description for name in BODY)


def test_all_prompts_of_a_message_get_its_hints_and_a_session_is_ended(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    engine = tiny_llm.llm_engine
    made: list[Any] = []
    make = engine.make_request

    def noting(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(engine, "make_request", noting)
    monkeypatch.setattr(tiny_llm, "end_session", lambda *session: {("s", "salt"): 7}[session])
    prompts = [np.array(text_of(i, 1), "<i4").tobytes() for i in range(2)]
    submit = Submit("r", prompts, SamplingParams(n=2), cache_salt="salt", cache_hints=OF_BODY)
    with zmq.Context() as context:
        ends = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL, zmq.PUSH, zmq.PULL)]
        for number, (pushing, pulling) in enumerate((ends[:2], ends[2:])):
            pulling.bind(f"inproc://{number}")
            pushing.connect(f"inproc://{number}")
        for message in (submit, EndSession(3, "s", "salt"), Shutdown()):
            ends[0].send(msgspec.msgpack.encode(message))
        EngineProcess(tiny_llm, ends[1], ends[2]).run()
        said = [msgspec.msgpack.decode(ends[3].recv(), type=ToFront) for _ in range(2)]
        for socket in ends:
            socket.close()
    engine.abort_all_requests()
    assert [seq.cache_hints for request in made for seq in request.sequences] == [OF_BODY] * 4
    assert said[1] == Done(3, 7)


# -------------------------------------------------------------------- the end of a session


@pytest.fixture(scope="module", params=["lru", "lhc"])
def small(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[httpx.Client]:
    """A client of a server with a cache of 40 blocks."""
    with running_server(tiny_model, "--eviction-policy", request.param, *SMALL) as server, server.client() as http:
        yield http
        server.wait_until_idle()


WAYS = {
    "the path": SimpleNamespace(body={}, headers={}),
    "the body": SimpleNamespace(body={"end_session": True}, headers={}),
    "a header": SimpleNamespace(body={"session_id": None}, headers={"X-Session-Id": "over", "X-End-Session": "true"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_blocks_of_an_ended_session_are_the_first_victims(small: httpx.Client, way: str):
    small.post("/v1/cache/reset").raise_for_status()
    number = 10 * list(WAYS).index(way)
    kept, over, other = text_of(number, 10), text_of(number + 1, 10), text_of(number + 2, 29)
    assert ask(small, kept, session_id="kept") == 0
    assert ask(small, over, WAYS[way].headers, **{"session_id": "over", **WAYS[way].body}) == 0
    if way == "the path":
        assert end(small, "over") == 10
    assert ask(small, other) == 0  # 20 blocks are empty, ten have to go
    assert ask(small, kept, session_id="kept") == 160  # although it is the older one
    assert ask(small, over) == 0


def test_a_session_that_was_not_ended_is_kept_in_its_turn(small: httpx.Client):
    """The same without the end: so the test before tells something."""
    small.post("/v1/cache/reset").raise_for_status()
    kept, newer, other = text_of(50, 10), text_of(51, 10), text_of(52, 29)
    for text, name in ((kept, "kept"), (newer, "newer")):
        assert ask(small, text, session_id=name) == 0
    assert ask(small, other) == 0
    assert ask(small, newer, session_id="newer") > 0


def test_an_end_holds_for_all_prompts_and_answers(tiny_model: Path):
    with running_server(tiny_model, *SMALL) as server, server.client() as http:
        kept, prompts = text_of(60, 10), [text_of(61, 5), text_of(62, 5)]
        ask(http, kept)
        ask(http, prompts, n=2, session_id="s", end_session=True)
        ask(http, text_of(63, 29))
        assert [ask(http, prompt) for prompt in (kept, *prompts)] == [160, 0, 0]


def test_only_blocks_of_its_own_are_ended(http: httpx.Client):
    shared = text_of(70, 3)[:48]
    ask(http, [*shared, *text_of(71, 2)], session_id="one")
    ask(http, [*shared, *text_of(72, 4)], session_id="two")
    assert end(http, "one") == 2
    assert end(http, "one") == 2  # again: it has them still
    assert end(http, "two") == 4


@pytest.mark.parametrize("session_id", ["never seen", "unknown/end"])
def test_an_unknown_session_has_no_blocks(http: httpx.Client, session_id: str):
    assert end(http, session_id) == 0
    assert end(http, session_id, cache_salt="x") == 0


@pytest.mark.parametrize(
    "session_id",
    [
        "a/b",
        "a/end",
        "/",
        "//",
        "end",
        "a b",
        " ",
        "%2F",
        "%",
        "?x=1#y",
        "..a",
        "\u00fc\u6f22\U0001f600",
        "a\nb",
        "\0",
        "\ufffd",
        "x" * 256,
    ],
)
def test_an_id_may_have_any_characters(http: httpx.Client, session_id: str):
    ask(http, text_of(session_id, 2), session_id=session_id)
    assert end(http, session_id) == 2


def test_a_plain_slash_is_as_good_as_an_encoded_one(http: httpx.Client):
    ask(http, text_of(80, 2), session_id="plain/slash")
    assert http.post("/v1/sessions/plain/slash/end").json()["ended_blocks"] == 2


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"/v1/sessions/{LONG}/end", "at most 256 characters"),
        ("/v1/sessions//end", "at least 1 character"),
        ("/v1/sessions/%ff/end", "not UTF-8"),
        ("/v1/sessions/a%ED%A0%80/end", "not UTF-8"),
    ],
)
def test_an_id_that_can_be_none_is_refused(http: httpx.Client, path: str, says: str):
    error = refused(http.post(path))
    assert error["param"] == "session_id"
    assert says in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"cache_salt": ""}', "cache_salt"),
        (b'{"cache_salt": 5}', "cache_salt"),
        (b'{"cache_slat": "x"}', "cache_slat"),
        (b"[]", None),
        (b"{", None),
    ],
)
def test_a_wrong_body_is_refused(http: httpx.Client, body: bytes, param: str | None):
    json_type = {"Content-Type": "application/json"}
    assert refused(http.post("/v1/sessions/s/end", content=body, headers=json_type))["param"] == param
    for nothing in (b"", b"{}", b"null", b'{"cache_salt": null}'):
        assert http.post("/v1/sessions/s/end", content=nothing, headers=json_type).status_code == 200
    assert http.get("/v1/sessions/s/end").status_code == 405
    assert http.post("/v1/sessions/s").status_code == http.post("/v1/sessions/end").status_code == 404


def test_a_session_belongs_to_a_salt(http: httpx.Client):
    ask(http, text_of(90, 2), session_id="salted", cache_salt="one")
    assert end(http, "salted") == 0
    assert end(http, "salted", cache_salt="two") == 0
    assert end(http, "salted", {"X-Cache-Salt": "two"}, cache_salt="one") == 0  # the header goes first, as elsewhere
    assert end(http, "salted", cache_salt="one") == end(http, "salted", {"X-Cache-Salt": "one"}) == 2
    for wrong in ("", "x" * 2000):
        response = http.post("/v1/sessions/salted/end", headers={"X-Cache-Salt": wrong})
        assert refused(response)["param"] == "cache_salt"


def test_no_key_can_end_a_session_of_another(tiny_model: Path):
    keys = {"PAGETABLE_API_KEY": "key-a,key-b", "PAGETABLE_ADMIN_API_KEY": "key-root"}
    with running_server(tiny_model, "--isolate-keys", *CACHE, env=keys) as server, server.client() as http:
        a, b, root = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b", "key-root"))
        ask(http, text_of(100, 3), a, session_id="s")
        ask(http, text_of(101, 3), a, session_id="s", cache_salt="salt")
        assert end(http, "s", b) == end(http, "s", b, cache_salt="salt") == end(http, "s", root) == 0
        assert (
            end(http, "s", a)
            == end(http, "s", a, cache_salt="salt")
            == end(http, "s", a | {"X-Cache-Salt": "salt"})
            == 3
        )
        assert refused(http.post("/v1/sessions/s/end"), 401)["code"] == "invalid_api_key"


def test_while_the_engine_is_restarted_no_session_is_ended(tiny_model: Path):
    with running_server(tiny_model, "--engine-timeout", "1", *CACHE) as server, server.client() as http:
        ask(http, text_of(110, 3), session_id="s")
        os.kill(server.engine_pid(), signal.SIGSTOP)
        for _ in range(2):  # the first one is on its way when the engine is killed, the next finds none
            error = refused(http.post("/v1/sessions/s/end"), 503)
            assert error["code"] == "engine_unavailable"
        server.wait_for("the engine has been restarted")
        assert end(http, "s") == 0


# -------------------------------------------------------------------- what was learned


def lhc(state: Path) -> tuple[str, ...]:
    return ("--eviction-policy", "lhc", "--eviction-state", str(state), *SMALL)


def test_what_was_learned_outlives_a_restart(tiny_model: Path, tmp_path: Path):
    file = tmp_path / "state.json"
    with running_server(tiny_model, *lhc(file)) as server, server.client() as http:
        for _ in range(2):
            for number in range(3):
                ask(http, text_of(120 + number, 4), session_id=str(number), expected_idle_s=number)
        assert not file.exists()
        assert server.stop() == 0
        assert not any("eviction state" in line for line in server.lines)
    learned = json.loads(file.read_text())
    assert learned["policy"] == "lhc"
    assert learned["num_opened"] > 0
    file.write_text(json.dumps(learned, indent=1))  # so that it is seen to be written again
    with running_server(tiny_model, *lhc(file)) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_for("the engine has been restarted")
        assert "\n" in file.read_text()
        assert server.stop() == 0
    assert "\n" not in file.read_text()
    assert json.loads(file.read_text()) == learned  # nothing was asked meanwhile
    assert list(tmp_path.iterdir()) == [file]


def test_what_runs_when_the_server_is_stopped_does_not_keep_the_state_from_being_written(
    tiny_model: Path, tmp_path: Path
):
    file = tmp_path / "state.json"
    arguments = (*lhc(file), "--shutdown-timeout", "0.2")
    body = {"prompt": "go on", "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 4}
    with (
        running_server(tiny_model, *arguments) as server,
        server.client() as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
        assert server.stop() == 0
    assert json.loads(file.read_text())["policy"] == "lhc"


@pytest.mark.parametrize("content", ["no JSON", '{"policy": "another"}'])
def test_a_file_that_is_no_state_is_left_out_with_a_warning(tiny_model: Path, tmp_path: Path, content: str):
    (tmp_path / "file").write_text(content)
    with running_server(tiny_model, *lhc(tmp_path / "file")) as server, server.client() as http:
        (warning,) = [line for line in server.lines if "no state that lhc can go on from" in line]
        assert f"{tmp_path / 'file'} is" in warning
        assert ask(http, text_of(130, 2), session_id="s") == 0
        assert end(http, "s") == 2
    assert (tmp_path / "file").read_text() == content


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--eviction-policy", "lru", "--eviction-state", "file"), "eviction_policy='lru': set that to lhc"),
        (("--eviction-policy", "lhc", "--eviction-state", "no/such/folder/file"), "cannot be written"),
        (("--eviction-policy", "lhc", "--eviction-state", "."), "cannot be written"),
    ],
)
def test_a_state_that_cannot_be_kept_is_one_line(tiny_model: Path, arguments: tuple[str, ...], says: str):
    run = run_serve(str(tiny_model), "--port", "0", *arguments)
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("Error: eviction_state=")
    assert says in line
