"""The equality matrix of the sampling surface: each feature alone, and mixtures, under chains and trees, v1 and v2."""

import functools
import random
from typing import Any

import numpy as np
import pytest

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.request import Request
from tests.cases import MAX_LEN, engine_of, target
from tests.dense import dense_logits
from tests.features import FEATURES, adjusted, mixture
from tests.tiny import VOCAB, requests_of, run

# They repeat themselves, so that penalties bite and a lookup finds something.
PROMPTS = ([5, 9, 21, 5, 9, 21, 5, 9], [33, 7, 40, 40, 7, 33, 11, 12, 7, 40, 40, 7, 33])
LAWS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95})
DRAFTS = ("ngram", "good", "sure-5-4-8")
NUM_MIXTURES = 5
MIXTURES = tuple(f"mixture {index}" for index in range(NUM_MIXTURES))


def engine_for(draft: str, schedule: str) -> Engine:
    return engine_of(draft, schedule, page_size=1)  # one prefill and one decode to compile


def settings_of(feature: str) -> list[SamplingParams]:
    """Each law with a feature, or with a mixture of its own."""
    changes = [FEATURES.get(feature) or mixture(random.Random(f"{feature}, {law}")) for law in LAWS]
    return [
        SamplingParams(seed=index, max_tokens=30, **law, **change)
        for index, (law, change) in enumerate(zip(LAWS, changes, strict=True))
    ]


def play(engine: Engine, params: list[SamplingParams]) -> list[Request]:
    """Every prompt with every one of the settings."""
    pairs = [(prompt, one) for prompt in PROMPTS for one in params]
    return run(engine, requests_of([p for p, _ in pairs], [one for _, one in pairs], max_model_len=MAX_LEN))


@functools.cache
def plain(feature: str) -> tuple[tuple[list[int], str | None], ...]:
    requests = play(engine_for("plain", "v1"), settings_of(feature))
    return tuple((request.output_ids, request.finish_reason) for request in requests)


@pytest.mark.parametrize("schedule", ["v1", "v2"])
@pytest.mark.parametrize("draft", DRAFTS)
class TestEquality:
    """Public reports: penalties have no effect or count rejected drafts (vLLM #18902, TRT-LLM #17701), biases are
    applied to the bonus token alone (vLLM #42744), processors are bypassed (sglang #26330).
    """

    @pytest.mark.parametrize("feature", [*FEATURES, *MIXTURES])
    def test_outputs_are_those_of_plain_decoding(self, draft, schedule, feature):
        engine = engine_for(draft, schedule)
        requests = play(engine, settings_of(feature))
        found = tuple((request.output_ids, request.finish_reason) for request in requests)
        assert found == plain(feature)

    def test_rows_with_different_wishes_do_not_affect_each_other(self, draft, schedule):
        engine = engine_for(draft, schedule)
        features = [*FEATURES, *MIXTURES]
        requests = play(engine, [one for feature in features for one in settings_of(feature)])
        # `play` goes through the prompts first.
        halves = [requests[: len(requests) // 2], requests[len(requests) // 2 :]]
        for place, feature in enumerate(features):
            mine = [half[2 * place + law] for half in halves for law in range(2)]
            assert tuple((one.output_ids, one.finish_reason) for one in mine) == plain(feature)


@pytest.mark.parametrize("feature", [*FEATURES, *MIXTURES])
def test_plain_greedy_decoding_is_the_argmax_of_adjusted_logits(feature):
    for request in play(engine_for("plain", "v1"), settings_of(feature)[:1]):
        prompt, outputs = request.prompt_ids, request.output_ids
        logits = dense_logits(target(), request.sequence)[len(prompt) - 1 : -1]
        for place, row in enumerate(logits):
            assert outputs[place] == np.argmax(adjusted(row, prompt, outputs[:place], request.params))


@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "not_speculated"])
def test_each_feature_changes_what_is_said(feature):
    without = play(
        engine_for("plain", "v1"), [SamplingParams(seed=index, max_tokens=30, **law) for index, law in enumerate(LAWS)]
    )
    assert tuple(request.output_ids for request in without) != tuple(outputs for outputs, _ in plain(feature))


@pytest.mark.parametrize("feature", [*FEATURES, *MIXTURES])
def test_an_identical_draft_is_accepted_whole_whatever_is_asked_for(feature):
    """The draft sees the same tokens before each of its own, so that it does not guess what cannot come."""
    engine = engine_for("identical", "v2")
    play(engine, settings_of(feature))
    stats = engine.metrics.stats
    assert stats.accepted == stats.proposed
    assert (stats.proposed > 0) == (feature != "not_speculated") or feature in MIXTURES


def test_a_request_without_speculation_emits_one_token_a_round_beside_others():
    settings = [SamplingParams(temperature=0, max_tokens=20, speculate=speculate) for speculate in (False, True)]
    alone, beside = run(engine_for("identical", "v1"), requests_of([PROMPTS[0]] * 2, settings, max_model_len=MAX_LEN))
    assert alone.output_ids == beside.output_ids
    assert [emission.count for emission in alone.emissions] == [1] * 20
    assert alone.completion("").proposed == 0
    assert len(beside.emissions) < 8


def test_bad_words_lie_in_the_output_alone():
    """The prompt's end is no part of a bad word; the word is banned from the output on every path."""
    banned, prompt = [21, 31], [5, 21]
    params = [
        SamplingParams(temperature=0, max_tokens=1, logit_bias={31: 100.0}, bad_words_ids=[banned]),
        SamplingParams(
            temperature=0, max_tokens=12, logit_bias={31: 90.0, 21: 100.0}, bad_words_ids=[[21, 21], banned]
        ),
    ]
    across, inside = run(engine_for("good", "v2"), requests_of([prompt] * 2, params, max_model_len=MAX_LEN))
    assert across.output_ids == [31]
    assert 21 in inside.output_ids
    assert all(pair not in ((21, 31), (21, 21)) for pair in zip(inside.output_ids, inside.output_ids[1:]))
    assert max(inside.output_ids) < VOCAB
