"""Flags of the scripts: SGLang's names, defaults that live in the settings, refusals by name, exits."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from jaxspec import cli
from jaxspec.config import ACCEPT_RULES, EngineConfig, SamplingParams, SpecConfig
from jaxspec.draft import DRAFTS
from jaxspec.draft_choice import AVAILABLE_ACCEPT_RULES, KNOWN_ALGORITHMS
from jaxspec.sglang_flags import MAPPED, OWN_FIELDS, REFUSED, flag_of


def parse(*argv: str, **defaults):
    parser = cli.build_parser("test")
    cli.add_model_flags(parser, default="embedded")
    cli.add_engine_flags(parser)
    cli.add_simulation_flag(parser)
    cli.add_spec_flags(parser)
    cli.add_sampling_flags(parser)
    parser.set_defaults(**defaults)
    return parser.parse_args(argv)


def error_of(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_no_flags_are_the_defaults_of_the_settings():
    args = parse()
    assert args.model == "embedded"
    assert cli.engine_config(args) == EngineConfig()
    assert cli.sampling_params(args) == SamplingParams()
    assert cli.spec_config(args) is None


def test_a_script_may_set_defaults_of_its_own_that_flags_replace():
    assert cli.sampling_params(parse(temperature=0.0)).temperature == 0
    assert cli.sampling_params(parse("--temperature", "0.5", temperature=0.0)).temperature == 0.5


@pytest.mark.parametrize("flag", ["--model-path", "--model"])
def test_the_model_has_two_names_and_is_required_without_a_default(flag, capsys):
    assert parse(flag, "folder").model == "folder"
    parser = cli.build_parser()
    cli.add_model_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "--model-path" in capsys.readouterr().err


ENGINE_FLAGS = {
    "max_model_len": ("--context-length 100", 100),
    "page_size": ("--page-size 4", 4),
    "max_total_tokens": ("--max-total-tokens 64", 64),
    "max_running_requests": ("--max-running-requests 7", 7),
    "max_queued_requests": ("--max-queued-requests 9", 9),
    "chunked_prefill_size": ("--chunked-prefill-size -1", None),
    "decode_row_buckets": ("--decode-row-buckets 4,1", (1, 4)),
    "prefill_chunk_buckets": ("--prefill-chunk-buckets 512", (512,)),
    "reasoning_parser": ("--reasoning-parser qwen3", "qwen3"),
    "prefix_caching": ("--no-prefix-caching", False),
    "rounds_per_dispatch": ("--rounds-per-dispatch 4", 4),
    "disable_overlap_schedule": ("--disable-overlap-schedule", True),
    "enable_dp_attention": ("--enable-dp-attention", True),
    "skip_tokenizer_init": ("--skip-tokenizer-init", True),
    "random_seed": ("--random-seed 5", 5),
    "dtype": ("--dtype bfloat16", "bfloat16"),
    "weight_dtype": ("--weight-dtype int8", "int8"),
    "attention_backend": ("--attention-backend xla", "xla"),
    "warmup": ("--no-warmup", False),
    "progress": ("--progress", True),
    "scan_layers": ("--no-scan-layers", False),
    "compilation_cache_dir": ("--compilation-cache-dir none", None),
    "max_stop_token_ids": ("--max-stop-token-ids 3", 3),
    "max_logprobs": ("--max-logprobs 2", 2),
    "simulate_accept_len": ("--simulate-accept-len 2.5", 2.5),
    "max_logit_bias": ("--max-logit-bias 9", 9),
    "max_bad_words": ("--max-bad-words 0", 0),
    "max_bad_word_tokens": ("--max-bad-word-tokens 4", 4),
}
SAMPLING_FLAGS = {
    "temperature": ("--temperature 0.5", 0.5),
    "top_p": ("--top-p 0.9", 0.9),
    "top_k": ("--top-k -1", -1),
    "min_p": ("--min-p 0.1", 0.1),
    "seed": ("--seed 3", 3),
    "max_tokens": ("--max-new-tokens none", None),
    "min_tokens": ("--min-new-tokens 2", 2),
    "stop": ("--stop a --stop b", ("a", "b")),
    "stop_token_ids": ("--stop-token-ids 2,7 --stop-token-ids 9", (2, 7, 9)),
    "ignore_eos": ("--ignore-eos", True),
    "n": ("--n 3", 3),
    "logprobs": ("--logprobs 4", 4),
    "prompt_logprobs": ("--prompt-logprobs 0", 0),
    "presence_penalty": ("--presence-penalty 0.5", 0.5),
    "frequency_penalty": ("--frequency-penalty -1", -1.0),
    "repetition_penalty": ("--repetition-penalty 1.2", 1.2),
    "logit_bias": ("--logit-bias 7:-2,5:1.5", ((5, 1.5), (7, -2.0))),
    "allowed_token_ids": ("--allowed-token-ids 2,7", (2, 7)),
    "bad_words_ids": ("--bad-words-ids 5,9 --bad-words-ids 3", ((5, 9), (3,))),
    "speculate": ("--no-speculate", False),
    "skip_special_tokens": ("--no-skip-special-tokens", False),
    "include_stop_str_in_output": ("--include-stop-str-in-output", True),
}
SPEC_FLAGS = {
    "draft_model": ("--speculative-draft-model folder", "folder"),
    "num_steps": ("--speculative-num-steps 5", 5),
    "eagle_topk": ("--speculative-eagle-topk 4", 4),
    "num_draft_tokens": ("--speculative-num-draft-tokens 8", 8),
    "overlap_trees": ("--overlap-trees", True),
    "strict": ("--strict", True),
    "shared_noise": ("--no-shared-noise", False),
    "accept_rule": ("--accept-rule target_only", "target_only"),
    "ngram_max_match": ("--ngram-max-match 5", 5),
    "ngram_min_match": ("--speculative-ngram-min-match-window-size 2", 2),
}

# Tested together: some of them need each other.
TREE_FIELDS = ("static_tree", "merge", "merge_draft_model", "merge_num_steps")
RULE_FIELDS = ("block_verification", "accept_threshold_single", "accept_threshold_acc")
PYTHON_ONLY = ("logits_processors",)  # functions, and the names of them


@pytest.mark.parametrize(
    ("settings", "build", "flags", "needed"),
    [
        (EngineConfig, cli.engine_config, ENGINE_FLAGS, ""),
        (SamplingParams, cli.sampling_params, SAMPLING_FLAGS, ""),
        (SpecConfig, cli.spec_config, SPEC_FLAGS, "--speculative-algorithm ngram"),
    ],
)
def test_every_setting_has_a_flag_that_sets_it_alone(settings, build, flags, needed):
    fields = {field.name for field in dataclasses.fields(settings)} - {"algorithm"}
    assert fields - {*TREE_FIELDS, *RULE_FIELDS, *PYTHON_ONLY} == set(flags)
    plain = vars(build(parse(*needed.split())))
    for name, (text, value) in flags.items():
        assert vars(build(parse(*needed.split(), *text.split()))) == {**plain, name: value}, name


def test_static_and_merged_trees_have_flags(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1]]")
    text = f"--static-tree {file} --merge standalone --merge-draft-model folder --merge-num-steps 4"
    spec = cli.spec_config(parse(*f"--speculative-algorithm ngram {text}".split()))
    assert spec is not None
    assert [getattr(spec, name) for name in TREE_FIELDS] == [((0,), (1,)), "STANDALONE", "folder", 4]


def test_the_draft_model_and_the_match_lengths_have_both_names():
    for flag in ("--speculative-draft-model-path", "--speculative-draft-model"):
        spec = cli.spec_config(parse("--speculative-algorithm", "STANDALONE", flag, "x"))
        assert spec == SpecConfig(algorithm="STANDALONE", draft_model="x")
    for flag in ("--speculative-ngram-max-match-window-size", "--ngram-max-match"):
        assert cli.spec_config(parse("--speculative-algorithm", "NGRAM", flag, "6")) == SpecConfig(
            algorithm="NGRAM", ngram_max_match=6
        )


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("value", [["7.5"], []])
def test_sglangs_other_flags_are_refused_by_name(name, value):
    args = parse("--speculative-algorithm", "NGRAM", flag_of(name), *value)
    with pytest.raises(ValueError, match=rf"\({flag_of(name)}\) is refused: ") as error:
        cli.spec_config(args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "refused"), REFUSED.items())
def test_sglangs_other_flags_pass_at_their_defaults(name, refused):
    for default in refused.defaults:
        args = parse("--speculative-algorithm", "NGRAM", flag_of(name), str(default))
        assert cli.spec_config(args) == SpecConfig(algorithm="NGRAM")


@pytest.mark.parametrize("name", ["single", "acc"])
def test_thresholds_pass_at_one_and_are_the_lossy_rule_below(name):
    flags = ("--speculative-algorithm", "NGRAM", f"--speculative-accept-threshold-{name}")
    assert cli.spec_config(parse(*flags, "1.0")) == SpecConfig(algorithm="NGRAM")
    lossy: dict[str, Any] = {f"accept_threshold_{name}": 0.8}
    assert cli.spec_config(parse(*flags, "0.8")) == SpecConfig(algorithm="NGRAM", accept_rule="target_only", **lossy)


def test_rejection_sampling_has_sglangs_flags():
    flags = ("--speculative-algorithm", "NGRAM")
    spec = cli.spec_config(parse(*flags, "--speculative-use-rejection-sampling", "true"))
    assert spec == SpecConfig(algorithm="NGRAM", accept_rule="rejection")
    spec = cli.spec_config(parse(*flags, "--speculative-use-block-verification"))
    assert spec == SpecConfig(algorithm="NGRAM", accept_rule="rejection", block_verification=True)


@pytest.mark.parametrize("algorithm", [[], ["--speculative-algorithm", "none"]])
@pytest.mark.parametrize(
    "flags", [["--speculative-num-steps", "3"], ["--strict"], ["--overlap-trees"], ["--speculative-token-map", "x"]]
)
def test_speculative_flags_without_an_algorithm_are_refused(algorithm, flags):
    assert cli.spec_config(parse(*algorithm)) is None
    with pytest.raises(ValueError, match=rf"{flags[0]} \(.*\) has no effect without --speculative-algorithm"):
        cli.spec_config(parse(*algorithm, *flags))


def test_every_mapped_flag_of_sglang_is_known_to_the_parser():
    parser = cli.build_parser()
    cli.add_spec_flags(parser)
    text = parser.format_help()
    for name in MAPPED:
        assert flag_of(name) in text
    for name in OWN_FIELDS:
        assert "--" + name.replace("_", "-") in text
    assert "--speculative-token-map" not in text


def test_help_offers_what_this_version_has():
    parser = cli.build_parser()
    cli.add_spec_flags(parser)
    actions = {action.dest: str(action.help) for action in parser._actions}
    offered = actions["speculative_algorithm"]
    assert {name for name in KNOWN_ALGORITHMS if name in offered} == set(DRAFTS) - {"NONE"}
    assert {rule for rule in ACCEPT_RULES if rule in actions["accept_rule"]} == set(AVAILABLE_ACCEPT_RULES)


def test_flags_that_a_script_refuses_are_hidden_and_say_why(capsys):
    parser = cli.build_parser()
    cli.add_engine_flags(parser, {"disable_overlap_schedule": "both schedules run", "warmup": "always"})
    cli.add_sampling_flags(parser, {"n": "one is enough"}, temperature=0.0)
    text = parser.format_help()
    assert "--n " not in text
    assert "--disable-overlap-schedule" not in text
    assert "0 is greedy (default: 0.0)" in text
    assert parser.parse_args([]).temperature == 0
    for argv, reason in {"--disable-overlap-schedule": "both", "--n=2": "one is", "--no-warmup": "always"}.items():
        with pytest.raises(SystemExit) as exit_:
            parser.parse_args([argv])
        assert exit_.value.code == 2
        assert f"{argv.partition('=')[0]}" in (line := capsys.readouterr().err.splitlines()[-1])
        assert f"it has no effect here: {reason}" in line


def test_help_shows_the_defaults_of_the_settings():
    parser = cli.build_parser()
    cli.add_engine_flags(parser)
    cli.add_spec_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "(default: 512)" in text
    assert "NGRAM looks up (default: 3)" in text
    assert "EAGLE3)" not in text, "there is no default algorithm on the command line"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--page-size", "big"], "argument --page-size: invalid int value: 'big'"),
        (["--max-new-tokens", "few"], "argument --max-new-tokens: invalid int value: 'few'"),
        (["--top-k", str(2**31)], "argument --top-k: 2147483648 does not fit into 32 bits"),
        (["--stop-token-ids", "1,x"], "argument --stop-token-ids: '1,x' is not a list of integers"),
        (["--speculative-num", "3"], "unrecognized arguments: --speculative-num"),
        (["--enable-mixed-chunk"], "unrecognized arguments: --enable-mixed-chunk"),
    ],
)
def test_flags_that_cannot_be_read_are_named(argv, part, capsys):
    assert part in error_of(capsys, *argv)


def test_settings_are_checked_when_built():
    with pytest.raises(ValueError, match="temperature=nan must be a finite number"):
        cli.sampling_params(parse("--temperature", "nan"))
    with pytest.raises(ValueError, match="dtype='int4' is not known"):
        cli.engine_config(parse("--dtype", "int4"))


def raising(error: BaseException | None, status: int | None = None):
    def main() -> int | None:
        if error is not None:
            raise error
        return status

    return main


@pytest.mark.parametrize(
    ("main", "status", "text"),
    [
        (raising(None), 0, ""),
        (raising(None, 3), 3, ""),
        (raising(ValueError("top_p=2 must be in (0, 1]")), 2, "error: top_p=2 must be in (0, 1]\n"),
        (raising(FileNotFoundError("no model at 'x'")), 2, "error: no model at 'x'\n"),
        (raising(PermissionError(13, "Permission denied", "x")), 2, "error: [Errno 13] Permission denied: 'x'\n"),
        (raising(TypeError("prompt 0 is a float")), 2, "error: prompt 0 is a float\n"),
        (raising(ValueError("a message\nof two lines")), 2, "error: a message of two lines\n"),
        (raising(ValueError()), 2, "error: ValueError\n"),
        (raising(KeyboardInterrupt()), 130, ""),
    ],
)
def test_run_exits_with_the_status_and_one_line(main, status, text, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.run(main)
    assert exit_.value.code == status
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    "error", [RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), MemoryError()]
)
def test_run_says_what_to_lower_where_the_memory_is_full(error, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.run(raising(error))
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the memory is full: use a smaller model, or lower --max-running-requests" in line


def test_run_lets_other_errors_show_where_they_came_from():
    with pytest.raises(RuntimeError, match="a defect"):
        cli.run(raising(RuntimeError("a defect")))


def test_run_is_quiet_when_the_reader_went_away():
    code = "from jaxspec import cli\ndef main():\n    while True: print('text')\ncli.run(main)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
