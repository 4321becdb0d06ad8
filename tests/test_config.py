"""Settings: what passes, what is normalised, and one clear line (value, limit, what to set) for what does not."""

import copy
import dataclasses
import inspect
import math
import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checks import MAX_INT32
from jaxspec.config import MAX_SEED, EngineConfig, SamplingParams, SpecConfig, check_settings
from jaxspec.sampling_params import UNSUPPORTED

SETTINGS = (SamplingParams, EngineConfig, SpecConfig)


def assert_says(error: pytest.ExceptionInfo[Exception], *parts: str):
    message = str(error.value)
    assert "\n" not in message, "one line"
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_are_frozen_hashable_keyword_only_and_equal_by_value(settings):
    one, other = settings(), settings()
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, dataclasses.fields(one)[0].name, None)
    with pytest.raises(TypeError):
        settings("EAGLE3")


@pytest.mark.parametrize("settings", SETTINGS)
def test_defaults_rebuild_themselves(settings):
    values = dataclasses.asdict(settings())
    assert settings(**values) == settings()


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_field_is_documented_and_checked(settings):
    for field in dataclasses.fields(settings):
        assert re.search(rf"^ {{8}}{field.name}: ", settings.__doc__ or "", re.MULTILINE), field.name
        with pytest.raises((TypeError, ValueError)) as error:
            settings(**{field.name: object()})
        assert_says(error, field.name)


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
        ({"n": 0}, ["n=0", "at least 1"]),
        ({"n": -2}, ["n=-2", "at least 1"]),
        ({"n": 2, "temperature": 0}, ["n=2", "temperature=0", "set n=1"]),
        ({"logprobs": 21}, ["logprobs=21", "0 to 20", "set None"]),
        ({"logprobs": -1}, ["logprobs=-1", "0 to 20"]),
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
    ],
)
def test_sampling_values_of_a_wrong_type_are_refused(values):
    with pytest.raises(TypeError) as error:
        SamplingParams(**values)
    assert_says(error, next(iter(values)), "must be")


def test_stops_become_tuples_without_repeats_in_order():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(stop_token_ids=[7, 2, 7]).stop_token_ids == (7, 2)
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported in this version; leave it out."),
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


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"dtype": "fp8"}, ["dtype='fp8'", "float32", "bfloat16"]),
        ({"attention_backend": "fa3"}, ["attention_backend='fa3'", "auto, xla"]),
        ({"max_model_len": 1}, ["max_model_len=1", "from 2 to 2147483647", "set None"]),
        ({"page_size": 0}, ["page_size=0", "from 1 to 2147483647", "set None"]),
        ({"max_total_tokens": 1}, ["max_total_tokens=1", "from 2 to 2147483647"]),
        ({"max_total_tokens": 10**13}, ["max_total_tokens=10000000000000", "from 2 to 2147483647", "set None"]),
        ({"max_running_requests": 0}, ["max_running_requests=0", "from 1 to 2147483647"]),
        ({"max_queued_requests": 0}, ["max_queued_requests=0", "at least 1", "no limit"]),
        ({"chunked_prefill_size": 0}, ["chunked_prefill_size=0", "at least 1", "None"]),
        ({"chunked_prefill_size": -2}, ["chunked_prefill_size=-2", "at least 1"]),
        ({"rounds_per_dispatch": 0}, ["rounds_per_dispatch=0", "from 1 to 2147483647"]),
        ({"random_seed": -1}, ["random_seed=-1", "0 to"]),
        ({"max_logprobs": 21}, ["max_logprobs=21", "0 to 20"]),
        ({"max_stop_token_ids": 0}, ["max_stop_token_ids=0", "from 1 to 2147483647"]),
        ({"decode_row_buckets": []}, ["decode_row_buckets", "empty", "None"]),
        ({"decode_row_buckets": [0, 4]}, ["decode_row_buckets[0]=0", "at least 1"]),
        (
            {"decode_row_buckets": [1, 4], "max_running_requests": 8},
            ["decode_row_buckets=[1, 4]", "max_running_requests=8", "at least 8"],
        ),
        (
            {"prefill_chunk_buckets": [64]},
            ["prefill_chunk_buckets=[64]", "chunked_prefill_size=512", "set chunked_prefill_size=64"],
        ),
        ({"compilation_cache_dir": " "}, ["compilation_cache_dir", "not empty"]),
    ],
)
def test_engine_values_out_of_range_are_refused(values, parts):
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        EngineConfig(**values)
    assert_says(error, *parts)


def test_engine_values_are_normalised():
    engine = EngineConfig(
        chunked_prefill_size=-1,
        decode_row_buckets=[8, 1, 8, 4],
        prefill_chunk_buckets=(32, 16),
        compilation_cache_dir=Path("cache"),
    )
    assert engine.chunked_prefill_size is None
    assert engine.decode_row_buckets == (1, 4, 8)
    assert engine.prefill_chunk_buckets == (16, 32)
    assert engine.compilation_cache_dir == "cache"
    assert EngineConfig(compilation_cache_dir=None).compilation_cache_dir is None


@pytest.mark.parametrize("name", ["disable_overlap_schedule", "warmup", "progress", "scan_layers"])
def test_engine_switches_take_no_strings(name):
    values: dict[str, Any] = {name: "false"}
    with pytest.raises(TypeError) as error:
        EngineConfig(**values)
    assert_says(error, f"{name}='false'", "True or False", "str")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"algorithm": "none"}, ["algorithm='none'", "spec=None"]),
        ({"algorithm": " "}, ["algorithm=' '", "spec=None"]),
        ({"draft_model": ""}, ["draft_model=''", "not empty"]),
        ({"num_steps": 0}, ["num_steps=0", "from 1 to 2147483647", "automatic"]),
        ({"num_steps": -3}, ["num_steps=-3", "from 1 to 2147483647"]),
        ({"eagle_topk": 0}, ["eagle_topk=0", "from 1 to 2147483647"]),
        ({"num_draft_tokens": 1}, ["num_draft_tokens=1", "from 2 to 2147483647"]),
        ({"accept_rule": "greedy"}, ["accept_rule='greedy'", "coupled, rejection, target_only, typical"]),
        ({"ngram_min_match": 0}, ["ngram_min_match=0", "at least 1"]),
        ({"ngram_min_match": 4}, ["ngram_min_match=4", "ngram_max_match=3", "at least 4"]),
    ],
)
def test_spec_values_out_of_range_are_refused(values, parts):
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        SpecConfig(**values)
    assert_says(error, *parts)


def test_spec_names_are_normalised():
    spec = SpecConfig(algorithm=" eagle3 ", draft_model=Path("heads") / "one")
    assert (spec.algorithm, spec.draft_model) == ("EAGLE3", "heads/one")


def test_settings_of_the_right_class_pass_and_none_is_the_default_engine():
    spec, engine = SpecConfig(algorithm="NGRAM"), EngineConfig(page_size=8)
    assert check_settings(spec, engine) == (spec, engine)
    assert check_settings(None, None) == (None, EngineConfig())


@pytest.mark.parametrize(
    ("spec", "engine", "parts"),
    [
        ("NGRAM", None, ["spec='NGRAM' must be a SpecConfig, not str", "SpecConfig(algorithm", "None for plain"]),
        ({}, None, ["spec={} must be a SpecConfig, not dict"]),
        (SpecConfig, None, ["must be a SpecConfig, not type"]),
        (EngineConfig(), None, ["must be a SpecConfig, not EngineConfig"]),
        (None, {}, ["engine={} must be an EngineConfig, not dict", "EngineConfig(...)"]),
        (None, False, ["engine=False must be an EngineConfig, not bool"]),
    ],
)
def test_settings_of_another_class_are_refused(spec, engine, parts):
    with pytest.raises(TypeError) as error:
        check_settings(spec, engine)
    assert_says(error, *parts)
