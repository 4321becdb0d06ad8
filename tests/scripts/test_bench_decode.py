"""`scripts/bench_decode.py`: its variants, its prompts, and the line of JSON it ends with."""

import json

import pytest

import bench_decode
from bench_variants import Measured, parse_variant
from jaxspec import EngineConfig, SpecConfig

SPEC = SpecConfig(algorithm="NGRAM")


@pytest.mark.parametrize(
    ("name", "speculates", "waits", "rounds"),
    [
        ("plain", False, False, 1),
        ("plain-v1", False, True, 1),
        ("plain-r2", False, False, 2),
        ("v1", True, True, 1),
        ("v2", True, False, 1),
        ("r4", True, False, 4),
    ],
)
def test_variant_names_set_draft_and_schedule(name, speculates, waits, rounds):
    spec, engine = parse_variant(name, SPEC, EngineConfig())
    assert (spec is SPEC, spec is None) == (speculates, not speculates)
    assert (engine.disable_overlap_schedule, engine.rounds_per_dispatch) == (waits, rounds)


@pytest.mark.parametrize("name", ["v3", "r0", "r", "plain-", "spec", ""])
def test_unknown_variants_are_named(name):
    with pytest.raises(ValueError, match=f"--variants has '{name}'"):
        parse_variant(name, SPEC, EngineConfig())


def test_speculative_variant_needs_an_algorithm():
    with pytest.raises(ValueError, match="set --speculative-algorithm"):
        parse_variant("v2", None, EngineConfig())


def test_variants_follow_from_the_algorithm():
    assert bench_decode._parse([]).variants == ["plain"]
    assert bench_decode._parse(["--speculative-algorithm", "NGRAM"]).variants == ["plain", "v1", "v2"]


def test_prompts_come_from_the_field_and_fill_the_batches(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a", "later"]}\n\n{"turns": ["b"]}\n{"turns": ["c"]}\n')
    args = bench_decode._parse(["--prompts", str(file), "--field", "turns", "--batch-sizes", "1,2"])
    assert bench_decode.read_prompts(args) == ["a", "b"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "no/such/file"], "no file 'no/such/file'"),
        (["--num-prompts", "3", "--batch-sizes", "2"], "3 prompts do not fill batches of 2"),
        (["--num-prompts", "1000"], "has 8 prompts and 1000 are needed"),
    ],
)
def test_prompts_that_do_not_fit_are_named(flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bench_decode.read_prompts(bench_decode._parse(flags))


def test_missing_field_is_named_with_the_fields_there_are(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:1 has no text in the field 'question', only \['text'\]"):
        bench_decode.read_prompts(bench_decode._parse(["--prompts", str(file), "--batch-sizes", "1"]))


@pytest.mark.parametrize("flag", ["--batch-sizes=0", "--batch-sizes=1,x", "--repeats=0", "--num-prompts=-1"])
def test_counts_below_one_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        bench_decode._parse([flag])
    assert "from 1 up" in capsys.readouterr().err


def test_rows_must_hold_the_largest_batch():
    args = bench_decode._parse(["--batch-sizes", "1,4"])
    bench_decode.check_rows(args, EngineConfig())
    with pytest.raises(ValueError, match="--max-running-requests 2 does not hold a batch of 4"):
        bench_decode.check_rows(args, EngineConfig(max_running_requests=2))


def test_measurements_add_up():
    one = Measured(
        tokens=[[1, 2, 3]],
        decode_tokens=2,
        decode_seconds=1.0,
        rounds=1,
        total_seconds=2.0,
        row_rounds=1,
        round_tokens=2,
    )
    two = Measured(tokens=[[4, 5]], decode_tokens=1, decode_seconds=0.5, rounds=1, total_seconds=0.5)
    both = Measured.together([one, two])
    assert both.tokens == [[1, 2, 3], [4, 5]]
    assert (both.decode_rate, both.total_rate, both.round_ms, both.accept_length) == (2.0, 2.0, 750.0, 2.0)
    assert two.accept_length is None


def test_benchmark_ends_with_json_that_holds_every_variant(small, capsys):
    flags = ["--speculative-algorithm", "NGRAM", "--variants", "plain,v1,v2", "--batch-sizes", "1,2"]
    assert bench_decode.main([*small, *flags, "--repeats", "2", "--max-new-tokens", "8"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["batch_size"] for result in report["results"]] == [1, 2]
    assert report["plans"]["v1"]["rounds_in_flight"] == 0
    assert report["plans"]["v2"]["rounds_in_flight"] == 1
    for result in report["results"]:
        assert list(result["variants"]) == ["plain", "v1", "v2"]
        for values in result["variants"].values():
            assert values["prompts_with_the_first_variants_tokens"] == 2
            assert values["decode_tokens_per_s_without_prefill"] > 0
            assert values["round_ms_without_prefill"] > 0
        assert result["variants"]["plain"]["accept_length"] == 1.0
        assert set(result["variants"]["v2"]["ratios_without_prefill"]) == {"plain", "v1"}
