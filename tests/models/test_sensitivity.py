"""A config field that is read wrong shows: changing any one of those that shape the result moves the logits."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.models.config import ModelConfig
from jaxspec.models.network import Network
from tests.families import network_of
from tests.models.test_oracle import TABLE, load_network

# Family -> changes of its public config, each a path and a value.
CHANGES: dict[str, list[tuple[str, Any]]] = {
    "llama": [("rope_scaling.factor", 4.0), ("rope_theta", 20000.0), ("rms_norm_eps", 1e-3)],
    "qwen3": [("rope_scaling.factor", 8.0), ("rope_scaling.rope_type", "linear")],
    "qwen3_moe": [("norm_topk_prob", False), ("num_experts_per_tok", 3)],
    "gemma3": [
        ("sliding_window", 7),
        ("sliding_window", 9),
        ("query_pre_attn_scalar", 32),
        ("rope_local_base_freq", 20000.0),
        ("rope_theta", 10000.0),
        ("rope_scaling.factor", 4.0),
        ("sliding_window_pattern", 2),
        ("hidden_activation", "silu"),
    ],
    "deepseek_v3": [
        ("rope_scaling.mscale_all_dim", 0.5),
        ("rope_scaling.factor", 8.0),
        ("rope_scaling.type", "linear"),
        ("rope_interleave", False),
        ("n_group", 2),
        ("topk_group", 3),
        ("norm_topk_prob", False),
        ("routed_scaling_factor", 1.0),
        ("num_experts_per_tok", 2),
    ],
    "qwen3_next": [("partial_rotary_factor", 0.5), ("rope_theta", 1e6), ("norm_topk_prob", False)],
    "qwen3_5": [
        ("text_config.rope_parameters.partial_rotary_factor", 0.25),
        ("text_config.rope_parameters.rope_theta", 1e6),
    ],
}
LEAST = 0.01  # of 0.08 to 6.2, and 0.013 for rms_norm_eps, measured with the reference implementation


@functools.partial(jax.jit, static_argnames="network")
def all_logits(network: Network, leaves, tokens) -> jax.Array:
    """Logits [T, V] of a text int32 [1, T]."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    block = Block(places, jnp.zeros(1, jnp.int32), jnp.asarray(TABLE))
    caches = network.init_cache(num_pages=1, page_size=4, num_rows=1, dtype=jnp.dtype("float32"))
    model = network.bind(leaves)
    return model.logits(model.extend(tokens, block, caches).hidden[0])


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return config | {first: changed(config[first], rest, value) if rest else value}


@pytest.mark.parametrize("family", CHANGES)
def test_every_field_moves_the_logits(shared, family):
    folder = shared / "oracle" / "tiny" / family
    ref = json.loads((folder / "ref.json").read_text())
    config = json.loads((folder / "config_hub.json").read_text())
    config.pop("layer_types", None)
    network, leaves = load_network(folder, scan_layers=False)
    tokens = np.array([ref["prompt"]], np.int32)
    plain = all_logits(network, leaves, tokens)
    np.testing.assert_allclose(plain[-1], ref["last_logits"], rtol=0, atol=2e-4)
    unmoved = {}
    for path, value in CHANGES[family]:
        other = network_of(ModelConfig.from_hf(changed(config, path, value)))
        assert other.treedef == network.treedef
        moved = float(jnp.abs(all_logits(other, leaves, tokens) - plain).max())
        if moved < LEAST:
            unmoved[path, value] = moved
    assert not unmoved
