"""Settings: what passes, what is normalised, and one clear line (value, limit, what to set) for what does not."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import EngineConfig, SamplingParams, SpecConfig, check_settings
from tests.says import assert_says

SETTINGS = (SamplingParams, EngineConfig, SpecConfig)


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
        ({"simulate_accept_len": 0.5}, ["simulate_accept_len=0.5", "from 1 to", "set None"]),
        ({"simulate_accept_len": 2.0001}, ["simulate_accept_len=2.0001", "three decimals"]),
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
        ({"num_steps": 0}, ["num_steps=0", "from 1 to 1024", "automatic"]),
        ({"num_steps": -3}, ["num_steps=-3", "from 1 to 1024"]),
        ({"eagle_topk": 0}, ["eagle_topk=0", "from 1 to 1024"]),
        ({"num_draft_tokens": 1}, ["num_draft_tokens=1", "from 2 to 1025"]),
        ({"num_steps": 40, "eagle_topk": 64, "num_draft_tokens": 10**5}, ["num_draft_tokens=100000", "from 2 to 1025"]),
        (
            dict.fromkeys(("num_steps", "eagle_topk", "num_draft_tokens"), 2**31 - 1),
            ["num_steps=2147483647", "to 1024"],
        ),
        ({"merge": "NGRAM", "merge_num_steps": 1025}, ["merge_num_steps=1025", "from 1 to 1024"]),
        ({"block_verification": True}, ["option of accept_rule='rejection'", "not of 'coupled'"]),
        ({"accept_threshold_single": 0.5}, ["accept_threshold_single=0.5 is lossy", "set accept_rule='target_only'"]),
        ({"accept_threshold_acc": 0}, ["accept_threshold_acc=0.0", "above 0 and at most 1"]),
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
