"""What it saves to compute a shared few-shot prompt once: questions of GSM8K behind five worked examples.

    .venv/bin/python scripts/bench_prefix.py --prompts gsm8k_test.jsonl --model smollm2

The same questions are answered with and without prefix caching, in turns and each time by a new engine, so that nothing
is left of an earlier turn; the tokens must be equal. The first records of the file are the examples. The last line of
stdout is JSON.
"""

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jaxspec
from fitting import fit
from jaxspec import EngineConfig, SamplingParams, SpecConfig, cli
from report import device_name

MOST_ROWS = 8


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    spec, params = cli.spec_config(args), cli.sampling_params(args)
    engine = fit(cli.engine_config(args), rows=MOST_ROWS, row_buckets=(MOST_ROWS,))
    prompts = read_prompts(Path(args.prompts), args.num_shots, args.num_prompts)
    turns: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    answers: list[list[list[int]]] = []
    for turn in range(2 * args.pairs):
        caching = turn % 2 == 0
        figures, tokens = answer(args.model, spec, dataclasses.replace(engine, prefix_caching=caching), prompts, params)
        turns[caching].append(figures)
        answers.append(tokens)
        print(f"{'with' if caching else 'without'} prefix caching: {figures}", file=sys.stderr, flush=True)
    ratios = [off["seconds"] / on["seconds"] for on, off in zip(turns[True], turns[False])]
    report = {
        "prompts": len(prompts),
        "with": turns[True],
        "without": turns[False],
        "answers_equal": sum(all(one == several[0] for one in several) for several in zip(*answers)),
        "time_ratio": statistics.median(ratios),
        "time_ratios": ratios,
        "model": args.model,
        "device": device_name(),
        "command": shlex.join(["python", *sys.argv]),
    }
    print(
        f"{report['answers_equal']} of {len(prompts)} answers have the same tokens; without prefix caching it takes "
        f"{report['time_ratio']:.2f} times as long.",
        file=sys.stderr,
    )
    print(json.dumps(report))
    return 0 if report["answers_equal"] == len(prompts) else 1


def answer(
    model: str, spec: SpecConfig | None, engine: EngineConfig, prompts: list[str], params: SamplingParams
) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures of one turn, and the tokens of each answer."""
    with jaxspec.LLM(model, spec=spec, engine=dataclasses.replace(engine, warmup=True)) as llm:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        metrics = llm.metrics
        figures = {
            "seconds": round(seconds, 3),
            "prompt_tokens": metrics.prompt_tokens,
            "prefilled_tokens": metrics.prefilled_tokens,
            "reused_tokens": metrics.reused_tokens,
            "output_tokens": metrics.emitted_tokens,
            "accept_length": metrics.accept_length,
        }
    return figures, [output.token_ids for output in outputs]


def read_prompts(path: Path, num_shots: int, count: int) -> list[str]:
    """Questions, each behind the same worked examples."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(records) < num_shots + count:
        raise ValueError(
            f"{path} has {len(records)} records; {num_shots} examples and {count} questions are asked for."
        )
    shots = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in records[:num_shots])
    return [f"{shots}Question: {r['question']}\nAnswer:" for r in records[num_shots : num_shots + count]]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompts", required=True, metavar="PATH", help="GSM8K as .jsonl: question and answer")
    parser.add_argument("--num-prompts", type=cli.count, default=50, help="questions (default: 50)")
    parser.add_argument("--num-shots", type=cli.count, default=5, help="worked examples (default: 5)")
    parser.add_argument("--pairs", type=cli.count, default=2, help="turns with and without (default: 2)")
    cli.add_model_flags(parser, default="smollm2")
    cli.add_engine_flags(
        parser, {"prefix_caching": "it is measured with and without", "warmup": "it is always warmed up"}
    )
    cli.add_spec_flags(parser)
    cli.add_sampling_flags(parser, {"n": "one answer each"}, temperature=0.0, max_tokens=16, seed=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
