"""Each family from a sharded checkpoint: every tensor is found, and names that do not fit are listed."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import LLM, EngineConfig, SamplingParams, SpecConfig
from jaxspec.loading import open_checkpoint
from jaxspec.loading.dequantised import dequantise
from jaxspec.loading.load import LoadedModel, load_model
from jaxspec.loading.safetensors_file import SafetensorsFile
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.families import FAMILIES
from jaxspec.models.mtp import MTPConfig, MTPHead
from jaxspec.models.tensor_names import Source
from tests.families import CONFIGS
from tests.loading.files import write_folder

MOE = {name: value for name, value in CONFIGS["qwen3_next"].items() if "linear" not in name}
ALL = {
    **CONFIGS,
    "qwen3_moe": {**MOE, "architectures": ["Qwen3MoeForCausalLM"], "partial_rotary_factor": None},
    "gemma3": {**MOE, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 3},
}


def _tensors_of(module, sources: dict[str, Source], seed: int) -> dict[str, np.ndarray]:
    """Random tensors for a module's leaves, as checkpoints store them."""
    leaves = dict(nnx.to_flat_state(nnx.state(nnx.eval_shape(module), nnx.Param)))
    rng, found = np.random.default_rng(seed), {}
    for name, source in sources.items():
        shape = leaves[source.path].shape[len(source.index) :]
        if source.columns is not None:
            shape = (*shape[:-1], source.columns[1] - source.columns[0])
        shape = (*shape[:-2], shape[-1], shape[-2]) if source.transpose else shape
        scale = 0.3 if len(shape) == 1 else 1.2 * shape[-1] ** -0.5
        found[name] = rng.normal(0, scale, shape).astype(np.float32)
    return found


def tensors_of(family: str, *, prefix: str = "model.") -> dict[str, np.ndarray]:
    """A target's tensors by their public names, and those of its own draft layer."""
    config = ModelConfig.from_hf(ALL[family])
    build = functools.partial(Decoder, config, dtype=jnp.dtype("float32"), scan_layers=False, rngs=None)
    found = _tensors_of(build, Decoder.tensor_map(config, False), 0)
    own = FAMILIES[config.architecture].own_draft
    if own is not None:
        head = MTPConfig.of(config, own)
        place = "mtp.layers.0." if "mtp.fc.weight" in own.names.values() else f"model.layers.{config.num_layers}."
        build = functools.partial(MTPHead, head, dtype=jnp.dtype("float32"), rngs=None)
        found |= _tensors_of(build, MTPHead.tensor_map(head, own, place, ()), 1)
    return {prefix + name.removeprefix("model.") if name.startswith("model.") else name: x for name, x in found.items()}


def load(folder: Path) -> LoadedModel:
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, dtype="float32", scan_layers=True)


@pytest.mark.parametrize("family", ALL)
def test_names_that_do_not_fit_are_listed(tmp_path, family):
    tensors = tensors_of(family)
    load(write_folder(tmp_path / "whole", ALL[family], tensors, num_shards=3))
    strange = {"model.layers.0.strange.weight": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"1 not expected: model\.layers\.0\.strange\.weight"):
        load(write_folder(tmp_path / "strange", ALL[family], tensors | strange, num_shards=3))
    lacking = sorted(name for name in tensors if name.startswith("model.layers.1."))[:2]
    rest = {name: values for name, values in tensors.items() if name not in lacking}
    with pytest.raises(ValueError, match="2 missing: ") as caught:
        load(write_folder(tmp_path / "lacking", ALL[family], rest, num_shards=3))
    assert all(name in str(caught.value) for name in lacking)


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of each layer in two tensors."""
    found = dict(tensors)
    layers = {name.partition("experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:

        def every(part: str, layer: str = layer) -> np.ndarray:
            count = sum(name.startswith(f"{layer}experts.") and part in name for name in tensors)
            return np.stack([found.pop(f"{layer}experts.{expert}.{part}.weight") for expert in range(count)])

        found[f"{layer}experts.gate_up_proj"] = np.concatenate([every("gate_proj"), every("up_proj")], axis=1)
        found[f"{layer}experts.down_proj"] = every("down_proj")
    return found


def test_wrapped_and_stacked_names_load_to_the_same_leaves(tmp_path):
    family = "qwen3_5_moe"
    plain = load(write_folder(tmp_path / "plain", ALL[family], tensors_of(family)))
    tower = {"model.visual.patch_embed.weight": np.zeros(3, np.float32)}
    others = stacked(tensors_of(family, prefix="model.language_model.")) | tower
    assert any("experts.gate_up_proj" in name for name in others)
    wrapped = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": ALL[family]}
    other = load(write_folder(tmp_path / "other", wrapped, others))
    assert other.config == plain.config
    for one, two in zip(plain.leaves, other.leaves, strict=True):
        np.testing.assert_array_equal(one, two)


PROMPT, PARAMS = [[3, 1, 4, 1, 5, 9, 2, 6]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def tokens(folder: Path, spec: SpecConfig | None) -> tuple[list[int], LLM]:
    engine = EngineConfig(
        max_model_len=32,
        max_running_requests=1,
        page_size=16,
        chunked_prefill_size=16,
        prefill_chunk_buckets=(16,),
        decode_row_buckets=(1,),
        skip_tokenizer_init=True,
        warmup=False,
        compilation_cache_dir=None,
    )
    with LLM(folder, spec=spec, engine=engine) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids, llm


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_nextn_drafts_with_the_checkpoints_own_layer(tmp_path, family):
    folder = write_folder(tmp_path, ALL[family], tensors_of(family), num_shards=2)
    plain, llm = tokens(folder, None)
    assert llm.plan.algorithm == "NONE"
    found, llm = tokens(folder, SpecConfig(algorithm="NEXTN"))
    assert found == plain
    plan = llm.plan
    assert (plan.num_steps, plan.eagle_topk, plan.num_draft_tokens, plan.rounds_in_flight) == (3, 1, 4, 1)
    assert llm.metrics.proposed > 0


def test_trees_on_a_recurrent_state_are_refused_by_name(tmp_path):
    folder = write_folder(tmp_path, ALL["qwen3_5"], tensors_of("qwen3_5"))
    spec = SpecConfig(algorithm="NEXTN", num_steps=3, eagle_topk=2, num_draft_tokens=6)
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM has layers with a recurrent state.* set eagle_topk=1"):
        tokens(folder, spec)


@pytest.mark.parametrize("name", ["fp8_block128", "fp8_block128_576"])
def test_blocks_are_dequantised_exactly_at_ragged_edges(shared, name):
    file = SafetensorsFile(shared / "oracle" / "tiny" / "quant.safetensors")
    stored, scales = file.read(f"{name}.weight"), file.read(f"{name}.weight_scale_inv")
    found = dequantise(stored, scales, (128, 128), name)
    np.testing.assert_array_equal(found, file.read(f"{name}.dequantised"))
    with pytest.raises(ValueError, match=r"set weight_block_size in its config\.json"):
        dequantise(stored, scales, (64, 128), name)
