"""`scripts/bench_decode.py`: its variants, its prompts, and the line of JSON it ends with."""

import json

import pytest

import bench_decode
import bench_inputs
from bench_variants import Measured, parse_variant
from jaxspec import EngineConfig, SamplingParams, SpecConfig

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


def test_a_variant_may_name_a_shape():
    spec, engine = parse_variant("v2:5x4x8", SPEC, EngineConfig())
    assert spec == SpecConfig(algorithm="NGRAM", num_steps=5, eagle_topk=4, num_draft_tokens=8, overlap_trees=True)
    assert not engine.disable_overlap_schedule
    spec, engine = parse_variant("v1:3x1x4", SPEC, EngineConfig())
    assert spec == SpecConfig(algorithm="NGRAM", num_steps=3, eagle_topk=1, num_draft_tokens=4)
    assert engine.disable_overlap_schedule


@pytest.mark.parametrize("name", ["v2:5x4", "v2:5x4xx", "v2:5xax8", "plain:1x1x2"])
def test_what_is_no_shape_is_named(name):
    with pytest.raises(ValueError, match=f"--variants has '{name}'"):
        parse_variant(name, SPEC, EngineConfig())


@pytest.mark.parametrize("name", ["v3", "r0", "r", "r\u00b2", "plain-", "spec", ""])
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
    assert bench_inputs.read_prompts(args) == ["a", "b"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "no/such/file"], "no file 'no/such/file'"),
        (["--num-prompts", "3", "--batch-sizes", "2"], "3 prompts do not fill batches of 2"),
        (["--num-prompts", "1000"], "has 8 prompts and 1000 are needed; set --num-prompts lower"),
        (["--batch-sizes", "1000"], "has 8 prompts and 1000 are needed; set --batch-sizes lower"),
        (["--field", "turns"], "--field turns has no effect on the built-in prompts"),
    ],
)
def test_prompts_that_do_not_fit_are_named(flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bench_inputs.read_prompts(bench_decode._parse(flags))


@pytest.mark.parametrize(("text", "message"), [(b"{", "prompts.jsonl:1 is not JSON"), (b"\xff", "is not UTF-8 text")])
def test_files_that_hold_no_json_are_named(text, message, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        bench_inputs.read_prompts(bench_decode._parse(["--prompts", str(file), "--batch-sizes", "1"]))


def test_missing_field_is_named_with_the_fields_there_are(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:1 has no text in the field 'question', only \['text'\]"):
        bench_inputs.read_prompts(bench_decode._parse(["--prompts", str(file), "--batch-sizes", "1"]))


@pytest.mark.parametrize("flag", ["--batch-sizes=0", "--batch-sizes=1,x", "--repeats=0", "--num-prompts=-1"])
def test_counts_below_one_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        bench_decode._parse([flag])
    assert "from 1 up" in capsys.readouterr().err


def test_rows_must_hold_the_largest_batch():
    args = bench_decode._parse(["--batch-sizes", "1,4"])
    bench_inputs.check_rows(args, EngineConfig())
    with pytest.raises(ValueError, match="--max-running-requests 2 does not hold a batch of 4"):
        bench_inputs.check_rows(args, EngineConfig(max_running_requests=2))
    with pytest.raises(ValueError, match="--decode-row-buckets 2 does not hold a batch of 4"):
        bench_inputs.check_rows(args, EngineConfig(decode_row_buckets=(2,)))


@pytest.mark.parametrize("tokens", [0, 1])
def test_one_token_leaves_nothing_to_time(tokens):
    with pytest.raises(ValueError, match=f"--max-new-tokens {tokens} leaves nothing to time"):
        bench_inputs.check_budget(SamplingParams(max_tokens=tokens))
    assert bench_inputs.check_budget(SamplingParams(max_tokens=2)).min_tokens == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--variants", "plain,v1,plain"], "--variants has 'plain' twice"),
        (["--variants", "v1,r4", "--rounds-per-dispatch", "2"], "--rounds-per-dispatch 2 has no effect on .* 'r4'"),
    ],
)
def test_variants_that_contradict_are_named(flags, message):
    args = bench_decode._parse([*flags, "--speculative-algorithm", "NGRAM"])
    with pytest.raises(ValueError, match=message):
        bench_inputs.check_variants(args, SPEC, bench_decode.cli.engine_config(args))


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--disable-overlap-schedule", "for v1 alone, set --variants plain-v1,v1"),
        ("--n=2", "each prompt is answered once"),
        ("--stop=x", "with stop tokens banned"),
        ("--skip-tokenizer-init", "the prompts are text"),
    ],
)
def test_flags_without_effect_are_refused(flag, reason, capsys):
    with pytest.raises(SystemExit):
        bench_decode._parse([flag])
    assert reason in capsys.readouterr().err


def test_help_shows_the_commands_as_they_are_typed(capsys):
    with pytest.raises(SystemExit):
        bench_decode._parse(["--help"])
    assert "plain,v1,v2,r4 \\\n        --prompts" in capsys.readouterr().out


def test_runs_without_a_round_to_time_are_an_error():
    class Instant:
        versions: dict[str, str] = {}  # noqa: RUF012

        def run(self, batch):
            return Measured(tokens=[[1, 2]], decode_tokens=0, decode_seconds=0.0, rounds=0, total_seconds=1.0)

        def close(self):
            pass

    with pytest.raises(ValueError, match="v2 was done before a round could be timed"):
        bench_decode.measure({"v2": Instant()}, [[1]], 1, 1)


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


def test_simulated_acceptance_is_marked_in_print_and_json(small, capsys):
    flags = ["--speculative-algorithm", "NGRAM", "--variants", "plain,v2", "--batch-sizes", "1", "--repeats", "1"]
    assert bench_decode.main([*small, *flags, "--max-new-tokens", "33", "--simulate-accept-len", "3.2"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert lines[0].startswith("SIMULATED accept length 3.2: ")
    assert any(line.startswith("SIMULATED acceptance: ") for line in lines[1:])
    assert "not the model's" in report["SIMULATED"]
    assert report["plans"]["plain"]["simulate_accept_len"] is None
    assert report["plans"]["v2"]["simulate_accept_len"] == 3.2
    (result,) = report["results"]
    assert result["variants"]["v2"]["accept_length"] == pytest.approx(3.2, abs=0.4)
    assert result["variants"]["plain"]["accept_length"] == 1.0


def test_benchmark_ends_with_json_that_holds_every_variant(small, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # parallel test runs set it
    flags = ["--speculative-algorithm", "NGRAM", "--variants", "plain,v1,v2", "--batch-sizes", "1,2"]
    assert bench_decode.main([*small, *flags, "--repeats", "2", "--max-new-tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    headings = next(line for line in lines if "variant" in line)
    assert all(heading in headings for heading in ("ms/round", "same", "x plain", "x v1")), "the table is cut"
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
