"""Training-time test against a direct computation, one chain at a time, with keys and values in plain lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.kv_cache import Accepted
from jaxspec.models.heads import Head
from jaxspec.models.layers import rotary_angles, rotate
from jaxspec.training.feature_draft import TrainingTimeTest
from jaxspec.training.losses import LOSSES, Laws
from jaxspec.training.taught import Taught
from tests.tiny import VOCAB, tiny_config, tiny_head

LENGTH, NUM_STEPS, NUM_ANCHORS = 8, 3, 5
# What the target wrote of each text: an answer to the end, and two with a question between them.
ANSWERS = ((4, 8),), ((2, 4), (6, 8))
SWITCHES = ({}, {"draft_vocab": 20, "fc_norm": True, "norm_before_residual": True}, {"feed_normed": True})


def texts(config) -> Taught:
    rng = np.random.default_rng(0)
    is_answer = np.zeros((len(ANSWERS), LENGTH), bool)
    for row, spans in enumerate(ANSWERS):
        for start, end in spans:
            is_answer[row, start:end] = True
    shape = is_answer.shape
    return Taught(
        jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        jnp.asarray(is_answer),
        tuple(jnp.asarray(rng.normal(size=(*shape, config.target_hidden)), jnp.float32) for _ in config.capture),
        jnp.asarray(rng.normal(0, 2, (*shape, config.draft_vocab)), jnp.float32),
        jnp.full(shape, 6.0),
    )


def chain_logits(head: Head, taught: Taught, row: int | jax.Array, anchor: int | jax.Array) -> jax.Array:
    """What a chain predicts after each pair [LENGTH - 1, Vd], from one pair after the other."""
    config = head.config.layer
    fused = head.fuse(tuple(feature[row, None] for feature in taught.features))[0]
    room = jnp.zeros((LENGTH - 1, config.num_kv_heads, config.head_dim))

    def run(carry, pair):
        keys, values, own = carry
        hidden = jnp.where(pair <= anchor, fused[pair], own)
        state, own, keys, values = one_pair(head, taught.ids[row, pair + 1], hidden, pair, keys, values)
        return (keys, values, own), head.own_logits(state)

    return jax.lax.scan(run, (room, room, jnp.zeros(config.hidden_size)), jnp.arange(LENGTH - 1))[1]


def one_pair(head: Head, token, hidden, pair, keys, values) -> tuple[jax.Array, ...]:
    """The layer over one pair: what logits are made of, the feature it hands on, and the cache with its row."""
    layer, config = head.layer, head.config.layer
    assert layer.input_layernorm is not None
    assert layer.hidden_norm is not None
    assert head.norm is not None
    embedded, normed = layer.input_layernorm(head.embed_tokens[...][token]), layer.hidden_norm(hidden)
    inputs = jnp.concatenate([embedded, normed])
    attention, width = layer.self_attn, config.head_dim
    angles = rotary_angles(config.rope, width, jnp.full((1, 1), pair))
    turn = lambda x: rotate(x.reshape(1, 1, -1, width), angles)[0, 0]  # noqa: E731
    queries = turn(attention.q_proj(inputs))
    keys = keys.at[pair].set(turn(attention.k_proj(inputs)))
    values = values.at[pair].set(attention.v_proj(inputs).reshape(-1, width))
    seen = (jnp.repeat(rows, config.num_heads // config.num_kv_heads, axis=1) for rows in (keys, values))
    seen_keys, seen_values = seen
    scores = jnp.einsum("hd,shd->hs", queries, seen_keys) * width**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(len(keys)) <= pair, scores, -jnp.inf))
    x = (normed if head.config.norm_before_residual else hidden) + attention.o_proj(
        jnp.einsum("hs,shd->hd", weights, seen_values).reshape(-1)
    )
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    normed = head.norm(x)
    return normed, normed if head.config.feed_normed else x, keys, values


def predictions(taught: Taught) -> list[tuple[int, int, int]]:
    """(row, anchor, step) of every token that counts: written by the target, in a chain whose first token is too."""
    found = []
    for row, is_answer in enumerate(np.asarray(taught.is_answer)):
        for anchor in range(LENGTH - 2):
            if is_answer[anchor + 2]:
                steps = range(min(NUM_STEPS, LENGTH - 2 - anchor))
                found += [(row, anchor, step) for step in steps if is_answer[anchor + 2 + step]]
    return found


def direct_loss(head: Head, taught: Taught, objective: TrainingTimeTest) -> jax.Array:
    found = predictions(taught)
    rows, anchors, steps = (jnp.array(part) for part in zip(*found, strict=True))
    chains = jax.vmap(lambda row, anchor: chain_logits(head, taught, row, anchor))(rows, anchors)
    draft = jax.nn.log_softmax(chains[jnp.arange(len(found)), anchors + steps])
    places = rows, anchors + 1 + steps
    losses = LOSSES[objective.loss](Laws(draft, taught.logits[places] - taught.log_mass[places][:, None]))
    weights = [objective.step_decay**step for step in range(NUM_STEPS)]
    means = [jnp.sum(losses * (steps == step)) / jnp.sum(steps == step) for step in range(NUM_STEPS)]
    return jnp.dot(jnp.stack(means), jnp.array(weights)) / sum(weights)


@pytest.mark.parametrize(("switches", "loss"), list(zip(SWITCHES, LOSSES, strict=True)), ids=str)
def test_loss_and_gradient_are_those_of_a_direct_computation(switches, loss):
    network, leaves = tiny_head(3, fused=True, layer=tiny_config(num_hidden_layers=1), **switches)
    taught, objective = texts(network.config), TrainingTimeTest(loss=loss, num_steps=NUM_STEPS, step_decay=0.7)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def bound(floats):
        given = iter(floats)
        return network.bind(tuple(next(given) if is_one else leaf for is_one, leaf in zip(is_float, leaves)))

    floats = tuple(leaf for is_one, leaf in zip(is_float, leaves) if is_one)
    ours = jax.jit(
        jax.value_and_grad(
            lambda floats: (lambda out: (out.total, out))(objective.losses(bound(floats), taught, NUM_ANCHORS)),
            has_aux=True,
        )
    )
    (total, losses), gradient = ours(floats)
    expected, direct = jax.jit(jax.value_and_grad(lambda floats: direct_loss(bound(floats), taught, objective)))(floats)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for one, other in zip(gradient, direct, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(np.asarray(other)).max() + 1e-9)
    steps = [step for *_, step in predictions(taught)]
    assert np.asarray(losses.count).tolist() == [steps.count(step) for step in range(NUM_STEPS)]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_step_of_training_predicts_what_the_same_step_of_drafting_does(switches):
    """Through the cache, the pages and the blocks of inference."""
    network, leaves = tiny_head(3, fused=True, layer=tiny_config(num_hidden_layers=1), **switches)
    taught, head = texts(network.config), network.bind(leaves)
    page_size, table = 2, jnp.arange(3, dtype=jnp.int32)[None]
    caches = network.init_cache(num_pages=3, page_size=page_size, dtype=jnp.dtype("float32"))
    anchor, row = 3, 0

    @jax.jit
    def draft(caches):
        places = jnp.arange(anchor + 1, dtype=jnp.int32)[None]
        block = Block(places, jnp.zeros(1, jnp.int32), table)
        fused = head.fuse(tuple(feature[row, None, : anchor + 1] for feature in taught.features))
        out = head.extend(taught.ids[row, None, 1 : anchor + 2], fused, block, caches)
        caches = head.commit(caches, out.pending, block, Accepted(places, jnp.array([anchor + 1])))
        drafted, hidden, earlier = [head.own_logits(out.state[0, -1])], out.hidden[:, -1:], None
        for step in range(1, NUM_STEPS):
            block = Block(jnp.full((1, 1), anchor + step), jnp.array([anchor + 1]), table)
            out = head.extend(taught.ids[row, None, None, anchor + 1 + step], hidden, block, caches, earlier=earlier)
            drafted.append(head.own_logits(out.state[0, 0]))
            hidden = out.hidden
            both = [one for one in (earlier, out.pending) if one is not None]
            earlier = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *both)
        return jnp.stack(drafted)

    trained = jax.jit(lambda: chain_logits(head, taught, row, anchor)[anchor : anchor + NUM_STEPS])()
    np.testing.assert_allclose(draft(caches), trained, rtol=1e-5, atol=1e-5)
