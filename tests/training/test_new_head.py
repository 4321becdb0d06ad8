"""What a new EAGLE-3 head starts from."""

import jax.numpy as jnp
import numpy as np

from jaxspec.models.layers import rotary_angles
from jaxspec.training.new_head import new_head
from jaxspec.training.unrolled import UnrolledBlock
from tests.tiny import tiny_model


def test_a_head_starts_as_the_targets_last_layer():
    """But for what is random: how it reads the embedding and the earlier features."""
    network, leaves = tiny_model(0)
    model, ids = network.bind(leaves), np.array([2, 5, 6, 40], np.int32)
    head_network, head_leaves = new_head(network, leaves, (0, 1), ids, seed=0)
    head, width = head_network.bind(head_leaves), network.config.hidden_size
    assert np.abs(head.fc.weight[...][:width]).max() > 0
    head.fc.weight[...] = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)])
    for linear in (head.layer.self_attn.q_proj, head.layer.self_attn.k_proj, head.layer.self_attn.v_proj):
        linear.weight[...] = linear.weight[...].at[:width].set(0)

    rng = np.random.default_rng(0)
    features = tuple(jnp.asarray(rng.normal(size=(1, 6, width)), jnp.float32) for _ in range(2))
    places = jnp.arange(6)[None]
    block = UnrolledBlock(places, places, step=0)
    out = head.extend(places, head.fuse(features), block, (None,))
    angles = rotary_angles(network.config.rope, network.config.head_dim, places)
    hidden, _ = model.segments[-1].extend_layer(features[1], angles, block, None, 0, None)
    np.testing.assert_allclose(out.state, model.norm(hidden), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(head.own_logits(out.state), model.logits(hidden)[..., ids], rtol=1e-4, atol=1e-4)
