"""`scripts/bench_kernels.py`: it runs in the interpreter, and says that such times mean nothing."""

import json

import jax
import numpy as np
import pytest

import bench_kernels
import kernel_peers
from jaxspec.pallas.specs import SPECS, TOLERANCE, Heads, Spec


def test_it_checks_and_times_the_smallest_shape_and_names_what_is_missing(capsys):
    assert bench_kernels.main(["--repeats", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    # Lines are wrapped to a terminal's width, which is not known here.
    assert " ".join(" ".join(lines).split()).startswith(f"INTERPRETED {report['INTERPRETED']}")
    assert "times mean nothing" in lines[0]
    (result,) = report["results"]
    assert result["shape"] == bench_kernels.SMALLEST
    assert set(result["variants"]) == {"pallas_tpu", "xla (twin)", "jax.nn"}
    assert set(result["missing"]) == {"jax.nn cuDNN", "paged, TPU", "paged, GPU", "ragged paged, TPU"}
    assert result["variants"]["pallas_tpu"]["difference_from_twin"] <= TOLERANCE["bfloat16"]
    # Keys and values of 524 committed and 4 own tokens, 3 heads of 64; queries and results of 4 x 9 heads.
    assert result["bytes"] == 2 * 64 * (2 * 528 * 3 + 2 * 4 * 9)
    assert all(values["share_of_peak"] is None for values in result["variants"].values())


def test_the_smallest_shape_is_one_of_the_shapes():
    assert bench_kernels.SMALLEST in SPECS
    with pytest.raises(ValueError, match="no shape's name holds --only nothing; there are SmolLM2"):
        bench_kernels.main(["--only", "nothing"])


@pytest.mark.parametrize(
    "spec",
    [Spec(Heads(4, 2, 8), (0, 5, 64, 70), 6, 3, num_earlier=3), Spec(Heads(4, 1, 40, 32), (0, 64, 70), 4, 0)],
    ids=["tree", "latent chain"],
)
def test_dense_attention_is_asked_for_the_same(spec):
    inputs, nudge = spec.inputs("float32"), np.float32(0)
    ours, dense = (jax.jit(kernel_peers.PEERS[name](inputs))(nudge) for name in ("xla (twin)", "jax.nn"))
    np.testing.assert_allclose(dense, ours, atol=2e-5, rtol=0)
