"""The compiled steps lower for accelerators on a machine that has none."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.draft.base import CacheShape, DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.draft.merged import Merged
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.plain import Plain
from jaxspec.draft.shape import TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.models import Decoder
from jaxspec.models.heads import Head
from jaxspec.models.mtp import MTPHead
from jaxspec.models.network import Network
from jaxspec.state import Rows, Sampling, State, Widths
from jaxspec.step import Chunks, Params, Program, decode_step, prefill_step
from tests.families import CONFIGS, family_config, mtp_config
from tests.tiny import VOCAB, chain, scored, tiny_config, tiny_head

NUM_ROWS, NUM_STOP_IDS, TABLE_WIDTH, CHUNK, MAX_LEN = 4, 2, 8, 32, 128
WIDTHS = Widths(num_biases=4, banned_vocab=VOCAB, num_bad_words=2, bad_word_len=3)
SHAPE = CacheShape(NUM_ROWS, 16, 16, jnp.dtype("bfloat16"))


def abstract_network(kind: type[Any], config: Any, **settings: Any) -> tuple[Network, tuple[Any, ...]]:
    """A bfloat16 network and the shapes of its leaves."""
    model = nnx.eval_shape(lambda: kind(config, dtype=SHAPE.dtype, rngs=None, **settings))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, kind, graphdef, treedef), tuple(leaves)


# Scanned layers, as on an accelerator.
NETWORK, LEAVES = abstract_network(Decoder, tiny_config(), scan_layers=True)
HEAD, HEAD_LEAVES = abstract_network(Head, tiny_head(0, fused=True, draft_vocab=48)[0].config)
METHODS: dict[str, tuple[DraftMethod, Any]] = {
    "plain": (Plain(), ()),
    "ngram": (Ngram(chain(3), 1, 3), ()),
    "standalone": (Standalone(NETWORK, chain(3), VOCAB), LEAVES),
    "ngram tree": (Ngram(TreeShape(3, 2, 6), 1, 3), ()),
    "feature chain": (Feature(HEAD, chain(3)), HEAD_LEAVES),
    "feature tree": (Feature(HEAD, TreeShape(5, 4, 8)), HEAD_LEAVES),
    "feature tree of EAGLE-2's size": (Feature(HEAD, TreeShape(8, 10, 60)), HEAD_LEAVES),
    "merged": (Merged((Feature(HEAD, scored(3)), Ngram(scored(3), 1, 3)), 7), (HEAD_LEAVES, ())),
}


def ints(*shape: int) -> Any:
    """Stands for an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def arguments(
    method: DraftMethod, draft_leaves: tuple[Any, ...], target: tuple[Network, tuple[Any, ...]] = (NETWORK, LEAVES)
) -> tuple[Params, State]:
    """Shapes of a program's weights and state."""
    network, leaves = target

    def state() -> State:
        caches = network.init_cache(
            num_pages=SHAPE.num_pages, page_size=SHAPE.page_size, num_rows=NUM_ROWS, dtype=SHAPE.dtype
        )
        return State(Rows.zeros(NUM_ROWS, MAX_LEN, NUM_STOP_IDS, WIDTHS), caches, method.init(SHAPE))

    return Params(leaves, draft_leaves), jax.eval_shape(state)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", METHODS)
def test_a_decode_step_lowers(name, platform):
    method, draft_leaves = METHODS[name]
    program = Program(NETWORK, method, rounds=2, num_top_logprobs=4)
    step = jax.jit(functools.partial(decode_step, program), donate_argnames=("state",))
    params, state = arguments(method, draft_leaves)
    traced = step.trace(params, state=state, row_ids=ints(2), table=ints(2, TABLE_WIDTH))
    assert "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_with_the_familys_own_draft_lowers(family):
    target = abstract_network(Decoder, family_config(family), scan_layers=True)
    head, head_leaves = abstract_network(MTPHead, mtp_config(family))
    method = Feature(head, chain(3))
    program = Program(target[0], method, rounds=2, num_top_logprobs=4)
    step = jax.jit(functools.partial(decode_step, program), donate_argnames=("state",))
    params, state = arguments(method, head_leaves, target)
    traced = step.trace(params, state=state, row_ids=ints(2), table=ints(2, TABLE_WIDTH))
    has_experts = "experts" in target[0].config.mlps
    for platform in ("tpu", "cuda"):
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("ragged_dot" in lowered) == has_experts


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", METHODS)
def test_a_prefill_step_lowers(name, platform):
    method, draft_leaves = METHODS[name]
    program = Program(NETWORK, method, rounds=1, num_top_logprobs=4)
    step = jax.jit(functools.partial(prefill_step, program), donate_argnames=("state",))
    params, state = arguments(method, draft_leaves)
    chunks = Chunks(
        row_ids=ints(2),
        table=ints(2, TABLE_WIDTH),
        tokens=ints(2, CHUNK),
        length=ints(2),
        start=ints(2),
        next_token=ints(2),
        is_last=jax.eval_shape(lambda: jnp.zeros(2, bool)),
        remaining=ints(2),
        sampling=jax.eval_shape(lambda: Sampling.zeros(2, NUM_STOP_IDS, WIDTHS)),
    )
    traced = step.trace(params, state=state, chunks=chunks)
    assert "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()
