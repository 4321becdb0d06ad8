"""Compiles a whole decode round for TPUs or a GPU that are not there, and says what it takes.

    pip install 'jaxspec[aot]'
    python scripts/aot_compile.py --model Llama-3.1-70B --topology v5p:2x2x2 --rows 16

Memory and collectives are the compiler's. Bytes and operations are counted from shapes: weights that are read and
multiplied, and the committed keys and values of `--length` tokens a row. The roofline is what both would take at the
chip's peak; nothing is measured.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from aot_devices import CHIPS, GPU, devices_of
from aot_round import MODEL_SHAPES, Round, RoundSettings, compile_round, make_round
from jaxspec.draft.shape import TreeShape
from jaxspec.models import ModelConfig

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


class Work(NamedTuple):
    """What one round has to read and to compute, on all chips together."""

    weight_bytes: float
    cache_bytes: float
    flops: float

    @classmethod
    def total(cls, parts: Iterable["Work"]) -> "Work":
        """All of it, one after the other."""
        return cls(*map(sum, zip(*parts)))


def pass_work(leaves: Any, caches: Any, num_layers: int, tokens: float, length: float, rows: int, heads: int) -> Work:
    """One pass over a network.

    Args:
        leaves: its weights. Matrices are read once and multiplied by every token.
        caches: its pools, keys and values [L, pages, K, page_size, D] each.
        num_layers, heads: of its attention.
        tokens: of all rows together.
        length: committed tokens of a row.
        rows: that run.
    """
    held = jax.tree.leaves(caches)
    one_token = sum(pool.shape[0] * pool.shape[2] * pool.shape[4] * pool.dtype.itemsize for pool in held)
    weights = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    # A norm's weights are no matrix, though stacked over layers they have two axes.
    matrices = [leaf.shape for leaf in leaves if len(leaf.shape) > 1 and leaf.shape[:-1] != (num_layers,)]
    multiplied = sum(map(math.prod, matrices))
    width = held[0].shape[4] if held else 0
    attention = 4 * tokens * length * num_layers * heads * width
    return Work(weights, rows * length * one_token, 2 * tokens * multiplied + attention)


def round_work(made: Round, length: float) -> Work:
    """A round's passes: the target over the tree, and the draft once for what was accepted and once for each level."""
    settings, draft = made.settings, made.program.draft
    rows, model = settings.num_rows, settings.model
    unread = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size  # a table of which few rows are read
    tokens = rows * draft.num_draft_tokens
    passes = [
        pass_work(made.params.target, made.state.caches, model.num_layers, tokens, length, rows, model.num_heads),
        Work(-unread * jax.numpy.dtype(settings.dtype).itemsize, 0, -2 * tokens * unread),
    ]
    network = getattr(draft, "network", None)
    if network is not None:
        layer = getattr(network.config, "layer", network.config)
        embedding = None if layer.tie_embeddings else (layer.vocab_size, layer.hidden_size)
        read = [leaf for leaf in made.params.draft if leaf.shape != embedding]
        for count in [draft.num_steps + 1, *[settings.shape.width] * (draft.num_steps - 1)]:
            caches = made.state.draft.caches
            passes.append(pass_work(read, caches, layer.num_layers, rows * count, length, rows, layer.num_heads))
    return Work.total(passes)


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Count and bytes of each kind of collective in a compiled program; those of a loop's body are counted once."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    pattern = re.compile(rf"= (\S+\[.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    for types, kind in pattern.findall(text):
        counts[kind] += 1
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types):
            sizes[kind] += _ITEM_BYTES.get(dtype, 4) * math.prod(int(size) for size in dims.split(",") if size)
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def table(made: Round, devices: list[Any], length: float, **options: Any) -> list[tuple[str, str]]:
    """Compiles a round and returns the lines of its table."""
    compiled = compile_round(made, devices, **options)
    memory, work = compiled.memory_analysis(), round_work(made, length)
    chip, num_chips = CHIPS[devices[0].device_kind], len(devices)
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    read = (work.weight_bytes + work.cache_bytes) / num_chips
    seconds = {"memory": read / chip.bandwidth, "compute": work.flops / num_chips / chip.flops}
    bound = max(seconds, key=seconds.__getitem__)
    shape = made.settings.shape
    lines = [
        ("chips", f"{num_chips} x {devices[0].device_kind}"),
        ("round", f"{made.settings.algorithm} {tuple(shape[:3])}, {made.settings.num_rows} rows of {length:g} tokens"),
        ("attention", made.settings.backend),
        ("weights and state a chip", _size(memory.argument_size_in_bytes)),
        ("temporaries a chip", _size(memory.temp_size_in_bytes)),
        ("code a chip", _size(memory.generated_code_size_in_bytes)),
        ("memory a chip", f"{_size(total)} of {_size(chip.memory)} ({total / chip.memory:.0%})"),
        ("weights read a round", _size(work.weight_bytes)),
        ("keys and values read a round", _size(work.cache_bytes)),
        ("operations a round", f"{work.flops / 1e9:.1f} GFLOP"),
        ("roofline of a round", f"{1000 * seconds[bound]:.3f} ms, bound by {bound}"),
    ]
    found = collectives(compiled.as_text())
    lines += [(kind, f"{count} in the program, {_size(size)} of results") for kind, (count, size) in found.items()]
    return lines if found else [*lines, ("collectives", "none")]


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**29 else f"{size / 2**20:.2f} MiB"


def _model(name: str) -> ModelConfig:
    """A named shape, or a folder's or a file's config.json."""
    if name in MODEL_SHAPES:
        return ModelConfig.from_hf(MODEL_SHAPES[name])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--model {name} is neither a file nor one of {', '.join(MODEL_SHAPES)}.")
    return ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    described = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(description=described)
    parser.add_argument("--model", required=True, help=f"{', '.join(MODEL_SHAPES)}; or a config.json or its folder")
    parser.add_argument("--layers", type=int, help="of the target, instead of its own number")
    parser.add_argument("--topology", default="v5e:1x1", help="e.g. v5e:1x1, v5p:2x2x2, h200 (default %(default)s)")
    parser.add_argument("--chips", type=int, help="use so many chips of the topology (default: all)")
    parser.add_argument("--rows", type=int, default=16, help="requests that run together (default %(default)s)")
    parser.add_argument("--length", type=int, help="committed tokens of a row (default: half of --max-model-len)")
    parser.add_argument("--max-model-len", type=int, default=4096, help="longest context (default %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page (default %(default)s)")
    parser.add_argument("--algorithm", default="EAGLE3", help="NONE, NGRAM, STANDALONE or EAGLE3 (default %(default)s)")
    parser.add_argument("--draft-model", help="the draft of STANDALONE, named as --model is")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--eagle-topk", type=int, default=1)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--attention-backend", choices=("xla", "pallas_tpu", "pallas_gpu"), help="default: the device's own kernel"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    args = parse(arguments)
    devices = devices_of(args.topology)[: args.chips]  # first: it tells XLA where its compilers are
    model = _model(args.model)
    if args.layers is not None:
        model = dataclasses.replace(model, num_layers=args.layers)
    settings = RoundSettings(
        model=model,
        algorithm=args.algorithm,
        shape=TreeShape(args.num_steps, args.eagle_topk, args.num_draft_tokens),
        draft=None if args.draft_model is None else _model(args.draft_model),
        num_rows=args.rows,
        max_model_len=args.max_model_len,
        page_size=args.page_size,
        backend=args.attention_backend or ("pallas_gpu" if args.topology == GPU else "pallas_tpu"),
        dtype=args.dtype,
    )
    lines = table(make_round(settings), devices, args.max_model_len / 2 if args.length is None else args.length)
    width = max(len(name) for name, _ in lines)
    print(f"{args.model} on {args.topology}")
    for name, value in lines:
        print(f"  {name:<{width}}  {value}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, RuntimeError) as error:  # jax's own errors derive from the latter
        sys.exit(f"error: {error}")
