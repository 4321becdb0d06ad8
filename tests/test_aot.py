"""Whole rounds of models of real size, over shapes alone: lowered, and compiled for TPUs where libtpu is there."""

import importlib.util
import math
import re
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from aot_devices import devices_of
from aot_round import Round, RoundSettings, compile_round, make_round, model_shape
from jaxspec.attention import AttentionInputs, fold
from jaxspec.draft.shape import TreeShape
from jaxspec.pallas import attention_kernel, padded_head_dim, prefix_kernel
from jaxspec.pallas.specs import SPECS
from tests.abstract import own_round
from tests.families import CONFIGS

# Equal layers are scanned, so that fewer of them are the same program, and fit on one chip of any kind.
NUM_LAYERS = 4
CONTEXT = 16384
MODELS = ("SmolLM2-135M", "Llama-3.1-8B")
SHAPES = {"chain": TreeShape(3, 1, 4), "tree": TreeShape(5, 4, 8)}
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
KERNELS = {"tree_attention_tpu", "commit_tpu"}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: the extra 'aot', on Linux and Python 3.11"
)
# Compiles in half the time; what it leaves out makes programs larger, never smaller.
FAST = {"exec_time_optimization_effort": -1.0}


def round_of(model: str, form: str, backend: str = "pallas_tpu") -> Round:
    config = model_shape(model, num_hidden_layers=NUM_LAYERS)
    settings = RoundSettings(model=config, shape=SHAPES[form], num_rows=8, max_model_len=CONTEXT, backend=backend)
    return make_round(settings)


def widest(text: str, size: int) -> int:
    """Elements of the largest array in a program that has an axis of a size."""
    shapes = [[int(n) for n in dims.split(",")] for dims in set(re.findall(r"\w\[([\d,]+)\]", text))]
    found = [shape for shape in shapes if size in shape]
    return max(map(math.prod, found), default=0)


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_round_lowers_to_our_kernels(model, form):
    made = round_of(model, form)
    text = made.step.trace(**made.arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert set(re.findall(r'kernel_name = "(\w+)"', text)) == KERNELS


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_round_lowers_to_our_kernel_for_hopper(model, form):
    made = round_of(model, form, "pallas_gpu")
    text = made.step.trace(**made.arguments).lower(lowering_platforms=("cuda",)).as_text()
    # The target, and the draft's levels and what it observes.
    assert text.count("custom_call @mosaic_gpu") == 3
    assert "tree_attention_gpu" in text


@needs_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("model", "form"), [("SmolLM2-135M", "chain"), ("Llama-3.1-8B", "tree")])
def test_a_round_compiles_and_copies_no_pool(model, form, topology):
    made = round_of(model, form)
    compiled: Any = compile_round(made, devices_of(topology)[:1], **FAST)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert set(re.findall(r"%(\w+_tpu)[.\d]* = ", text)) == KERNELS
    # Every pool stays where it is: it is an argument and, without another byte, a result.
    pools = jax.tree.leaves((made.state.caches, made.state.draft.caches))
    assert memory.alias_size_in_bytes >= sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert memory.temp_size_in_bytes < pools[0].size * pools[0].dtype.itemsize
    # Nothing is as large as a mask of nodes x context. The tokens' history is rows x context, and penalties, where a
    # row has some, count each of its tokens at a place of two coordinates.
    assert widest(text, CONTEXT) <= 2 * made.settings.num_rows * CONTEXT


@needs_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_latent_attention_and_a_prefix_alone_compile(topology):
    """DeepSeek-V3's heads; of the pool nothing is copied."""
    chip = SingleDeviceSharding(devices_of(topology)[0])
    inputs = SPECS["DeepSeek-V3 chain short"].inputs("bfloat16")
    kernel, prefix = attention_kernel("pallas_tpu"), prefix_kernel("pallas_tpu")

    def run(queries, keys, pool, layer, block):
        how = {"kernel": kernel, "scoring": inputs.scoring}
        folded = AttentionInputs(fold(queries, 1), keys, None, (pool,), layer, block)
        return block.attend(queries, keys, None, (pool,), layer, 1.0, **how), prefix(folded, inputs.scoring)

    pool = jax.ShapeDtypeStruct((8, 4096, 1, 64, padded_head_dim("pallas_tpu", 576)), inputs.keys.dtype)
    given = (inputs.queries, inputs.keys, pool, inputs.layer, inputs.block)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), given)
    compiled: Any = jax.jit(run).lower(*placed).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.size * 2 / 100


@needs_libtpu
@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_with_the_familys_own_draft_compiles(family):
    chip = SingleDeviceSharding(devices_of("v5p:2x2x1")[0])
    step, given = own_round(family)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), given)
    # The suite asks for the highest precision, which the compiler's kernel for ragged_dot refuses for bfloat16.
    with jax.default_matmul_precision("default"):
        compiled: Any = step.lower(**placed).compile(compiler_options=FAST)
    caches = jax.tree.leaves((given["state"].caches, given["state"].draft.caches))
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in caches)


@needs_libtpu
def test_several_chips_split_the_kernels_by_heads():
    made = round_of("Llama-3.1-8B", "chain")
    compiled: Any = compile_round(made, devices_of("v5p:2x2x2"), **FAST)
    shapes = re.findall(r"%tree_attention_tpu[.\d]* = bf16\[([\d,]+)\]", compiled.as_text())
    assert {tuple(map(int, shape.split(",")))[1] for shape in shapes} == {1}  # of 8 kv heads, on 8 chips
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.arguments))
    assert compiled.memory_analysis().argument_size_in_bytes < whole / 4  # some is on every chip
