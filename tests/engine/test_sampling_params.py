"""Sampling parameters are checked when they are made, and what is not supported is refused by name."""

import math

import numpy as np
import pytest

from pagetable.engine import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -1),
        ("min_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("n", 0),
        ("n", 10**12),
        ("top_k", 2**31),
        ("temperature", 10**400),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", [2**31]),
        ("n", 1.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("min_tokens", -1),
        ("seed", "x"),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("stop", [""]),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", "yes"),
        ("include_stop_str_in_output", 1),
    ],
)
def test_bad_values_are_named(name: str, value: object):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.2),
        ("logit_bias", {5: 1.0}),
        ("bad_words", ["x"]),
    ],
)
def test_what_does_not_exist_yet_is_refused_by_name_and_accepted_when_off(name: str, value: object):
    with pytest.raises(RequestError, match=f"{name}=.*not supported yet"):
        SamplingParams(**{name: value})
    SamplingParams(presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, bad_words=[], logit_bias=None)


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(RequestError, match="min_tokens=9"):
        SamplingParams(min_tokens=9, max_tokens=4)


def test_defaults_and_shapes():
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], temperature=np.float32(0.5), top_k=np.int64(3))
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(stop_token_ids=np.array([1, 2]), seed=np.int64(5)).stop_token_ids == (1, 2)
    assert SamplingParams().max_tokens == 16
    assert SamplingParams(max_tokens=None).max_tokens is None
