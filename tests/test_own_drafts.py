"""The equality matrix of models with draft layers of their own: NEXTN, and drafts that are always wrong or right.

For each family, v1 and v2: 8 greedy and 8 sampled requests in three rows, prompts in chunks, undisturbed and preempted,
emit the tokens of plain decoding; and recurrent states end where plain decoding leaves them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.config import SamplingParams
from jaxspec.draft.base import DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.engine import Engine
from jaxspec.models.delta_cache import DeltaCache
from jaxspec.request import Request
from jaxspec.runner import Runner
from tests.cases import MAX_LEN, NUM_ROWS, Case, play
from tests.families import CONFIGS, family_head, family_model
from tests.scripted import Scripted, script_leaves
from tests.tiny import VOCAB, chain, engine_over, make_runner

NUM_STEPS, PAGE_SIZE, NUM_PAGES, SMALL_POOL, CHUNK = 3, 16, 24, 7, 7
WRONG, RIGHT, MIXED = (0,), (NUM_STEPS,), (3, 0, 2, 1)
SCRIPTED = {"wrong": WRONG, "right": RIGHT, "mixed": MIXED}
# (prompt length, most output tokens).
LENGTHS = ((3, 20), (1, 17), (40, 25), (8, 60), (6, 62), (20, 1), (23, 7), (14, 30))
LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 12},
)
GREEDY: dict[str, Any] = {"temperature": 0.0}


@functools.cache
def cases() -> tuple[Case, ...]:
    """8 greedy requests, then 8 sampled ones of the same lengths."""
    rng = np.random.default_rng(5)
    made = []
    for index in range(2 * len(LENGTHS)):
        length, budget = LENGTHS[index % len(LENGTHS)]
        law = GREEDY if index < len(LENGTHS) else LAWS[index % len(LAWS)]
        prompt = (index, *(int(token) for token in rng.integers(0, VOCAB, length - 1)))
        made.append(Case(prompt, SamplingParams(**law, seed=100 + index, max_tokens=budget)))
    return tuple(made)


def draft_of(family: str, draft: str) -> tuple[DraftMethod | None, tuple[jax.Array, ...]]:
    if draft == "plain":
        return None, ()
    if draft == "nextn":
        network, leaves = family_head(family)
        return Feature(network, chain(NUM_STEPS)), leaves
    return Scripted(NUM_STEPS, is_chain=True), script_leaves([], WRONG, max_len=MAX_LEN, num_sequences=len(cases()))


@functools.cache
def runner_of(family: str, draft: str) -> Runner:
    """The device side; what is scripted has one program."""
    return make_runner(
        family_model(family),
        *draft_of(family, draft),
        num_rows=NUM_ROWS,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_model_len=MAX_LEN,
    )


def engine_of(family: str, draft: str, *, v2: bool = False, small: bool = False) -> Engine:
    runner = runner_of(family, "scripted" if draft in SCRIPTED else draft)
    if draft in SCRIPTED:
        sequences = [tuple(request.sequence) for request in plain(family)]
        leaves = script_leaves(sequences, SCRIPTED[draft], max_len=MAX_LEN, num_sequences=len(cases()))
        runner.params = runner.params._replace(draft=leaves)
    return engine_over(
        runner,
        rounds_in_flight=int(v2),
        pool_pages=SMALL_POOL if small else None,
        chunked_prefill_size=CHUNK,
        prefill_chunk_buckets=(CHUNK,),
        decode_row_buckets=(NUM_ROWS,),
    )


@functools.cache
def plain(family: str) -> tuple[Request, ...]:
    """The finished requests of plain decoding."""
    return tuple(play(engine_of(family, "plain"), cases()))


def check(family: str, engine: Engine, indices: Sequence[int]) -> None:
    requests = play(engine, [cases()[index] for index in indices])
    for index, request in zip(indices, requests, strict=True):
        assert request.output_ids == plain(family)[index].output_ids, f"case {index}, {cases()[index]}"


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
class TestMatrix:
    """Tokens equal plain decoding."""

    @pytest.mark.parametrize("draft", ["nextn", *SCRIPTED])
    @pytest.mark.parametrize("half", [0, 1], ids=["greedy", "sampled"])
    def test_in_three_rows(self, family, v2, draft, half):
        size = len(LENGTHS)
        engine = engine_of(family, draft, v2=v2)
        check(family, engine, range(half * size, (half + 1) * size))
        metrics = engine.metrics
        assert metrics.preemptions == 0
        if draft == "wrong":
            assert metrics.accepted == 0 < metrics.proposed
        elif draft == "right":
            assert metrics.accepted == metrics.proposed > 0
        else:
            assert 0 < metrics.accepted < metrics.proposed

    @pytest.mark.parametrize("draft", ["nextn", "mixed"])
    def test_mixed_and_preempted(self, family, v2, draft):
        engine = engine_of(family, draft, v2=v2, small=True)
        check(family, engine, sorted(range(len(cases())), key=lambda index: index % len(LENGTHS) not in (2, 3, 4, 7)))
        assert engine.metrics.preemptions > 0
        assert engine.num_free_pages == SMALL_POOL


def recurrent_states(engine: Engine) -> list[np.ndarray]:
    """State and convolution inputs of the first row."""
    caches = [cache for cache in engine.runner.state.caches if isinstance(cache, DeltaCache)]
    return [np.asarray(leaf[:, 0]) for cache in caches for leaf in (cache.state, cache.inputs)]


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "deepseek_v3"])
@pytest.mark.parametrize("draft", ["nextn", "mixed"])
def test_recurrent_states_are_those_of_plain_decoding(family, draft):
    plain(family)  # now: it runs where the states are that are read below
    found = {}
    for name in ("plain", draft):
        engine = engine_of(family, name)
        check(family, engine, [3])
        found[name] = recurrent_states(engine)
    assert found["plain"]
    for one, other in zip(found["plain"], found[draft], strict=True):
        assert np.abs(one).max() > 0.1
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
