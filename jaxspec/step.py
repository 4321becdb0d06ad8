"""The two compiled steps: `prefill_step` takes in prompt chunks, `decode_step` runs whole rounds.

A round is propose -> verify -> accept -> commit -> observe over device-resident, donated state. v1 and v2 run the same
program; they differ only in how many dispatches are in flight. A dispatch runs up to `rounds` rounds in a device loop
and leaves early when no row is active, so a dispatch whose rows all finished in the one before costs nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.adjust import Processor
from jaxspec.attention import Block
from jaxspec.context import Context
from jaxspec.draft.base import DraftMethod, Observation
from jaxspec.kv_cache import Accepted, put_caches, take_caches, wait_for
from jaxspec.models.network import Network
from jaxspec.rules import COUPLED, Rule
from jaxspec.sampling import draw, token_logprobs
from jaxspec.state import DraftState, Rows, Sampling, State, put, take
from jaxspec.tree import DraftTree, ancestor_mask, node_depths, pack_bits
from jaxspec.verify import Verdict, Walk, accept, advance, clip_walk


class Params(NamedTuple):
    """Weights as flat leaves; not donated."""

    target: tuple[jax.Array, ...]
    draft: tuple[Any, ...]  # leaves; of merged methods, a tuple of them for each


class Chunks(NamedTuple):
    """One chunk of a prompt per row, with the settings of the row's request."""

    row_ids: jax.Array  # int32 [b]; the number of rows marks padding
    table: jax.Array  # int32 [b, pages]
    tokens: jax.Array  # int32 [b, C]
    length: jax.Array  # int32 [b], 0 for padding
    start: jax.Array  # int32 [b], tokens before the chunk
    next_token: jax.Array  # int32 [b], first token of the next chunk; ignored for the last one
    is_last: jax.Array  # bool [b]
    remaining: jax.Array  # int32 [b], budget of output tokens
    sampling: Sampling


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything static about a step."""

    target: Network
    draft: DraftMethod
    rounds: int  # at most so many in one decode dispatch
    num_top_logprobs: int
    processors: tuple[Processor, ...] = ()  # the user's
    rule: Rule = COUPLED

    @property
    def path_len(self) -> int:
        """Tokens a round emits at most."""
        return self.draft.num_steps + 1


def _verdict(program: Program, walk: Walk, logits: jax.Array, rows: Rows) -> Verdict:
    """The host's view of a walk; logits [B, P, V] are those that drew its tokens."""
    wanted = jnp.any(rows.sampling.want_logprobs & (walk.count > 0))
    logprobs = token_logprobs(logits, walk.tokens, program.num_top_logprobs, wanted)
    return Verdict(walk.tokens, walk.count, walk.accepted, walk.proposed, walk.finish, *logprobs)


def _judgeable(tree: DraftTree, depth: jax.Array, rows: Rows) -> DraftTree:
    """Empties nodes that no budget reaches, and those of rows without speculation: they are not judged or counted."""
    most = jnp.where(rows.sampling.speculate, jnp.maximum(rows.remaining, 1), 1)
    reachable = depth < most[:, None]
    return tree._replace(tokens=jnp.where(reachable, tree.tokens, -1))


class _Judged(NamedTuple):
    """A tree that was drafted and verified, and nothing committed yet."""

    tree: DraftTree
    block: Block
    out: Any  # of the target, over the tree's nodes
    logits: jax.Array  # float32 [B, N, V]
    drawn: jax.Array  # int32 [B, N], see `Judgement`
    walk: Walk


def _judge(program: Program, params: Params, state: State, table: jax.Array) -> _Judged:
    target, method, rows = program.target.bind(params.target), program.draft, state.rows
    tree = method.propose(params.draft, state.draft, rows, table)
    tree = program.rule.replace_drafts(tree, rows, method.num_steps)
    depth = node_depths(tree.parents, method.num_steps)
    tree = _judgeable(tree, depth, rows)
    ancestors = None if method.is_chain else pack_bits(ancestor_mask(tree.parents, method.num_steps))
    positions = rows.seq_len[:, None] + depth
    block = Block(positions, jnp.where(rows.active, rows.seq_len, 0), table, ancestors)
    out = target.extend(tree.tokens, block, state.caches, capture=method.capture)
    logits = target.logits(out.hidden)
    context = Context.of_tree(rows, tree, method.num_steps)
    judgement = program.rule.judge(logits, positions + 1, tree, rows, context, program.processors, program.path_len)
    return _Judged(tree, block, out, logits, judgement.drawn, accept(tree, judgement, rows))


def decode_round(program: Program, params: Params, state: State, table: jax.Array) -> tuple[State, Verdict]:
    """Commits 1..P tokens to every active row and 0 to the others; `state` holds just the rows that run."""
    tree, block, out, logits, _, walk = _judge(program, params, state, table)
    target, rows = program.target.bind(params.target), state.rows
    verdict = _verdict(program, walk, _along(walk.path, logits), rows)

    caches = target.commit(state.caches, out.pending, block, walk.as_accepted())
    features = tuple(_along(walk.path, layer) for layer in out.captured)
    committed = jnp.take_along_axis(tree.tokens, walk.path, axis=1)
    seen = Observation(committed, walk.tokens, walk.count, rows.seq_len, features)
    rows = advance(rows, walk)
    draft = program.draft.observe(params.draft, state.draft, rows, table, seen)
    return State(rows, caches, draft), verdict


class RoundView(NamedTuple):
    """What a round would do, to be looked at."""

    tree: DraftTree
    drawn: jax.Array  # int32 [B, N], the target's token at every node; -1 where the rule draws none
    logprobs: jax.Array  # float32 [B, N], of each node's token by the target's own law at its parent; 0 at the root
    path: jax.Array  # int32 [B, P], nodes from the root on whose keys and values would be kept
    count: jax.Array  # int32 [B], how many of them


def preview_step(program: Program, params: Params, state: State, row_ids: jax.Array, table: jax.Array) -> RoundView:
    """Drafts and verifies the next round of the named rows, and leaves the state as it is; see `decode_step`."""
    judged = _judge(program, params, _take_rows(state, row_ids), table)
    tree, walk = judged.tree, judged.walk
    above = _along(jnp.maximum(tree.parents, 0), jax.nn.log_softmax(judged.logits, axis=-1))
    own = jnp.take_along_axis(above, jnp.maximum(tree.tokens, 0)[..., None], axis=-1)[..., 0]
    return RoundView(tree, judged.drawn, jnp.where(tree.parents < 0, 0.0, own), walk.path, walk.count)


def _along(path: jax.Array, nodes: jax.Array) -> jax.Array:
    """Rows of nodes [B, N, X] along path [B, P]."""
    return jnp.take_along_axis(nodes, path[..., None], axis=1)


def _take_rows(state: State, row_ids: jax.Array) -> State:
    """The state seen by a dispatch: its rows, and of the caches what they share whole."""
    rows = take(state.rows, row_ids)
    rows = rows._replace(active=rows.active & (row_ids < state.rows.active.shape[0]))
    draft = DraftState(take_caches(state.draft.caches, row_ids), take(state.draft.carry, row_ids))
    return State(rows, take_caches(state.caches, row_ids), draft)


def _put_rows(state: State, row_ids: jax.Array, local: State) -> State:
    """Undoes `_take_rows`."""
    caches = put_caches(state.draft.caches, row_ids, local.draft.caches)
    draft = DraftState(caches, put(state.draft.carry, row_ids, local.draft.carry))
    return State(put(state.rows, row_ids, local.rows), put_caches(state.caches, row_ids, local.caches), draft)


def decode_step(
    program: Program, params: Params, state: State, row_ids: jax.Array, table: jax.Array
) -> tuple[State, Verdict]:
    """Runs up to `program.rounds` rounds.

    Args:
        program: what is static.
        params: weights.
        state: of all rows; donated.
        row_ids: int32 [b], rows that run; the number of rows marks padding.
        table: int32 [b, pages], their pages; -1 where none is reserved.

    Returns:
        The new state, and verdicts with a leading axis [rounds]; count 0 where a round did not run.
    """
    local = _take_rows(state, row_ids)
    verdicts = Verdict.zeros(
        program.rounds, row_ids.shape[0], path_len=program.path_len, num_top=program.num_top_logprobs
    )

    def going(carry: tuple[jax.Array, State, Verdict]) -> jax.Array:
        done, local, _ = carry
        return (done < program.rounds) & jnp.any(local.rows.active)

    def run(carry: tuple[jax.Array, State, Verdict]) -> tuple[jax.Array, State, Verdict]:
        done, local, verdicts = carry
        local, verdict = decode_round(program, params, local, table)
        return done + 1, local, jax.tree.map(lambda all_, new: all_.at[done].set(new), verdicts, verdict)

    _, local, verdicts = jax.lax.while_loop(going, run, (jnp.int32(0), local, verdicts))
    return _put_rows(state, row_ids, local), verdicts


class Echo(NamedTuple):
    """Log-probabilities of what follows each token of a chunk, by the model's law; zeros where no row wants them."""

    logprobs: jax.Array  # float32 [b, C]
    top_ids: jax.Array  # int32 [b, C, num_top]
    top_logprobs: jax.Array  # float32 [b, C, num_top]


# Positions whose logits an echo holds at a time.
ECHO_POSITIONS = 16


def _echo(program: Program, params: Params, hidden: jax.Array, tokens: jax.Array, wanted: jax.Array) -> Echo:
    """The echo of hidden states [b, C, E] that are followed by tokens int32 [b, C]; computed where `wanted`."""
    num_rows, length = tokens.shape
    size = min(ECHO_POSITIONS, length)
    missing = -length % size

    def slices(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf, [(0, 0), (0, missing)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(padded.reshape(num_rows, -1, size, *leaf.shape[2:]), 1, 0)

    def one(_: None, part: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array, jax.Array]]:
        logits = program.target.bind(params.target).logits(part[0])
        return None, token_logprobs(logits, part[1], program.num_top_logprobs, jnp.bool_(True))

    def compute() -> Echo:
        _, found = jax.lax.scan(one, None, (slices(hidden), slices(tokens)))
        return Echo(*(jnp.moveaxis(leaf, 0, 1).reshape(num_rows, -1, *leaf.shape[3:])[:, :length] for leaf in found))

    shapes = jax.eval_shape(compute)
    return jax.lax.cond(wanted, compute, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))


def prefill_step(program: Program, params: Params, state: State, chunks: Chunks) -> tuple[State, Verdict, Echo]:
    """Takes in one chunk of a prompt per row; the last chunk of a prompt also draws its first output token.

    A chunk is a block that is accepted whole, and the draft observes it as it would a verdict.

    Args:
        program: what is static.
        params: weights.
        state: of all rows; donated.
        chunks: tokens and settings. Settings are written at every chunk, which makes the row the request's.

    Returns:
        The new state, a verdict with P = 1 (count 0 where more chunks follow), and the prompts' log-probabilities.
    """
    target, method = program.target.bind(params.target), program.draft
    local = _take_rows(state, chunks.row_ids)
    end = chunks.start + chunks.length
    rows = local.rows._replace(
        seq_len=chunks.start, remaining=chunks.remaining, active=chunks.is_last, sampling=chunks.sampling
    ).write_history(chunks.tokens, chunks.start, chunks.length)
    offsets = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)
    block = Block(chunks.start[:, None] + offsets, chunks.start, chunks.table)
    out = target.extend(chunks.tokens, block, local.caches, capture=method.capture)

    final = jnp.maximum(chunks.length - 1, 0)
    logits = target.logits(_along(final[:, None], out.hidden))
    # Before `advance`, a row stands where its bonus token is the prompt's last.
    context = Context.of(rows._replace(seq_len=end - 1))
    tokens = draw(logits, end[:, None], rows.sampling, context, program.processors)
    path = jnp.broadcast_to(offsets, chunks.tokens.shape)
    kept = Accepted(path, wait_for(chunks.length, tokens[:, 0]))
    caches = target.commit(local.caches, out.pending, block, kept)
    none = jnp.zeros_like(chunks.length)
    count, finish = clip_walk(tokens, none, rows)
    walk = Walk(none[:, None], tokens, count, none, none, finish)
    verdict = _verdict(program, walk, logits, rows)

    follows = jnp.where(chunks.is_last, tokens[:, 0], chunks.next_token)
    shifted = jnp.roll(chunks.tokens, -1, axis=1)
    next_tokens = jnp.where(offsets == final[:, None], follows[:, None], shifted)
    seen = Observation(chunks.tokens, next_tokens, chunks.length, chunks.start, out.captured)
    # `advance` counts emitted tokens from the one before the bonus: put it there, then set the committed length.
    rows = advance(rows._replace(seq_len=end - 1), walk)._replace(seq_len=end)
    draft = method.observe(params.draft, local.draft, rows, chunks.table, seen)
    echo = _echo(program, params, out.hidden, next_tokens, jnp.any(rows.sampling.want_prompt_logprobs))
    return _put_rows(state, chunks.row_ids, State(rows, caches, draft)), verdict, echo


# Few: what is compiled for the CPU takes some 500 memory maps a program, and a process may have 65,530. Runners hold
# on to their own.
@functools.lru_cache(maxsize=4)
def compiled_steps(program: Program) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Jitted (prefill_step, decode_step) of a program; engines of equal programs share them and their compilations.

    The leaves of `params` are arguments, so nothing of a model is baked in; the state is donated.
    """
    prefill = jax.jit(functools.partial(prefill_step, program), donate_argnames=("state",))
    decode = jax.jit(functools.partial(decode_step, program), donate_argnames=("state",))
    return prefill, decode
