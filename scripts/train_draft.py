"""Trains a draft for a model, on text that the model itself writes.

    .venv/bin/python scripts/train_draft.py answers --model smollm2 --prompts prompts.jsonl --out answers
    .venv/bin/python scripts/train_draft.py train --model smollm2 --data answers --out run

`answers` has the target answer prompts, in its chat template. `train` trains a draft on answers, chats or texts, and
leaves it in run/draft: an EAGLE-3 head (new, or one to train further with --init), or with --algorithm STANDALONE a
small model. Either command that was killed goes on when it is started again.
Flags are named as in SGLang where it has them.
"""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fitting import fit
from jaxspec import cli

# Answers decoded together where --max-running-requests does not say.
MOST_ROWS = 32
# Tokens of a held-out prompt and its answer at most.
EVAL_CONTEXT = 1024
_NO_TEXT = "answers are kept as tokens; leave it out"
_ONE = "each prompt is answered once; for more, use another --seed and --out"
REFUSED = {
    "n": _ONE,
    "stop": _NO_TEXT,
    "skip_special_tokens": _NO_TEXT,
    "include_stop_str_in_output": _NO_TEXT,
    "logprobs": _NO_TEXT,
}
# Flags that are not named after their setting.
FLAGS = {"num_steps": "--unroll-steps"}


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    return args.run(args)


def make_answers(args: argparse.Namespace) -> int:
    """Has the target answer the prompts."""
    params = cli.sampling_params(args)
    engine, spec = cli.engine_config(args), cli.spec_config(args)
    from jaxspec import LLM
    from jaxspec.training.answers import AnswerFolder, write_answers
    from jaxspec.training.records import read_prompts

    prompts = [prompt for path in args.prompts for prompt in read_prompts(Path(path), args.field)][: args.num_prompts]
    settings: dict[str, Any] = {"model": args.model, "params": dataclasses.asdict(params)}
    folder = AnswerFolder(Path(args.out), settings)
    engine = fit(engine, rows=min(len(prompts), MOST_ROWS))
    with (
        LLM(args.model, spec=spec, engine=engine) as llm,
        tqdm(total=len(prompts), initial=len(folder.done), unit="answer") as bar,
    ):
        num_tokens = 0

        def count(answer: Any) -> None:
            nonlocal num_tokens
            num_tokens += len(answer["output_ids"])
            bar.set_postfix(tokens=num_tokens, refresh=False)
            bar.update()

        write_answers(llm, prompts, folder, params, on_answer=count)
    print(f"{len(folder.done)} answers in {args.out}")
    return 0


def train(args: argparse.Namespace) -> int:
    """Trains a draft."""
    from jaxspec.training.curves import save_curves
    from jaxspec.training.feature_draft import TrainingTimeTest
    from jaxspec.training.new_decoder import DecoderSettings
    from jaxspec.training.new_head import HeadSettings
    from jaxspec.training.next_token import NextToken
    from jaxspec.training.run import Told, train_draft
    from jaxspec.training.trainer import LOG, TrainSettings

    is_model = args.algorithm == "STANDALONE"
    kinds = (DecoderSettings, NextToken) if is_model else (HeadSettings, TrainingTimeTest)
    args.fused = None if is_model else args.algorithm == "EAGLE3"
    _refuse_others(args, kinds, (DecoderSettings, NextToken, HeadSettings, TrainingTimeTest))

    with contextlib.ExitStack() as stack:
        bar: Any = None

        def tell(told: Told) -> None:
            nonlocal bar
            if told.kind == "data":
                print(f"data: {json.dumps(told.values)}", flush=True)
                bar = stack.enter_context(tqdm(total=told.values["examples"], unit="text", desc="target"))
            elif told.kind == "lessons":
                bar.update(told.values["examples"])
            elif told.kind == "start":
                bar.close()
                steps = told.values
                bar = stack.enter_context(
                    tqdm(total=steps["steps"], initial=steps["step"], unit="step", desc="training")
                )
            elif told.kind == "epoch":
                tqdm.write(f"epoch {told.values['epochs']}: {json.dumps(told.values['measured'])}")
            else:
                losses = told.values["losses"]
                if bar.n % 10 == 0:
                    bar.set_postfix(loss=f"{float(losses.total):.3f}", refresh=False)
                bar.update()

        folder = train_draft(
            kinds[0](**_given(args, kinds[0])),
            kinds[1](**_given(args, kinds[1])),
            TrainSettings(**_given(args, TrainSettings)),
            Path(args.out),
            tell=tell,
            measure=_measure(args) if args.eval_prompts else None,
            until=args.until,
            lessons=args.lessons and Path(args.lessons),
        )
    print(f"the draft is in {folder}")
    log = Path(args.out) / LOG
    if args.curves and log.is_file():
        save_curves(log, log.with_suffix(".png"))
        print(f"loss and accept length by step are drawn in {log.with_suffix('.png')}")
    return 0


def _measure(args: argparse.Namespace) -> Callable[[Path], dict[str, Any]]:
    """Has the engine draft greedily, chains of three on held-out prompts."""
    from jaxspec import LLM, EngineConfig, SamplingParams, SpecConfig
    from jaxspec.training.evaluation import evaluate, read_task_prompts

    prompts = read_task_prompts(args.eval_prompts, None, args.eval_num_prompts)
    engine = fit(EngineConfig(max_model_len=EVAL_CONTEXT), rows=8, row_buckets=(8,))
    params = SamplingParams(temperature=0.0, max_tokens=args.eval_new_tokens)

    def measure(draft: Path) -> dict[str, Any]:
        spec = SpecConfig(algorithm=args.algorithm, draft_model=draft, num_steps=3, eagle_topk=1, num_draft_tokens=4)
        with LLM(args.model, spec=spec, engine=engine) as llm:
            return evaluate(llm, prompts, params).values()

    return measure


def _refuse_others(args: argparse.Namespace, kinds: Sequence[Any], known: Sequence[Any]) -> None:
    """Refuses flags that another kind of draft has, and this one has not."""
    names, others = ({field.name for kind in some for field in dataclasses.fields(kind)} for some in (kinds, known))
    for name in sorted(others - names):
        if getattr(args, name, None) is not None:
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise ValueError(f"{flag} has no effect on --algorithm {args.algorithm}; leave it out.")


def _given(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """The flags that name fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(args).items() if name in names and value is not None}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    answers = commands.add_parser("answers", help="have the target answer prompts", allow_abbrev=False)
    answers.set_defaults(run=make_answers)
    answers.add_argument("--prompts", action="append", required=True, help=".jsonl, .jsonl.gz or .parquet; repeatable")
    answers.add_argument("--field", help="which field holds the prompt (default: looked for)")
    answers.add_argument("--num-prompts", type=cli.count, help="the first so many (default: all)")
    answers.add_argument("--out", required=True, help="folder for the answers")
    cli.add_model_flags(answers, default="smollm2")
    cli.add_engine_flags(answers, {"skip_tokenizer_init": "the prompts are text; leave it out"})
    cli.add_spec_flags(answers)
    cli.add_sampling_flags(answers, REFUSED, temperature=0.0, max_tokens=256, seed=0)
    _add_train(commands.add_parser("train", help="train a draft", allow_abbrev=False))
    return parser.parse_args(argv)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=train)
    cli.add_model_flags(parser, default="smollm2")
    parser.add_argument("--data", action="append", required=True, help="folder of answers, or .jsonl[.gz]/.parquet")
    parser.add_argument("--out", required=True, help="folder for checkpoints, the log and the draft")
    parser.add_argument(
        "--algorithm", choices=("EAGLE3", "EAGLE", "STANDALONE"), default="EAGLE3", help="what drafts (EAGLE3)"
    )
    parser.add_argument("--init", help="EAGLE3 or EAGLE head to train further")
    parser.add_argument("--num-layers", type=cli.count, help="of a STANDALONE draft that starts at random (2)")
    parser.add_argument("--hidden-size", type=cli.count, help="width of a STANDALONE draft (the target's)")
    parser.add_argument("--until", type=cli.count, help="stop after so many steps; the next start goes on")
    parser.add_argument(
        "--layers",
        type=_layers,
        help="0-based layers of the target, e.g. 1,14,26, that a head reads, or that a STANDALONE draft starts from",
    )
    parser.add_argument("--draft-vocab", type=cli.count, help="tokens that the head chooses from (8192)")
    parser.add_argument("--max-length", type=cli.count, help="tokens after which a text is cut (512)")
    parser.add_argument("--keep-lessons", choices=("disk", "none"), help="run the target once, or in every step")
    parser.add_argument(
        "--lessons", help="folder for what the target makes of the texts (OUT/lessons); runs can share it"
    )
    parser.add_argument("--lesson-dtype", choices=("float32", "bfloat16"), help="of states that are kept on disk")
    parser.add_argument("--export-dtype", choices=("float32", "bfloat16"), help="of the exported draft")
    parser.add_argument("--loss", choices=("kl", "lk_alpha", "lk_hybrid"), help="what is minimised")
    parser.add_argument("--unroll-steps", dest="num_steps", type=cli.count, help="steps of training-time test (3)")
    parser.add_argument("--step-decay", type=float, help="weight of each step next to the one before it (0.8)")
    parser.add_argument("--epochs", type=cli.count, help="passes over the data (5)")
    parser.add_argument("--rows", type=cli.count, help="texts a step (8)")
    parser.add_argument("--accumulate", type=cli.count, help="steps whose gradients make one update (1)")
    parser.add_argument("--learning-rate", type=float, help="at its highest (1e-3)")
    parser.add_argument(
        "--eval-prompts", action="append", help="held-out prompts to measure the accept length on after every epoch"
    )
    parser.add_argument("--eval-num-prompts", type=cli.count, default=16, help="of each file (16)")
    parser.add_argument("--eval-new-tokens", type=cli.count, default=64, help="for each prompt (64)")
    parser.add_argument(
        "--curves",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw loss and accept length by step into log.png (default: True)",
    )
    parser.add_argument("--save-seconds", type=float, help="time between checkpoints (120)")
    parser.add_argument("--log-steps", type=cli.count, help="steps between lines of the log (10)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations (float32)")
    parser.add_argument("--seed", type=int, help="of weights and the order of texts (0)")


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    cli.run(main)
