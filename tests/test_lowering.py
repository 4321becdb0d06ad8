"""The compiled steps lower for accelerators on a machine that has none."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.draft.base import DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.draft.merged import Merged
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.plain import Plain
from jaxspec.draft.shape import TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.models import Decoder
from jaxspec.models.heads import Head
from jaxspec.state import Sampling
from jaxspec.step import Chunks, Program, decode_step, prefill_step
from tests.abstract import (
    CHUNK,
    NUM_STOP_IDS,
    TABLE_WIDTH,
    WIDTHS,
    abstract_network,
    arguments,
    ints,
    own_round,
)
from tests.families import CONFIGS, family_config
from tests.tiny import VOCAB, chain, scored, tiny_config, tiny_head

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


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", METHODS)
def test_a_decode_step_lowers(name, platform):
    method, draft_leaves = METHODS[name]
    program = Program(NETWORK, method, rounds=2, num_top_logprobs=4)
    step = jax.jit(functools.partial(decode_step, program), donate_argnames=("state",))
    params, state = arguments(method, draft_leaves, (NETWORK, LEAVES))
    traced = step.trace(params, state=state, row_ids=ints(2), table=ints(2, TABLE_WIDTH))
    assert "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_with_the_familys_own_draft_lowers(family):
    step, given = own_round(family)
    traced = step.trace(**given)
    has_experts = "experts" in family_config(family).mlps
    for platform in ("tpu", "cuda"):
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("ragged_dot" in lowered) == has_experts


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", METHODS)
def test_a_prefill_step_lowers(name, platform):
    method, draft_leaves = METHODS[name]
    program = Program(NETWORK, method, rounds=1, num_top_logprobs=4)
    step = jax.jit(functools.partial(prefill_step, program), donate_argnames=("state",))
    params, state = arguments(method, draft_leaves, (NETWORK, LEAVES))
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
