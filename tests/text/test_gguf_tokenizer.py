"""The tokenizer built from GGUF metadata: right tokens for every way of cutting text, and no silent guess."""

import json
import random
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetable.checkpoint import Checkpoint, ModelError
from pagetable.text import load_tokenizer

from .conftest import SAMPLE
from .reference_bpe import GPT2, LLAMA3, QWEN2, ReferenceBPE, byte_characters

CORPUS = [
    "",
    " ",
    "\n",
    "a",
    "Hello, world!",
    "  two  spaces   three    four ",
    "1234567890 12 345\n6,789.01 ½ ² Ⅷ ٣٤ ৪",
    "a 1  2   3    4\t5\t\t6\n7 \n 8  \n  9",
    "I'm you're it's WE'LL they'd 'tis o'clock don't",
    "tab\there\r\nline\r\n\r\n  indented\n\n\n\n    more",
    "def f(x: int) -> str:\n    return f'{x!r:>{10}}'  # comment\n\n\nclass A(B):\n\tpass\n",
    "你好，世界！今天是2024年1月1日。こんにちは世界。안녕하세요 세계",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "😀😃 👍🏽 👩‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️ e\u0301 \u200b\u200d\ufeff zero",
    "x\u00a0y\u2003z\u3000w\u2028v\u0085u\x0bt\x0cs",
    "naïve café ÀÉÎÕÜ ﬁ ǆ ß ſ İ ı",
    "https://example.org/a?b=c&d=%20e#f <html><p class='x'>&amp;</p></html>",
    "$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$ ±∞≠≤ → ⇒ ∀∃",
    "-----====____****////\\\\\\\\....,,,,;;;;!!!!????",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|",
    "\ufffd\ufffd broken",
    SAMPLE,
]


@pytest.fixture(scope="session")
def reference(smollm2_checkpoint):
    metadata = smollm2_checkpoint.metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    specials = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    merges = metadata["tokenizer.ggml.merges"]
    return ReferenceBPE(tokens, merges, GPT2, digits_first=True, specials=specials)


@pytest.mark.parametrize("text", CORPUS)
def test_default_model_tokenizes_as_the_reference(smollm2, reference, text):
    assert smollm2.encode(text) == reference.encode(text)


def test_default_model_tokenizes_a_large_text_as_the_reference(smollm2, reference):
    for name in sorted(topics)[::2]:
        assert smollm2.encode(topics[name]) == reference.encode(topics[name]), name


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_default_model_tokenizes_random_text_as_the_reference(smollm2, reference, text):
    assert smollm2.encode(text) == reference.encode(text)


def test_text_survives_the_round_trip(smollm2):
    for text in [*CORPUS, *list(topics.values())[::10]]:
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_spaces_before_a_number_are_not_part_of_it(smollm2):
    # transformers' own conversion from GGUF leaves the cut before digits out, and gets this one wrong.
    assert [smollm2.token_text(i) for i in smollm2.encode("a  12")] == ["a", "  ", "1", "2"]


def test_default_model_declares_its_tokens(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.encode("a") == smollm2.encode("a", add_special_tokens=False)  # add_bos_token is false


def test_special_tokens_are_skipped_on_request(smollm2):
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


# ------------------------------------------------------------------------------------------------- made-up vocabularies

MERGES = ["Ġ a", "h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ġ Ġ", "' S", "Ċ Ċ", "e Ì", "eÌ ģ"]
SPECIALS = ["<s>", "</s>", "<eot>", "<eom>", "<tool>"]


def fields(**changes):
    """Metadata of a small byte-level BPE; `changes` by key under tokenizer.ggml., None takes one out."""
    tokens = [*SPECIALS, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES), "12345"]
    ggml = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": MERGES,
        "token_type": [3, 3, 3, 3, 4] + [1] * (len(tokens) - 5),
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}


def load(metadata):
    gguf = SimpleNamespace(metadata=metadata)
    return load_tokenizer(Checkpoint(path=Path("model.gguf"), kind="gguf", name="model", gguf=gguf))


@pytest.mark.parametrize(
    ("pre", "reference_arguments"),
    [
        ("gpt-2", {"pattern": GPT2}),
        ("default", {"pattern": GPT2}),
        ("smollm", {"pattern": GPT2, "digits_first": True}),
        ("llama-bpe", {"pattern": LLAMA3, "ignore_merges": True}),
        ("llama-v3", {"pattern": LLAMA3, "ignore_merges": True}),
        ("qwen2", {"pattern": QWEN2}),
    ],
)
def test_every_known_splitting_agrees_with_its_pattern(pre, reference_arguments):
    metadata = fields(pre=pre, add_bos_token=False)
    tokenizer = load(metadata)
    reference = ReferenceBPE(metadata["tokenizer.ggml.tokens"], MERGES, specials=SPECIALS, **reference_arguments)
    texts = [text for text in CORPUS if pre != "qwen2" or "\u0301" not in text]  # qwen2 composes characters first
    rng = random.Random(7)
    texts += ["".join(rng.choices("helo a123'S\n\r\t.,é<s>", k=30)) for _ in range(200)]
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text), (pre, text)


def test_qwen2_composes_characters_first():
    assert load(fields(pre="qwen2")).encode("e\u0301") == load(fields(pre="qwen2")).encode("é")
    assert load(fields(pre="gpt-2")).encode("e\u0301") != load(fields(pre="gpt-2")).encode("é")


def test_every_end_token_is_honoured_once():
    tokenizer = load(fields(eot_token_id=2, eom_token_id=3))
    assert tokenizer.eos_token_ids == (1, 2, 3)
    assert load(fields(eot_token_id=1)).eos_token_ids == (1,)
    assert load(fields(eos_token_id=None)).eos_token_ids == ()


def test_begin_and_end_tokens_are_added_as_the_metadata_say():
    assert load(fields()).encode("a")[0] != 0
    assert load(fields(add_bos_token=True)).encode("a")[0] == 0
    assert load(fields(add_bos_token=True)).encode("") == [0]
    assert load(fields(add_bos_token=True)).encode("a", add_special_tokens=False)[0] != 0
    assert load(fields(add_bos_token=True, add_eos_token=True)).encode("")[-1] == 1
    assert load(fields(pre="llama-bpe")).encode("")[0] == 0  # Llama 3's default
    assert load(fields(pre="llama-bpe", add_bos_token=False)).encode("") == []


def test_user_defined_tokens_are_matched_whole_but_stay_visible():
    tokenizer = load(fields())
    assert tokenizer.encode("a<tool>a")[1] == 4
    assert 4 not in tokenizer.special_token_ids
    assert tokenizer.decode([4]) == "<tool>"
    assert tokenizer.decode([0, 4, 1]) == "<tool>"


def test_end_tokens_are_special_even_if_their_type_does_not_say_so():
    assert load(fields(token_type=None)).special_token_ids == {0, 1}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, "SentencePiece.*tokenizer.json"),
        ({"model": "bert"}, "bert"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "tekken"}, "tekken.*smollm"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"pre": 3}, "not a string"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokens"),
        ({"tokens": ["a", 1]}, "not a list of strings"),
        ({"tokens": ["a", "b", "a"], "merges": ["a b"]}, "'a' more than once"),
        ({"merges": None}, "merges is missing"),
        ({"merges": "a b"}, "not a list of strings"),
        ({"merges": ["Ġ nonsense"]}, "Ġ nonsense"),
        ({"merges": ["Ġ b"]}, "Ġ b"),  # both known, what they make is not
        ({"merges": ["Ġa"]}, "Ġa"),
        ({"token_type": [1]}, "token_type"),
        ({"token_type": ["x"] * 300}, "token_type"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eot_token_id": True}, "eot_token_id is True"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_by_name(changes, named):
    with pytest.raises(ModelError, match=named):
        load(fields(**changes))


def test_named_chat_templates_are_read():
    metadata = fields() | {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"}
    assert load(metadata).chat_templates == {"default": "d", "tool_use": "t"}
    with pytest.raises(ModelError, match=r"tokenizer.chat_template is 3"):
        load(fields() | {"tokenizer.chat_template": 3})


def test_metadata_survive_json():
    # Plain Python values only: whoever fakes a checkpoint needs no GGUF types.
    assert load(json.loads(json.dumps(fields()))).encode("hello") == load(fields()).encode("hello")
