"""What a token of a model takes, what capacities mean in blocks, and how sizes and times are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagetable.checkpoint import ModelError
from pagetable.replay.sizing import bytes_per_token, format_bytes, parse_capacity, seconds_for_people
from pagetable.replay.trace import TraceError

CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
GGUF = {
    "llama.block_count": 4,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.embedding_length": 256,
}


def folder(path: Path, config: Any) -> str:
    """A model of which only the configuration will be read."""
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").touch()
    return str(path)


def gguf_file(path: Path, **metadata: Any) -> str:
    """The same as one file; None leaves a key out."""
    writer = gguf.GGUFWriter(path / "model.gguf", "llama")
    for key, value in {**GGUF, **metadata}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path / "model.gguf")


# ---------------------------------------------------------------- a token


@pytest.mark.parametrize(
    ("changes", "per_layer"),
    [
        ({}, 2 * 2 * 32),
        ({"head_dim": 128}, 2 * 2 * 128),
        ({"head_dim": None}, 2 * 2 * 32),
        ({"num_key_value_heads": None}, 2 * 8 * 32),
        ({"num_key_value_heads": 1}, 2 * 1 * 32),
        ({"num_key_value_heads": None, "head_dim": 16}, 2 * 8 * 16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("fp8", 1)])
def test_a_token_takes_k_and_v_of_all_layers(
    changes: dict[str, Any], per_layer: int, dtype: str, size: int, tmp_path: Path
) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    assert bytes_per_token(folder(tmp_path, config), dtype) == 4 * per_layer * size
    assert bytes_per_token(folder(tmp_path, {**CONFIG, **changes}), dtype) == 4 * per_layer * size  # null says nothing


def test_of_a_model_that_sees_as_well_the_part_that_reads_counts(tmp_path: Path) -> None:
    config = {"text_config": CONFIG, "vision_config": {"num_hidden_layers": 99}, "hidden_size": 7}
    assert bytes_per_token(folder(tmp_path, config), "bfloat16") == 4 * 2 * 2 * 32 * 2


@pytest.mark.parametrize("inner", ["none", [1], 7, None])
def test_an_inner_configuration_that_is_none_is_passed_over(inner: Any, tmp_path: Path) -> None:
    assert bytes_per_token(folder(tmp_path, {**CONFIG, "text_config": inner}), "bfloat16") == 4 * 2 * 2 * 32 * 2


@pytest.mark.parametrize(
    ("metadata", "per_layer"),
    [
        ({}, 2 * 2 * 32),
        ({"llama.attention.key_length": 64}, 2 * 2 * 64),
        ({"llama.attention.head_count_kv": None}, 2 * 8 * 32),
    ],
    ids=str,
)
def test_a_gguf_file_says_the_same(metadata: dict[str, Any], per_layer: int, tmp_path: Path) -> None:
    assert bytes_per_token(gguf_file(tmp_path, **metadata), "bfloat16") == 4 * per_layer * 2


def test_the_default_model() -> None:
    assert bytes_per_token("smollm2", "bfloat16") == 30 * 3 * 64 * 2 * 2 == 23_040
    assert bytes_per_token("smollm2", "float32") == 46_080


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in CONFIG if name != "num_key_value_heads"),
        {"num_hidden_layers": 0},
        {"num_hidden_layers": "4"},
        {"num_hidden_layers": -4},
        {"num_attention_heads": 0},
        {"num_attention_heads": 8.5},
        {"num_key_value_heads": [2, 2, 4, 4]},
        {"num_key_value_heads": -1},
        {"hidden_size": "wide"},
        {"hidden_size": 4},  # less than one a head
        {"head_dim": "wide"},
        {"head_dim": -32},
        {"head_dim": [64]},
    ],
    ids=str,
)
def test_a_configuration_that_does_not_say_it_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--bytes-per-token"):
        bytes_per_token(folder(tmp_path, {**CONFIG, **changes}), "bfloat16")


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.block_count": None},
        {"llama.embedding_length": "wide"},
        {"llama.attention.head_count_kv": [1, 2, 3, 4]},
        {"general.architecture": None, "llama.block_count": None, "other.block_count": 4},
    ],
    ids=str,
)
def test_so_is_a_gguf_file_that_does_not(metadata: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--bytes-per-token"):
        bytes_per_token(gguf_file(tmp_path, **metadata), "bfloat16")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for name in ("nowhere", str(tmp_path), ""):
        with pytest.raises(ModelError):
            bytes_per_token(name, "bfloat16")
    (tmp_path / "model.safetensors").touch()
    for content in ("[]", "{", "null"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json"):
            bytes_per_token(str(tmp_path), "bfloat16")


# ---------------------------------------------------------------- capacities


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("5%", 50),
        ("100%", 1000),
        ("0.1%", 1),
        ("0.01%", 1),
        ("0.000000001%", 1),
        ("0.14%", 1),
        ("0.16%", 2),
        ("12.34%", 123),
        ("12.36%", 124),
        (" 5 % ", 50),
        ("1", 1),
        ("2000", 2000),
        (" 7 ", 7),
        ("4096B", 1),
        ("4096b", 1),
        ("8191 B", 1),
        ("8192B", 2),
        ("1MiB", 256),
        ("1 mib", 256),
        ("1MB", 244),
        ("4KiB", 1),
        ("5kB", 1),
        ("1.5GiB", 393_216),
        ("4GiB", 1_048_576),
        ("0.001TB", 244_140),
        ("0.25TiB", 67_108_864),
    ],
)
def test_a_capacity_is_a_share_or_blocks_or_bytes(text: str, blocks: int) -> None:
    assert parse_capacity(text, 1000, 4096) == blocks


def test_shares_are_exact_where_floating_point_is_not() -> None:
    assert parse_capacity("0.07%", 10**4, None) == 7
    assert parse_capacity("29%", 100, None) == 29
    assert parse_capacity("1.1%", 100_000_000, None) == 1_100_000


def test_bytes_never_get_more_blocks_than_fit() -> None:
    for size in range(1, 300):
        assert parse_capacity("300B", 1, size) == 300 // size


def test_bytes_need_to_know_what_a_block_takes() -> None:
    with pytest.raises(TraceError, match=r"'4GiB' is in bytes: .*--model or --bytes-per-token"):
        parse_capacity("4GiB", 1000, None)
    assert parse_capacity("5%", 1000, None) == 50
    assert parse_capacity("5", 1000, None) == 5


NO_CAPACITIES = [
    *(
        "",
        " ",
        "%",
        "GiB",
        "-1",
        "-5%",
        "+5",
        "5%%",
        "%5",
        "5 5",
        "5,000",
        "1e3",
        "1_000",
        "0x10",
        "five",
        "nan",
        "inf",
    ),
    *("5.%", ".5%", "1.5.5%", "5 percent", "4PiB", "4G", "4gi", "4iB", "4 blocks", "5%\n6%", "5;", "1/2", "5% of it"),
    *(
        "\uff15%",
        "\u0665",
        "5\u00b2",
        "1.5",
        "0.5",
        "2000.25",
        "9" * 16,
        "9" * 5000,
        "0." + "1" * 10 + "%",
        "\0",
        "5\0",
    ),
]


@pytest.mark.parametrize("text", NO_CAPACITIES, ids=lambda text: ascii(text)[:30])
def test_what_is_no_capacity_is_refused_as_it_was_given(text: str) -> None:
    with pytest.raises(TraceError, match="^capacity '") as caught:
        parse_capacity(text, 1000, 4096)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0%", "0B", "1B", "4095B", "200000000", "100TiB", "99999999999%"])
def test_no_block_and_too_many_are_refused(text: str) -> None:
    with pytest.raises(TraceError, match=r"means \d+ blocks: at least 1"):
        parse_capacity(text, 1000, 4096)


# ---------------------------------------------------------------- for people


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (23_040, "22.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (1.5 * (1 << 30), "1.50 GiB"),
        (1 << 40, "1.00 TiB"),
        (5 << 50, "5120.00 TiB"),
    ],
)
def test_bytes_are_said_in_the_largest_unit_that_fits(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.25, "250 ms"),
        (0.0125, "12.5 ms"),
        (1.25, "1.25 s"),
        (12.5, "12.5 s"),
        (119, "119 s"),
        (210, "3.5 min"),
        (7560, "2.1 h"),
        (86_400, "24 h"),
    ],
)
def test_times_are_said_in_a_unit_of_their_size(seconds: float | None, text: str) -> None:
    assert seconds_for_people(seconds) == text


@pytest.mark.parametrize("seconds", [0.0, 0.9994, 0.9996, 119.96, 7199.9, 3_596_400, 3_600_000, 86_400 * 365])
def test_no_time_is_said_with_an_exponent(seconds: float) -> None:
    number, unit = seconds_for_people(seconds).split(" ")
    assert "e" not in number
    size = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}[unit]
    assert float(number.replace(",", "")) * size == pytest.approx(seconds, rel=0.006)
