"""Models whose weights are panels compute what they compute with plain arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.attention import Block
from jaxspec.cpu.panels import Panels
from jaxspec.cpu.register import why_not
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.head import load_head
from jaxspec.loading.load import load_model
from jaxspec.models import Decoder
from jaxspec.models.network import Network
from jaxspec.models.weights import Matrix, Table, look_up, multiply, pack_weights
from tests.loading.files import hf_config, random_tensors, write_folder
from tests.loading.heads import opened, write_head
from tests.tiny import VOCAB, tiny_config, tiny_head

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or why_not() is not None, reason=f"needs the CPU's kernels: {why_not()}"
)


def with_panels(network: Network, leaves) -> tuple[Network, tuple[jax.Array, ...]]:
    state = dict(nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves)))
    pack_weights(state)
    packed, treedef = jax.tree.flatten(nnx.from_flat_state(list(state.items())))
    return dataclasses.replace(network, treedef=treedef), tuple(packed)


def decoder(*, scan_layers: bool, **changes) -> tuple[Network, tuple[jax.Array, ...]]:
    config = tiny_config(**changes)
    graphdef, state = nnx.split(Decoder(config, dtype=jnp.dtype("float32"), scan_layers=scan_layers, rngs=nnx.Rngs(0)))
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, Decoder, graphdef, treedef), tuple(leaf * (6 if leaf.ndim > 1 else 1) for leaf in leaves)


def logits_of(network: Network, leaves) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 7)), jnp.int32)
    caches = network.init_cache(num_pages=4, page_size=16, dtype=jnp.dtype("float32"))
    table = jnp.array([[0, 1], [2, 3]], jnp.int32)
    block = Block(jnp.broadcast_to(jnp.arange(7), (2, 7)), jnp.zeros(2, jnp.int32), table)

    def run(leaves):
        model = network.bind(leaves)
        return model.logits(model.extend(tokens, block, caches).hidden)

    return np.asarray(jax.jit(run)(leaves))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True}], ids=str)
def test_a_decoder_of_panels_is_the_same_decoder(scan_layers, changes):
    plain = decoder(scan_layers=scan_layers, **changes)
    expected = logits_of(*plain)
    found = logits_of(*with_panels(*plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "how", [{"fused": False}, {"fused": True, "draft_vocab": 48}, {"fused": True, "lm_head": "table"}]
)
def test_a_head_of_panels_is_the_same_head(how):
    network, leaves = tiny_head(1, **how)
    rng = np.random.default_rng(0)
    features = tuple(jnp.asarray(rng.normal(size=(1, 5, 32)), jnp.float32) for _ in network.config.capture)
    tokens, table = jnp.asarray(rng.integers(0, VOCAB, (1, 5)), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    caches = network.init_cache(num_pages=1, page_size=16, dtype=jnp.dtype("float32"))

    def run(network, leaves):
        head = network.bind(leaves)
        block = Block(jnp.arange(5)[None], jnp.zeros(1, jnp.int32), table)
        return head.own_logits(head.extend(tokens, head.fuse(features), block, caches).state)

    expected, found = (np.asarray(run(*model)) for model in ((network, leaves), with_panels(network, leaves)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_checkpoint_loads_as_panels_and_its_head_shares_them(tmp_path):
    tied = hf_config(tie_word_embeddings=True)
    checkpoint = open_checkpoint(write_folder(tmp_path / "target", tied, random_tensors(tied)))
    plain = load_model(checkpoint, dtype="float32", scan_layers=False)
    loaded = load_model(checkpoint, dtype="float32", scan_layers=False, panel_dtype="float32")
    networks = [Network(one.config, Decoder, one.graphdef, one.treedef) for one in (plain, loaded)]
    models = [network.bind(one.leaves) for network, one in zip(networks, (plain, loaded))]
    table = models[1].embed_tokens
    assert isinstance(table.get_value(), Panels)
    ids = jnp.array([0, 5, 3])
    np.testing.assert_array_equal(look_up(table, ids), look_up(models[0].embed_tokens, ids))

    file = opened(write_head(tmp_path / "head", "sglang", tied, own=()), tied, fused=True)
    head, leaves = load_head(file, networks[1], loaded.leaves, dtype="float32", panel_dtype="float32")
    bound = head.bind(leaves)
    assert bound.embed_tokens.get_value().panels is table.get_value().panels
    assert bound.lm_head.get_value().panels is table.get_value().panels


def test_plain_weights_are_differentiated_as_before():
    """Training multiplies plain arrays through the same function."""
    x, matrix = jnp.ones((2, 3)), Matrix(jnp.arange(12.0).reshape(3, 4))
    grad = jax.grad(lambda value: multiply(x, Matrix(value))[0].sum())(matrix.get_value())
    np.testing.assert_array_equal(grad, np.full((3, 4), 2.0))
    np.testing.assert_array_equal(multiply(x, Table(matrix.get_value().T))[0], multiply(x, matrix)[0])
