"""Where a request ends: stops and budgets at every place inside an accepted block, and the books of each ending."""

import functools

import pytest

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.metrics import Emission, RoundStats
from jaxspec.request import Request
from tests.cases import DRAFTS, MAX_LEN, NUM_STEPS, SCHEDULES, SCRIPT, SCRIPTED, cases, engine_of, follow, play, truth
from tests.scripted import expected_emissions
from tests.tiny import VOCAB, requests_of, run

PROMPT = (63, 5, 40, 11)
# Whole blocks first: the prefill emits output 0, the first round outputs 1..4, the second 5..8.
WHOLE = (NUM_STEPS,)
NUM_PLACES = 9
EOS = VOCAB - 1


def requests_for(params: list[SamplingParams], eos_ids: tuple[int, ...] = ()) -> list[Request]:
    return requests_of([list(PROMPT)] * len(params), params, max_model_len=MAX_LEN, eos_ids=eos_ids)


def sampled(seed: int, **changes) -> SamplingParams:
    return SamplingParams(seed=seed, **{"max_tokens": 24, **changes})


@functools.cache
def unstopped() -> tuple[int, tuple[int, ...]]:
    """A seed whose first outputs all differ, so that each names its place, and all its outputs by plain decoding."""
    tried = run(engine_of("plain", "v1"), requests_for([sampled(seed) for seed in range(40)]))
    for seed, request in enumerate(tried):
        first = request.output_ids[: NUM_PLACES + 1]
        if len({*first, EOS}) == len(first) + 1:
            return seed, tuple(request.output_ids)
    raise AssertionError("no seed gives different tokens; try more")


def scripted_engine(schedule: str, draft: str = "chain", script: tuple[int, ...] = WHOLE) -> Engine:
    engine = engine_of(draft, schedule)
    follow(engine, [(*PROMPT, *unstopped()[1])], script)
    return engine


def rounds_of(request: Request) -> RoundStats:
    return RoundStats.of(request.emissions)


@pytest.mark.parametrize("schedule", SCHEDULES)
class TestInsideABlock:
    """The script accepts whole blocks; the row ends somewhere inside one."""

    def test_a_stop_token_may_be_any_draft_of_a_block_or_the_bonus(self, schedule):
        """Public report: the text goes on after an EOS that was accepted in mid-block (HF #47912)."""
        seed, outputs = unstopped()
        params = [sampled(seed, stop_token_ids=(outputs[place],)) for place in range(NUM_PLACES)]
        requests = run(scripted_engine(schedule), requests_for(params))
        for place, request in enumerate(requests):
            assert request.output_ids == list(outputs[: place + 1])
            assert (request.finish_reason, request.stop_reason) == ("stop", outputs[place])
            assert request.emissions == expected_emissions(SCRIPTED["chain"], WHOLE, request)
        # The j-th draft of the first block is the stop: it is emitted, and nothing behind it is counted.
        firsts = [requests[place].emissions[1] for place in (1, 2, 3, 4)]
        assert firsts == [Emission(1, 1, 1, True), Emission(2, 2, 2, True), Emission(3, 3, 3, True), (4, 3, 3, True)]

    @pytest.mark.parametrize("script", [WHOLE, (0,), SCRIPT], ids=["whole", "none", "mixed"])
    def test_the_earlier_of_stop_and_budget_ends_it_and_a_stop_in_the_last_place_is_a_stop(self, schedule, script):
        """Public report: one block holds the stop and crosses max_new_tokens; junk leaked (sglang #31599)."""
        seed, outputs = unstopped()
        pairs = [(place, budget) for place in range(NUM_PLACES) for budget in range(1, NUM_PLACES + 1)]
        params = [sampled(seed, stop_token_ids=(outputs[place],), max_tokens=budget) for place, budget in pairs]
        requests = run(scripted_engine(schedule, script=script), requests_for(params))
        for (place, budget), request in zip(pairs, requests, strict=True):
            stops = place < budget
            assert request.output_ids == list(outputs[: place + 1 if stops else budget])
            assert request.finish_reason == ("stop" if stops else "length")
            assert request.stop_reason == (outputs[place] if stops else None)
            assert request.emissions == expected_emissions(SCRIPTED["chain"], script, request)

    def test_the_first_of_several_stop_tokens_ends_it(self, schedule):
        seed, outputs = unstopped()
        params = [sampled(seed, stop_token_ids=(outputs[7], outputs[place], outputs[3])) for place in (2, 5)]
        requests = run(scripted_engine(schedule), requests_for(params))
        assert [request.output_ids for request in requests] == [list(outputs[:3]), list(outputs[:4])]

    @pytest.mark.parametrize("draft", ["identical", "ngram"])
    def test_min_tokens_at_every_offset(self, schedule, draft):
        """Public report: min_new_tokens bans the stop too long under speculation (sglang PR #33643)."""
        seed, outputs = unstopped()
        pairs = [(place, least) for place in (1, 2, 4, 6) for least in range(NUM_PLACES)]
        params = [sampled(seed, stop_token_ids=(outputs[place],), min_tokens=least) for place, least in pairs]
        expected = run(engine_of("plain", "v1"), requests_for(params))
        requests = run(engine_of(draft, schedule), requests_for(params))
        for (place, least), request, plain in zip(pairs, requests, expected, strict=True):
            assert request.output_ids == plain.output_ids
            assert request.finish_reason == plain.finish_reason
            assert outputs[place] not in request.output_ids[:least]
            if place >= least:  # at exactly min_tokens the stop is allowed again
                assert request.output_ids == list(outputs[: place + 1])
            else:
                assert request.output_ids[:place] == list(outputs[:place])
                assert request.output_ids[place] != outputs[place]

    def test_one_token_is_the_prefills_and_none_is_nothing(self, schedule):
        """Public report: overlap runs a wasted decode for max_new_tokens=1, and counts its draft (HF PR #34935)."""
        seed, outputs = unstopped()
        engine = scripted_engine(schedule)
        one, none = run(engine, requests_for([sampled(seed, max_tokens=1), sampled(seed, max_tokens=0)]))
        assert (one.output_ids, one.finish_reason) == ([outputs[0]], "length")
        assert (none.output_ids, none.finish_reason) == ([], "length")
        assert engine.metrics.decode_dispatches == 0
        assert engine.metrics.rounds == engine.metrics.proposed == 0
        assert one.completion("").accept_length is None

    def test_eos_ends_it_unless_ignored(self, schedule):
        seed, outputs = unstopped()
        params = [sampled(seed), sampled(seed, ignore_eos=True), sampled(seed, ignore_eos=True, stop_token_ids=(EOS,))]
        eos_ids = (EOS, outputs[6])
        stopped, ignored, still = run(scripted_engine(schedule), requests_for(params, eos_ids))
        assert (stopped.output_ids, stopped.stop_reason) == (list(outputs[:7]), outputs[6])
        assert (ignored.output_ids, ignored.finish_reason) == (list(outputs), "length")
        assert still.output_ids == list(outputs)

    def test_the_context_ends_it_like_a_budget(self, schedule):
        engine = engine_of("identical", schedule)
        (request,) = run(engine, requests_for([SamplingParams(temperature=0, max_tokens=None)]))
        assert len(PROMPT) + len(request.output_ids) == MAX_LEN
        assert request.finish_reason == "length"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_metrics_are_sums_over_requests_and_their_identities_hold(draft, schedule):
    """Public report: accept rates above 1, drafts behind EOS counted (sglang PR #11572, vLLM #56101)."""
    engine = engine_of(draft, schedule)
    if draft in SCRIPTED:
        follow(engine, truth(), SCRIPT)
    requests = play(engine, cases())
    metrics, stats = engine.metrics, [rounds_of(request) for request in requests]
    assert metrics.emitted_tokens == sum(len(request.output_ids) for request in requests)
    assert metrics.rounds == sum(one.rounds for one in stats)
    assert metrics.accepted == sum(one.accepted for one in stats) == sum(metrics.accepted_per_position)
    assert metrics.proposed == sum(one.proposed for one in stats)
    assert metrics.prompt_tokens == metrics.prefilled_tokens == sum(len(case.prompt) for case in cases())
    assert metrics.requests == metrics.finished == len(requests)
    for request, one in zip(requests, stats, strict=True):
        done = request.completion("")
        assert one.prefill_tokens == 1
        assert (done.accept_length or 0) * done.rounds == pytest.approx(len(request.output_ids) - 1)
        assert 0 <= done.accepted <= done.proposed
        # A round emits its accepted drafts and one more token, unless its last draft ended the request.
        short = [e for e in request.emissions if e.is_round and e.count == e.accepted]
        assert short in ([], request.emissions[-1:])
        assert request.arrival <= (request.first_token or 0) <= (request.finished or 0)
