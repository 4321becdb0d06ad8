"""Sampling settings: what passes, what is normalised, and one clear line for what does not."""

import copy
import dataclasses
import inspect
import math
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jaxspec.checks import MAX_INT32
from jaxspec.config import MAX_SEED, SamplingParams
from jaxspec.sampling_params import UNSUPPORTED
from tests.says import assert_says


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1e-5},
        {"temperature": 100.0},
        {"temperature": 1e10},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"top_p": 5e-324},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 50},
        {"top_k": MAX_INT32},
        {"min_p": 0},
        {"min_p": 0.999},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": None, "min_tokens": 5000},
        {"n": 4},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prompt_logprobs": 20},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 10.0},
        {"logit_bias": ((0, -100.0), (5, 100.0))},
        {"allowed_token_ids": (0,)},
        {"bad_words_ids": ((4,), (1, 2))},
        {"logits_processors": (("mine", (1.0, 2.5)), ("yours", ()))},
        {"speculate": False},
    ],
)
def test_sampling_limits_are_included(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"temperature": -0.1}, ["temperature=-0.1", "at least 1e-05", "set 0 for greedy"]),
        ({"temperature": 1e-9}, ["temperature=1e-09", "at least 1e-05", "set 0 for greedy"]),
        ({"temperature": math.nan}, ["temperature=nan", "finite"]),
        ({"temperature": math.inf}, ["temperature=inf", "finite"]),
        ({"top_p": 0}, ["top_p=0", "(0, 1]", "set 1"]),
        ({"top_p": 1.0001}, ["top_p=1.0001", "(0, 1]", "set 1"]),
        ({"top_p": -1}, ["top_p=-1", "(0, 1]"]),
        ({"top_p": math.nan}, ["top_p=nan", "finite"]),
        ({"min_p": 1}, ["min_p=1", "[0, 1)", "set 0"]),
        ({"min_p": -0.5}, ["min_p=-0.5", "[0, 1)"]),
        ({"min_p": math.nan}, ["min_p=nan", "finite"]),
        ({"temperature": 1e11}, ["temperature=100000000000.0", "at most 1e+10", "set it lower"]),
        ({"temperature": 1e38}, ["temperature=1e+38", "at most 1e+10"]),
        ({"temperature": 10**400}, ["temperature=inf", "finite"]),
        ({"top_k": -2}, ["top_k=-2", "from -1 to 2147483647", "set -1 or 0"]),
        ({"top_k": 2**31}, ["top_k=2147483648", "from -1 to 2147483647", "set -1 or 0"]),
        ({"seed": -1}, ["seed=-1", "0 to 18446744073709551615"]),
        ({"seed": MAX_SEED + 1}, [f"seed={MAX_SEED + 1}", "0 to"]),
        ({"max_tokens": -1}, ["max_tokens=-1", "at least 0", "set None"]),
        ({"min_tokens": -1}, ["min_tokens=-1", "at least 0"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens=9", "max_tokens=8", "at least 9"]),
        ({"min_tokens": 129}, ["min_tokens=129", "max_tokens=128"]),
        ({"stop": ""}, ["stop[0]", "empty", "leave it out"]),
        ({"stop": ["a", ""]}, ["stop[1]", "empty"]),
        ({"stop_token_ids": [3, -1]}, ["stop_token_ids[1]=-1", "at least 0"]),
        ({"n": 0}, ["n=0", "from 1 to 4096"]),
        ({"n": -2}, ["n=-2", "from 1 to 4096"]),
        ({"n": 10**9}, ["n=1000000000", "4096"]),
        ({"n": 2, "temperature": 0}, ["n=2", "temperature=0", "set n=1"]),
        ({"logprobs": 21}, ["logprobs=21", "0 to 20", "set None"]),
        ({"logprobs": -1}, ["logprobs=-1", "0 to 20"]),
        ({"prompt_logprobs": 21}, ["prompt_logprobs=21", "0 to 20", "set None"]),
        ({"prompt_logprobs": 0, "max_tokens": 0}, ["prompt_logprobs=0 needs", "max_tokens to at least 1"]),
        ({"presence_penalty": 2.5}, ["presence_penalty=2.5", "-2.0 to 2.0", "set 0"]),
        ({"frequency_penalty": -3}, ["frequency_penalty=-3.0", "-2.0 to 2.0", "set 0"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0.0", "above 0", "set 1"]),
        ({"repetition_penalty": 11}, ["repetition_penalty=11.0", "at most 10.0", "set 1"]),
        ({"logit_bias": {3: 101}}, ["logit_bias[3]=101.0", "-100 to 100"]),
        ({"logit_bias": {-1: 1}}, ["logit_bias key=-1", "at least 0"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids is empty", "set None"]),
        ({"bad_words_ids": [[1], []]}, ["bad_words_ids[1] is empty"]),
    ],
)
def test_sampling_values_out_of_range_are_refused(values, parts):
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        SamplingParams(**values)
    assert_says(error, *parts)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "1.0"},
        {"temperature": True},
        {"temperature": None},
        {"top_k": 2.0},
        {"top_k": True},
        {"seed": 1.5},
        {"max_tokens": "8"},
        {"stop": 3},
        {"stop": b"end"},
        {"stop": ["a", 3]},
        {"stop_token_ids": 3},
        {"stop_token_ids": "3"},
        {"stop_token_ids": [1.5]},
        {"ignore_eos": "false"},
        {"ignore_eos": 1},
        {"n": 1.0},
        {"presence_penalty": "1"},
        {"logit_bias": 3},
        {"logit_bias": [3]},
        {"logit_bias": {"a": 1.0}},
        {"allowed_token_ids": 3},
        {"bad_words_ids": [3]},
        {"bad_words_ids": "word"},
        {"logits_processors": "mine"},
        {"logits_processors": {"mine": 1.0}},
        {"speculate": 0},
    ],
)
def test_sampling_values_of_a_wrong_type_are_refused(values):
    with pytest.raises(TypeError) as error:
        SamplingParams(**values)
    assert_says(error, next(iter(values)), "must be")


def test_what_is_asked_of_the_logits_becomes_pairs_and_tuples():
    params = SamplingParams(
        logit_bias={7: 1, 3: float(np.float32(2))},
        allowed_token_ids=range(3),
        bad_words_ids=[[1, 2], (3,), [1, 2]],
        logits_processors={"yours": (), "mine": [1]},
    )
    assert params.biases == ((3, 2.0), (7, 1.0))
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.bad_words_ids == ((1, 2), (3,))
    assert params.processors == (("mine", (1.0,)), ("yours", ()))
    assert SamplingParams(logits_processors=["mine"]).processors == (("mine", ()),)
    assert hash(params) == hash(copy.copy(params))


def test_stops_become_tuples_without_repeats_in_order():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(stop_token_ids=[7, 2, 7]).stop_token_ids == (7, 2)
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"typical_p": 0.5}, "typical_p is not supported in this version; leave it out."),
        ({"bad_words": ["x"]}, "bad_words: use bad_words_ids, with the token ids of each word."),
        ({"guided_decoding": None}, "guided_decoding is not supported in this version, which has no constrained"),
        ({"max_new_tokens": 3}, "max_new_tokens: use max_tokens."),
        ({"temperature": 0, "sampling_seed": 3}, "sampling_seed: use seed."),
        ({"max_tokns": 3}, "unexpected keyword argument 'max_tokns'"),
    ],
)
def test_arguments_of_other_libraries_are_refused_by_name(values, message):
    with pytest.raises(TypeError) as error:
        SamplingParams(**values)
    assert_says(error, message)


def test_arguments_of_other_libraries_name_settings_that_exist():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not fields & set(UNSUPPORTED)
    for reason in UNSUPPORTED.values():
        instead = re.match(r"use (\w+)", reason)
        assert instead is None or instead[1] in fields | {"EngineConfig"}


def test_sampling_params_stay_an_ordinary_dataclass():
    params = SamplingParams(temperature=0.5, stop="x")
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params
    assert dataclasses.replace(params, top_k=3) == SamplingParams(temperature=0.5, stop="x", top_k=3)
    with pytest.raises(TypeError, match="best_of is not supported"):
        dataclasses.replace(params, best_of=2)
    assert list(inspect.signature(SamplingParams).parameters) == [field.name for field in dataclasses.fields(params)]


def test_numbers_of_other_libraries_become_plain_ones():
    values: dict[str, Any] = {"temperature": np.float32(0.5), "top_p": Fraction(1, 2), "max_tokens": np.int64(7)}
    values["stop_token_ids"] = np.array([1, 2])
    params = SamplingParams(**values)
    got = (params.temperature, params.top_p, params.max_tokens, *params.stop_token_ids)
    assert got == (0.5, 0.5, 7, 1, 2)
    assert [type(value) for value in got] == [float, float, int, int, int]
