"""`scripts/bench_cpu.py`: every way to keep weights runs, and the last line is JSON with their times."""

import json

import jax
import pytest

import bench_cpu
from jaxspec.cpu.register import why_not

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or why_not() is not None, reason=f"needs the CPU's kernel: {why_not()}"
)


def test_it_measures_products_and_forwards_by_the_kernel_and_by_xla(tiny_model, capsys):
    flags = ["--model", str(tiny_model), "--rows", "1,4", "--repeats", "2", "--prefix-len", "20"]
    assert bench_cpu.main(flags) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {(one["part"], one["weights"], one["rows"]): one for one in report["results"]}
    assert set(found) == {(p, w, r) for p in ("products", "forward") for w in bench_cpu.WEIGHTS for r in (1, 4)}
    assert all(one["ms"] > 0 for one in found.values())
    assert found["forward", "int8", 1]["time_of_one_row"] == 1
    assert found["products", "plain", 4]["time_of_last"] == 1
    assert found["products", "float32", 4]["time_of_first"] == 1
    # Two layers of seven matrices, and the embedding as the head.
    hidden, inner, half, vocab = 32, 48, 16, 259
    layer = 2 * hidden * hidden + 2 * hidden * half + 3 * hidden * inner
    assert report["weight_bytes"]["plain"] == 4 * (2 * layer + vocab * hidden)
    assert report["weight_bytes"]["int8"] < report["weight_bytes"]["bfloat16"] < report["weight_bytes"]["float32"]
    assert report["read_gb_per_s"] > 0


@pytest.mark.parametrize(
    "flag", ["--rows=0", "--rows=1,x", "--repeats=0", "--prefix-len=-1", "--weights=int8", "--weights=int8,int4"]
)
def test_values_without_a_meaning_are_refused_by_name(flag, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench_cpu._parse([flag])
    assert exit_.value.code == 2
    assert f"argument {flag.partition('=')[0]}" in capsys.readouterr().err
