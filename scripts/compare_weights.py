r"""What rounding the weights changes: the law of the next token by rounded weights against that by float32.

    .venv/bin/python scripts/compare_weights.py --model smollm2 --answers checkpoints/data/gsm8k --num-answers 64

Every answer is read once by each model, and every place of the answer counts: KL is the Kullback-Leibler divergence
from the float32 law to the other (nats), and agreement the share of places at which both find the same token likeliest.
The last line of stdout is JSON.
"""

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import jaxspec
from jaxspec import cli
from report import device_name, make_console

ROUNDED = ("bfloat16", "int8")
Answer = tuple[Sequence[int], Sequence[int]]


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    answers = read_answers(Path(args.answers), args.num_answers)
    results = compare(args.model, answers)
    report = {
        "benchmark": "compare_weights",
        "model": str(args.model),
        "device": device_name(),
        "answers": str(args.answers),
        "num_answers": len(answers),
        "results": results,
        "version": jaxspec.__version__,
        "command": shlex.join(["python", *sys.argv]),
    }
    table = Table(title=f"{args.model}: weights of fewer bits against float32", title_justify="left")
    for heading in ("weights", "places", "mean KL", "median KL", "largest KL", "agreement"):
        table.add_column(heading, justify="right")
    for name, found in results.items():
        kl = (f"{found[f'{which}_kl']:.5f}" for which in ("mean", "median", "largest"))
        table.add_row(name, str(found["num_places"]), *kl, f"{found['agreement']:.4f}")
    make_console().print(table)
    print(json.dumps(report))
    return 0


def read_answers(folder: Path, count: int) -> list[Answer]:
    """The first answers in a folder of shards: ids of each prompt and of what was answered.

    Raises:
        FileNotFoundError: there are no shards.
        ValueError: there are fewer answers.
    """
    from jaxspec.training.records import read_records

    shards = sorted(folder.glob("answers-*.jsonl*"))
    if not shards:
        raise FileNotFoundError(f"there are no answers-*.jsonl in {str(folder)!r}; set --answers to a folder of them.")
    records = itertools.chain.from_iterable(read_records(shard) for shard in shards)
    answers = [(record["prompt_ids"], record["output_ids"]) for _, record in itertools.islice(records, count)]
    if len(answers) < count:
        raise ValueError(f"{folder} has {len(answers)} answers; set --num-answers to at most that.")
    return answers


def compare(model: str, answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Dtype of the weights -> how far its laws are from float32's, over all places of the answers.

    Raises:
        NotImplementedError: this host cannot run the CPU's kernels.
    """
    exact = laws(model, "float32", answers)
    found = {}
    for dtype in ROUNDED:
        other = laws(model, dtype, answers)
        kl = np.einsum("pv,pv->p", np.exp(exact), exact - other)
        found[dtype] = {
            "num_places": len(kl),
            "mean_kl": float(np.mean(kl)),
            "median_kl": float(np.median(kl)),
            "largest_kl": float(np.max(kl)),
            "agreement": float(np.mean(np.argmax(exact, axis=-1) == np.argmax(other, axis=-1))),
        }
    return found


def laws(model: str, dtype: str, answers: Sequence[Answer]) -> np.ndarray:
    """Log-probabilities at every place of the answers, float32 [places, V], with weights stored as `dtype`."""
    import jax
    import jax.numpy as jnp

    from jaxspec.attention import Block
    from jaxspec.loading.checkpoint import open_checkpoint
    from jaxspec.loading.drafts import ModelSource

    with open_checkpoint(model) as checkpoint:
        network, leaves = ModelSource.of(checkpoint, None).load(dtype="float32", scan_layers=False, panel_dtype=dtype)
    longest = max(len(prompt) + len(output) for prompt, output in answers)

    @jax.jit
    def run(leaves: tuple[Any, ...], tokens: jax.Array) -> jax.Array:
        bound = network.bind(leaves)
        caches = network.init_cache(num_pages=1, page_size=1, dtype=jnp.dtype("float32"))  # nothing is committed
        block = Block(jnp.arange(longest)[None], jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
        return jax.nn.log_softmax(bound.logits(bound.extend(tokens, block, caches).hidden)[0])

    found = []
    for prompt, output in answers:
        ids = [*prompt, *output]
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(ids)] = ids
        found.append(np.asarray(run(leaves, tokens))[len(prompt) - 1 : len(ids) - 1])
    return np.concatenate(found)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--answers", required=True, metavar="FOLDER", help="what `train_draft.py answers` wrote")
    parser.add_argument("--num-answers", type=cli.count, default=16, metavar="N", help="default: 16")
    cli.add_model_flags(parser, default="smollm2")
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
