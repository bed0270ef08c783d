"""Streamed text equals text decoded at once, whatever the tokens; stop strings cut it where a plain search would."""

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from pagetable.text import Detokenizer, Tokenizer
from pagetable.text.stop_strings import StopStrings
from pagetable.text.vocabulary import Vocabulary

from .conftest import SAMPLE

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer, ids, **options):
    """(the pieces pushed, the piece at the end, the detokenizer)."""
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return pieces, detokenizer.finish(), detokenizer


def plain_cut(text, stops):
    """(text before the stop string that begins first, that stop string: the shortest of those that begin there)."""
    found = sorted((text.find(stop), len(stop), stop) for stop in stops if stop in text)
    return (text[: found[0][0]], found[0][2]) if found else (text, None)


@FUZZ
@given(data=st.data())
def test_random_tokens_stream_to_what_they_decode_to(any_tokenizer, data):
    # Random ids are mostly half characters in the two small vocabularies: bytes are most of their tokens.
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 3), max_size=80))
    skip = data.draw(st.booleans())
    pieces, rest, detokenizer = stream(any_tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == any_tokenizer.decode(ids, skip_special_tokens=skip) == detokenizer.text


@FUZZ
@given(data=st.data())
def test_random_bytes_stream_to_what_they_decode_to(byte_level, metaspace, data):
    bytes_ = data.draw(
        st.lists(st.sampled_from([*b"a \n", *"é世😀".encode(), 0x80, 0xC0, 0xE4, 0xED, 0xF0, 0xFF]), max_size=60)
    )
    for tokenizer, ids in (
        (metaspace, [3 + byte for byte in bytes_]),
        (byte_level, [i for byte in bytes_ for i in byte_level_ids(byte_level)[byte]]),
    ):
        pieces, rest, _ = stream(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)


def byte_level_ids(tokenizer):
    from .reference_bpe import byte_characters

    return [[tokenizer._backend.token_to_id(character)] for character in byte_characters()]


@FUZZ
@given(text=st.text(alphabet=st.sampled_from("ab é世界😀👩🏽‍🚀\n"), max_size=40))
def test_no_broken_character_is_ever_shown(any_tokenizer, text):
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    pieces, rest, _ = stream(any_tokenizer, ids)
    assert "\ufffd" not in "".join(pieces) + rest
    assert "".join(pieces) == text  # and nothing whole is held back to the end
    assert rest == ""


def test_half_a_character_waits_and_is_flushed_at_the_end(byte_level):
    ids = [i for byte in "😀".encode() for i in byte_level_ids(byte_level)[byte]]
    pieces, rest, _ = stream(byte_level, ids)
    assert (pieces, rest) == (["", "", "", "😀"], "")
    pieces, rest, detokenizer = stream(byte_level, ids[:2])
    assert (pieces, rest, detokenizer.text) == (["", ""], "\ufffd", "\ufffd")
    assert detokenizer.finish() == ""
    assert detokenizer.push(ids[0]) == ""


def test_half_a_character_before_a_whole_one_is_shown_with_it(byte_level):
    first = byte_level_ids(byte_level)["😀".encode()[0]]
    pieces, rest, _ = stream(byte_level, [*first, *byte_level.encode("a")])
    assert (pieces, rest) == (["", "\ufffda"], "")


def test_a_real_replacement_character_is_kept(any_tokenizer):
    text = "a\ufffd\ufffdb\ufffd"
    pieces, rest, _ = stream(any_tokenizer, any_tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) + rest == text


def test_a_skipped_token_inside_a_character_does_not_break_it(byte_level):
    ids = [i for byte in "é".encode() for i in byte_level_ids(byte_level)[byte]]
    pieces, rest, _ = stream(byte_level, [ids[0], 0, ids[1]])
    assert (pieces, rest) == (["", "", "é"], "")


def test_tokens_without_text_leave_no_trace(byte_level, metaspace):
    # So many of them that they would push everything else out of the window.
    ids = [i for byte in "é".encode() for i in byte_level_ids(byte_level)[byte]]
    assert stream(byte_level, [ids[0], *[0] * 30, *[10**6] * 30, ids[1]])[2].text == "é"
    the, in_ = metaspace.encode("the in", add_special_tokens=False)[0], metaspace.encode("in", False)
    assert stream(metaspace, [the, *[10**6] * 30, *in_])[2].text == "the in"
    with pytest.raises(ValueError, match="negative"):
        Detokenizer(metaspace).push(-1)


def test_leading_space_is_dropped_alone_and_kept_after_a_prompt(metaspace):
    prompt, output = metaspace.encode("the"), metaspace.encode("in the", add_special_tokens=False)
    assert stream(metaspace, output)[2].text == "in the"
    assert stream(metaspace, output, prompt_token_ids=prompt)[2].text == " in the"


@FUZZ
@given(data=st.data())
def test_prompt_and_output_together_read_as_one(any_tokenizer, data):
    text = data.draw(st.text(alphabet=st.sampled_from("ab é世界😀\ufffd"), min_size=1, max_size=30))
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    prompt = any_tokenizer.decode(ids[:cut])
    pieces, rest, _ = stream(any_tokenizer, ids[cut:], prompt_token_ids=ids[:cut])
    output = "".join(pieces) + rest
    if not text.startswith(prompt):  # the prompt ends within a character: the output completes it
        assert prompt.endswith("\ufffd")
        prompt = prompt[:-1]
    assert prompt + output == text


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(prefix="##", cleanup=True), decoders.Metaspace(), decoders.BPEDecoder(suffix="</w>")],
    ids=["WordPiece", "Metaspace", "BPEDecoder"],
)
@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 9), max_size=60))
def test_other_decoders_stream_as_well(decoder, ids):
    words = ["a", "##b", "▁c", "▁", "d</w>", "##e", "f", "é", "x</w>", "▁世"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    backend.decoder = decoder
    tokenizer = Tokenizer(Vocabulary(backend, None, (), {}, {}))
    pieces, rest, _ = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_cost_of_a_token_does_not_grow_with_the_text(byte_level):
    # Nothing but broken characters: the worst that can be held.
    lead = byte_level_ids(byte_level)[0xF0]
    detokenizer = Detokenizer(byte_level)
    for _ in range(1000):
        detokenizer.push(lead[0])
        assert len(detokenizer._window) <= 16
    assert len(detokenizer.text) == 999
    assert detokenizer.finish() == "\ufffd"


# -------------------------------------------------------------------------------------------------------- stop strings


@FUZZ
@given(data=st.data())
def test_stop_strings_cut_where_a_plain_search_would(any_tokenizer, data):
    text = data.draw(st.text(alphabet=st.sampled_from("abé世😀 "), max_size=40))
    stops = data.draw(st.lists(st.text(alphabet=st.sampled_from("abé世😀 "), min_size=1, max_size=6), max_size=4))
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    pieces, rest, detokenizer = stream(any_tokenizer, ids, stop=stops)
    assert ("".join(pieces) + rest, detokenizer.stopped) == plain_cut(text, stops)
    assert detokenizer.text == "".join(pieces) + rest


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=15),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
def test_the_cut_does_not_depend_on_the_pieces(pieces, stops, include):
    filter_ = StopStrings(stops, include_stop_str_in_output=include)
    text = "".join(filter_.push(piece) for piece in pieces) + filter_.finish()
    cut, stopped = plain_cut("".join(pieces), stops)
    assert (text, filter_.stopped) == (cut + (stopped or "" if include else ""), stopped)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1)
)
def test_text_is_held_back_only_while_a_stop_string_may_begin_there(text, stops):
    filter_, shown = StopStrings(stops), ""
    for at, character in enumerate(text, 1):
        shown += filter_.push(character)
        if filter_.stopped is not None:
            return
        held = text[len(shown) : at]
        assert shown + held == text[:at]
        assert not held or any(stop.startswith(held) or held.startswith(stop) or stop in held for stop in stops)
        assert len(held) < max(map(len, stops))


def test_a_stop_string_over_several_tokens_is_never_shown(byte_level):
    text = "x" * 5 + "<STOP😀>" + "y" * 5
    pieces, rest, detokenizer = stream(byte_level, byte_level.encode(text), stop="<STOP😀>")
    assert "".join(pieces) == "xxxxx"
    assert (rest, detokenizer.stopped) == ("", "<STOP😀>")
    assert not any("<" in piece for piece in pieces)


def test_a_stop_string_shorter_than_a_token_cuts_the_token(smollm2):
    ids = smollm2.encode("Hello wonderful world")
    pieces, _, detokenizer = stream(smollm2, ids, stop=["nder"])
    assert ("".join(pieces), detokenizer.stopped) == ("Hello wo", "nder")


def test_a_stop_string_begun_but_not_completed_is_shown(smollm2):
    pieces, rest, detokenizer = stream(smollm2, smollm2.encode("one </sto"), stop=["</stop>"])
    assert "".join(pieces) == "one "
    assert (rest, detokenizer.stopped) == ("</sto", None)


def test_an_earlier_match_wins_though_it_completes_later():
    filter_ = StopStrings(["bc", "abcd"])
    assert filter_.push("xabc") == "x"
    assert filter_.stopped is None
    assert filter_.push("d") == ""
    assert filter_.stopped == "abcd"
    filter_ = StopStrings(["bc", "abcd"])
    assert filter_.push("xabc") + filter_.push("e") == "xa"
    assert filter_.stopped == "bc"
    filter_ = StopStrings(["bc", "abcd"])
    assert filter_.push("xabc") + filter_.finish() == "xa"
    assert filter_.stopped == "bc"


def test_the_stop_string_is_kept_on_request(smollm2):
    ids = smollm2.encode("a b. c")
    assert stream(smollm2, ids, stop=".", include_stop_str_in_output=True)[2].text == "a b."


def test_tokens_after_a_stop_are_ignored(smollm2):
    detokenizer = Detokenizer(smollm2, stop=["b"])
    for token_id in smollm2.encode("a b c d"):
        detokenizer.push(token_id)
    assert detokenizer.push(smollm2.encode("z")[0]) == detokenizer.finish() == ""
    assert detokenizer.text == "a "


@pytest.mark.parametrize(("stop", "error"), [([""], ValueError), ("", ValueError), (["a", 3], TypeError)])
def test_stop_strings_that_make_no_sense_are_refused(smollm2, stop, error):
    with pytest.raises(error, match="stop string"):
        Detokenizer(smollm2, stop=stop)


def test_a_long_text_streams_whole(any_tokenizer):
    ids = any_tokenizer.encode(SAMPLE * 20, add_special_tokens=False)
    pieces, rest, _ = stream(any_tokenizer, ids, stop=["never there"])
    assert "".join(pieces) + rest == any_tokenizer.decode(ids) == SAMPLE * 20


def test_stop_strings_do_not_count_in_the_first_min_tokens(byte_level):
    ids = [i for byte in b"xENDyENDz" for i in byte_level_ids(byte_level)[byte]]
    assert stream(byte_level, ids, stop="END")[2].text == "x"
    assert stream(byte_level, ids, stop="END", min_tokens=4)[2].text == "xENDy"
    pieces, rest, detokenizer = stream(byte_level, ids, stop="END", min_tokens=9)
    assert "".join(pieces) + rest == detokenizer.text == "xENDyENDz"
    assert detokenizer.stopped is None
