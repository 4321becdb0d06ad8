"""Loading: the right tensor in every leaf, one error for all that does not fit, and memory near one copy."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType

from jaxspec.loading import load as loading
from jaxspec.loading import open_checkpoint
from jaxspec.loading.load import LoadedModel, load_model
from jaxspec.models import MODELS
from tests.loading.files import hf_config, random_tensors, write_folder, write_gguf

FAMILIES = ("llama", "qwen2", "qwen3")


def load(folder, *, dtype="float32", scan_layers=False) -> LoadedModel:
    return load_model(open_checkpoint(folder), dtype=dtype, scan_layers=scan_layers)


def leaves_by_path(loaded: LoadedModel) -> dict[tuple, jax.Array]:
    state = jax.tree.unflatten(loaded.treedef, loaded.leaves)
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(state)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_tensor_lands_in_its_leaf(tmp_path, family, scan_layers):
    config = hf_config(family)
    tensors = random_tensors(config)
    loaded = load(write_folder(tmp_path, config, tensors, num_shards=2), scan_layers=scan_layers)
    leaves = leaves_by_path(loaded)
    sources = MODELS[loaded.config.architecture].tensor_map(loaded.config, scan_layers)
    assert set(sources) == set(tensors)
    for name, source in sources.items():
        leaf = leaves[source.path] if source.layer is None else leaves[source.path][source.layer]
        np.testing.assert_array_equal(leaf, tensors[name].T if source.transpose else tensors[name])


def test_leaves_put_the_model_together_again_inside_jit(tmp_path):
    config = hf_config("qwen3")
    tensors = random_tensors(config)
    loaded = load(write_folder(tmp_path, config, tensors))

    @jax.jit
    def project(leaves, x):
        model = nnx.merge(loaded.graphdef, jax.tree.unflatten(loaded.treedef, leaves))
        return model.segments[1].mlp.down_proj(x)

    x = np.ones((1, 64), np.float32)
    expected = x @ tensors["model.layers.1.mlp.down_proj.weight"].T
    np.testing.assert_allclose(project(loaded.leaves, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2", "qwen3"])
def test_reference_models_load(shared, family):
    loaded = load(shared / "oracle" / "tiny" / family)
    assert all(leaf.dtype == jnp.float32 for leaf in loaded.leaves)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_loads_to_the_same_leaves_as_the_folder(tmp_path, family):
    config = hf_config(family, tie_word_embeddings=True)
    tensors = random_tensors(config)
    folder = load(write_folder(tmp_path / "folder", config, tensors))
    file = load(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert file.config == folder.config
    assert file.treedef == folder.treedef
    for ours, theirs in zip(file.leaves, folder.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_weights_are_cast_norms_too(tmp_path, stored, wanted, scan_layers):
    config = hf_config(num_hidden_layers=1)
    tensors = {name: values.astype(stored) for name, values in random_tensors(config).items()}
    loaded = load(write_folder(tmp_path, config, tensors), dtype=wanted, scan_layers=scan_layers)
    assert {leaf.dtype.name for leaf in loaded.leaves} == {wanted}
    norm = leaves_by_path(loaded)["norm", "weight"]
    # float64 goes through float32.
    narrowed = tensors["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(norm, narrowed.astype(jnp.dtype(wanted)))


def test_a_dtype_that_no_model_runs_in_is_an_error(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path, config, random_tensors(config))
    with pytest.raises(ValueError, match="dtype=int8 is not supported; use float32, bfloat16 or float16"):
        load(folder, dtype="int8")


def test_missing_unexpected_and_misshapen_tensors_are_one_error(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros((32, 64), np.float32)
    with pytest.raises(ValueError, match="do not fit") as caught:
        load(write_folder(tmp_path, config, tensors))
    message = str(caught.value)
    assert "2 missing: model.norm.weight, model.layers.1.mlp.up_proj.weight" in message
    assert "1 not expected: model.layers.0.self_attn.q_proj.bias" in message
    assert "1 of another shape: model.layers.0.mlp.gate_proj.weight [32, 64] instead of [64, 32]" in message


def test_at_most_20_names_of_a_kind_are_listed(tmp_path):
    config = hf_config(num_hidden_layers=3)
    few = random_tensors(config | {"num_hidden_layers": 0})
    with pytest.raises(ValueError, match=r"27 missing: (model\.[\w.]+, ){20}and 7 more\."):
        load(write_folder(tmp_path, config, few))


def test_nothing_is_read_before_the_names_are_checked(tmp_path, monkeypatch):
    config = hf_config()
    tensors = random_tensors(config)
    del tensors["model.norm.weight"]
    monkeypatch.setattr(loading, "_fill", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"1 missing: model.norm.weight"):
        load(write_folder(tmp_path, config, tensors))


def test_a_stored_copy_of_a_tied_head_is_ignored(tmp_path):
    config = hf_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    loaded = load(write_folder(tmp_path, config, tensors))
    assert ("lm_head",) not in leaves_by_path(loaded)


def test_quantised_folders_are_refused_by_the_name_of_their_method(tmp_path):
    config = hf_config(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"is quantised \(gptq\)"):
        load(write_folder(tmp_path, config, random_tensors(config)))


def test_integer_weights_are_refused_by_name(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    with pytest.raises(ValueError, match=r"tensor model.norm.weight is stored as int8"):
        load(write_folder(tmp_path, config, tensors))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_leaves_do_not_change_with_the_file(tmp_path, scan_layers):
    """On the CPU an array may be the mapped file itself; weights must not be."""
    config = hf_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path, config, tensors)
    loaded = load(folder, scan_layers=scan_layers)
    before = [np.array(leaf) for leaf in loaded.leaves]
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    for leaf, value in zip(loaded.leaves, before, strict=True):
        np.testing.assert_array_equal(leaf, value)


def larger_config():
    """About 33 million weights: 130 MB in float32."""
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "head_dim": 64}
    return hf_config(tie_word_embeddings=True) | sizes | {"num_attention_heads": 8, "num_key_value_heads": 4}


def zero_tensors(config):
    return {name: np.zeros_like(values) for name, values in random_tensors(config).items()}


def test_host_arrays_never_add_up_to_the_model(tmp_path):
    """NumPy holds one tensor at a time, dequantised, besides the leaves."""
    config = larger_config()
    path = write_gguf(tmp_path / "x.gguf", config, zero_tensors(config), kind=GGMLQuantizationType.Q8_0)
    load(path)  # traces and compiles
    tracemalloc.start()
    loaded = load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The largest tensor is an eighth of the model; the rest is what one chunk takes to dequantise.
    assert peak < 0.2 * sum(leaf.nbytes for leaf in loaded.leaves)


MEASURE = """
import json, sys
from jaxspec.loading import open_checkpoint
from jaxspec.loading.load import load_model

def high_water():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024

for path in sys.argv[1:3]:  # the first, a small one, brings in the runtime
    before = high_water()
    loaded = load_model(open_checkpoint(path), dtype="float32", scan_layers=sys.argv[3] == "scan")
print(json.dumps([high_water() - before, sum(leaf.nbytes for leaf in loaded.leaves)]))
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the memory high-water mark from Linux's /proc"
)
@pytest.mark.parametrize(("kind", "layers"), [("gguf", "unrolled"), ("folder", "scan")])
def test_peak_memory_stays_near_one_copy(tmp_path, kind, layers):
    small, config = hf_config(), larger_config()
    write_folder(tmp_path / "small", small, random_tensors(small))
    if kind == "gguf":
        path = write_gguf(tmp_path / "x.gguf", config, zero_tensors(config), kind=GGMLQuantizationType.Q8_0)
    else:
        path = write_folder(tmp_path / "larger", config, zero_tensors(config), num_shards=2)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(path), layers]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    grown, size = json.loads(done.stdout)
    assert 0.9 * size < grown < 1.3 * size
