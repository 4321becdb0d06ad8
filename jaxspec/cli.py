"""What the scripts share: SGLang's flag names, and the settings built from them.

A flag that is not given leaves no attribute behind, so that the defaults live in `jaxspec.config` alone.
"""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jaxspec import sglang_flags
from jaxspec.cli_values import or_none, read_biases, read_bool, read_int, read_ints, read_literal
from jaxspec.config import ATTENTION_BACKENDS, DTYPES, WEIGHT_DTYPES, EngineConfig, SamplingParams, SpecConfig
from jaxspec.draft_choice import AVAILABLE_ACCEPT_RULES
from jaxspec.reasoning import PARSERS

_NOT_GIVEN: Any = argparse.SUPPRESS
# How jax's error for an allocation that fails begins; its class is not known here, where jax is not imported.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# What a script says about flags that it sets itself, by the name of the setting.
Reasons = Mapping[str, str]


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser that takes no abbreviations, so that a flag means the same in every version."""
    return argparse.ArgumentParser(description=description, allow_abbrev=False)


def add_model_flags(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Adds the flag for the model, as `args.model`; it is required where there is no default."""
    text = "Hugging Face folder or .gguf file" + ("" if default is None else f" (default: {default})")
    group = parser.add_argument_group("model")
    group.add_argument("--model-path", "--model", dest="model", default=default, required=default is None, help=text)


def add_engine_flags(parser: argparse.ArgumentParser, refused: Reasons | None = None) -> None:
    """Adds the flags of `EngineConfig`; those in `refused` are hidden, and an error with the reason."""
    group = _Group(parser, "engine", EngineConfig, refused)
    group.value("max_model_len", read_int, "most tokens of a prompt and its output", "--context-length")
    group.value("page_size", read_int, "tokens in a page of the KV cache")
    group.value("max_total_tokens", read_int, "tokens the KV pool holds")
    group.value("max_running_requests", read_int, "completions decoded together")
    group.value("max_queued_requests", read_int, "completions that may wait")
    group.value("chunked_prefill_size", read_int, "prompt tokens computed in one step; -1 is the whole prompt")
    group.value("decode_row_buckets", read_ints, "batch sizes that decoding is compiled for, e.g. 1,4,16")
    group.value("prefill_chunk_buckets", read_ints, "chunk lengths that prefill is compiled for, e.g. 64,512")
    group.toggle("prefix_caching", "compute what several prompts begin with once")
    group.value("rounds_per_dispatch", read_int, "rounds the device runs before the host looks")
    group.switch("disable_overlap_schedule", "wait for each round (v1) instead of overlapping one (v2)")
    group.switch("enable_dp_attention", "data-parallel attention (not in this version)")
    group.switch("skip_tokenizer_init", "run on token ids alone")
    group.value("reasoning_parser", str, f"tells reasoning from the answer: {' or '.join(PARSERS)}")
    group.value("random_seed", int, "draws the seeds of requests that bring none")
    group.value("dtype", str, f"of weights, activations and caches: {', '.join(DTYPES)}")
    group.value("weight_dtype", str, f"what multiplied weights are stored as: {', '.join(WEIGHT_DTYPES)}")
    group.value("attention_backend", str, f"one of {', '.join(ATTENTION_BACKENDS)}")
    group.toggle("warmup", "compile every shape before the first request")
    group.toggle("progress", "show progress bars (automatic: only on a terminal)")
    group.toggle("scan_layers", "stack equal layers and scan over them (automatic)")
    group.value("compilation_cache_dir", or_none(str), "where compiled programs are kept; none keeps none")
    group.value("max_stop_token_ids", read_int, "most stop ids a request may have")
    group.value("max_logprobs", read_int, "most top log-probabilities a request may ask for")
    group.value("max_logit_bias", read_int, "most tokens whose logits a request may bias")
    group.value("max_bad_words", read_int, "most bad words of several tokens a request may have")
    group.value("max_bad_word_tokens", read_int, "longest bad word, in tokens")


def add_simulation_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `EngineConfig.simulate_accept_len`: for benchmarks, because the output is not the model's then."""
    group = _Group(parser, "simulation", EngineConfig)
    group.value("simulate_accept_len", float, "accept drafts unseen, so that a round emits so many tokens on average")


def add_spec_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `SpecConfig`, and SGLang's others, which `spec_config` refuses by name."""
    group = _Group(parser, "speculation", SpecConfig)
    group.sglang("algorithm", str, "NGRAM, STANDALONE, EAGLE, EAGLE3 or NEXTN; without it, plain decoding")
    group.sglang("draft_model_path", str, "checkpoint that drafts", sglang_flags.flag_of("draft_model"))
    group.sglang("num_steps", read_int, "longest draft path, in tokens")
    group.sglang("eagle_topk", read_int, "branches kept per step; 1 is a chain")
    group.sglang("num_draft_tokens", read_int, "nodes a round verifies, root included")
    group.sglang("ngram_min_match_window_size", read_int, "shortest suffix that NGRAM looks up", "--ngram-min-match")
    group.sglang("ngram_max_match_window_size", read_int, "longest suffix that NGRAM looks up", "--ngram-max-match")
    for name in sglang_flags.THRESHOLDS:
        group.sglang(name, float, "a lower one is lossy and accepts more (accept rule target_only)")
    group.sglang("use_rejection_sampling", read_bool, "the same as --accept-rule rejection")
    group.sglang("use_block_verification", read_bool, "judge chains as a whole (accept rule rejection)")
    group.value("accept_rule", str, f"one of {', '.join(AVAILABLE_ACCEPT_RULES)}")
    group.toggle("shared_noise", "draw sampled drafts with the noise of the target's own draw")
    group.value("static_tree", str, "JSON file of a tree of fixed form: its nodes as ranks, [[0], [1], [0, 0]]")
    group.value("merge", str, "a second draft method, whose chain fills the same tree")
    group.value("merge_draft_model", str, "its checkpoint, where it needs one")
    group.value("merge_num_steps", read_int, "length of its chain")
    group.switch("overlap_trees", "let draft trees run on the overlapped schedule, v2")
    group.switch("strict", "refuse to start where a setting was overridden or has no effect, or v1 replaces v2")
    # Known, so that they are refused with a reason and not as unrecognised; hidden, so that nobody is sent to them.
    for name in sglang_flags.REFUSED:
        flag, dest = sglang_flags.flag_of(name), f"{sglang_flags.PREFIX}{name}"
        text = argparse.SUPPRESS
        parser.add_argument(flag, dest=dest, nargs="?", const=True, type=read_literal, default=_NOT_GIVEN, help=text)


def add_sampling_flags(parser: argparse.ArgumentParser, refused: Reasons | None = None, **defaults: Any) -> None:
    """Adds the flags of `SamplingParams`, with a script's own `defaults`; `refused` is as in `add_engine_flags`."""
    parser.set_defaults(**defaults)
    group = _Group(parser, "sampling", SamplingParams, refused, **defaults)
    group.value("temperature", float, "0 is greedy")
    group.value("top_p", float, "keeps the smallest set of tokens with this probability; 1 is off")
    group.value("top_k", read_int, "keeps the k likeliest tokens; -1 is off")
    group.value("min_p", float, "drops tokens below this fraction of the likeliest one's probability; 0 is off")
    group.value("seed", int, "makes sampled output repeatable")
    group.value(
        "max_tokens", or_none(read_int), "most tokens to emit; none is up to the context length", "--max-new-tokens"
    )
    group.value("min_tokens", read_int, "no stop token ends the output before this many", "--min-new-tokens")
    group.value("stop", str, "a string that ends the output; may be given several times", action="append")
    group.value("stop_token_ids", read_ints, "token ids that end the output, e.g. 2,7", action="extend")
    group.switch("ignore_eos", "emit the model's own end-of-text tokens like any other")
    group.value("n", read_int, "completions per prompt")
    group.value(
        "logprobs", read_int, "0 gives the emitted tokens' log-probabilities, k the k likeliest tokens' as well"
    )
    group.value("prompt_logprobs", read_int, "the same for the prompt's tokens")
    group.value("presence_penalty", float, "from -2 to 2, for tokens in the output so far; 0 is off")
    group.value("frequency_penalty", float, "from -2 to 2, for each time a token is in the output so far; 0 is off")
    group.value("repetition_penalty", float, "above 0, for tokens in the prompt or the output so far; 1 is off")
    group.value("logit_bias", read_biases, "added to the logits of tokens, e.g. 5:1.5,7:-2")
    group.value("allowed_token_ids", read_ints, "the only token ids that may be emitted, e.g. 2,7")
    group.value("bad_words_ids", read_ints, "token ids of a word that is never said, e.g. 5,9", action="append")
    group.toggle("speculate", "have drafts judged; --no-speculate emits one token a round")
    group.toggle("skip_special_tokens", "leave special tokens out of the text")
    group.toggle("include_stop_str_in_output", "keep the stop string in the text")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Returns the engine's settings from parsed flags."""
    return EngineConfig(**_given(args, EngineConfig))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Returns the sampling settings from parsed flags."""
    return SamplingParams(**_given(args, SamplingParams))


def spec_config(args: argparse.Namespace) -> SpecConfig | None:
    """Returns the speculative settings from parsed flags, None where no algorithm is named.

    Raises:
        ValueError: a flag is refused, or has no effect because no algorithm is named.
    """
    own = sglang_flags.OWN_FIELDS
    flags = {name: value for name, value in vars(args).items() if name.startswith(sglang_flags.PREFIX) or name in own}
    if str(flags.pop(f"{sglang_flags.PREFIX}algorithm", None)).upper() == "NONE":
        if flags:
            name, value = next(iter(flags.items()))
            flag = _flag(name) if name in own else sglang_flags.flag_of(name.removeprefix(sglang_flags.PREFIX))
            algorithm = sglang_flags.flag_of("algorithm")
            raise ValueError(f"{flag} ({value}) has no effect without {algorithm}; name an algorithm, or leave it out.")
        return None
    return SpecConfig.from_sglang(algorithm=args.speculative_algorithm, **flags)


def count(text: str) -> int:
    """Reads a number from 1 up."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 1 up")
    return int(text)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script and exits with its status, with one line on stderr for what the user can mend.

    A bad setting or file, and sizes that do not fit into memory, exit with 2, Ctrl-C with 130, and a reader that went
    away (`| head`) with 141 and no word.
    """
    try:
        status = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would complain about the pipe then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        status = 130
    except (ValueError, TypeError, OSError) as error:
        status = _report(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(_OUT_OF_MEMORY):
            raise
        sizes = "--max-running-requests, --context-length or --max-total-tokens"
        status = _report(error, f"; the memory is full: use a smaller model, or lower {sizes}.")
    sys.exit(status)


def _report(error: Exception, hint: str = "") -> int:
    """Prints an error on one line, and returns the exit status."""
    logging.getLogger("jaxspec").debug("where the error was raised:", exc_info=True)
    text = " ".join(str(error).splitlines()).strip() or type(error).__name__
    print(f"error: {text.rstrip('.') if hint else text}{hint}", file=sys.stderr)
    return 2


class _Refuse(argparse.Action):
    """A flag that is known, so that it is refused with a reason and not as unrecognised."""

    def __init__(self, option_strings: list[str], dest: str, *, reason: str, **_: Any):
        # Taken with or without a value: the reason counts, not how the flag was written.
        super().__init__(option_strings, dest, nargs="?", default=_NOT_GIVEN, help=argparse.SUPPRESS)
        self._reason = reason

    def __call__(self, *_: Any) -> NoReturn:
        raise argparse.ArgumentError(self, f"it has no effect here: {self._reason}")


class _Group:
    """A group of flags for the fields of one settings class."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        title: str,
        settings: Any,
        refused: Reasons | None = None,
        **defaults: Any,
    ):
        self._group = parser.add_argument_group(title)
        self._refused = refused or {}
        self._defaults = {field.name: field.default for field in dataclasses.fields(settings)} | defaults

    def value(
        self, name: str, parse: Callable[[str], Any], text: str, flag: str | None = None, *, action: str = "store"
    ) -> None:
        """Adds a flag with a value."""
        flag, text = flag or _flag(name), self._with_default(name, text)
        metavar = _metavar(parse)
        self._add(flag, name, type=parse, action=action, metavar=metavar, help=text)

    def sglang(self, name: str, parse: Callable[[str], Any], text: str, *aliases: str) -> None:
        """Adds a speculative flag under SGLang's name, and under others."""
        # SpecConfig's own default algorithm is not the flag's: without the flag there is no speculation.
        text = text if name == "algorithm" else self._with_default(sglang_flags.MAPPED.get(name, name), text)
        flags, dest = (sglang_flags.flag_of(name), *aliases), f"{sglang_flags.PREFIX}{name}"
        how: dict[str, Any] = {"nargs": "?", "const": True} if parse is read_bool else {}
        self._group.add_argument(
            *flags, dest=dest, type=parse, default=_NOT_GIVEN, metavar=_metavar(parse), help=text, **how
        )

    def switch(self, name: str, text: str) -> None:
        """Adds a flag that switches something on."""
        self._add(_flag(name), name, action="store_true", help=text)

    def toggle(self, name: str, text: str) -> None:
        """Adds a pair of flags, --x and --no-x."""
        action = argparse.BooleanOptionalAction
        text = self._with_default(name, text)
        self._add(_flag(name), name, action=action, help=text)

    def _add(self, flag: str, name: str, **how: Any) -> None:
        if name in self._refused:
            flags = [flag, *(["--no-" + flag.removeprefix("--")] * (how["action"] is argparse.BooleanOptionalAction))]
            self._group.add_argument(*flags, dest=name, action=_Refuse, reason=self._refused[name])
        else:
            self._group.add_argument(flag, dest=name, default=_NOT_GIVEN, **how)

    def _with_default(self, name: str, text: str) -> str:
        default = self._defaults.get(name)
        return text if default is None or default == () else f"{text} (default: {default})"


def _given(args: argparse.Namespace, settings: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


_METAVARS = {
    "int": "N",
    "count": "N",
    "float": "X",
    "read_ints": "N,N,...",
    "read_biases": "N:X,...",
    "read_bool": "true|false",
}


def _metavar(parse: Callable[[str], Any]) -> str:
    return _METAVARS.get(parse.__name__, "TEXT")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
