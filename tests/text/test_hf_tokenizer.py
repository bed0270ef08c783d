"""The tokenizer of a Hugging Face folder, against transformers reading the same folder."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetable.checkpoint import ModelError
from pagetable.text import load_tokenizer

from .conftest import SAMPLE, byte_level_backend, folder_checkpoint, metaspace_backend, write_folder

TEXTS = ["", "a", " the the", "  the  in ", "\n\n", SAMPLE, "<s>the</s>", "<|end|> x", "世界 世 😀😀 é ée"]


BAD_MERGE = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}'


def load(folder):
    return load_tokenizer(folder_checkpoint(folder))


@pytest.mark.parametrize("backend", [byte_level_backend, metaspace_backend])
def test_folder_reads_as_transformers_reads_it(tmp_path, backend):
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": "<s>", "eos_token": "</s>"} if backend is metaspace_backend else {"eos_token": "<|end|>"}
    folder = write_folder(tmp_path / "m", backend(), tokenizer_config=config)
    ours, theirs = load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip, clean_up_tokenization_spaces=False)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_survives_the_round_trip(byte_level, metaspace, text):
    assert byte_level.decode(byte_level.encode(text)) == text
    if "▁" not in text:  # this family writes a space with it
        assert metaspace.decode(metaspace.encode(text)) == text


def test_a_bad_byte_costs_itself_only(metaspace):
    ids = [3 + byte for byte in "世".encode() + b"\xff" + "😀".encode()[:3]]
    assert metaspace.decode(ids) == "世\ufffd\ufffd"


def test_end_tokens_of_all_files_count(byte_level, metaspace):
    assert byte_level.eos_token_ids == (1, 0)  # generation_config.json names two, the other files one of them again
    assert metaspace.eos_token_ids == (2,)
    assert metaspace.bos_token_id == 1
    assert byte_level.bos_token_id is None


def test_special_tokens_map_is_read_when_the_configuration_is_silent(tmp_path):
    folder = write_folder(tmp_path / "m", metaspace_backend(), special_tokens_map={"eos_token": {"content": "</s>"}})
    assert load(folder).eos_token_ids == (2,)


def test_a_named_token_becomes_special(tmp_path):
    folder = write_folder(tmp_path / "m", metaspace_backend(), tokenizer_config={"eos_token": "!"})
    tokenizer = load(folder)
    assert tokenizer.eos_token_ids[0] in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("a!")) == "a"


@pytest.mark.parametrize(
    ("flags", "begins", "ends"),
    [
        ({}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_begin_and_end_tokens_follow_the_configuration(tmp_path, flags, begins, ends):
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    ids = load(write_folder(tmp_path / "m", metaspace_backend(), tokenizer_config=config)).encode("the")
    assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    tokenizer = load(write_folder(tmp_path / "m", backend))
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": "1.0"', '{"model": {"type": "BPE"}}', BAD_MERGE])
def test_a_broken_tokenizer_json_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer.json is not a tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": 10**6}},
        {"generation_config": {"eos_token_id": [0, "1"]}},
        {"config": {"eos_token_id": -1}},
        {"config": {"eos_token_id": 1.5}},
        {"config": {"eos_token_id": True}},
        {"tokenizer_config": {"eos_token": 5}},
        {"tokenizer_config": {"chat_template": 5}},
        {"tokenizer_config": {"chat_template": [{"name": "default"}]}},
    ],
)
def test_declarations_that_do_not_fit_are_refused(tmp_path, files):
    with pytest.raises(ModelError):
        load(write_folder(tmp_path / "m", byte_level_backend(), **files))


def test_chat_templates_are_found_wherever_they_are_kept(tmp_path):
    folder = tmp_path / "m"
    write_folder(folder, byte_level_backend())
    assert load(folder).chat_template is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert load(folder).chat_template == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load(folder).chat_templates == {"default": "two", "tool_use": "tools"}
    (folder / "chat_template.jinja").write_text("three")
    assert load(folder).chat_templates == {"default": "three", "tool_use": "tools"}


def test_token_text_keeps_the_leading_space(any_tokenizer):
    for text in ("the a", "in the"):
        ids = any_tokenizer.encode(text, add_special_tokens=False)
        assert "".join(any_tokenizer.token_text(i) for i in ids).strip() == text
    with pytest.raises(ValueError, match="not in the vocabulary"):
        any_tokenizer.token_text(any_tokenizer.vocab_size)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        any_tokenizer.token_text(-1)


def test_ids_above_the_vocabulary_decode_to_nothing(any_tokenizer):
    a = any_tokenizer.encode("a", add_special_tokens=False)
    assert any_tokenizer.decode([*a, any_tokenizer.vocab_size + 5]) == "a"
    with pytest.raises(ValueError, match="token ids must be"):
        any_tokenizer.decode([-1])


def test_what_is_no_text_is_refused(any_tokenizer):
    with pytest.raises(TypeError, match="must be a string"):
        any_tokenizer.encode(b"bytes")
    with pytest.raises(ValueError, match="surrogates"):
        any_tokenizer.encode("\ud800")
