"""Compiled steps over shapes alone, in bfloat16, for devices that this machine need not have."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.draft.base import CacheShape, DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.models import Decoder
from jaxspec.models.mtp import MTPHead
from jaxspec.models.network import Network
from jaxspec.state import Rows, State, Widths
from jaxspec.step import Params, Program, decode_step
from tests.families import family_config, mtp_config
from tests.tiny import VOCAB, chain

NUM_ROWS, NUM_STOP_IDS, TABLE_WIDTH, CHUNK, MAX_LEN = 4, 2, 8, 32, 128
WIDTHS = Widths(num_biases=4, banned_vocab=VOCAB, num_bad_words=2, bad_word_len=3)
SHAPE = CacheShape(NUM_ROWS, 16, 16, jnp.dtype("bfloat16"))


def abstract_network(kind: type[Any], config: Any, **settings: Any) -> tuple[Network, tuple[Any, ...]]:
    """A bfloat16 network and the shapes of its leaves."""
    model = nnx.eval_shape(lambda: kind(config, dtype=SHAPE.dtype, rngs=None, **settings))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, kind, graphdef, treedef), tuple(leaves)


def ints(*shape: int) -> Any:
    """Stands for an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def arguments(
    method: DraftMethod, draft_leaves: tuple[Any, ...], target: tuple[Network, tuple[Any, ...]]
) -> tuple[Params, State]:
    """Shapes of a program's weights and state."""
    network, leaves = target

    def state() -> State:
        caches = network.init_cache(
            num_pages=SHAPE.num_pages, page_size=SHAPE.page_size, num_rows=NUM_ROWS, dtype=SHAPE.dtype
        )
        return State(Rows.zeros(NUM_ROWS, MAX_LEN, NUM_STOP_IDS, WIDTHS), caches, method.init(SHAPE))

    return Params(leaves, draft_leaves), jax.eval_shape(state)


def own_round(family: str) -> tuple[Any, dict[str, Any]]:
    """A decode step of a family that drafts with its own layer, and its arguments."""
    target = abstract_network(Decoder, family_config(family), scan_layers=True)
    head, head_leaves = abstract_network(MTPHead, mtp_config(family))
    method = Feature(head, chain(3))
    program = Program(target[0], method, rounds=2, num_top_logprobs=4)
    step = jax.jit(functools.partial(decode_step, program), donate_argnames=("state",))
    params, state = arguments(method, head_leaves, target)
    return step, {"params": params, "state": state, "row_ids": ints(2), "table": ints(2, TABLE_WIDTH)}
