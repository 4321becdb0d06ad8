"""What the evaluations share: their flags, and running the same prompts with and without speculation."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import jaxspec
from fitting import fit
from jaxspec import cli
from report import device_name, make_console, number, plan_values

# Answers decoded together where --max-running-requests does not say.
MOST_ROWS = 8
REFUSED = {
    "n": "each prompt is answered once; leave it out",
    "logprobs": "no text is shown; leave it out",
}


def parse(description: str | None, argv: list[str] | None, *, prompts: str) -> argparse.Namespace:
    """The flags of an evaluation; `prompts` says what its files hold."""
    parser = cli.build_parser(description)
    parser.add_argument("--prompts", action="append", required=True, help=f"{prompts}; repeatable")
    parser.add_argument("--field", help="which field holds the prompt (default: looked for)")
    parser.add_argument("--num-prompts", type=cli.count, help="the first so many of each file (default: all)")
    parser.add_argument(
        "--compare-plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also answer without speculation: the tokens must be equal, and the speed-up is shown (default: True)",
    )
    cli.add_model_flags(parser, default="smollm2")
    cli.add_engine_flags(parser, {"skip_tokenizer_init": "the prompts are text; leave it out"})
    cli.add_spec_flags(parser)
    cli.add_sampling_flags(parser, REFUSED, temperature=0.0, max_tokens=128, seed=0)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Evaluates, and prints tables and a line of JSON.

    Returns:
        0; 1 where outputs with and without speculation differ and must not: greedy, in float32.
    """
    engine, spec, params = cli.engine_config(args), cli.spec_config(args), cli.sampling_params(args)
    from jaxspec.training.evaluation import Evaluation, evaluate, read_task_prompts

    prompts = read_task_prompts(args.prompts, args.field, args.num_prompts)
    rows = min(len(prompts), MOST_ROWS)
    engine = fit(engine, rows=rows, row_buckets=(rows,))
    specs = (
        {"plain": None} if spec is None else {spec.algorithm: spec, **({"plain": None} if args.compare_plain else {})}
    )
    results: dict[str, Evaluation] = {}
    plans: dict[str, Any] = {}
    for name, one in specs.items():
        print(f"answering {len(prompts)} prompts: {name}", file=sys.stderr, flush=True)
        with jaxspec.LLM(args.model, spec=one, engine=engine) as llm:
            results[name] = evaluate(llm, prompts, params)
            plans[name] = plan_values(llm.plan)
    same = _num_equal([result.token_ids for result in results.values()])
    console = make_console()
    console.print(f"{escape(args.model)}, {plans[next(iter(plans))]['dtype']}, on {escape(device_name())}")
    for name, result in results.items():
        console.print(_table(name, result))
    if len(results) > 1:
        console.print(f"{same} of {len(prompts)} answers have the same tokens with and without speculation.")
    report = {
        "evaluation": Path(sys.argv[0]).stem,
        "model": args.model,
        "device": device_name(),
        "results": {name: result.values() for name, result in results.items()},
        "answers_equal": same if len(results) > 1 else None,
        "settings": {name: value for name, value in vars(args).items() if value is not None},
        "plans": plans,
        "versions": {"jaxspec": jaxspec.__version__, "jax": metadata.version("jax")},
        "command": shlex.join(["python", *sys.argv]),
    }
    print(json.dumps(report, ensure_ascii=False, default=str))
    exact = params.temperature == 0 and all(plan["dtype"] == "float32" for plan in plans.values())
    if exact and same < len(prompts):
        print(
            f"error: {len(prompts) - same} answers differ; in float32 speculation must not change them.",
            file=sys.stderr,
        )
        return 1
    return 0


def _num_equal(answers: Sequence[list[list[int]]]) -> int:
    return sum(all(one == several[0] for one in several) for several in zip(*answers, strict=True))


def _table(name: str, result: Any) -> Table:
    columns = ("task", "prompts", "tokens", "accept length", "accepted at position 1, 2, ...", "accuracy", "reasoning")
    table = Table(*columns, title=f"{name}: {number(result.decode_rate, 1)} tokens/s in rounds", title_justify="left")
    for task, sums in (*result.tasks.items(), ("all", result.overall)):
        rates = " ".join(f"{rate:.2f}" for rate in sums.accept_rate_per_position)
        accuracy = "-" if sums.accuracy is None else f"{sums.accuracy:.1%}"
        table.add_row(
            escape(task),
            str(sums.prompts),
            str(sums.tokens),
            number(sums.accept_length),
            rates or "-",
            accuracy,
            str(sums.reasoning_tokens),
        )
    return table
