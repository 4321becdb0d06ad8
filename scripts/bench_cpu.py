r"""The CPU's kernel: how fast it reads weights, and what several rows cost next to one.

    .venv/bin/python scripts/bench_cpu.py --model smollm2 --rows 1,2,4,8,16

Two tables, for each way to keep the weights: "plain" arrays that XLA multiplies, or panels of float32, bfloat16 or int8
for the kernel. "Products": all matrix products of the model and nothing else, in milliseconds and GB/s of weights; "of
a read" is the speed next to a plain read by all cores of the first kind's bytes (NumPy's maximum or XLA's sum, the
faster one).
"Forward": a whole pass over the model, head included, behind a prefix; v(M) is the time of M rows over that of one. All
variants take turns, and ratios are medians of ratios within a turn. The last line of stdout is JSON.
"""

import argparse
import functools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import numpy as np
from rich.table import Table

import jaxspec
from jaxspec import cli
from report import device_name, make_console, number

PLAIN = "plain"
WEIGHTS = ("float32", "bfloat16", "int8", PLAIN)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    # Here, so that --help does not wait for it.
    import jax

    if jax.default_backend() != "cpu":
        raise ValueError(
            f"the benchmark is of the CPU, and JAX runs on {jax.default_backend()}; set JAX_PLATFORMS=cpu."
        )
    models = {kind: _load(args.model, kind) for kind in args.weights}
    calls: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for rows in args.rows:
        for kind, model in models.items():
            calls["products", kind, rows] = _products(model, rows)
            calls["forward", kind, rows] = _forward(model, rows, args.prefix_len)
    weights = models[args.weights[0]].multiplied
    with ThreadPoolExecutor() as pool:
        calls["read", "NumPy", 0] = functools.partial(_read, pool, [np.asarray(weight) for weight in weights])
        calls["read", "XLA", 0] = functools.partial(jax.jit(lambda arrays: [array.sum() for array in arrays]), weights)
        times = _measure(calls, args.repeats)
    report = _describe(args, times, {kind: model.num_bytes for kind, model in models.items()})
    _print(report)
    print(json.dumps(report))
    return 0


class _Model:
    """A network, its leaves, and the weights that are multiplied."""

    def __init__(self, network: Any, leaves: tuple[Any, ...]):
        import jax
        from flax import nnx

        from jaxspec.models.weights import Matrix, Table

        self.network, self.leaves = network, leaves
        state = dict(nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves)))
        self.variables = [leaf for leaf in state.values() if isinstance(leaf, Matrix | Table)]
        self.multiplied = [array for leaf in self.variables for array in jax.tree.leaves(leaf)]
        self.num_bytes = sum(array.nbytes for array in self.multiplied)


def _load(model: str, kind: str) -> _Model:
    from jaxspec.loading.checkpoint import open_checkpoint
    from jaxspec.loading.drafts import ModelSource

    with open_checkpoint(model) as checkpoint:
        source = ModelSource.of(checkpoint, None)
        return _Model(*source.load(dtype="float32", scan_layers=False, panel_dtype=None if kind == PLAIN else kind))


def _products(model: _Model, rows: int) -> Callable[[], Any]:
    """Every product once, each with an input of its own width; the sums keep XLA from leaving one out."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxspec.models.weights import multiply

    @jax.jit
    def run(leaves: tuple[Any, ...], inputs: dict[int, Any]) -> Any:
        state = dict(nnx.to_flat_state(jax.tree.unflatten(model.network.treedef, leaves)))
        total = jnp.zeros((rows, 1))
        for weight in state.values():
            if type(weight) in {type(leaf) for leaf in model.variables}:
                x = inputs[_length(weight)] + total  # one after the other, as in a model
                total = multiply(x, weight)[0][:, :1] * 1e-6
        return total

    lengths = {_length(leaf) for leaf in model.variables}
    inputs = {
        length: jnp.asarray(np.random.default_rng(length).normal(size=(rows, length)), "float32") for length in lengths
    }
    return functools.partial(run, model.leaves, inputs)


def _length(weight: Any) -> int:
    """K of a weight."""
    from jaxspec.cpu.panels import Panels
    from jaxspec.models.weights import Table

    value = weight.get_value()
    return value.panels.shape[-2] if isinstance(value, Panels) else value.shape[1 if isinstance(weight, Table) else 0]


def _forward(model: _Model, rows: int, prefix_len: int) -> Callable[[], Any]:
    """A pass over a chain of `rows` tokens of one sequence, behind a prefix; greedy tokens come out."""
    import jax
    import jax.numpy as jnp

    from jaxspec.attention import Block

    page_size, num_pages = 64, -(-(prefix_len + rows) // 64)
    caches = model.network.init_cache(num_pages=num_pages, page_size=page_size, dtype=jnp.dtype("float32"))

    @jax.jit
    def run(leaves: tuple[Any, ...], tokens: Any, caches: Any) -> Any:
        network = model.network.bind(leaves)
        prefix = jnp.full(1, prefix_len, jnp.int32)
        table = jnp.arange(num_pages, dtype=jnp.int32)[None]
        block = Block(prefix[:, None] + jnp.arange(rows, dtype=jnp.int32), prefix, table)
        return jnp.argmax(network.logits(network.extend(tokens, block, caches).hidden), axis=-1)

    vocab_size = model.network.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, (1, rows)).astype(np.int32)
    return functools.partial(run, model.leaves, tokens, caches)


def _read(pool: ThreadPoolExecutor, arrays: list[np.ndarray]) -> float:
    """Reads every value once; NumPy's maximum runs with vectors, and in several threads at a time."""
    cores = os.cpu_count() or 1
    parts = [part for array in arrays for part in np.array_split(array.reshape(-1), cores)]
    return max(pool.map(np.max, parts))


def _measure(calls: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[float]]:
    """Seconds of each call, in turns; the first two of each are not timed."""
    import jax

    times: dict[Any, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):
        for name, call in list(calls.items())[:: 1 if repeat % 2 == 0 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
    return times


def _describe(args: argparse.Namespace, times: dict[Any, list[float]], num_bytes: dict[str, int]) -> dict[str, Any]:
    """The medians, and what is needed to read them and to get them again."""
    first, read_bytes = min(args.rows), num_bytes[args.weights[0]]
    # The faster of the two: a bound that is not the fault of either.
    read = min((values for (part, *_), values in times.items() if part == "read"), key=statistics.median)

    def ratio(mine: list[float], other: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(mine, other, strict=True))

    results = [
        {
            "part": part,
            "weights": kind,
            "rows": rows,
            "ms": 1000 * statistics.median(values),
            "gb_per_s": num_bytes[kind] / statistics.median(values) / 1e9,
            "speed_of_a_read": ratio(read, values) * num_bytes[kind] / read_bytes,
            "time_of_one_row": ratio(values, times[part, kind, first]),
            "time_of_first": ratio(values, times[part, args.weights[0], rows]),
            "time_of_last": ratio(values, times[part, args.weights[-1], rows]),
        }
        for (part, kind, rows), values in times.items()
        if part != "read"
    ]
    return {
        "benchmark": "cpu",
        "model": str(args.model),
        "device": device_name(),
        "weight_bytes": num_bytes,
        "read_ms": 1000 * statistics.median(read),
        "read_bytes": read_bytes,
        "read_gb_per_s": read_bytes / statistics.median(read) / 1e9,
        "results": results,
        "settings": vars(args),
        "versions": {
            "jaxspec": jaxspec.__version__,
            "jax": metadata.version("jax"),
            "llvmlite": metadata.version("llvmlite"),
        },
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "command": shlex.join(["python", *sys.argv]),
    }


def _print(report: dict[str, Any]) -> None:
    console = make_console()
    for part in ("products", "forward"):
        title = f"{part.capitalize()}: {report['model']}, computed in float32, on {report['device']}"
        table = Table(title=title, title_justify="left")
        first, *_, last = report["settings"]["weights"]
        for heading in ("rows", "weights", "ms", "GB/s", "of a read", "v(rows)", f"time of {first}", f"time of {last}"):
            table.add_column(heading, justify="right")
        for found in report["results"]:
            if found["part"] == part:
                cells = ("ms", "gb_per_s", "speed_of_a_read", "time_of_one_row", "time_of_first", "time_of_last")
                table.add_row(str(found["rows"]), found["weights"], *(number(found[cell]) for cell in cells))
        console.print(table)
    console.print(
        f"A read of {report['read_bytes'] / 1e6:.0f} MB ({first}) by all cores: {report['read_ms']:.1f} ms, "
        f"{report['read_gb_per_s']:.1f} GB/s. v(rows): time over that of the fewest rows."
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=_counts, default=[1, 2, 4, 8, 16], metavar="LIST", help="default: 1,2,4,8,16")
    names = ", ".join(WEIGHTS)
    parser.add_argument(
        "--weights", type=_kinds, default=list(WEIGHTS), metavar="LIST", help=f"of {names}; default: all"
    )
    parser.add_argument("--prefix-len", type=cli.count, default=128, metavar="N", help="committed tokens; default: 128")
    parser.add_argument("--repeats", type=cli.count, default=15, metavar="N", help="timed turns; default: 15")
    cli.add_model_flags(parser, default="smollm2")
    return parser.parse_args(argv)


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if len(kinds) < 2 or len({*kinds}) < len(kinds) or not {*kinds} <= {*WEIGHTS}:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least two of {', '.join(WEIGHTS)}, as in float32,int8")
    return kinds


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 1 up, as in 1,8")
    return sorted({int(part) for part in parts})


if __name__ == "__main__":
    cli.run(main)
