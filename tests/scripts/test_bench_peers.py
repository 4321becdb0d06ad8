"""`scripts/bench_peers.py`: what is not there is named, and what runs is measured in turns."""

import argparse
import json

import pytest

import bench_peers
from bench_variants import parse_variant
from jaxspec import EngineConfig, SamplingParams, SpecConfig
from tests.tiny import HAS_PANELS


def test_it_measures_this_library_and_names_every_peer_that_is_missing(small, capsys, monkeypatch):
    monkeypatch.setattr(bench_peers, "_module", _no_module)
    kind = "int8" if HAS_PANELS else "float32"
    flags = ["--variants", f"plain@{kind}", "--batch-sizes", "2", "--num-prompts", "2", "--repeats", "1"]
    assert bench_peers.main([*small, *flags, "--max-new-tokens", "4", "--raw"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert set(report["missing"]) == set(bench_peers.PEERS)
    assert "missing: openvino (ImportError: it is not here)" in out
    (result,) = report["results"]
    assert report["plans"][f"plain@{kind}"]["weight_dtype"] == kind
    assert result["variants"][f"plain@{kind}"]["decode_tokens_per_s_without_prefill"] > 0
    assert report["benchmark"] == "peers"


def _no_module(name: str) -> None:
    raise ImportError("it is not here")


def test_a_variant_may_name_what_its_weights_are_stored_as():
    spec, engine = parse_variant("v2:3x1x4@int8", SpecConfig(algorithm="NGRAM"), EngineConfig())
    assert engine.weight_dtype == "int8"
    assert spec is not None
    assert spec.num_steps == 3
    with pytest.raises(ValueError, match="weight_dtype='int3'"):
        parse_variant("plain@int3", None, EngineConfig())


def test_files_that_are_not_given_or_not_there_are_named():
    with pytest.raises(ValueError, match="set --gguf"):
        bench_peers._given("--gguf", None)
    with pytest.raises(FileNotFoundError, match="--gguf no/such is not there"):
        bench_peers._given("--gguf", "no/such")


def test_sampling_and_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="--temperature"):
        bench_peers.check_greedy(SamplingParams(temperature=0.5))
    with pytest.raises(argparse.ArgumentTypeError, match="openvino-lookup"):
        bench_peers._names("hf,other")
