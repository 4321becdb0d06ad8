"""The decoder: one function of tokens, however it is cut into blocks, segments and dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.attention import Block
from jaxspec.kv_cache import Accepted, CacheSizes
from jaxspec.models import Decoder
from jaxspec.tree import ancestor_mask, node_depths, pack_bits
from tests.tiny import VOCAB, tiny_config

PAGE_SIZE, NUM_PAGES, NUM_ROWS = 4, 12, 2
TABLE = jnp.array([[7, 2, 9, 4], [0, 11, 5, 3]])
TEXT = np.random.default_rng(0).integers(0, VOCAB, (NUM_ROWS, 9)).astype(np.int32)


@functools.cache
def make_model(*, scan_layers: bool = False, dtype: str = "float32", **changes) -> Decoder:
    """A two-layer decoder with weights that are large enough to matter; those of scanned layers are the same."""
    config = tiny_config(**changes)
    plain = Decoder(config, dtype=jnp.dtype("float32"), scan_layers=False, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    weights = {
        path: leaf[...] * 8 if leaf.ndim == 2 else leaf[...] + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32)
        for path, leaf in nnx.to_flat_state(nnx.state(plain, nnx.Param))
    }
    model = Decoder(config, dtype=jnp.dtype(dtype), scan_layers=scan_layers, rngs=None)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if scan_layers and path[0] == "segments":
            value = jnp.stack([weights["segments", layer, *path[2:]] for layer in range(config.num_layers)])
        else:
            value = weights[path]
        leaf[...] = value.astype(dtype)
    return model


def empty_caches(model: Decoder):
    return model.init_cache(model.config, CacheSizes(NUM_PAGES, PAGE_SIZE, NUM_ROWS, model.embed_tokens[...].dtype))


def block_of(start: int, size: int, **fields) -> Block:
    positions = jnp.broadcast_to(start + jnp.arange(size), (NUM_ROWS, size))
    return Block(positions, jnp.full(NUM_ROWS, start), TABLE, **fields)


@nnx.jit(static_argnames=("capture",))
def extend(model: Decoder, tokens, block, caches, earlier=None, capture=()):
    """Logits beside what `Decoder.extend` returns."""
    out = model.extend(tokens, block, caches, earlier=earlier, capture=capture)
    return model.logits(out.hidden), out


def pass_over(model: Decoder, tokens: np.ndarray, **how):
    """A block of tokens [B, N] from an empty cache."""
    return extend(model, jnp.asarray(tokens), block_of(0, tokens.shape[1]), empty_caches(model), **how)


@functools.partial(nnx.jit, static_argnames=("count",))
def commit(model: Decoder, caches, pending, block: Block, count: int):
    path = jnp.broadcast_to(jnp.arange(block.positions.shape[1]), block.positions.shape)
    return model.commit(caches, pending, block, Accepted(path, jnp.full(NUM_ROWS, count)))


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}],
    ids=["tied", "untied, biased"],
)
def test_scanned_layers_equal_unrolled_ones(changes):
    plain, scanned = make_model(**changes), make_model(scan_layers=True, **changes)
    assert len(jax.tree.leaves(nnx.state(scanned))) < len(jax.tree.leaves(nnx.state(plain)))
    for ours, theirs in zip(
        jax.tree.leaves(pass_over(scanned, TEXT, capture=(0, 1))),
        jax.tree.leaves(pass_over(plain, TEXT, capture=(0, 1))),
    ):
        close(ours, theirs)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_capture_returns_the_outputs_of_the_layers_named(scan_layers):
    model = make_model(scan_layers=scan_layers)
    _, out = pass_over(model, TEXT, capture=(1, 0))
    np.testing.assert_array_equal(out.captured[0], out.hidden)
    _, plain = pass_over(model, TEXT)
    assert plain.captured == ()
    close(plain.hidden, out.hidden)
    # The first layer alone, over the embeddings, is a model of one layer.
    short = nnx.clone(make_model())
    short.segments = nnx.List([short.segments[0]])
    short.config = dataclasses.replace(short.config, num_layers=1)
    _, first = pass_over(short, TEXT)
    close(out.captured[1], first.hidden)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_chunks_committed_one_by_one_equal_one_block(scan_layers):
    model = make_model(scan_layers=scan_layers)
    whole, _ = pass_over(model, TEXT)
    caches, start = empty_caches(model), 0
    for size in (3, 1, 5):
        block = block_of(start, size)
        logits, out = extend(model, jnp.asarray(TEXT[:, start : start + size]), block, caches)
        caches = commit(model, caches, out.pending, block, size)
        close(logits, whole[:, start : start + size])
        start += size


@pytest.mark.parametrize("scan_layers", [False, True])
def test_pending_passed_as_earlier_equals_one_block(scan_layers):
    model = make_model(scan_layers=scan_layers)
    whole, _ = pass_over(model, TEXT)
    caches = empty_caches(model)
    prefix = block_of(0, 4)
    _, out = extend(model, jnp.asarray(TEXT[:, :4]), prefix, caches)
    caches = commit(model, caches, out.pending, prefix, 4)
    _, first = extend(model, jnp.asarray(TEXT[:, 4:7]), block_of(4, 3), caches)
    # Three nodes that are not committed, then two more: positions go on, the prefix does not.
    later = block_of(4, 2)._replace(positions=jnp.broadcast_to(jnp.array([7, 8]), (NUM_ROWS, 2)))
    logits, _ = extend(model, jnp.asarray(TEXT[:, 7:]), later, caches, earlier=first.pending)
    close(logits, whole[:, 7:])
    # Slots that nothing has filled yet are hidden by their bits.
    room = model.empty_pending(NUM_ROWS, 5)
    filled = jax.tree.map(lambda slots, new: slots.at[:, :, :3].set(new), room, first.pending)
    bits = pack_bits(jnp.array([[[1, 1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 1]]] * NUM_ROWS, bool))
    logits, _ = extend(model, jnp.asarray(TEXT[:, 7:]), later._replace(ancestors=bits), caches, earlier=filled)
    close(logits, whole[:, 7:])


def test_every_path_of_a_tree_equals_its_own_chain():
    model = make_model()
    parents = np.array([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 0, 4]])
    tokens = np.random.default_rng(2).integers(0, VOCAB, (NUM_ROWS, 6)).astype(np.int32)
    caches = empty_caches(model)
    prefix = block_of(0, 5)
    _, out = extend(model, jnp.asarray(TEXT[:, :5]), prefix, caches)
    caches = commit(model, caches, out.pending, prefix, 5)
    depth = node_depths(jnp.asarray(parents), 3)
    bits = pack_bits(ancestor_mask(jnp.asarray(parents), 3))
    block = Block(5 + depth, jnp.full(NUM_ROWS, 5), TABLE, bits)
    logits, _ = extend(model, jnp.asarray(tokens), block, caches)
    for row in range(NUM_ROWS):
        for node in range(6):
            path = [node]
            while parents[row, path[0]] >= 0:
                path.insert(0, int(parents[row, path[0]]))
            text = np.zeros((NUM_ROWS, 9), np.int32)  # one shape; what is behind the path does not matter
            text[row, : 5 + len(path)] = [*TEXT[row, :5], *tokens[row, path]]
            chain, _ = pass_over(model, text)
            close(logits[row, node], chain[row, 4 + len(path)])


def test_a_rolled_back_block_leaves_no_trace():
    model = make_model()
    caches = empty_caches(model)
    prefix, tail = block_of(0, 5), block_of(5, 4)
    _, out = extend(model, jnp.asarray(TEXT[:, :5]), prefix, caches)
    caches = commit(model, caches, out.pending, prefix, 5)
    wrong = (TEXT[:, 5:] + 1) % VOCAB
    wrong[:, 0] = TEXT[:, 5]
    _, out = extend(model, jnp.asarray(wrong), tail, caches)
    caches = commit(model, caches, out.pending, tail, 1)
    logits, _ = extend(model, jnp.asarray(TEXT[:, 6:]), block_of(6, 3), caches)
    close(logits, pass_over(model, TEXT)[0][:, 6:])


def test_a_tied_head_is_the_embedding_table():
    model = make_model(tie_word_embeddings=True)
    assert model.lm_head is None
    hidden = jnp.asarray(np.random.default_rng(3).standard_normal((2, 32)), jnp.float32)
    close(model.logits(hidden), np.asarray(model.norm(hidden)) @ np.asarray(model.embed_tokens[...]).T)
    untied = make_model(tie_word_embeddings=False)
    assert untied.lm_head is not None
    close(untied.logits(hidden), np.asarray(untied.norm(hidden)) @ np.asarray(untied.lm_head[...]))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_stays_bfloat16_and_logits_are_float32(scan_layers, tied):
    model = make_model(scan_layers=scan_layers, dtype="bfloat16", tie_word_embeddings=tied)
    logits, out = pass_over(model, TEXT)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype("bfloat16")}
    expected, _ = pass_over(make_model(tie_word_embeddings=tied), TEXT)
    error = np.abs(np.asarray(logits) - np.asarray(expected))
    assert error.max() < 0.1 * np.abs(expected).max()


def test_a_node_without_a_draft_leaves_its_siblings_alone():
    model = make_model()
    parents = jnp.array([[-1, 0, 0]] * NUM_ROWS)
    block = Block(node_depths(parents, 1), jnp.zeros(NUM_ROWS, jnp.int32), TABLE, pack_bits(ancestor_mask(parents, 1)))
    with_draft, _ = extend(model, jnp.asarray(TEXT[:, :3]), block, empty_caches(model))
    without, _ = extend(model, jnp.asarray(TEXT[:, :3]).at[:, 1].set(-1), block, empty_caches(model))
    np.testing.assert_array_equal(without[:, [0, 2]], with_draft[:, [0, 2]])
    assert np.isfinite(without).all()
