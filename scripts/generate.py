"""Text from a model: one prompt or many, plain or speculative.

    .venv/bin/python scripts/generate.py --model smollm2 --chat --prompt "Why is the sky blue?"
    echo "Once upon a time" | .venv/bin/python scripts/generate.py --model smollm2 --speculative-algorithm NGRAM
    .venv/bin/python scripts/generate.py --model ./Qwen3-0.6B --chat --lines questions.txt --json > answers.jsonl

A single completion is printed as it comes; several are printed whole, in the order of the prompts. The text goes to
stdout, everything else to stderr. Flags are named as in SGLang where it has them. Where they leave it open, decoding is
compiled for as many rows as there are completions (at most 16), and prefill for two lengths of chunk.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxspec
from fitting import fit
from jaxspec import RequestOutput, SamplingParams, cli
from jaxspec.output_values import completion_values
from report import decode_rate, number

# Completions decoded together where --max-running-requests does not say.
MOST_ROWS = 16


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    spec, engine, params = cli.spec_config(args), cli.engine_config(args), cli.sampling_params(args)
    if params.logprobs is not None and not args.json:
        raise ValueError("--logprobs are printed with --json alone; add it, or leave --logprobs out.")
    prompts = read_prompts(args, only_ids=engine.skip_tokenizer_init)
    engine = fit(engine, rows=min(len(prompts) * params.n, MOST_ROWS))
    # By its full name, which loads jax: here, so that Ctrl-C is quiet from the start, and a wrong flag is told at once.
    with jaxspec.LLM(args.model, spec=spec, engine=engine) as llm:
        if args.json:
            _print_json(llm, prompts, params)
        elif len(prompts) == params.n == 1:
            _print_stream(llm, prompts, params, show_ids=engine.skip_tokenizer_init)
        else:
            _print_whole(llm, prompts, params, show_ids=engine.skip_tokenizer_init)
    return 0


def read_prompts(args: argparse.Namespace, *, only_ids: bool) -> list[Any]:
    """The prompts in the order --prompt, --file, --lines, --prompt-ids, or stdin as one prompt where there are none.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: there is no prompt, ids and text are mixed up, or a file is not text.
    """
    if [*args.file, *args.lines].count("-") > 1:
        raise ValueError("stdin (-) can be read once; give it to one of --file and --lines.")
    texts = list(args.prompt)
    texts += [_read(path) for path in args.file]
    texts += [line for path in args.lines for line in _read(path).splitlines() if line.strip()]
    ids = [_parse_ids(text) for text in args.prompt_ids]
    if not texts and not ids:
        if args.lines:
            raise ValueError(f"--lines {args.lines[0]} has no line with text; give at least one prompt.")
        if sys.stdin.isatty():
            raise ValueError("there is no prompt; give --prompt, --file, --lines or --prompt-ids, or pipe one in.")
        texts = [_read("-")]
        if not texts[0]:
            raise ValueError("stdin is empty; pipe a prompt in, or give --prompt, --file, --lines or --prompt-ids.")
    if "" in texts:
        raise ValueError("a prompt is empty; give at least one character.")
    if only_ids and texts:
        raise ValueError("--skip-tokenizer-init runs on token ids alone; give the prompt with --prompt-ids.")
    if not args.chat:
        if args.system is not None:
            raise ValueError("--system is part of a chat; add --chat.")
        return [*texts, *ids]
    if ids:
        raise ValueError("--prompt-ids are a whole prompt already, and --chat would wrap it; leave one of them out.")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [[*system, {"role": "user", "content": text}] for text in texts]


def output_values(index: int, output: RequestOutput) -> dict[str, Any]:
    """One prompt's result as JSON values; rates are of decoding alone."""
    completions = []
    for completion in output.completions:
        values = completion_values(completion)
        values["timings"] = {"ttft_s": completion.timings.ttft, "total_s": completion.timings.total}
        values["decode_tokens_per_s"] = decode_rate(completion)
        completions.append(values)
    return {"prompt_index": index, "prompt_tokens": len(output.prompt_token_ids), "completions": completions}


def _print_json(llm: "jaxspec.LLM", prompts: list[Any], params: SamplingParams) -> None:
    for index, output in _in_order(llm, prompts, params):
        print(json.dumps(output_values(index, output), ensure_ascii=False), flush=True)


def _print_stream(llm: "jaxspec.LLM", prompts: list[Any], params: SamplingParams, *, show_ids: bool) -> None:
    for chunk in llm.stream(prompts, params):
        sys.stdout.write(" ".join(map(str, [*chunk.token_ids, ""])) if show_ids else chunk.text)
        sys.stdout.flush()
        if chunk.output is not None:
            sys.stdout.write("\n")
            _print_figures(chunk.output)


def _print_whole(llm: "jaxspec.LLM", prompts: list[Any], params: SamplingParams, *, show_ids: bool) -> None:
    for index, output in _in_order(llm, prompts, params):
        for completion in output.completions:
            which = f", completion {completion.index + 1} of {params.n}" if params.n > 1 else ""
            print(f"=== prompt {index + 1} of {len(prompts)}{which}")
            print(" ".join(map(str, completion.token_ids)) if show_ids else completion.text, flush=True)
        _print_figures(output)


def _in_order(llm: "jaxspec.LLM", prompts: list[Any], params: SamplingParams) -> Iterator[tuple[int, RequestOutput]]:
    """Yields each prompt's output as soon as it and those before it are done."""
    done: dict[int, RequestOutput] = {}
    following = 0
    for chunk in llm.stream(prompts, params):
        if chunk.output is not None:
            done[chunk.prompt_index] = chunk.output
        while following in done:
            yield following, done.pop(following)
            following += 1


def _print_figures(output: RequestOutput) -> None:
    for completion in output.completions:
        print(
            f"[{len(completion.token_ids)} tokens, {completion.finish_reason}; "
            f"{number(decode_rate(completion), 1)} tokens/s without the prompt; "
            f"accept length {number(completion.accept_length)} over {completion.rounds} rounds]",
            file=sys.stderr,
        )


def _read(path: str) -> str:
    # Not is_file(), which a pipe is not: --file <(command) is fine.
    if path != "-" and (not Path(path).exists() or Path(path).is_dir()):
        raise FileNotFoundError(f"there is no file {path!r} to read a prompt from.")
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        name = "stdin" if path == "-" else path
        raise ValueError(f"{name} is not UTF-8 text ({error}); convert it first.") from None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--prompt-ids {text!r} must be token ids, as in --prompt-ids 1,2,3.") from None


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.usage = "%(prog)s [--prompt TEXT ...] [flags]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    prompts = parser.add_argument_group("prompts", "all of them are answered; with none, stdin is one prompt")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    prompts.add_argument(
        "--file", action="append", default=[], metavar="PATH", help="a file that is one prompt; - is stdin"
    )
    prompts.add_argument(
        "--lines", action="append", default=[], metavar="PATH", help="a file with a prompt on each line"
    )
    prompts.add_argument("--prompt-ids", action="append", default=[], metavar="IDS", help="token ids, as in 1,2,3")
    prompts.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    prompts.add_argument("--system", metavar="TEXT", help="the system message of the chat")
    parser.add_argument("--json", action="store_true", help="one JSON line for each prompt instead of text")
    cli.add_model_flags(parser, default="smollm2")
    cli.add_engine_flags(parser)
    cli.add_spec_flags(parser)
    cli.add_sampling_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
