r"""Decoding speed next to other engines on the CPU, in one process and in turns.

    .venv/bin/python scripts/bench_peers.py --model smollm2 --speculative-algorithm NGRAM --batch-sizes 1,8 \
        --variants plain,plain@int8,v2 --prompts questions.jsonl --gguf f32.gguf --gguf-q8 q8_0.gguf --openvino FOLDER

What runs of this library is said as for bench_decode.py. The others: hf (Hugging Face's generate on torch), hf-lookup
and hf-assisted (its prompt lookup, and assisted generation by the first 2 layers; batch 1 only), openvino and
openvino-lookup (openvino-genai), llama, llama-lookup (llama.cpp with --gguf) and llama-q8 (with --gguf-q8). None of
them is a requirement of this library: `pip install torch openvino-genai xllamacpp` has them all, and what is not there
is named as missing, with the reason. --write-gguf FOLDER makes the two GGUF files of the embedded model; openvino's
folder comes from `optimum-cli export openvino --weight-format fp32` of a Hugging Face folder.

All answer the same token ids greedily with the same number of tokens, stop tokens banned. Decode tokens/s count the
time and the tokens after the last row of a batch has its first token; ratios are medians of ratios within a turn. The
last line of stdout is JSON; progress goes to stderr.
"""

import argparse
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxspec
from bench_decode import (
    add_flags,
    describe,
    encode,
    first_llm,
    load,
    measure,
    print_tables,
    progress,
)
from bench_inputs import check_budget, check_rows, check_variants, read_prompts
from bench_variants import Variant
from fitting import fit
from jaxspec import SamplingParams, cli
from report import make_console

# Tokens of a prompt and its answer, where --context-length does not say: what the others make room for.
CONTEXT = 512
PEERS = ("hf", "hf-lookup", "hf-assisted", "openvino", "openvino-lookup", "llama", "llama-lookup", "llama-q8")
# Those that refuse to speculate for several rows.
ONE_ROW_ONLY = dict.fromkeys(("hf-lookup", "hf-assisted"), "it speculates for one row only")


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if args.write_gguf is not None:
        from peer_files import write_embedded_gguf

        for file in write_embedded_gguf(Path(args.write_gguf)):
            print(file)
        return 0
    engine, spec, params = cli.engine_config(args), cli.spec_config(args), cli.sampling_params(args)
    check_rows(args, engine)
    engine = fit(engine, rows=max(args.batch_sizes), row_buckets=args.batch_sizes)
    params = check_greedy(check_budget(params))
    settings = check_variants(args, spec, engine)
    texts = read_prompts(args)
    variants: dict[str, Variant] = {}
    missing: dict[str, str] = {}
    try:
        load(variants, args.model, settings, params)
        llm = first_llm(variants)
        prompts = encode(llm, texts, raw=args.raw)
        for name, make in makers(args, llm, params).items():
            progress(f"loading {name}")
            try:
                variants[name] = make()
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                missing[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                progress(f"{name} is missing: {missing[name]}")
        results = [_measure(variants, prompts, size, args.repeats) for size in args.batch_sizes]
        report = {**describe(args, variants, prompts, results), "benchmark": "peers", "missing": missing}
    finally:
        for variant in variants.values():
            variant.close()
    print_tables(report)
    for name, reason in missing.items():
        make_console().print(f"missing: {name} ({reason})", markup=False)
    print(json.dumps(report, ensure_ascii=False))
    return 0


def check_greedy(params: SamplingParams) -> SamplingParams:
    """Refuses sampling.

    Raises:
        ValueError: the random numbers would differ, and with them the text that is timed.
    """
    if params.temperature != 0:
        raise ValueError(f"--temperature {params.temperature} cannot be compared with others; set it to 0.")
    return params


def makers(args: argparse.Namespace, llm: "jaxspec.LLM", params: SamplingParams) -> dict[str, Callable[[], Variant]]:
    """What builds each of the engines that were asked for; each raises where something that it needs is not there."""
    num_tokens = params.max_tokens or 0
    context = getattr(args, "max_model_len", None) or CONTEXT
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "--skip-tokenizer-init is refused"

    @functools.cache
    def hugging_face() -> Any:
        return _module("peer_hf").HuggingFaceModel(args.model, dtype=llm.plan.dtype)

    def hf(**how: Any) -> Variant:
        return _module("peer_hf").HuggingFaceVariant(hugging_face(), num_tokens, **how)

    def hf_lookup() -> Variant:
        return hf(prompt_lookup_num_tokens=_module("peer_hf").LOOKUP_TOKENS)

    def hf_assisted() -> Variant:
        assistant = hugging_face().first_layers(_module("peer_hf").ASSISTANT_LAYERS)
        return hf(assistant_model=assistant)

    def open_vino(**how: Any) -> Variant:
        module = _module("peer_openvino")
        return module.OpenVinoVariant(_given("--openvino", args.openvino), num_tokens, **how)

    def llama(flag: str, file: str | None, **how: Any) -> Variant:
        module = _module("peer_llama_cpp")
        sizes = {"max_batch": max(args.batch_sizes), "context": context, "encode": tokenizer.encode}
        return module.LlamaCppVariant(_given(flag, file), num_tokens, **sizes, **how)

    found: dict[str, Callable[[], Variant]] = {
        "hf": hf,
        "hf-lookup": hf_lookup,
        "hf-assisted": hf_assisted,
        "openvino": open_vino,
        "openvino-lookup": functools.partial(open_vino, has_lookup=True),
        "llama": functools.partial(llama, "--gguf", args.gguf),
        "llama-lookup": functools.partial(llama, "--gguf", args.gguf, has_lookup=True),
        "llama-q8": functools.partial(llama, "--gguf-q8", args.gguf_q8),
    }
    return {name: found[name] for name in args.peers}


def _module(name: str) -> Any:
    """Imported when it is needed: what it wraps may not be installed."""
    return importlib.import_module(name)


def _given(flag: str, path: str | None) -> str:
    if path is None:
        raise ValueError(f"set {flag}")
    if not Path(path).exists():
        raise FileNotFoundError(f"{flag} {path} is not there")
    return path


def _measure(variants: dict[str, Variant], prompts: list[list[int]], batch_size: int, repeats: int) -> dict[str, Any]:
    refusing = {name: reason for name, reason in ONE_ROW_ONLY.items() if name in variants and batch_size > 1}
    running = {name: variant for name, variant in variants.items() if name not in refusing}
    references = ("plain", "hf", "openvino", "llama")
    return {**measure(running, prompts, batch_size, repeats, references), "not_run": refusing}


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if len({*names}) < len(names) or not {*names} <= {*PEERS}:
        raise argparse.ArgumentTypeError(f"{text!r} must be of {', '.join(PEERS)}, each once")
    return names


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.usage = "%(prog)s [flags]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    peers = parser.add_argument_group("other engines")
    peers.add_argument("--peers", type=_names, default=list(PEERS), metavar="LIST", help="default: all of them")
    peers.add_argument("--gguf", metavar="FILE", help="the model for llama.cpp, float32")
    peers.add_argument("--gguf-q8", metavar="FILE", help="the same in Q8_0")
    peers.add_argument("--openvino", metavar="FOLDER", help="the model for openvino-genai, float32")
    peers.add_argument("--write-gguf", metavar="FOLDER", help="write the embedded model's GGUF files there, and stop")
    add_flags(parser)
    args = parser.parse_args(argv)
    if args.variants is None:
        args.variants = ["plain", "plain@int8"] + ([] if cli.spec_config(args) is None else ["v2"])
    return args


if __name__ == "__main__":
    cli.run(main)
