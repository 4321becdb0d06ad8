"""Answers a file of prompts, for hours if need be, and goes on after whatever stopped it.

    .venv/bin/python scripts/batch_generate.py --model smollm2 --input prompts.jsonl --output answers.jsonl
    .venv/bin/python scripts/batch_generate.py --model smollm2 --input prompts.jsonl --output answers.jsonl --resume

A line of the input is a prompt: {"id": 7, "prompt": "Once"}, with "messages" for a chat, "prompt_ids" for ids, and
any setting of SamplingParams beside it ({"prompt": "Once", "temperature": 0.5}); or a row of the OpenAI batch format
({"custom_id", "method", "url", "body"}), whose answer has that format too. A row without an id is line-N. Answers come
in any order, each with the id of its prompt; a row that cannot be answered gets an error for an answer, and the others
go on. Both files may be gzipped (.jsonl.gz).

An answer is written whole or not at all. With --resume a run that was killed, or found its disk full, goes on with the
rows that have no answer; every row has a seed of its own, so that its answer is what it would have been. The last line
of stdout is JSON.
"""

import argparse
import json
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import jaxspec
from fitting import fit
from jaxspec import cli
from report import device_name, plan_values

if TYPE_CHECKING:
    from jaxspec.offline.report import Totals

# Completions decoded together where --max-running-requests does not say.
MOST_ROWS = 48
REFUSED = {"max_queued_requests": "no more rows are handed to the engine than it takes; leave it out"}


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    spec, engine, params = cli.spec_config(args), cli.engine_config(args), cli.sampling_params(args)
    if args.system is not None and not args.chat:
        raise ValueError("--system is part of a chat; add --chat.")
    from jaxspec.offline.generation import Generation
    from jaxspec.offline.job import Job
    from jaxspec.offline.rows import Reading

    reading = Reading(params, args.prompt_field, tuple(args.copy), is_chat=args.chat, system=args.system)
    matters = {
        name: getattr(engine, name) for name in ("dtype", "weight_dtype", "reasoning_parser", "simulate_accept_len")
    }
    settings = {"model": args.model, **matters, "spec": spec, "reading": reading._asdict()}
    with Job(Path(args.input), Path(args.output), _as_json(settings), resume=args.resume) as job:
        if job.num_cut:
            print(f"{job.out}: dropped {job.num_cut} bytes of a row that was cut short", file=sys.stderr)
        rows = min(max(1, job.num_rows - job.num_done) * params.n, MOST_ROWS)
        engine = fit(engine, rows=rows, row_buckets={rows, -(-rows // 4)})
        with jaxspec.LLM(args.model, spec=spec, engine=engine) as llm:
            by_length, show = args.order == "length", _Progress()
            totals = Generation(llm, job, reading, model=args.model, by_length=by_length, on_progress=show).run()
            show.end(totals)
            summary = {
                "input": args.input,
                "output": args.output,
                **totals.values(),
                "preemptions": llm.metrics.preemptions,
                "model": args.model,
                "device": device_name(),
                "plan": plan_values(llm.plan),
                "versions": {"jaxspec": jaxspec.__version__, "jax": metadata.version("jax")},
                "command": shlex.join(["python", *sys.argv]),
            }
    print(json.dumps(summary, ensure_ascii=False))
    return 0


class _Progress:
    """A line on stderr: over and over on a terminal, now and then in a log."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._interval = 0.5 if self._is_terminal else 10.0
        self._next = 0.0

    def __call__(self, totals: "Totals") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            self._print(totals)

    def end(self, totals: "Totals") -> None:
        """The last line."""
        self._print(totals)
        if self._is_terminal:
            print(file=sys.stderr)

    def _print(self, totals: "Totals") -> None:
        start, end = ("\r\x1b[K", "") if self._is_terminal else ("", "\n")
        print(f"{start}{totals.line()}", end=end, file=sys.stderr, flush=True)


def _as_json(settings: object) -> dict:
    """Settings as JSON values."""
    return json.loads(json.dumps(settings, default=vars))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    files = parser.add_argument_group("files")
    files.add_argument("--input", required=True, metavar="PATH", help="prompts, as .jsonl or .jsonl.gz")
    files.add_argument("--output", required=True, metavar="PATH", help="their answers, likewise")
    files.add_argument("--resume", action="store_true", help="go on with the answers that are there")
    files.add_argument("--prompt-field", metavar="NAME", help="the field that holds the prompt")
    files.add_argument(
        "--copy", action="append", default=[], metavar="NAME", help="a field that is copied to the answer; repeatable"
    )
    files.add_argument("--chat", action="store_true", help="put each text into the model's chat template")
    files.add_argument("--system", metavar="TEXT", help="the system message of those chats")
    files.add_argument(
        "--order",
        choices=("input", "length"),
        default="input",
        help="which rows are answered first: as they come, or the longest, so that rows of like length run together. "
        "On a CPU that takes longer; measure it where attention costs what the longest row of a batch does "
        "(default: input)",
    )
    cli.add_model_flags(parser, default="smollm2")
    cli.add_engine_flags(parser, REFUSED)
    cli.add_spec_flags(parser)
    cli.add_sampling_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
