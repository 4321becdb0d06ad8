"""What a request yields depends on its prompt, its parameters and its seed, and on nothing else."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.request import Request, completion_seed
from tests.cases import MAX_LEN, SCHEDULES, SCRIPT, SCRIPTED, cases, engine_of, follow, plain, play, target, truth
from tests.dense import dense_logits, log_softmax
from tests.tiny import VOCAB, requests_of, run

DRAFTS = ("plain", "ngram", "good", "tree")
PROMPT = (60, 2, 33, 33, 7)
LAW: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02, "max_tokens": 20}
SEEDS = (0, 1, 2, 2**64 - 1)


def requests_for(params: list[SamplingParams], prompt: tuple[int, ...] = PROMPT) -> list[Request]:
    return requests_of([list(prompt)] * len(params), params, max_model_len=MAX_LEN)


def engine_with(draft: str, schedule: str = "v2") -> Engine:
    """An engine whose scripted drafts follow the shared cases."""
    engine = engine_of(draft, schedule)
    if draft in SCRIPTED:
        follow(engine, truth(), SCRIPT)
    return engine


def neighbours(count: int, budget: int) -> list[Request]:
    """Requests of all sorts, with ids of their own."""
    rng = np.random.default_rng(count)
    made = []
    for index in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
        params = SamplingParams(
            temperature=0.0 if index % 3 == 0 else 1.3,
            top_k=int(rng.integers(0, 9)),
            seed=index,
            max_tokens=budget,
            logprobs=index % 2 or None,
        )
        (request,) = requests_of([prompt], params, max_model_len=MAX_LEN)
        request.id = f"neighbour {index}"
        made.append(request)
    return made


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Outputs of each seed by plain decoding, with nobody else there."""
    outputs = {}
    for seed in SEEDS:
        (request,) = run(engine_of("plain", "v1"), requests_for([SamplingParams(seed=seed, **LAW)]))
        outputs[seed] = request.output_ids
    return outputs


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft", DRAFTS)
class TestEachSeed:
    """Public report: two seeded requests in one batch disturb each other (vLLM #9441)."""

    def one(self, seed: int) -> Request:
        return requests_for([SamplingParams(seed=seed, **LAW)])[0]

    def engine(self, draft: str, expected: list[int], schedule: str = "v2") -> Engine:
        engine = engine_of(draft, schedule)
        if draft in SCRIPTED:
            follow(engine, [(*PROMPT, *expected)], SCRIPT)
        return engine

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_alone(self, draft, seed, schedule, alone):
        (request,) = run(self.engine(draft, alone[seed], schedule), [self.one(seed)])
        assert request.output_ids == alone[seed]

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_in_any_row_beside_two_others(self, draft, seed, place, alone):
        mine, others, engine = self.one(seed), neighbours(2, budget=30), self.engine(draft, alone[seed])
        for request in [*others[:place], mine, *others[place:]]:
            engine.add(request)
        while engine.has_work:
            engine.step()
            assert mine.row in (place, None)
        assert mine.output_ids == alone[seed]

    def test_beside_neighbours_that_finish_and_are_followed_by_others(self, draft, seed, alone):
        mine, others = self.one(seed), neighbours(8, budget=3)
        run(self.engine(draft, alone[seed]), [others[0], mine, *others[1:]])
        assert mine.output_ids == alone[seed]

    def test_beside_neighbours_that_are_aborted(self, draft, seed, alone):
        mine, others, engine = self.one(seed), neighbours(4, budget=40), self.engine(draft, alone[seed])
        for request in [*others[:2], mine, *others[2:]]:
            engine.add(request)
        while engine.has_work:
            engine.step()
            if mine.output_ids and others:
                assert engine.abort(others.pop(0).id)
        assert not others
        assert mine.output_ids == alone[seed]

    @pytest.mark.parametrize("place", [1, 8, 15])
    def test_preempted_after_so_many_tokens(self, draft, seed, place, alone):
        mine, engine = self.one(seed), self.engine(draft, alone[seed])
        for request in [*neighbours(1, budget=40), mine]:
            engine.add(request)
        while engine.has_work:
            engine.step()
            if len(mine.output_ids) >= place and mine.epoch == 0:
                # As if an older request had needed its pages just now.
                engine._scheduler._preempt(mine)
        assert mine.epoch == 1
        assert mine.output_ids == alone[seed]


def test_equal_seeds_give_equal_outputs_and_others_do_not(alone):
    again = run(engine_with("good"), requests_for([SamplingParams(seed=seed, **LAW) for seed in SEEDS * 2]))
    assert [request.output_ids for request in again] == [alone[seed] for seed in SEEDS * 2]
    assert len({tuple(outputs) for outputs in alone.values()}) == len(SEEDS)


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them():
    """Public report: requests without a seed share one stream of noise (TRT-LLM #19487)."""
    first, second = (run(engine_with("ngram"), requests_for([SamplingParams(**LAW)] * 6)) for _ in range(2))
    assert len({tuple(request.output_ids) for request in first}) == 6
    assert [request.output_ids for request in first] == [request.output_ids for request in second]


@pytest.mark.parametrize("draft", ["plain", "ngram", "good"])
def test_completions_of_a_prompt_are_requests_with_seeds_of_their_own(draft, alone):
    several = run(engine_with(draft), requests_for([SamplingParams(seed=1, n=5, **LAW)]))
    singles = [SamplingParams(seed=completion_seed(1, index), **LAW) for index in range(5)]
    expected = [run(engine_of("plain", "v1"), requests_for([params]))[0].output_ids for params in singles]
    assert [request.output_ids for request in several] == expected
    assert several[0].output_ids == alone[1]
    assert len({tuple(outputs) for outputs in expected}) == 5


@pytest.mark.parametrize("draft", ["plain", "ngram", "identical", "bad", "tree"])
def test_logprobs_are_those_of_a_dense_forward(draft):
    """Public report: only the first token has a logprob, or all have 0.0 (sglang PR #14046, vLLM #17876)."""
    wanted = [2, 3, 4, 7, 9, 11]
    params = [cases()[index].params for index in wanted]
    made = requests_of(
        [list(cases()[index].prompt) for index in wanted],
        [dataclasses.replace(one, logprobs=count) for one, count in zip(params, (0, 4, 2, 4, 1, 3))],
        max_model_len=MAX_LEN,
    )
    others = neighbours(3, budget=10)
    run(engine_with(draft), [*others, *made])
    for index, request in zip(wanted, made, strict=True):
        assert request.output_ids == plain()[index].output_ids
        exact = log_softmax(dense_logits(target(), request.sequence))[len(request.prompt_ids) - 1 : -1]
        _check_logprobs(request, exact)
    assert others[0].completion("").logprobs is None


def _check_logprobs(request: Request, exact: np.ndarray) -> None:
    """Against the model's own law at each output, float64 [outputs, V]."""
    assert [entry.token_id for entry in request.logprobs] == request.output_ids
    chosen = exact[np.arange(len(exact)), request.output_ids]
    np.testing.assert_allclose([entry.logprob for entry in request.logprobs], chosen, atol=1e-4)
    num_top = request.params.logprobs or 0
    for entry, law in zip(request.logprobs, exact, strict=True):
        assert list(entry.top) == np.argsort(-law)[:num_top].tolist()
        np.testing.assert_allclose(list(entry.top.values()), np.sort(law)[::-1][:num_top], atol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logprobs_equal_those_of_plain_decoding(schedule):
    """Public report: greedy logprobs and their sums differ under speculation."""
    params = [dataclasses.replace(case.params, logprobs=4) for case in cases()]
    prompts = [list(case.prompt) for case in cases()]
    expected = run(engine_of("plain", "v1"), requests_of(prompts, params, max_model_len=MAX_LEN))
    requests = run(engine_with("good", schedule), requests_of(prompts, params, max_model_len=MAX_LEN))
    for request, other in zip(requests, expected, strict=True):
        mine, theirs = ([entry.logprob for entry in one.logprobs] for one in (request, other))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert sum(mine) == pytest.approx(sum(theirs), abs=1e-3)
        assert [list(entry.top) for entry in request.logprobs] == [list(entry.top) for entry in other.logprobs]


def test_logprobs_of_a_request_do_not_change_its_tokens():
    requests = play(engine_with("good"), cases())
    assert [request.output_ids for request in requests] == [request.output_ids for request in plain()]
    assert not any(request.logprobs for request in requests)
