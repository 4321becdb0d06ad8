"""The rules that toss coins, over an engine: greedy output, schedules, neighbours, and what is said of the output."""

import dataclasses
import functools
from typing import Any

import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.draft.base import Noise
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.shape import TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.engine import Engine
from jaxspec.launch import noise_for, rule_for
from jaxspec.rules import COUPLED, Rejection, TargetOnly
from jaxspec.runner import Runner
from tests.cases import DEVICE_TOKENS, MAX_LEN, NUM_ROWS, NUM_STEPS, cases, nearly, plain, play, sure, target
from tests.plans import plan_of
from tests.tiny import VOCAB, chain, engine_over, make_runner, requests_of, run

SETTINGS = {
    "rejection": {"accept_rule": "rejection"},
    "block": {"accept_rule": "rejection", "block_verification": True},
    "target only": {"accept_rule": "target_only"},
}
PAGE_SIZE = 16


@functools.cache
def runner_of(case: str) -> Runner:
    plan = plan_of("NGRAM", **SETTINGS[case])
    network, leaves = target()
    method, weights = {
        "rejection": (Standalone(network, chain(NUM_STEPS), VOCAB, noise=noise_for(plan)), nearly(leaves, 0.04)),
        "block": (Ngram(chain(NUM_STEPS), 1, 3), ()),
        "target only": (
            Standalone(network, TreeShape(3, 2, 6), VOCAB, noise=noise_for(plan)),
            sure(nearly(leaves, 0.04)),
        ),
    }[case]
    return make_runner(
        target(),
        method,
        weights,
        rule=rule_for(plan),
        num_rows=NUM_ROWS,
        page_size=PAGE_SIZE,
        num_pages=DEVICE_TOKENS // PAGE_SIZE,
        max_model_len=MAX_LEN,
    )


def engine_for(case: str, rounds_in_flight: int) -> Engine:
    return engine_over(
        runner_of(case),
        rounds_in_flight=rounds_in_flight,
        chunked_prefill_size=None,
        prefill_chunk_buckets=(MAX_LEN,),
        decode_row_buckets=(NUM_ROWS,),
    )


@pytest.mark.parametrize("case", SETTINGS)
class TestEachRule:
    def test_greedy_requests_get_the_tokens_of_plain_decoding_beside_sampled_ones(self, case):
        engine = engine_for(case, 1)
        requests = play(engine, cases())
        assert engine.metrics.accepted > 0
        for case_, request, expected in zip(cases(), requests, plain(), strict=True):
            if case_.params.temperature == 0:
                assert (request.output_ids, request.finish_reason) == (expected.output_ids, expected.finish_reason)
            assert request.finish_reason in ("stop", "length")

    def test_neither_the_schedule_nor_the_neighbours_change_a_token(self, case):
        first = [request.output_ids for request in play(engine_for(case, 0), cases())]
        assert [request.output_ids for request in play(engine_for(case, 1), cases()[::-1])] == first[::-1]

    def test_a_sampled_draft_is_accepted_in_part(self, case):
        params = [SamplingParams(seed=seed, max_tokens=40, temperature=0.8) for seed in range(9)]
        engine = engine_for(case, 1)
        run(engine, requests_of([[5, 9, 21, 5, 9]] * 9, params, max_model_len=MAX_LEN))
        assert 0 < engine.metrics.accepted < engine.metrics.proposed


def test_the_plan_names_the_rule_and_how_its_drafts_are_drawn():
    for settings, rule, noise in (
        ({}, COUPLED, Noise.SHARED),
        ({"shared_noise": False}, COUPLED, Noise.OWN),
        (SETTINGS["block"], Rejection(is_block=True), Noise.FRESH),
        ({"accept_rule": "target_only", "accept_threshold_acc": 0.5}, TargetOnly(threshold_acc=0.5), Noise.NONE),
    ):
        plan = plan_of("NGRAM", **settings)
        assert (rule_for(plan), noise_for(plan)) == (rule, noise)


def test_what_is_not_exact_is_called_so_in_the_metrics_and_in_sampled_output():
    lossy: dict[str, Any] = {"accept_rule": "target_only", "accept_threshold_single": 0.3}
    plan = dataclasses.replace(engine_for("target only", 1).plan, **lossy)
    settings = EngineConfig(prefill_chunk_buckets=(MAX_LEN,), decode_row_buckets=(NUM_ROWS,), chunked_prefill_size=None)
    engine = Engine(runner_of("target only"), plan, settings)
    assert engine.metrics.exactness == "lossy"
    params = [SamplingParams(temperature=temperature, max_tokens=2) for temperature in (0.0, 1.0)]
    requests = requests_of([[1, 2]] * 2, params, max_model_len=MAX_LEN, exactness=plan.exactness)
    greedy, sampled = (request.completion("") for request in run(engine, requests))
    assert (greedy.exactness, sampled.exactness) == ("token", "lossy")
