"""`pagetable bench serve` against a small server on a real socket that answers with known delays."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import islice, pairwise

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("aiohttp")
from aiohttp import web

from pagetable.serving import load, load_data
from pagetable.serving.bench_command import bench
from pagetable.serving.load_report import Measurement, ReportOptions, RequestFailure, Run, summarise, table

WORDS = [" The", " çat", " 猫", " sat", " on", " a", " mat", "."]


@dataclass
class Answer:
    """How the server answers."""

    words: list[str] = field(default_factory=lambda: WORDS)
    delay: float = 0.0  # before the first word
    gap: float = 0.0  # between words
    words_per_write: int = 1
    bytes_per_write: int = 0  # cuts the stream into pieces of this size
    end: str = "finish"  # or cut, drop, error
    status: int = 200
    usage: dict | None = field(default_factory=lambda: {"prompt_tokens": 20})
    finish_reason: str = "length"
    key: str | None = None


class Server:
    """Speaks the protocol on a thread of its own and remembers what it was asked."""

    def __init__(self):
        self.answer = Answer()
        self.bodies, self.times = [], []
        self.running = self.most_running = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self):
        self._thread.start()
        self.port = self._call(self._start())
        return self

    def __exit__(self, *_):
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return self._runner.addresses[0][1]

    async def _models(self, request):
        if self.answer.key and request.headers.get("Authorization") != f"Bearer {self.answer.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"data": [{"id": "tiny"}, {"id": "other"}]})

    async def _complete(self, request):
        self.bodies.append(await request.json())
        self.times.append(time.perf_counter())
        if self.answer.status != 200:
            return web.json_response({"error": {"message": "too busy", "code": 1}}, status=self.answer.status)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            return await self._stream(request, self.answer)
        finally:
            self.running -= 1

    async def _stream(self, request, answer):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "chat" in request.path
        if chat:
            await self._write(response, [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}])
        await asyncio.sleep(answer.delay)
        for first in range(0, len(answer.words), answer.words_per_write):
            if first:
                await asyncio.sleep(answer.gap)
            words = answer.words[first : first + answer.words_per_write]
            await self._write(
                response, [{"choices": [{"delta": {"content": w}} if chat else {"text": w}]} for w in words]
            )
        if answer.end == "drop":
            request.transport.abort()
        elif answer.end == "error":
            await self._write(response, [{"error": {"message": "out of blocks"}}])
        elif answer.end == "finish":
            await self._write(
                response, [{"choices": [{"delta": {}, "text": "", "finish_reason": answer.finish_reason}]}]
            )
            if answer.usage is not None:
                usage = {"completion_tokens": len(answer.words), **answer.usage}
                await self._write(response, [{"choices": [], "usage": usage}])
            await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    async def _write(self, response, events):
        raw = b"".join(b"data: %s\r\n\r\n" % json.dumps(event, ensure_ascii=False).encode() for event in events)
        size = self.answer.bytes_per_write or len(raw)
        for start in range(0, len(raw), size):
            await response.write(raw[start : start + size])
            if size < len(raw):
                await asyncio.sleep(0.001)


@pytest.fixture
def server():
    with Server() as running:
        yield running


def serve(server: Server, *options: object) -> Result:
    arguments = ["serve", "--port", server.port, "--input-len", 8, "--output-len", 8, *options]
    return CliRunner().invoke(bench, [str(argument) for argument in arguments], env={"OPENAI_API_KEY": None})


def figures(server: Server, *options: object) -> dict:
    result = serve(server, "--json", *options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


def run(server: Server, sessions: list[load_data.Session], arrivals=None, chat=False, **options: object) -> Run:
    path = "chat/completions" if chat else "completions"
    target = load.Target(f"http://127.0.0.1:{server.port}/v1/{path}", "tiny", chat, timeout=options.pop("timeout", 30))
    times = load_data.arrival_times(float("inf"), 1, 0) if arrivals is None else arrivals
    return asyncio.run(load.run_load(target, sessions, times, **options))


def one_turn(text="hello") -> load_data.Session:
    return load_data.Session((load_data.Turn(({"role": "user", "content": text},), 8),))


# ------------------------------------------------------------------------------------ the figures


def test_times_and_tokens_are_those_of_the_server(server):
    server.answer = Answer(
        delay=0.2, gap=0.03, usage={"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 5}}
    )
    found = figures(server, "--num-prompts", 6, "--metric-percentiles", "50,99.9")
    assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, "tiny")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (120, 48)
    assert (found["total_cached_tokens"], found["cached_share"]) == (30, 0.25)
    assert found["max_concurrent_requests"] == 6
    assert found["tokens_counted_as"] == "usage"
    assert 200 <= found["p50_ttft_ms"] <= 1000
    assert 29 <= found["median_tpot_ms"] <= 150
    assert 28 <= found["median_itl_ms"] <= 150
    assert 409 <= found["median_e2el_ms"] <= found["p99.9_e2el_ms"] <= 2000
    assert found["duration"] >= 0.41
    assert found["output_throughput"] == pytest.approx(48 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(168 / found["duration"])


def test_a_chat_begins_with_its_first_text_not_with_its_role(server):
    server.answer = Answer(delay=0.2)
    record = run(server, [one_turn()], chat=True).records[0]
    assert record.ttft >= 0.19
    assert (record.text, record.finish_reason) == ("".join(WORDS), "length")


def test_deltas_that_came_together_are_one_arrival(server):
    server.answer = Answer(words_per_write=4, gap=0.1)
    found = figures(server, "--num-prompts", 2)
    assert found["tokens_per_arrival"] == 4
    assert found["median_itl_ms"] >= 90, "no gaps of zero"
    assert found["median_tpot_ms"] < found["median_itl_ms"] / 2
    assert any("4.00 tokens came at a time" in text for text in found["warnings"])


def test_an_end_token_does_not_count_as_lumped(server):
    server.answer = Answer(words=[" yes"], usage={"completion_tokens": 2}, finish_reason="stop")
    assert figures(server, "--num-prompts", 2)["tokens_per_arrival"] == 1


def test_without_usage_tokens_are_chunks_and_that_is_said(server):
    server.answer = Answer(usage=None)
    found = figures(server, "--num-prompts", 2)
    assert (found["tokens_counted_as"], found["total_output_tokens"]) == ("chunks", 16)
    assert found["cached_share"] is None
    assert any("counted as chunks" in text for text in found["warnings"])


def test_an_answer_without_text_is_complete(server):
    server.answer = Answer(words=[], delay=0.05, usage={"completion_tokens": 1}, finish_reason="stop")
    found = figures(server, "--num-prompts", 1)
    assert (found["completed"], found["median_tpot_ms"]) == (1, None)
    assert found["median_ttft_ms"] >= 49


def test_goodput_takes_limits_as_vllm_does(server):
    server.answer = Answer(delay=0.1, gap=0.01)
    found = figures(server, "--num-prompts", 4, "--goodput", "ttft:10000", "tpot:5000")
    assert found["goodput_share"] == 1
    assert found["request_goodput"] == found["request_throughput"]
    assert figures(server, "--num-prompts", 4, "--goodput", "ttft:50")["goodput_share"] == 0


def test_the_table_has_the_figures_and_json_has_nothing_else(server, tmp_path):
    saved = tmp_path / "result.json"
    text = serve(server, "--num-prompts", 2, "--api-key", "s3cret", "--save-result", saved, "--save-detailed").stdout
    assert "Serving Benchmark Result" in text
    assert "P99 ITL (ms):" in text
    assert "s3cret" not in saved.read_text()
    found = json.loads(saved.read_text())
    assert [request["completion_tokens"] for request in found["requests"]] == [8, 8]
    assert "median_tpot_ms" not in figures(server, "--num-prompts", 1, "--percentile-metrics", "ttft,e2el")


def test_each_latency_is_what_its_name_says():
    record = Measurement(scheduled=0.5, ready=0.75, sent=1.0)
    chunks = [(2.0, {"text": "a"}), (3.0, {"text": "b"}), (3.0, {"text": "c"}), (5.0, {"finish_reason": "length"})]
    for now, choice in chunks:
        record.take(json.dumps({"choices": [choice]}).encode(), now)
    record.take(b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}', 9.0)
    found = summarise(Run([record]), ReportOptions(is_open_loop=True, goodput={"ttft": 1000, "tpot": 999}))
    assert (record.arrivals, record.itls) == ([2.0, 3.0], [1.0])
    assert [found[f"mean_{name}_ms"] for name in ("ttft", "tpot", "itl", "e2el")] == [1000, 1000, 1000, 4000]
    assert found["mean_ttft_including_client_queue_ms"] == 1500
    assert found["mean_e2el_including_client_queue_ms"] == 4500
    assert found["p99_client_send_lag_ms"] == 250
    assert (found["duration"], found["goodput_share"], found["tokens_per_arrival"]) == (5.0, 0.0, 2.0)


def test_the_cached_tokens_of_llama_server_are_found():
    record = Measurement(0, 0)
    record.take(b'{"choices": [], "usage": {"prompt_tokens": 7}, "timings": {"cache_n": 6}}', 1.0)
    assert record.cached_tokens == 6


def test_nothing_completed_leaves_no_figures():
    failed = Measurement(0, 0, ended=1, failure=RequestFailure("HTTP 500", "no"))
    found = summarise(Run([failed]), ReportOptions())
    assert (found["median_ttft_ms"], found["failed_by_kind"]) == (None, {"HTTP 500": 1})
    assert "1 failed, HTTP 500: no" in table(found)
    assert summarise(Run(), ReportOptions())["request_throughput"] is None


# ----------------------------------------------------------------------------- arrivals and slots


def test_concurrency_is_capped_and_waiting_counts_from_the_schedule(server):
    server.answer = Answer(delay=0.1)
    found = figures(server, "--num-prompts", 6, "--request-rate", 1000, "--max-concurrency", 2)
    assert server.most_running == found["max_concurrent_requests"] == 2
    assert found["median_ttft_ms"] < found["median_ttft_including_client_queue_ms"]
    assert found["p99_ttft_including_client_queue_ms"] >= 290, "the last two waited for four others"
    assert found["p99_client_send_lag_ms"] < 200, "waiting for a slot is no lag of the client"


def test_slow_answers_do_not_hold_up_arrivals(server):
    server.answer = Answer(delay=0.8)
    records = run(server, [one_turn()] * 5, [0.0, 0.05, 0.1, 0.15, 0.2]).records
    assert sorted(record.scheduled for record in records) == [0.0, 0.05, 0.1, 0.15, 0.2]
    assert all(record.sent - record.scheduled < 0.5 for record in records)
    assert server.most_running == 5


def test_a_client_that_falls_behind_is_found_out(server):
    result = run(server, [one_turn()] * 6, [0.05 * i for i in range(6)], on_record=lambda _: time.sleep(0.2))
    found = summarise(result, ReportOptions(is_open_loop=True))
    assert found["p99_client_send_lag_ms"] > 100
    assert found["p99_client_loop_lag_ms"] > 100
    assert found["p99_ttft_including_client_queue_ms"] > 100
    assert len([text for text in found["warnings"] if "late (p99)" in text]) == 2


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0])
def test_arrivals_have_the_asked_rate_and_spread(burstiness):
    times = list(islice(load_data.arrival_times(50, burstiness, seed=1), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.06)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.15)
    assert times == list(islice(load_data.arrival_times(50, burstiness, seed=1), 20_000))
    assert times[:9] != list(islice(load_data.arrival_times(50, burstiness, seed=2), 9))


def test_duration_ends_the_sending_and_waits_for_answers(server):
    server.answer = Answer(delay=0.1)
    found = figures(server, "--duration", 0.5, "--max-concurrency", 2)
    assert 2 <= found["completed"] <= 10
    assert found["failed"] == 0
    assert 0.5 <= found["duration"] < 2


# ---------------------------------------------------------------------------------------- streams


STREAM = b': hi\n\nevent: x\ndata: {"a": "\xc3\xa9"}\r\n\r\ndata:one\ndata: two\n\nid: 1\n\ndata: [DONE]\n\n'


def test_events_are_found_wherever_the_bytes_are_cut():
    for size in range(1, len(STREAM) + 1):
        events = load.EventParser()
        found = [data for i in range(0, len(STREAM), size) for data in events.feed(STREAM[i : i + size])]
        assert found == [b'{"a": "\xc3\xa9"}', b"one\ntwo", b"[DONE]"], size


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_cut_within_characters_is_read_whole(server, chat):
    server.answer = Answer(bytes_per_write=5)
    record = run(server, [one_turn()], chat=chat).records[0]
    assert record.failure is None
    assert record.text == "".join(WORDS)
    assert (record.completion_tokens, record.prompt_tokens) == (8, 20)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer(status=503), "HTTP 503", "too busy"),
        (Answer(end="error"), "error in stream", "out of blocks"),
        (Answer(end="cut"), "cut stream", "neither a finish reason nor [DONE]"),
        (Answer(end="drop"), "connection", ""),
        (Answer(usage={"prompt_tokens": "many"}), "bad event", "many"),
    ],
)
def test_a_failure_is_counted_by_its_kind(server, answer, kind, message):
    server.answer = answer
    found = figures(server, "--num-prompts", 3)
    assert (found["completed"], found["failed"], found["failed_by_kind"]) == (0, 3, {kind: 3})
    assert message in found["first_errors"][kind]


def test_a_request_without_end_times_out(server):
    server.answer = Answer(delay=20)
    records = run(server, [one_turn()], timeout=0.1).records
    assert records[0].failure.kind == "timeout"


def test_failures_set_the_exit_status(server):
    server.answer = Answer(status=500)
    assert serve(server, "--num-prompts", 1).exit_code == 1
    assert serve(server, "--num-prompts", 1, "--allow-failures").exit_code == 0
    server.answer = Answer()
    assert serve(server, "--num-prompts", 1).exit_code == 0


def test_an_absent_server_is_one_line():
    result = CliRunner().invoke(bench, ["serve", "--port", "9", "--num-prompts", "1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no server answers at http://127.0.0.1:9")
    assert result.stderr.count("\n") == 1


def test_a_wrong_key_is_named_and_a_right_one_sent(server):
    server.answer = Answer(key="s3cret")
    assert "wrong key" in serve(server, "--num-prompts", 1).stderr
    assert serve(server, "--num-prompts", 1, "--api-key", "s3cret").exit_code == 0


# ------------------------------------------------------------------------------------------- data


def prompts(**options: object) -> list[str]:
    sessions = load_data.take(load_data.make_sessions(load_data.Data(**options), chat=False), 40)
    return [turn.messages[0]["content"] for session in sessions for turn in session.turns]


@pytest.mark.parametrize("name", ["random", "shared-prefix", "multi-turn"])
def test_a_seed_decides_the_data(name):
    assert prompts(dataset_name=name, seed=3, range_ratio=0.5) == prompts(dataset_name=name, seed=3, range_ratio=0.5)
    assert prompts(dataset_name=name, seed=3) != prompts(dataset_name=name, seed=4)


def test_lengths_are_in_words_and_within_the_range():
    assert {len(prompt.split()) for prompt in prompts(input_len=50)} == {50}
    lengths = {len(prompt.split()) for prompt in prompts(input_len=50, range_ratio=0.2)}
    assert min(lengths) >= 40
    assert max(lengths) <= 60
    assert len(lengths) > 5


def test_prefixes_are_shared_and_suffixes_are_not():
    found = [prompt.split() for prompt in prompts(dataset_name="shared-prefix", num_prefixes=3, prefix_len=20)]
    assert len({tuple(words[:20]) for words in found}) == 3
    assert len({tuple(words[20:]) for words in found}) == 40


def test_the_server_sees_what_was_asked_for(server):
    serve(server, "--num-prompts", 1, "--ignore-eos", "--temperature", 0.5, "--model", "other")
    body = server.bodies[0]
    assert len(body.pop("prompt").split()) == 8
    assert body == {
        "model": "other",
        "max_tokens": 8,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_each_turn_of_a_chat_repeats_the_conversation(server):
    options = ("--dataset-name", "multi-turn", "--multi-turn-num-turns", 3, "--backend", "openai-chat")
    found = figures(server, *options, "--num-prompts", 5, "--max-concurrency", 1)
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5, 1, 3]
    assert found["completed"] == 5
    first, second, third = (body["messages"] for body in server.bodies[:3])
    assert second[:2] == [*first, {"role": "assistant", "content": "".join(WORDS)}]
    assert third[:4] == [*second, {"role": "assistant", "content": "".join(WORDS)}]


def test_each_turn_of_a_text_begins_with_the_one_before_and_its_answer(server):
    options = ("--dataset-name", "multi-turn", "--multi-turn-num-turns", 2, "--multi-turn-think-time", 0.2)
    serve(server, *options, "--num-prompts", 2)
    first, second = (body["prompt"] for body in server.bodies)
    assert second.startswith(first + "".join(WORDS) + "\n")
    assert server.times[1] - server.times[0] >= 0.19


def test_a_failed_turn_ends_its_conversation(server):
    server.answer = Answer(status=500)
    found = figures(server, "--dataset-name", "multi-turn", "--num-prompts", 8)
    assert (found["failed"], found["unsent"], len(server.bodies)) == (2, 6, 2)


def test_a_file_is_sent_once_in_its_order(server, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"prompt": "one"}\n\n{"prompt": "two", "max_tokens": 3}\n{"prompt": "three", "output_tokens": 4}\n'
    )
    options = ("--dataset-name", "custom", "--dataset-path", path, "--max-concurrency", 1)
    assert figures(server, *options)["completed"] == 3
    asked = [(body["prompt"], body["max_tokens"]) for body in server.bodies]
    assert asked == [("one", 8), ("two", 3), ("three", 4)]
    assert figures(server, *options, "--num-prompts", 4)["completed"] == 4, "begins again at its end"


def test_a_file_of_messages_needs_a_chat(server, tmp_path):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    options = ("--dataset-name", "custom", "--dataset-path", path)
    assert "line 1: 'messages' can be sent to a chat endpoint only" in serve(server, *options).stderr
    assert serve(server, *options, "--endpoint", "/v1/chat/completions").exit_code == 0
    assert server.bodies[0]["messages"] == messages


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[1]", "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": 5}', "'prompt' is not a text"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens is True"),
        ('{"messages": ["hi"]}', "not a list of objects"),
        ('{"prompt": "\xff"}', "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line.encode("latin-1"))
    with pytest.raises(ValueError, match=r"requests\.jsonl, line 2: ") as error:
        load_data.read_custom(path, 8, chat=True)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--burstiness", "-1"),
        ("--num-prompts", "0"),
        ("--max-concurrency", "0"),
        ("--random-range-ratio", "1"),
        ("--duration", "5"),
        ("--metric-percentiles", "50,x"),
        ("--metric-percentiles", "101"),
        ("--percentile-metrics", "ttft,speed"),
        ("--goodput", "itl:5"),
        ("--goodput", "ttft:soon"),
        ("ttft:5",),
        ("--backend", "openai-chat", "--endpoint", "/v1/completions"),
        ("--base-url", "localhost:8000"),
        ("--save-result", "/no/such/folder/file.json"),
    ],
)
def test_options_that_cannot_be_are_refused(server, options):
    result = serve(server, *options)
    assert result.exit_code == 2, result.output
    assert not server.bodies


def test_a_custom_data_set_needs_a_file(server):
    assert "needs --dataset-path" in serve(server, "--dataset-name", "custom").stderr


def test_a_base_url_may_end_as_clients_of_openai_have_it(server):
    assert serve(server, "--num-prompts", 1, "--base-url", f"http://127.0.0.1:{server.port}/v1/").exit_code == 0


def test_the_generator_needs_no_torch_and_its_help_no_client():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pagetable.serving.bench_command; assert 'aiohttp' not in sys.modules\n"
        "import pagetable.serving.load; sys.modules['pagetable.serving.load'] = sys.modules['aiohttp'] = None\n"
        "sys.argv = ['bench', 'serve', '--help']; pagetable.serving.bench_command.bench()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--request-rate" in done.stdout
