"""What v2 hides: time a round in v1 and v2, without host work and with host work as long as a round.

    .venv/bin/python scripts/bench_overlap.py --model smollm2 --speculative-algorithm NGRAM

One row decodes greedily; after each round the caller sleeps for as long as v1's round takes without that, which stands
for slow bookkeeping. v1 then takes two round times a round; v2 runs the next round meanwhile. v1 and v2 take turns;
the ratios are medians over the repeats. The last line of stdout is JSON.
"""

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import sys
import time

import jaxspec
from bench_inputs import BUILT_IN_PROMPTS, FIXED_LENGTH
from fitting import fit
from jaxspec import cli
from report import device_name, simulation_mark

# Dispatches at the beginning and at the end of an output that are not timed, and the fewest times worth a median.
UNTIMED, FEWEST = 2, 3
REFUSED = {
    "disable_overlap_schedule": "v1 and v2 are compared, so that both run; leave it out",
    "skip_tokenizer_init": "the prompt is text; leave it out",
}


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    engine, spec = fit(cli.engine_config(args), rows=1), cli.spec_config(args)
    params = cli.sampling_params(args)
    if params.max_tokens is None:
        raise ValueError("the benchmark needs a number of tokens; set --max-new-tokens.")
    num_tokens = params.max_tokens
    params = dataclasses.replace(params, min_tokens=num_tokens)  # no stop before the budget
    prompt = [{"role": "user", "content": BUILT_IN_PROMPTS[0]}]
    llms = {
        name: jaxspec.LLM(
            args.model, spec=spec, engine=dataclasses.replace(engine, disable_overlap_schedule=name == "v1")
        )
        for name in ("v1", "v2")
    }

    def seconds(name: str, sleep: float) -> float:
        """Median time between dispatches."""
        times, last = [], None
        for _ in llms[name].stream(prompt, params):
            time.sleep(sleep)
            now = time.perf_counter()
            if last is not None:
                times.append(now - last)
            last = now
        return median_time(times, num_tokens)

    rows = []
    for repeat in range(args.repeats):
        idle = {name: seconds(name, 0.0) for name in (("v1", "v2") if repeat % 2 == 0 else ("v2", "v1"))}
        busy = {name: seconds(name, idle["v1"]) for name in ("v1", "v2")}
        rows.append({"idle": idle, "busy": busy})
        print(
            f"repeat {repeat + 1}: v1 {idle['v1'] * 1e3:.1f} ms a round, v2 {idle['v2'] * 1e3:.1f}; with "
            f"{idle['v1'] * 1e3:.1f} ms of host work v1 {busy['v1'] * 1e3:.1f}, v2 {busy['v2'] * 1e3:.1f}",
            file=sys.stderr,
        )
    busy_ratio = statistics.median(row["busy"]["v2"] / row["busy"]["v1"] for row in rows)
    idle_ratio = statistics.median(row["idle"]["v1"] / row["idle"]["v2"] for row in rows)
    mark = simulation_mark(engine)
    for name, text in mark.items():
        print(f"{name} {text}")
    print(f"with host work as long as a round, v2's time a round is {busy_ratio:.2f} of v1's")
    print(f"without host work, v2 is {idle_ratio:.2f} times as fast as v1")
    report = {
        "benchmark": "overlap",
        **mark,
        "model": str(args.model),
        "device": device_name(),
        "dtype": llms["v2"].plan.dtype,
        "batch": 1,
        "algorithm": llms["v2"].plan.algorithm,
        "v2_time_of_v1_with_host_work": busy_ratio,
        "v2_speed_of_v1_without": idle_ratio,
        "repeats": rows,
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "command": shlex.join(["python", *sys.argv]),
    }
    print(json.dumps(report))
    for llm in llms.values():
        llm.close()
    return 0


def median_time(times: list[float], num_tokens: int) -> float:
    """The median without the first and the last times.

    Raises:
        ValueError: too few are left.
    """
    timed = times[UNTIMED:-UNTIMED]
    if len(timed) < FEWEST:
        raise ValueError(
            f"--max-new-tokens {num_tokens} took {len(times) + 1} dispatches, and the benchmark needs "
            f"{2 * UNTIMED + FEWEST + 1}; set --max-new-tokens higher, or --rounds-per-dispatch lower."
        )
    return statistics.median(timed)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.usage = "%(prog)s [flags]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=cli.count, metavar="N", default=5, help="runs of each; default: 5")
    cli.add_model_flags(parser, default="smollm2")
    cli.add_engine_flags(parser, REFUSED)
    cli.add_spec_flags(parser)
    cli.add_simulation_flag(parser)
    cli.add_sampling_flags(parser, FIXED_LENGTH, temperature=0.0, seed=0, max_tokens=96)
    return parser.parse_args(argv)


if __name__ == "__main__":
    cli.run(main)
