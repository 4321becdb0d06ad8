"""From a prompt to requests, and from a finished request to its completion."""

import dataclasses
import random
from typing import cast

import numpy as np
import pytest

from jaxspec.checks import MAX_INT32
from jaxspec.config import SamplingParams
from jaxspec.metrics import Emission
from jaxspec.request import Request, RequestOutput, RequestRules, Status, completion_seed, make_requests
from jaxspec.state import Sampling

RULES = RequestRules(max_model_len=10, vocab_size=100, eos_ids=(2, 3), max_stop_token_ids=4, max_logprobs=5)


def make(prompt=(1, 2), rules=RULES, rng=None, **params) -> list[Request]:
    return make_requests(
        prompt, SamplingParams(**params), rules, request_id="q", prompt_index=6, rng=rng or random.Random(0)
    )


def test_each_completion_is_a_request_with_its_own_seed():
    requests = make(n=3, seed=11)
    assert [request.id for request in requests] == ["q/0", "q/1", "q/2"]
    assert [(request.prompt_index, request.index) for request in requests] == [(6, 0), (6, 1), (6, 2)]
    assert requests[0].seed == 11
    assert len({request.seed for request in requests}) == 3
    assert [request.seed for request in make(n=3, seed=11)] == [request.seed for request in requests]


def test_unseeded_prompts_draw_from_the_engine_and_do_not_share_a_stream():
    """TRT-LLM #19487."""
    rng = random.Random(5)
    seeds = [make(rng=rng)[0].seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert seeds[0] == random.Random(5).getrandbits(64)


def test_seed_mix_keeps_the_first_and_spreads_the_others():
    assert completion_seed(2**64 - 1, 0) == 2**64 - 1
    seeds = {completion_seed(seed, index) for seed in range(200) for index in range(20)}
    assert len(seeds) == 200 * 20
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_budget_is_the_smaller_of_max_tokens_and_the_room():
    assert make(max_tokens=3)[0].budget == 3
    assert make(max_tokens=None)[0].budget == 8
    assert make(max_tokens=100)[0].budget == 8


def test_stop_ids_are_the_models_own_and_the_requests():
    assert make(stop_token_ids=[7, 3])[0].stop_ids == (2, 3, 7)
    assert make(stop_token_ids=[7, 3], ignore_eos=True)[0].stop_ids == (7, 3)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt 6 is empty"),
        ([1] * 10, {}, "has 10 tokens, which leaves no room to generate in max_model_len=10"),
        ([1, 100], {}, r"token id 100; this model's ids are 0\.\.99"),
        ([-1], {}, "token id -1"),
        ([1], {"stop_token_ids": [100]}, r"stop_token_ids has 100; this model's ids are 0\.\.99"),
        ([1], {"stop_token_ids": [4, 5, 6]}, "5 stop tokens .* more than max_stop_token_ids=4"),
        ([1], {"logprobs": 6}, "logprobs=6 is more than max_logprobs=5"),
        ([1, 2], {"min_tokens": 9, "max_tokens": 20}, "prompt 6 has 2 tokens, .* room for 8 .* min_tokens=9; set .* 8"),
        ([1, 2], {"min_tokens": 2**40, "max_tokens": None}, "fewer than min_tokens=1099511627776"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused(prompt, params, message):
    with pytest.raises(ValueError, match=message):
        make(prompt, **params)


def test_the_largest_values_fit_the_devices_integers():
    (request,) = make(max_tokens=2**70, min_tokens=8, seed=2**64 - 1, top_k=MAX_INT32, stop_token_ids=[99])
    assert (request.budget, request.min_len, request.max_len) == (8, 10, 10)
    sampling = Sampling.zeros(1, 4, xp=np)
    cast(np.ndarray, sampling.top_k)[0] = request.params.top_k
    cast(np.ndarray, sampling.min_len)[0] = request.min_len
    cast(np.ndarray, sampling.seed)[0] = request.seed >> 32, request.seed & 0xFFFFFFFF


def test_stops_that_cover_the_vocabulary_leave_min_tokens_nothing_to_emit():
    rules = RequestRules(max_model_len=10, vocab_size=4, eos_ids=(2, 7), max_stop_token_ids=9)
    every = [0, 1, 3]
    with pytest.raises(
        ValueError, match=r"min_tokens=1 .* all 4 ids of this model are stop tokens, .* set min_tokens=0"
    ):
        make(rules=rules, min_tokens=1, stop_token_ids=every)
    assert make(rules=rules, stop_token_ids=every)[0].stop_ids == (2, 7, 0, 1, 3)
    assert make(rules=rules, min_tokens=1, stop_token_ids=every, ignore_eos=True)[0].stop_ids == (0, 1, 3)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {100: 1}}, r"logit_bias has 100; this model's ids are 0\.\.99"),
        ({"logit_bias": dict.fromkeys(range(3), 1)}, r"3 logit_bias .* max_logit_bias=2; .*\(max_logit_bias=3\)"),
        ({"allowed_token_ids": [5, 100]}, "allowed_token_ids has 100"),
        ({"bad_words_ids": [[5, 100]]}, "bad_words_ids has 100"),
        ({"bad_words_ids": [[1, 2], [1, 3], [4]]}, r"2 bad_words_ids of two tokens .* max_bad_words=1"),
        ({"bad_words_ids": [[1, 2, 3, 4]]}, r"word of 4 tokens, .* max_bad_word_tokens=3; .*\(max_bad_word_tokens=4\)"),
        ({"allowed_token_ids": [5], "bad_words_ids": [[9, 5]]}, "could leave nothing to emit"),
        ({"allowed_token_ids": [2, 3], "min_tokens": 1}, "could leave nothing to emit"),
        ({"logits_processors": ["theirs"]}, "has 'theirs', and the engine's are: mine, yours"),
        ({"logits_processors": {"mine": range(9)}}, r"\['mine'\] has 9 numbers; give at most 8"),
        ({"prompt_logprobs": 6}, r"prompt_logprobs=6 is more than max_logprobs=5"),
    ],
)
def test_what_the_engine_cannot_do_to_logits_is_refused(params, message):
    sizes = {"max_logit_bias": 2, "max_bad_words": 1, "max_bad_word_tokens": 3, "processors": ("mine", "yours")}
    with pytest.raises(ValueError, match=message):
        make(rules=dataclasses.replace(RULES, **sizes), **params)


def test_processors_are_named_by_their_places():
    rules = dataclasses.replace(RULES, processors=("mine", "yours"))
    (request,) = make(rules=rules, logits_processors={"yours": [1, 2]})
    assert request.processors == {1: (1.0, 2.0)}


def test_lengths_follow_the_outputs():
    (request,) = make(max_tokens=5, min_tokens=2)
    request.output_ids += [8, 9]
    assert request.sequence == [1, 2, 8, 9]
    assert (request.known_len, request.max_len, request.min_len, request.remaining) == (4, 7, 4, 3)


def finished_request(**params) -> Request:
    (request,) = make(max_tokens=5, **params)
    request.output_ids = [8, 9, 3]
    request.emissions = [Emission(1, 0, 0, False), Emission(2, 1, 3, True)]
    request.status, request.finish_reason, request.stop_reason = Status.FINISHED, "stop", 3
    request.arrival, request.first_token, request.finished = 10.0, 10.5, 12.0
    return request


def test_completion_of_a_finished_request():
    completion = finished_request().completion("hi")
    assert (completion.text, completion.token_ids, completion.logprobs) == ("hi", [8, 9, 3], None)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 3)
    assert (completion.rounds, completion.accept_length) == (1, 2.0)
    assert (completion.accepted, completion.proposed, completion.accepted_per_position) == (1, 3, [1])
    assert (completion.timings.ttft, completion.timings.total) == (0.5, 2.0)
    output = RequestOutput(request_id="q", prompt="x", prompt_token_ids=[1, 2], completions=(completion,))
    for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason", "accept_length", "rounds", "timings"):
        assert getattr(output, name) == getattr(completion, name)
    assert output.accepted_per_position == [1]


def test_zero_rounds_have_no_accept_length():
    request = finished_request()
    request.output_ids, request.emissions, request.first_token = [], [], None
    completion = request.completion("")
    assert (completion.rounds, completion.accept_length, completion.timings.ttft) == (0, None, None)


def test_an_unfinished_request_has_no_completion():
    with pytest.raises(RuntimeError, match="q/0 is waiting"):
        make()[0].completion("")
