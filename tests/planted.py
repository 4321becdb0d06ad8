"""A target whose next token is a known function of earlier tokens, and heads whose weights copy that function.

The token after position i is `4 * group[t_{i-2}] + member[t_i]`. The target's hidden state has four blocks, three of
them one-hot over the vocabulary, so that every norm divides by a known number:

    now     t_i, renamed by each layer from 1 on
    past    t_{i-2}, looked up by layer 1
    work    empty
    one     1

A head that reads pair (h_i, t_{i+1}) needs `t_{i+1}`, which it is given, and `t_{i-1}`, which stands in no state that
it is given: it has to look up the pair before, in its own cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models import Decoder, ModelConfig
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.layers import Attention, rope_frequencies
from jaxspec.models.network import Network
from tests.tiny import tiny_config

VOCAB, NUM_LAYERS = 16, 3
NOW, PAST, WORK = (slice(start, start + VOCAB) for start in (0, VOCAB, 2 * VOCAB))
ONE = 3 * VOCAB
HIDDEN = 3 * VOCAB + 1
EMPTY_RMS, FULL_RMS = (2 / HIDDEN) ** 0.5, (3 / HIDDEN) ** 0.5  # without and with a past
MARGIN = 20.0  # between the best logit and the second
# Group 2 never comes: its tokens are not in a head's vocabulary.
DRAFT_IDS = np.array([token for token in range(VOCAB) if token // 4 != 2], np.int32)

RNG = np.random.default_rng(3)
GROUP, MEMBER = RNG.choice([0, 1, 3], VOCAB), RNG.integers(0, 4, VOCAB)
NAMES = [np.arange(VOCAB), RNG.permutation(VOCAB), RNG.permutation(VOCAB)]  # of a token after each layer
NORM = RNG.choice([-1.0, 1.0], HIDDEN) * RNG.uniform(0.5, 2, HIDDEN)  # the final norm's weight


def next_token(text: list[int]) -> int:
    """What the target says after a text of at least three tokens."""
    return int(4 * GROUP[text[-3]] + MEMBER[text[-1]])


def one_hot(ids: np.ndarray) -> np.ndarray:
    return np.eye(VOCAB)[ids]


def layer_config(num_layers: int) -> ModelConfig:
    """One query head for each thing that is looked up; the norms are exact."""
    return tiny_config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2,
        num_hidden_layers=num_layers,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=VOCAB,
        rope_theta=100.0,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
    )


def vocabulary_head() -> np.ndarray:
    """Logits from blocks `now` (as the last layer names it) and `past`, [HIDDEN, V]; it undoes the final norm."""
    ids = np.arange(VOCAB)
    table = np.zeros((HIDDEN, VOCAB))
    table[NOW][NAMES[-1]] = ids[None] % 4 == MEMBER[:, None]
    table[PAST] = ids[None] // 4 == GROUP[:, None]
    return MARGIN * FULL_RMS * table / NORM[:, None]


def plant(attention: Attention, config: ModelConfig, one: tuple[int, float], lookups: list[tuple]) -> None:
    """Sets an attention's weights so that head h copies what the token `offset` before holds.

    Args:
        attention: its module.
        config: its sizes.
        one: an input channel that is constant, and its value.
        lookups: (offset, what is copied [size_in, V], block it is added to) for each head.
    """
    size_in = attention.q_proj.weight.shape[0]
    queries, keys, values = (np.zeros((size_in, 3, VOCAB)) for _ in range(3))
    out = np.zeros((3, VOCAB, HIDDEN))
    frequencies = rope_frequencies(config.rope, VOCAB)
    sharp = 25.0  # the square of it, times some tenths, is how far the right place stands above its neighbours
    for head, (offset, copied, block) in enumerate(lookups):
        keys[one[0], head, : VOCAB // 2] = sharp / one[1]
        # Turned back by `offset`: rotary positions make the product largest there.
        queries[one[0], head] = (
            sharp / one[1] * np.concatenate([np.cos(offset * frequencies), -np.sin(offset * frequencies)])
        )
        values[:, head] = copied
        out[head, :, block] = np.eye(VOCAB)
    for projection, weight in ((attention.q_proj, queries), (attention.k_proj, keys), (attention.v_proj, values)):
        projection.weight[...] = jnp.asarray(weight.reshape(size_in, -1), jnp.float32)
    attention.o_proj.weight[...] = jnp.asarray(out.reshape(-1, HIDDEN), jnp.float32)


def split(module: Decoder | Head) -> tuple[Network, tuple[jax.Array, ...]]:
    """A module as a network and its leaves."""
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    return Network(module.config, type(module), graphdef, treedef), tuple(leaves)


def bare_head(config: HeadConfig, kind: type[Head] = Head) -> Head:
    """A head whose matrices are 0 and whose norms are 1."""
    return kind(config, dtype=jnp.dtype("float32"), rngs=None)


@functools.cache
def planted_target() -> tuple[Network, tuple[jax.Array, ...]]:
    config = layer_config(NUM_LAYERS)
    model = Decoder(config, dtype=jnp.dtype("float32"), scan_layers=False, rngs=None)
    model.embed_tokens[...] = jnp.asarray(embedding(), jnp.float32)
    for layer, segment in enumerate(model.segments):
        if layer == 0:
            continue  # its output is the embedding
        rms = EMPTY_RMS if layer == 1 else FULL_RMS
        rename = np.zeros((HIDDEN, VOCAB))
        rename[NOW][NAMES[layer - 1]] = rms * (one_hot(NAMES[layer]) - one_hot(NAMES[layer - 1]))
        lookups = [(0, rename, NOW)]
        if layer == 1:
            past = np.zeros((HIDDEN, VOCAB))
            past[NOW] = rms * np.eye(VOCAB)
            lookups.append((2, past, PAST))
        plant(segment.self_attn, config, (ONE, 1 / rms), lookups)
    model.norm.weight[...] = jnp.asarray(NORM, jnp.float32)
    assert model.lm_head is not None
    model.lm_head[...] = jnp.asarray(vocabulary_head(), jnp.float32)
    return split(model)


def embedding() -> np.ndarray:
    table = np.zeros((VOCAB, HIDDEN))
    table[:, NOW] = np.eye(VOCAB)
    table[:, ONE] = 1
    return table


@functools.cache
def planted_eagle() -> tuple[Network, tuple[jax.Array, ...]]:
    """From the normed state; its own output is the target's next normed state."""
    layer = layer_config(1)
    config = HeadConfig(
        layer=layer, fused=False, capture=("normed",), target_hidden=HIDDEN, target_embed=HIDDEN, draft_vocab=VOCAB
    )
    head = bare_head(config)
    scale = NORM / FULL_RMS  # the target's state is 0s and 1s times this
    # [embedding; hidden] -> now: the token, by its last name; work: the token before; one.
    fc = np.zeros((2 * HIDDEN, HIDDEN))
    fc[NOW, NOW] = one_hot(NAMES[-1]) * scale[NOW]
    before = fc[HIDDEN:]
    before[NOW, WORK][NAMES[-1]] = np.eye(VOCAB) / scale[NOW][NAMES[-1]][:, None]
    fc[ONE, ONE] = scale[ONE]
    clear, past = np.zeros((HIDDEN, VOCAB)), np.zeros((HIDDEN, VOCAB))
    clear[WORK], past[WORK] = -np.eye(VOCAB), np.diag(scale[PAST])
    plant(head.layer.self_attn, layer, (ONE, scale[ONE]), [(0, clear, WORK), (1, past, PAST)])
    head.fc.weight[...] = jnp.asarray(fc, jnp.float32)
    head.embed_tokens[...] = jnp.asarray(embedding(), jnp.float32)
    assert head.lm_head is not None
    head.lm_head[...] = jnp.asarray(vocabulary_head(), jnp.float32)
    return split(head)


@functools.cache
def planted_eagle3() -> tuple[Network, tuple[jax.Array, ...]]:
    """From layers 0 and 1, over a part of the vocabulary: it feeds on layer 0's `now` and layer 1's `past`."""
    layer = layer_config(1)
    config = HeadConfig(
        layer=layer, fused=True, capture=(0, 1), target_hidden=HIDDEN, target_embed=HIDDEN, draft_vocab=len(DRAFT_IDS)
    )
    head = bare_head(config)
    fc = np.zeros((2 * HIDDEN, HIDDEN))
    fc[NOW, NOW] = np.eye(VOCAB)
    fc[HIDDEN:][PAST, PAST] = np.eye(VOCAB)
    fc[HIDDEN + ONE, ONE] = 1
    head.fc.weight[...] = jnp.asarray(fc, jnp.float32)
    # [normed embedding; normed feature]: replace `now` by the token, and `past` by the pair before's `now`.
    now, clear, past = (np.zeros((2 * HIDDEN, VOCAB)) for _ in range(3))
    now[NOW] = EMPTY_RMS * np.eye(VOCAB)
    now[HIDDEN:][NOW] = -FULL_RMS * np.eye(VOCAB)
    clear[HIDDEN:][PAST] = -FULL_RMS * np.eye(VOCAB)
    past[HIDDEN:][NOW] = FULL_RMS * np.eye(VOCAB)
    lookups = [(0, now, NOW), (0, clear, PAST), (1, past, PAST)]
    plant(head.layer.self_attn, layer, (ONE, 1 / EMPTY_RMS), lookups)
    table = vocabulary_head()
    table[NOW] = table[NOW][NAMES[-1]] * (NORM[NOW][NAMES[-1]] / NORM[NOW])[:, None]
    assert head.norm is not None
    head.norm.weight[...] = jnp.asarray(NORM, jnp.float32)
    head.embed_tokens[...] = jnp.asarray(embedding(), jnp.float32)
    assert head.lm_head is not None
    head.lm_head[...] = jnp.asarray(table[:, DRAFT_IDS], jnp.float32)
    assert head.target_ids is not None
    head.target_ids[...] = jnp.asarray(DRAFT_IDS)
    return split(head)
