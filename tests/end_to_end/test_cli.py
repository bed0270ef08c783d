"""The command line, as a person and as a program use it."""

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

SMALL = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024")


def pagetable(*arguments: str, given: str = "", check: bool = True) -> subprocess.CompletedProcess:
    run = subprocess.run(
        [sys.executable, "-m", "pagetable", *arguments], input=given, capture_output=True, text=True, timeout=300
    )
    if check:
        assert run.returncode == 0, run.stderr
    return run


def test_generate_prints_prompt_and_answer():
    run = pagetable("generate", "The capital of France is", "--max-tokens", "4", "-v", *SMALL)
    assert run.stdout.startswith("The capital of France is Paris")
    assert "hit_rate" in run.stderr


def test_generate_reads_lines_and_writes_json():
    run = pagetable("generate", "--json", "--max-tokens", "3", "--ignore-eos", *SMALL, given="One two\nThree four\n")
    first, second = map(json.loads, run.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("One two", "Three four")
    assert len(first["outputs"][0]["token_ids"]) == 3
    assert first["num_cached_tokens"] == 0


def test_chat_keeps_the_conversation_and_finds_it_in_the_cache():
    run = pagetable(
        "chat", "--json", "--max-tokens", "16", *SMALL, given="Hello, who are you?\n\nTell me more.\n/exit\nno\n"
    )
    first, second = map(json.loads, run.stdout.splitlines())
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] >= 32
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"] + 10


def test_chat_on_a_terminal():
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pagetable", "chat", "--max-tokens", "8", *SMALL],
        stdin=child, stdout=child, stderr=child, close_fds=True,
    )  # fmt: skip
    os.close(child)
    seen = b""

    def expect(text: bytes) -> None:
        nonlocal seen
        until = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < until, seen
            if select.select([parent], [], [], 1)[0]:
                seen += os.read(parent, 4096)
        seen = seen[seen.index(text) + len(text) :]

    expect(b"Ctrl-D")
    expect(b"> ")
    os.write(parent, b"Hello\n")
    expect(b"prompt tokens cached")
    expect(b"> ")
    os.write(parent, b"\x04")
    assert process.wait(60) == 0
    os.close(parent)


def test_demo_shows_the_shared_blocks():
    report = json.loads(pagetable("demo", "--json", "--max-tokens", "8", *SMALL).stdout)
    on, off = report["cached"], report["uncached"]
    assert on["answers"] == off["answers"]
    assert len(on["shared_blocks"]) >= 5
    assert off["shared_blocks"] == []
    assert on["computed_tokens"] < off["computed_tokens"] / 2
    assert off["computed_tokens"] == off["prompt_tokens"] == on["prompt_tokens"]
    for table in on["block_tables"]:
        assert set(on["shared_blocks"]) <= set(table)


def test_demo_is_made_for_people():
    text = pagetable("demo", "--max-tokens", "4", *SMALL).stdout
    assert "Block tables" in text
    assert "prompt tokens computed" in text
    assert "The answers are the same" in text


def test_info_says_what_a_token_costs():
    assert "46,080" in pagetable("info").stdout
    facts = json.loads(pagetable("info", "smollm2", "--memory", "2GiB", "--json").stdout)
    assert facts["architecture"] == "llama"
    assert facts["kv_cache"]["float32"]["bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    assert facts["kv_cache"]["bfloat16"]["num_tokens"] == 2**31 // 23_040 // 16 * 16


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "x", "--temperature", "nan"), "temperature=nan"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens=0"),
        (("generate", "x", "-m", "nowhere"), "nowhere"),
        (("generate", "x", "-n", "0", "-m", "nowhere"), "n=0"),
        (("generate", "x", "--block-size", "3"), "block_size=3"),
        (("generate", ""), "no tokens"),
        (("info", "nowhere"), "nowhere"),
        (("info", "--memory", "lots"), "lots"),
        (("juggle",), "juggle"),
        (("demo", "--device", "toaster"), "toaster"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(arguments: tuple[str, ...], says: str):
    run = pagetable(*arguments, check=False)
    assert run.returncode != 0
    assert says in run.stderr
    assert "Traceback" not in run.stderr
