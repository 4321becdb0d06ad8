r"""Attention kernels over the named shapes of `jaxspec.pallas.specs`: time, GB/s and share of the memory's peak.

    python scripts/bench_kernels.py                              # on a TPU or a GPU: all shapes, bfloat16
    python scripts/bench_kernels.py --only "Llama-3.1-8B tree" --repeats 9

Our kernel, its twin by XLA, dense attention of jax.nn (and cuDNN's), and the paged kernels that ship with jax, each
where it can serve; what cannot is named with the reason. Variants take turns, and ratios are medians of ratios within a
turn. Each is checked against the twin first. Bytes are the keys and values of the prefix and the block, and the queries
and results, once. On a CPU the kernel for TPUs runs in the interpreter, and ITS TIMES MEAN NOTHING: that it runs is all
that is shown. The last line of stdout is JSON.
"""

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from rich.table import Table

from jaxspec import cli
from report import device_name, make_console, number

# What one turn runs of a variant, so that the dispatch is a small part of it.
CALLS = 32
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu", "cpu": "pallas_tpu"}
SMALLEST = "SmolLM2-135M plain short"
MEANINGLESS = "on a CPU: the times mean nothing, only that the kernel runs and agrees with its twin"


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    # Here, so that --help does not wait for it.
    import jax

    from jaxspec.pallas.specs import SPECS

    platform = jax.default_backend()
    only = args.only if args.only is not None else (SMALLEST if platform == "cpu" else "")
    names = [name for name in SPECS if only in name]
    if not names:
        raise ValueError(f"no shape's name holds --only {only}; there are {', '.join(SPECS)}.")
    results = [measure(name, args.dtype, args.repeats, platform) for name in names]
    report = {
        "benchmark": "kernels",
        **({"INTERPRETED": MEANINGLESS} if platform == "cpu" else {}),
        "device": device_name(),
        "dtype": args.dtype,
        "kernel": KERNELS[platform],
        "calls_a_turn": 1 if platform == "cpu" else CALLS,
        "repeats": args.repeats,
        "results": results,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "command": shlex.join(["python", *sys.argv]),
    }
    print_table(report)
    print(json.dumps(report))
    return 0


def measure(name: str, dtype: str, repeats: int, platform: str) -> dict[str, Any]:
    """Checks and times every variant on one shape."""
    import jax
    import numpy as np
    from jax.experimental.pallas import tpu as pltpu

    from jaxspec.pallas.specs import SPECS, TOLERANCE
    from kernel_peers import PEERS, ours

    inputs, kernel = SPECS[name].inputs(dtype), KERNELS[platform]
    interpreted = platform == "cpu"
    missing: dict[str, str] = {}
    turns: dict[str, Callable[[], float]] = {}
    outputs: dict[str, Any] = {}
    with pltpu.force_tpu_interpret_mode() if interpreted else contextlib.nullcontext():
        for variant, make in {kernel: lambda inputs: ours(inputs, kernel), **PEERS}.items():
            try:
                run = make(inputs)
                outputs[variant] = np.asarray(jax.jit(run)(np.float32(0)), np.float32)
            except NotImplementedError as error:
                missing[variant] = str(error)
                continue
            except Exception as error:
                if variant not in PEERS:
                    raise
                missing[variant] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            turns[variant] = turn_of(run, 1 if interpreted else CALLS)
        times = take_turns(turns, repeats)
    expected = outputs["xla (twin)"]
    apart = {variant: float(np.max(np.abs(output - expected))) for variant, output in outputs.items()}
    if kernel in apart and not apart[kernel] <= TOLERANCE[dtype]:
        raise ValueError(f"{kernel} is {apart[kernel]:.1e} from its twin on {name!r}; at most {TOLERANCE[dtype]:.0e}.")
    peak = None if interpreted else _bandwidth()
    size = bytes_of(inputs)
    variants = {}
    for variant, seconds in times.items():
        rate = size / statistics.median(seconds)
        variants[variant] = {
            "us": 1e6 * statistics.median(seconds),
            "us_range": [1e6 * min(seconds), 1e6 * max(seconds)],
            "gb_per_s": rate / 1e9,
            "share_of_peak": None if peak is None else rate / peak,
            "time_of_kernel": statistics.median(a / b for a, b in zip(seconds, times[kernel]))
            if kernel in times
            else None,
            "difference_from_twin": apart[variant],
        }
    return {"shape": name, "bytes": size, "variants": variants, "missing": missing}


def turn_of(run: Callable[[Any], Any], calls: int) -> Callable[[], float]:
    """Seconds a call, of `calls` of them one after the other on the device."""
    import jax
    import jax.numpy as jnp

    def one(nudge: Any) -> Any:
        return run(nudge).reshape(-1)[0].astype(jnp.float32) * 1e-30

    @jax.jit
    def all_calls(nudge: Any) -> Any:
        return one(nudge) if calls == 1 else jax.lax.fori_loop(0, calls, lambda _, nudge: one(nudge), nudge)

    start = jnp.float32(0)
    all_calls(start).block_until_ready()

    def turn() -> float:
        started = time.perf_counter()
        all_calls(start).block_until_ready()
        return (time.perf_counter() - started) / calls

    return turn


def take_turns(turns: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Times of every variant; the order is turned round at every repeat."""
    times: dict[str, list[float]] = {variant: [] for variant in turns}
    for repeat in range(repeats):
        for variant in list(turns)[:: 1 if repeat % 2 == 0 else -1]:
            times[variant].append(turns[variant]())
    return times


def bytes_of(inputs: Any) -> int:
    """Keys and values of all committed and own tokens, and queries and results."""
    item = inputs.queries.dtype.itemsize
    one_token = sum(pool.shape[2] * pool.shape[4] for pool in inputs.pool)
    tokens = int(inputs.block.prefix_len.sum()) + inputs.keys.shape[0] * inputs.keys.shape[1]
    out = inputs.queries.size // inputs.queries.shape[-1] * (inputs.value_dim or inputs.queries.shape[-1])
    return item * (tokens * one_token + inputs.queries.size + out)


def _bandwidth() -> float | None:
    """Bytes a second of this chip's memory, None where it is not known."""
    import jax

    from aot_devices import CHIPS

    chip = CHIPS.get(jax.devices()[0].device_kind)
    return None if chip is None else chip.bandwidth


def print_table(report: dict[str, Any]) -> None:
    console = make_console()
    if "INTERPRETED" in report:
        console.print(f"INTERPRETED {report['INTERPRETED']}", style="bold")
    table = Table(title=f"Attention in {report['dtype']} on {report['device']}", title_justify="left")
    for heading in ("shape", "variant"):
        table.add_column(heading)
    for heading in ("us", "min-max", "GB/s", "of peak", "x kernel", "off twin"):
        table.add_column(heading, justify="right")
    for result in report["results"]:
        for variant, values in result["variants"].items():
            low, high = values["us_range"]
            share = values["share_of_peak"]
            table.add_row(
                result["shape"],
                variant,
                number(values["us"], 1),
                f"{low:.1f}-{high:.1f}",
                number(values["gb_per_s"], 1),
                "-" if share is None else f"{share:.0%}",
                number(values["time_of_kernel"]),
                f"{values['difference_from_twin']:.0e}",
            )
    console.print(table)
    reasons = {(variant, reason) for result in report["results"] for variant, reason in result["missing"].items()}
    for variant, reason in sorted(reasons):
        console.print(f"without {variant}, at some or all shapes: {reason}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", metavar="TEXT", help=f"shapes whose name holds this; default: all, on a CPU {SMALLEST}"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")
    parser.add_argument("--repeats", type=cli.count, metavar="N", default=5, help="timed turns; default: 5")
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
