"""How many drafts are accepted: accept length over files of prompts, overall, by position and by task.

    .venv/bin/python scripts/eval_acceptance.py --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD \\
        --prompts mt_bench.jsonl --prompts humaneval.jsonl --num-prompts 100

MT-bench, HumanEval, Spec-Bench, GSM8K or any JSONL of prompts; of conversations the first turn is asked. A task is a
file, or one of the categories that its records name. The same prompts are answered without speculation as well: in
float32 at temperature 0 a difference is an error (exit status 1). The last line of stdout is JSON.
"""

import eval_runs
from jaxspec import cli


def main(argv: list[str] | None = None) -> int:
    return eval_runs.run(eval_runs.parse(__doc__, argv, prompts=".jsonl, .jsonl.gz or .parquet of prompts"))


if __name__ == "__main__":
    cli.run(main)
