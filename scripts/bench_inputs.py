"""What the benchmarks take: their prompts, and the checks of flags that have to agree before anything is loaded."""

import argparse
import dataclasses
import json
from pathlib import Path

from bench_variants import parse_variant
from jaxspec import EngineConfig, SamplingParams, SpecConfig

# Open questions, a sum, code, and two texts to copy: prompt lookup finds something in some and nothing in others.
BUILT_IN_PROMPTS: tuple[str, ...] = (
    "What are three good reasons to learn to swim?",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that in a day?",
    "Write a short story about a lighthouse keeper.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it line by line.",
    "Repeat this text word for word: The wind is so loud in winter that the keeper cannot hear the waves. He writes "
    "the name of every ship in a large blue book, and when the night is over he puts out the lamp and goes to sleep.",
    "Explain to a child why the sky is blue.",
    "List the months of the year, each with the number of its days.",
    'Replace "cat" by "dog" in this text: The cat sat on the mat. The cat saw another cat. Both cats looked at a fish.',
)
DEFAULT_FIELD = "question"

# Flags that the benchmark sets itself, or that have no effect on it.
_ALL_TOKENS = "every variant emits --max-new-tokens tokens, with stop tokens banned; leave it out"
_NO_TEXT = "tokens are counted, and no text is shown; leave it out"
FIXED_LENGTH = {
    "n": "each prompt is answered once; leave it out",
    "min_tokens": _ALL_TOKENS,
    "stop": _ALL_TOKENS,
    "stop_token_ids": _ALL_TOKENS,
    "ignore_eos": _ALL_TOKENS,
    "skip_special_tokens": _NO_TEXT,
    "include_stop_str_in_output": _NO_TEXT,
}
REFUSED = {
    "disable_overlap_schedule": "--variants says the schedule; for v1 alone, set --variants plain-v1,v1",
    "skip_tokenizer_init": "the prompts are text; leave it out",
}


def check_budget(params: SamplingParams) -> SamplingParams:
    """Returns the parameters with stop tokens banned, so that everyone emits exactly as many tokens.

    Raises:
        ValueError: the number of tokens is open, or leaves nothing to time after the first one.
    """
    if params.max_tokens is None:
        raise ValueError("the benchmark needs a number of tokens for everyone; set --max-new-tokens.")
    if params.max_tokens < 2:
        raise ValueError(
            f"--max-new-tokens {params.max_tokens} leaves nothing to time, because decoding is timed after the first "
            "token; set it to at least 2."
        )
    return dataclasses.replace(params, min_tokens=params.max_tokens)


def check_variants(
    args: argparse.Namespace, spec: SpecConfig | None, engine: EngineConfig
) -> dict[str, tuple[SpecConfig | None, EngineConfig]]:
    """The settings of every variant.

    Raises:
        ValueError: a name is not known or there twice, or contradicts a flag.
    """
    settings = {name: parse_variant(name, spec, engine) for name in args.variants}
    if len(settings) < len(args.variants):
        twice = next(name for name in settings if args.variants.count(name) > 1)
        raise ValueError(f"--variants has {twice!r} twice; leave one out.")
    other = [name for name in settings if settings[name][1].rounds_per_dispatch != engine.rounds_per_dispatch]
    if hasattr(args, "rounds_per_dispatch") and other:
        raise ValueError(
            f"--rounds-per-dispatch {engine.rounds_per_dispatch} has no effect on the variant {other[0]!r}; "
            "leave one of them out."
        )
    return settings


def check_rows(args: argparse.Namespace, engine: EngineConfig) -> None:
    """Refuses fewer rows than the largest batch has: the rest of it would wait."""
    rows, flag, largest = engine.max_running_requests, "--max-running-requests", max(args.batch_sizes)
    if rows is None and engine.decode_row_buckets:
        rows, flag = max(engine.decode_row_buckets), "--decode-row-buckets"
    if rows is not None and rows < largest:
        raise ValueError(
            f"{flag} {rows} does not hold a batch of {largest}; set it to {largest}, or --batch-sizes lower."
        )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """`num_prompts` texts of the file, or the built-in ones.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: it has too few prompts, or a line without the field.
    """
    if args.prompts is None and args.field != DEFAULT_FIELD:
        raise ValueError(f"--field {args.field} has no effect on the built-in prompts; add --prompts, or leave it out.")
    count = args.num_prompts or max(args.batch_sizes)
    texts = list(BUILT_IN_PROMPTS) if args.prompts is None else _read_field(Path(args.prompts), args.field, count)
    if len(texts) < count:
        source = args.prompts or "the built-in list"
        hint = "--batch-sizes" if args.num_prompts is None else "--num-prompts"
        raise ValueError(
            f"{source} has {len(texts)} prompts and {count} are needed; set {hint} lower, or give more with --prompts."
        )
    small = [size for size in args.batch_sizes if count % size]
    if small:
        raise ValueError(
            f"{count} prompts do not fill batches of {small[0]}; set --num-prompts to a multiple of every batch size."
        )
    return texts[:count]


def _read_field(path: Path, field: str, count: int) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} to read prompts from.")
    texts: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}).") from None
    for number_, line in enumerate(lines, start=1):
        if len(texts) == count or not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number_} is not JSON ({error}); --prompts is one JSON object a line.") from None
        # Spec-Bench and MT-bench keep the turns of a conversation in a list; the first one is the prompt.
        text = value.get(field) if isinstance(value, dict) else None
        text = text[0] if isinstance(text, list) and text else text
        if not isinstance(text, str):
            known = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{path}:{number_} has no text in the field {field!r}, only {known}; set --field.")
        texts.append(text)
    return texts
