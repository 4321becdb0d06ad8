r"""Decoding speed: plain against speculative, v1 against v2, several batch sizes, in one process.

    .venv/bin/python scripts/bench_decode.py --model smollm2 --speculative-algorithm NGRAM --batch-sizes 1,8
    .venv/bin/python scripts/bench_decode.py --model smollm2 --speculative-algorithm NGRAM --variants plain,v1,v2,r4 \
        --prompts questions.jsonl --field question

Variants: plain, plain-v1 and plain-r4 decode without speculation; v1, v2 and r4 with it. v1 waits for each round, v2
overlaps one, rN is v2 with N rounds a dispatch; plain is plain-v2. v2:5x4x8 drafts trees of num_steps=5, eagle_topk=4
and num_draft_tokens=8, v2:3x1x4 a chain; plain@int8 and v2:3x1x4@int8 store weights in int8. All variants answer the
same prompts with the same number of tokens (stop tokens are banned until then). They take turns, in an order that is
turned round at every repeat, and ratios are medians of ratios within a repeat, so that a machine that gets slower does
not favour anyone.

Decode tokens/s count the time and the tokens after the last row of a batch has its first token: loading, compilation
and prefill are not in it. "with prefill" counts from the first request to the last token. Every variant holds its own
copy of the weights. The last line of stdout is JSON; progress goes to stderr.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import jaxspec
from bench_inputs import DEFAULT_FIELD, FIXED_LENGTH, REFUSED, check_budget, check_rows, check_variants, read_prompts
from bench_variants import Batch, JaxspecVariant, Measured, Variant
from fitting import fit
from jaxspec import EngineConfig, SamplingParams, SpecConfig, cli
from report import device_name, make_console, number, plan_values, simulation_mark

# What a variant's speed is given relative to.
REFERENCES = ("plain", "v1")


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    engine, spec, params = cli.engine_config(args), cli.spec_config(args), cli.sampling_params(args)
    check_rows(args, engine)
    engine = fit(engine, rows=max(args.batch_sizes), row_buckets=args.batch_sizes)
    params = check_budget(params)
    settings = check_variants(args, spec, engine)
    texts = read_prompts(args)
    variants: dict[str, Variant] = {}
    try:
        load(variants, args.model, settings, params)
        prompts = encode(first_llm(variants), texts, raw=args.raw)
        results = [measure(variants, prompts, size, args.repeats) for size in args.batch_sizes]
        report = describe(args, variants, prompts, results)
    finally:
        for variant in variants.values():
            variant.close()
    print_tables(report)
    print(json.dumps(report, ensure_ascii=False))
    return 0


def load(
    variants: dict[str, Variant],
    model: str,
    settings: dict[str, tuple[SpecConfig | None, EngineConfig]],
    params: SamplingParams,
) -> None:
    """Adds an engine for each variant's settings; those that were loaded are there even if a later one fails."""
    for name, (spec, engine) in settings.items():
        progress(f"loading {name}")
        variants[name] = JaxspecVariant(jaxspec.LLM(model, spec=spec, engine=engine), params)


def encode(llm: "jaxspec.LLM", texts: Sequence[str], *, raw: bool) -> list[list[int]]:
    """Token ids of the prompts, in the chat template where the model has one, so that every variant gets the same."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "--skip-tokenizer-init is refused"
    if raw or not tokenizer.has_chat_template:
        return [tokenizer.encode(text) for text in texts]
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def first_llm(variants: dict[str, Variant]) -> "jaxspec.LLM":
    return next(variant.llm for variant in variants.values() if isinstance(variant, JaxspecVariant))


def measure(
    variants: dict[str, Variant],
    prompts: list[list[int]],
    batch_size: int,
    repeats: int,
    references: Sequence[str] = REFERENCES,
) -> dict[str, Any]:
    """Runs all prompts through all variants, `repeats` times in turns, and returns the medians.

    A variant's speed is given relative to the `references`, where they run too.
    """
    batches: list[Batch] = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    for variant in variants.values():
        variant.run(batches[0])  # not timed: first touches of caches and memory
    runs: dict[str, list[Measured]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name in list(variants)[:: 1 if repeat % 2 == 0 else -1]:
            run = Measured.together([variants[name].run(batch) for batch in batches])
            if not (run.decode_tokens and run.rounds):
                raise ValueError(
                    f"{name} was done before a round could be timed (batch {batch_size}); set --max-new-tokens higher."
                )
            runs[name].append(run)
            progress(
                f"batch {batch_size}, repeat {repeat + 1} of {repeats}, {name}: "
                f"{run.decode_rate:.1f} tokens/s without prefill"
            )
    references = [name for name in references if name in variants]
    return {
        "batch_size": batch_size,
        "references": references,
        "variants": {name: _medians(name, runs, references) for name in variants},
    }


def _medians(name: str, runs: dict[str, list[Measured]], references: Sequence[str]) -> dict[str, Any]:
    mine, reference = runs[name], next(iter(runs.values()))
    rates = [run.decode_rate for run in mine]
    pairs = zip(mine[0].tokens, reference[0].tokens, strict=True)
    return {
        "decode_tokens_per_s_without_prefill": statistics.median(rates),
        "decode_tokens_per_s_range": [min(rates), max(rates)],
        "tokens_per_s_with_prefill": statistics.median(run.total_rate for run in mine),
        "accept_length": mine[0].accept_length,
        "round_ms_without_prefill": statistics.median(run.round_ms for run in mine),
        "ratios_without_prefill": {
            other: statistics.median(a.decode_rate / b.decode_rate for a, b in zip(mine, runs[other], strict=True))
            for other in references
            if other != name
        },
        "prompts_with_the_first_variants_tokens": sum(a == b for a, b in pairs),
    }


def describe(
    args: argparse.Namespace, variants: dict[str, Variant], prompts: list[list[int]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Everything needed to read the numbers, and to get them again."""
    plans = {name: plan_values(v.llm.plan) for name, v in variants.items() if isinstance(v, JaxspecVariant)}
    return {
        "benchmark": "decode",
        **simulation_mark(cli.engine_config(args)),
        "model": str(args.model),
        "device": device_name(),
        "dtype": first_llm(variants).plan.dtype,
        "batch_sizes": args.batch_sizes,
        "num_prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "prompts": args.prompts or "built-in",
        "results": results,
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "plans": plans,
        "versions": {"jaxspec": jaxspec.__version__, "jax": metadata.version("jax"), **_other_versions(variants)},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "command": shlex.join(["python", *sys.argv]),
    }


def _other_versions(variants: dict[str, Variant]) -> dict[str, str]:
    return {name: version for variant in variants.values() for name, version in variant.versions.items()}


def print_tables(report: dict[str, Any]) -> None:
    console = make_console()
    if "SIMULATED" in report:
        console.print(f"SIMULATED {report['SIMULATED']}", style="bold")
    for result in report["results"]:
        title = f"{report['model']}, {report['dtype']}, batch {result['batch_size']}, on {report['device']}"
        if "SIMULATED" in report:
            title = f"SIMULATED acceptance: {title}"
        references = result["references"]
        table = Table(title=escape(title), title_justify="left")
        table.add_column("variant")
        headings = ["tok/s", "min-max", "+prefill", "accept", "ms/round", "same"]
        for heading in [*headings, *(f"x {name}" for name in references)]:
            table.add_column(heading, justify="right")
        for name, values in result["variants"].items():
            low, high = values["decode_tokens_per_s_range"]
            ratios = [number(values["ratios_without_prefill"].get(other)) for other in references]
            table.add_row(
                name,
                number(values["decode_tokens_per_s_without_prefill"], 1),
                f"{low:.1f}-{high:.1f}",
                number(values["tokens_per_s_with_prefill"], 1),
                number(values["accept_length"]),
                number(values["round_ms_without_prefill"], 1),
                f"{values['prompts_with_the_first_variants_tokens']}/{report['num_prompts']}",
                *ratios,
            )
        console.print(table)
    console.print(
        "tok/s, min-max, ms/round and the ratios are of decoding, without prefill; +prefill is tok/s with it; nothing "
        "includes loading or compiling. accept: accept length. same: prompts with the tokens of the first variant."
    )


def progress(text: str) -> None:
    """Says on stderr what goes on."""
    print(text, file=sys.stderr, flush=True)


def batch_sizes(text: str) -> list[int]:
    """Reads `1,8`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 1 up, as in 1,8")
    return sorted({int(part) for part in parts})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what every benchmark of decoding takes."""
    bench = parser.add_argument_group("benchmark")
    bench.add_argument("--batch-sizes", type=batch_sizes, default=[1, 8], metavar="LIST", help="default: 1,8")
    bench.add_argument("--variants", type=lambda text: text.split(","), default=None, metavar="LIST", help="see above")
    bench.add_argument(
        "--repeats", type=cli.count, metavar="N", default=3, help="timed runs of each variant; default: 3"
    )
    bench.add_argument("--prompts", metavar="FILE", help="a JSONL file; default: a few built-in prompts")
    bench.add_argument("--field", default=DEFAULT_FIELD, help=f"the field of --prompts; default: {DEFAULT_FIELD}")
    bench.add_argument("--num-prompts", type=cli.count, metavar="N", help="default: the largest batch size")
    bench.add_argument("--raw", action="store_true", help="do not put the prompts into the chat template")
    cli.add_model_flags(parser, default="smollm2")
    cli.add_engine_flags(parser, REFUSED)
    cli.add_spec_flags(parser)
    cli.add_simulation_flag(parser)
    cli.add_sampling_flags(parser, FIXED_LENGTH, temperature=0.0, seed=0)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.usage = "%(prog)s [flags]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser)
    args = parser.parse_args(argv)
    if args.variants is None:
        args.variants = ["plain"] if cli.spec_config(args) is None else ["plain", "v1", "v2"]
    return args


if __name__ == "__main__":
    cli.run(main)
