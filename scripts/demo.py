"""A small real model answers three prompts, first plain, then with speculation: the same tokens, in fewer steps.

scripts/demo.sh runs this in an environment of its own. The embedded model is drafted for by the EAGLE3 head that ships
with it, another model by prompt lookup (NGRAM), unless a flag says otherwise. The first prompt asks for a copy, which
is easy to draft; the others are open.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import jaxspec
from jaxspec import EngineConfig, RequestOutput, SamplingParams, SpecConfig, cli
from jaxspec.plan import SpecPlan
from report import decode_rate, device_name, make_console, number, plan_table

PROMPTS = {
    "copy": (
        'Rewrite the following text, changing nothing but the word "lamp", which becomes "lantern":\n\n'
        "The lighthouse keeper climbs the stairs every evening, lights the lamp, and watches the ships pass by. In "
        "winter the wind is so loud that he cannot hear the waves. He writes the name of every ship in a large blue "
        "book, and when the night is over he puts out the lamp and goes to sleep."
    ),
    "advice": "What are three good reasons to learn to swim?",
    "story": "Write a short story about a lighthouse keeper.",
}

# The embedded model, and the head that ships for it.
MODEL = "smollm2"
HEAD = Path(__file__).resolve().parents[1] / "checkpoints" / "smollm2-135m-instruct-eagle3"

# One prompt at a time and one length of prefill chunk: two programs to compile.
ENGINE = EngineConfig(
    max_running_requests=1, max_model_len=1024, chunked_prefill_size=128, prefill_chunk_buckets=(128,)
)


@dataclasses.dataclass(frozen=True)
class Pass:
    """All prompts answered by one engine."""

    outputs: dict[str, RequestOutput]
    plan: SpecPlan


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_new_tokens)
    drafts = cli.spec_config(args) or automatic_drafts(args.model)
    console = make_console()
    started = time.monotonic()
    console.print(f"[bold]{escape(args.model)}[/] on {escape(device_name())}")
    plain = answer(args.model, None, params, console)
    spec = answer(args.model, drafts, params, console)
    same = {name: spec.outputs[name].token_ids == plain.outputs[name].token_ids for name in PROMPTS}
    console.print()
    console.print(comparison(plain, spec, same))
    console.print()
    console.print(plan_table(spec.plan))
    console.print(f"\nAll of it took {time.monotonic() - started:.0f} s.")
    if all(same.values()):
        console.print("[bold green]Plain and speculative outputs are equal, token for token.[/]")
        return 0
    console.print(f"[bold red]Outputs differ: {', '.join(name for name in same if not same[name])}.[/]")
    return 1


def automatic_drafts(model: str) -> SpecConfig:
    """How drafts are made where no flag says it."""
    return SpecConfig(algorithm="EAGLE3", draft_model=HEAD) if model == MODEL else SpecConfig(algorithm="NGRAM")


def answer(model: str, spec: SpecConfig | None, params: SamplingParams, console: Console) -> Pass:
    """Answers every prompt with one engine, printing the text as it comes."""
    label = "plain decoding" if spec is None else f"speculative decoding, {spec.algorithm}"
    console.print(f"\nLoading and compiling for {label}")
    outputs: dict[str, RequestOutput] = {}
    # By its full name, which loads jax: here, so that Ctrl-C is quiet from the start.
    with jaxspec.LLM(model, spec=spec, engine=ENGINE) as llm:
        for name, prompt in PROMPTS.items():
            console.print(f"[bold]--- {label}: {name}[/]")
            console.print(prompt.splitlines()[0], style="dim", no_wrap=True, overflow="ellipsis")
            for chunk in llm.stream([{"role": "user", "content": prompt}], params):
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                if chunk.output is not None:
                    outputs[name] = chunk.output
            sys.stdout.write("\n")
        return Pass(outputs, llm.plan)


def comparison(plain: Pass, spec: Pass, same: dict[str, bool]) -> Table:
    method = spec.plan.algorithm
    caption = f"plain and {method}: tokens/s of decoding alone, without loading or the prompt"
    headings = ("prompt", "tokens", "plain", method, "speed-up", "accept length", "same tokens")
    table = Table(*headings, caption=caption, caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, output in spec.outputs.items():
        before, after = decode_rate(plain.outputs[name].completions[0]), decode_rate(output.completions[0])
        table.add_row(
            name,
            str(len(output.token_ids)),
            number(before, 1),
            number(after, 1),
            number(after / before if after and before else None, 2, "x"),
            number(output.accept_length),
            "yes" if same[name] else "NO",
        )
    return table


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="A small real model answers, plain and speculative: the same tokens, in fewer steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=MODEL, help='a model folder, a GGUF file, or "smollm2", the embedded model')
    parser.add_argument("--max-new-tokens", type=cli.count, metavar="N", default=96, help="most tokens of each answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; a sampled answer is equal too")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers")
    cli.add_spec_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
