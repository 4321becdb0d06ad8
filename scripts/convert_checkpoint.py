"""Checkpoints from one form into another, without a change of a weight's value.

    .venv/bin/python scripts/convert_checkpoint.py head ./eagle3-head ./eagle3-speculators --to speculators
    .venv/bin/python scripts/convert_checkpoint.py gguf-to-hf smollm2 ./SmolLM2-135M-Instruct
    .venv/bin/python scripts/convert_checkpoint.py hf-to-orbax ./SmolLM2-135M-Instruct ./smollm2-orbax
    .venv/bin/python scripts/convert_checkpoint.py orbax-to-hf ./smollm2-orbax ./SmolLM2-again

The output folder appears when it is whole, and nothing is replaced without --overwrite. Orbax checkpoints are for other
programs: jaxspec itself runs Hugging Face folders and GGUF files. The last line says what was written and what changed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxspec import cli


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    print(args.convert(args))
    return 0


def _head(args: argparse.Namespace) -> object:
    given = {"to": args.to, "target": args.target, "verifier": args.verifier, "overwrite": args.overwrite}
    return _convert().convert_head(args.source, args.out, **given)


def _gguf_to_hf(args: argparse.Namespace) -> object:
    given = {"dtype": args.dtype, "skip_tokenizer": args.skip_tokenizer, "overwrite": args.overwrite}
    return _convert().gguf_to_hf(args.source, args.out, **given)


def _hf_to_orbax(args: argparse.Namespace) -> object:
    return _convert().hf_to_orbax(args.source, args.out, overwrite=args.overwrite)


def _orbax_to_hf(args: argparse.Namespace) -> object:
    return _convert().orbax_to_hf(args.source, args.out, overwrite=args.overwrite)


def _convert() -> Any:
    """Loads jax and orbax: here, so that Ctrl-C is quiet from the start, and a wrong flag is told at once."""
    from jaxspec.loading import convert

    return convert


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(title="conversions", required=True, metavar="CONVERSION")

    def add(name: str, run: Callable[..., object], source: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("source", metavar="SOURCE", help=source)
        command.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
        command.add_argument("--overwrite", action="store_true", help="replace a checkpoint that OUT holds")
        command.set_defaults(convert=run)
        return command

    head = add("head", _head, "the head's folder", "an EAGLE or EAGLE3 draft head in the other dialect")
    text = "sglang is also SpecForge's and the EAGLE repository's; jaxspec reads both, but of speculators only eagle3"
    head.add_argument("--to", required=True, metavar="DIALECT", help=f"sglang or speculators; {text}")
    text = "the model that it drafts for, where a speculators config leaves rope settings to it"
    head.add_argument("--target", metavar="PATH", help=text)
    head.add_argument("--verifier", metavar="NAME", help="the target's name, which a speculators config holds")
    text = "a GGUF file as a Hugging Face folder with its tokenizer; F32, F16 and BF16 tensors keep their bits"
    gguf = add("gguf-to-hf", _gguf_to_hf, "a .gguf file, a folder with one, or smollm2", text)
    text = "of tensors that were quantised: float32, bfloat16 or float16 (default: float32)"
    gguf.add_argument("--dtype", default="float32", metavar="TEXT", help=text)
    gguf.add_argument("--skip-tokenizer", action="store_true", help="leave the tokenizer out")
    text = (
        "a Hugging Face folder as an Orbax checkpoint (OUT/orbax) with its other files beside; jaxspec does not run it"
    )
    add("hf-to-orbax", _hf_to_orbax, "a Hugging Face folder", text)
    text = "back, into one model.safetensors"
    add("orbax-to-hf", _orbax_to_hf, "a folder that hf-to-orbax wrote", text)
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
