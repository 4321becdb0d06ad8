"""Accuracy on GSM8K with and without speculation, which must be equal; and accept length.

    .venv/bin/python scripts/eval_gsm8k.py --prompts gsm8k_test.jsonl --num-prompts 100 --speculative-algorithm NGRAM

A record has a question and an answer that ends in "#### NUMBER". The question is asked as it is, in the chat template;
the last number of what the model says is its answer. The last line of stdout is JSON.
"""

import json
from pathlib import Path

import eval_runs
from jaxspec import cli


def main(argv: list[str] | None = None) -> int:
    args = eval_runs.parse(__doc__, argv, prompts="GSM8K as .jsonl: question and answer")
    from jaxspec.training.evaluation import grade
    from jaxspec.training.records import read_records

    for path in args.prompts:
        for place, record in read_records(Path(path)):
            if grade(record, "") is None:
                raise ValueError(
                    f"{place} has no answer that ends in '#### NUMBER', only {json.dumps(sorted(record))}."
                )
    return eval_runs.run(args)


if __name__ == "__main__":
    cli.run(main)
