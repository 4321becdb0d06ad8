"""What the tests of the engine share: one tiny target, every draft for it, and requests whose plain outputs are known.

Runners are cached and their shapes are few, because compiling is what takes time here.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxspec.config import SamplingParams
from jaxspec.draft.base import DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.draft.merged import Merged
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.shape import StaticTree, TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.engine import Engine
from jaxspec.models.network import Network
from jaxspec.request import Request
from jaxspec.runner import Runner
from tests.processors import PROCESSORS
from tests.scripted import NO_DRAFT, Scripted, script_leaves
from tests.tiny import VOCAB, chain, engine_over, make_runner, requests_of, run, scored, tiny_head, tiny_model

MAX_LEN, NUM_ROWS, NUM_STEPS, DEVICE_TOKENS = 96, 3, 3, 384
DRAFTS = ("ngram", "identical", "good", "bad", "chain", "tree")
HEADS = ("eagle", "eagle3")
# Drafts by their sizes (num_steps, topk, num_draft_tokens; a chain is the tree of one branch), as trees of a fixed
# form, or merged with another draft.
TREES = (
    *(f"{head}-{form}" for form in ("3-1-4", "3-2-6", "5-4-8", "4-8-32", "static") for head in HEADS),
    *("sure-5-4-8", "sure-static", "ngram-3-3-8", "eagle3-ngram", "sure-ngram", "sure-eagle"),
)
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 1), (0, 0, 0), (2, 1, 1))
STATIC = TreeShape(3, 3, 1 + len(PATHS), StaticTree(PATHS))
SCRIPTED = {"chain": Scripted(NUM_STEPS, is_chain=True), "tree": Scripted(NUM_STEPS, is_chain=False)}
# v1, v2, and v2 with several rounds a dispatch: (rounds in flight, rounds per dispatch).
SCHEDULES = {"v1": (0, 1), "v2": (1, 1), "r4": (1, 4)}
# (chunk lengths, rows) to compile for: several where it matters, batches of one row and grouped prompts among them.
BUCKETS = {(16, 1): ((16, MAX_LEN), (1, NUM_ROWS))}
ONE_BUCKET = ((MAX_LEN,), (NUM_ROWS,))
# Every count from none to all, a round without drafts, and a length that is prime to everything else.
SCRIPT = (3, 0, 2, 1, NO_DRAFT, 3, 3)


@functools.cache
def target() -> tuple[Network, tuple[jax.Array, ...]]:
    return tiny_model(0)


def nearly(leaves: tuple[jax.Array, ...], noise: float) -> tuple[jax.Array, ...]:
    """Weights that differ from `leaves` by a share of their own size."""
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return tuple(leaf * (1 + noise * jax.random.normal(key, leaf.shape)) for leaf, key in zip(leaves, keys))


def sure(leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Weights whose logits are 4 times larger: a draft that is so sure grows deep trees and not wide ones."""
    model = target()[0].bind(leaves)
    model.norm.weight[...] *= 4
    return tuple(jax.tree.leaves(nnx.state(model)))


@functools.cache
def random_head(name: str) -> tuple[Network, tuple[jax.Array, ...]]:
    """EAGLE's as published; EAGLE-3's with a part of the vocabulary, and switches that most heads leave off."""
    if name == "eagle":
        return tiny_head(2, fused=False)
    return tiny_head(3, fused=True, draft_vocab=48, norm_before_residual=True, fc_norm=True, feed_normed=True)


def draft_of(name: str) -> tuple[DraftMethod | None, tuple[Any, ...]]:
    """A draft and its weights, by a name of `DRAFTS` or `TREES`; a model or head without sizes drafts a chain.

    STANDALONE's have one program; a script's leaves come with `follow`. The heads are random.
    """
    name, *sizes = name.split("-")
    if name == "plain":
        return None, ()
    if name in SCRIPTED:
        return SCRIPTED[name], script_leaves([], SCRIPT, max_len=MAX_LEN, num_sequences=NUM_CASES)
    if not sizes:
        return _method(name, chain(NUM_STEPS))
    if sizes == ["static"]:
        return _method(name, STATIC)
    if len(sizes) == 1:
        (first, weights), (second, others) = _method(name, scored(NUM_STEPS)), _method(sizes[0], scored(5))
        # A chain of 3 and one of 5 below the root, cut to the better 6 of the 8.
        return Merged((first, second), 7), (weights, others)
    num_steps, topk, num_nodes = map(int, sizes)
    return _method(name, TreeShape(num_steps, topk, num_nodes))


def _method(name: str, shape: TreeShape) -> tuple[DraftMethod, tuple[jax.Array, ...]]:
    network, leaves = target()
    if name == "ngram":
        return Ngram(shape, min_match=1, max_match=3), ()
    if name in HEADS:
        head, weights = random_head(name)
        return Feature(head, shape), weights
    good = nearly(leaves, 0.04)
    weights = {"identical": leaves, "good": good, "sure": sure(good), "bad": tiny_model(1)[1]}
    return Standalone(network, shape, VOCAB), weights[name]


@functools.cache
def runner_of(name: str, page_size: int = 16, rounds: int = 1) -> Runner:
    """The device side; it serves one engine after another."""
    return make_runner(
        target(),
        *draft_of(name),
        rounds_per_dispatch=rounds,
        num_rows=NUM_ROWS,
        page_size=page_size,
        num_pages=DEVICE_TOKENS // page_size,
        max_model_len=MAX_LEN,
        processors=tuple(PROCESSORS.values()),
    )


def engine_of(
    name: str, schedule: str = "v2", *, page_size: int = 16, chunk: int | None = None, pool_pages: int | None = None
) -> Engine:
    """An engine with a draft; `chunk` None takes prompts in whole."""
    rounds_in_flight, rounds = SCHEDULES[schedule]
    chunk_buckets, row_buckets = BUCKETS.get((page_size, rounds), ONE_BUCKET)
    return engine_over(
        runner_of(name, page_size, rounds),
        rounds_in_flight=rounds_in_flight,
        pool_pages=pool_pages,
        chunked_prefill_size=chunk,
        prefill_chunk_buckets=chunk_buckets,
        decode_row_buckets=row_buckets,
    )


def follow(engine: Engine, sequences: Sequence[Sequence[int]], script: Sequence[int]) -> None:
    """Gives a scripted engine its truth and its script."""
    leaves = script_leaves(sequences, script, max_len=MAX_LEN, num_sequences=NUM_CASES)
    engine.runner.params = engine.runner.params._replace(draft=leaves)


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt and its parameters."""

    prompt: tuple[int, ...]
    params: SamplingParams


def _prompt(first: int, length: int) -> tuple[int, ...]:
    """Random tokens behind `first`, so that no prompt begins like another."""
    rest = np.random.default_rng(first).integers(0, VOCAB, length - 1)
    return (first, *(int(token) for token in rest))


LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 12},
)
# (prompt length, most output tokens); those of more than 90 are short at first and outgrow a small pool together.
LENGTHS = ((3, 24), (1, 17), (50, 30), (8, 86), (6, 88), (20, 1), (33, 7), (14, 40))
NUM_CASES = 2 * len(LENGTHS)
# Index of a case -> which of its outputs, when nothing stops it, is declared a stop token; and its min_tokens.
STOPS = {1: (2, 0), 2: (11, 0), 6: (3, 7), 7: (3, 10), 8: (6, 0), 10: (9, 4), 14: (2, 0), 15: (5, 17)}


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every prompt length with every law; some stop at a token, and some of those not before `min_tokens`."""
    free = []
    for index in range(NUM_CASES):
        half, place = divmod(index, len(LENGTHS))
        (length, budget), law = LENGTHS[place], LAWS[(place + half) % len(LAWS)]
        params = SamplingParams(**law, seed=1000 + index, max_tokens=budget)
        free.append(Case(_prompt(3 * index, length), params))
    outputs = [request.output_ids for request in play(engine_of("plain", "v1"), free)]
    for index, (place, min_tokens) in STOPS.items():
        stop = (outputs[index][place],)
        params = dataclasses.replace(free[index].params, stop_token_ids=stop, min_tokens=min_tokens)
        free[index] = Case(free[index].prompt, params)
    return tuple(free)


@functools.cache
def plain() -> tuple[Request, ...]:
    """The finished requests of plain decoding, one for each case: what every draft must reproduce."""
    return tuple(play(engine_of("plain", "v1"), cases()))


@functools.cache
def truth() -> tuple[tuple[int, ...], ...]:
    """Prompt and outputs of each case."""
    return tuple(tuple(request.sequence) for request in plain())


def play(engine: Engine, cases: Sequence[Case]) -> list[Request]:
    """Runs cases together to their end."""
    made = requests_of([list(case.prompt) for case in cases], [case.params for case in cases], max_model_len=MAX_LEN)
    return run(engine, made)
