"""Simulated acceptance: rounds as long as asked for on average, and no output that does not say so."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.outputs import RequestOutput
from jaxspec.plan import WARNING
from jaxspec.request import Request
from jaxspec.runner import Runner
from jaxspec.simulation import Simulated, round_lengths
from tests.cases import MAX_LEN, NUM_ROWS, draft_of, target
from tests.plans import note_of, notes_of, plan_of, refusal
from tests.tiny import engine_over, make_runner, requests_of, run

# By the draft: what a round is to emit on average. NGRAM finds nothing in these prompts, and trees may be shallow.
LENGTHS = {"ngram": 3.25, "eagle3-5-4-8": 4.6}
PROMPTS = [[5, 9, 3, 7, 2], [11], [40, 41, 42]]


@pytest.mark.parametrize("accept_len", [1, 1.001, 1.97, 2.5, 3.333, 4, 6])
def test_rounds_from_anywhere_have_the_mean_that_was_asked_for(accept_len):
    emitted = np.asarray(round_lengths(jnp.arange(8000, dtype=jnp.int32), accept_len))
    assert emitted.min() >= 1
    assert emitted.max() <= np.ceil(accept_len)
    for start in (0, 1, 2, 777):
        position, rounds = start, 0
        while position < 5000:
            position, rounds = position + int(emitted[position]), rounds + 1
            assert abs(position - start - rounds * accept_len) < accept_len + 1


@functools.cache
def runner_of(draft: str) -> Runner:
    runner = make_runner(target(), *draft_of(draft), num_rows=NUM_ROWS, num_pages=24, max_model_len=MAX_LEN)
    program = dataclasses.replace(runner.program, rule=Simulated(LENGTHS[draft]))
    return Runner(program, runner.params, runner.shape)


def answers(draft: str, rounds_in_flight: int) -> list[Request]:
    """Greedy and sampled requests, whose stop tokens are half of the vocabulary."""
    buckets = {"prefill_chunk_buckets": (MAX_LEN,), "decode_row_buckets": (NUM_ROWS,), "chunked_prefill_size": None}
    engine = engine_over(runner_of(draft), rounds_in_flight=rounds_in_flight, **buckets)
    params = [
        SamplingParams(max_tokens=80, min_tokens=80, temperature=heat, seed=3, stop_token_ids=list(range(0, 16, 2)))
        for heat in (0.0, 1.0, 1.0)
    ]
    return run(engine, requests_of(PROMPTS, params, max_model_len=MAX_LEN))


@pytest.mark.parametrize("draft", LENGTHS)
def test_v1_and_v2_emit_the_same_at_the_mean_that_was_asked_for(draft):
    wanted, one, two = LENGTHS[draft], answers(draft, 0), answers(draft, 1)
    assert [request.output_ids for request in one] == [request.output_ids for request in two]
    for request in one:
        done = request.completion("")
        assert len(done.token_ids) == 80
        assert done.accept_length is not None
        # The first round and the one that the budget cuts; all others are as they are to be.
        assert abs(done.accept_length - wanted) * done.rounds < 2 * wanted


def test_outputs_say_so():
    (request, *_) = requests_of([[1, 2]], SamplingParams(max_tokens=4))
    engine = engine_over(runner_of("ngram"), decode_row_buckets=(NUM_ROWS,))
    assert engine.metrics.simulate_accept_len is None
    plan = dataclasses.replace(engine.plan, simulate_accept_len=3.25)
    engine = type(engine)(engine.runner, plan, EngineConfig())
    assert engine.metrics.simulate_accept_len == 3.25
    request.simulate_accept_len, request.finish_reason = 3.25, "length"
    done = request.completion("")
    output = RequestOutput(request_id="0", prompt="", prompt_token_ids=[1], completions=(done,))
    assert (done.simulate_accept_len, output.simulate_accept_len) == (3.25, 3.25)


def test_the_plan_says_so_aloud():
    plan = plan_of("NGRAM", engine=EngineConfig(simulate_accept_len=2.5))
    note = note_of(plan, "simulate_accept_len")
    assert (plan.simulate_accept_len, note.after, note.kind) == (2.5, 2.5, WARNING)
    assert "THE OUTPUT IS NOT THE MODEL'S" in note.reason
    assert "simulate_accept_len=2.5" in plan.describe()


def test_no_variable_sets_it():
    names = ("SGLANG_SIMULATE_ACC_LEN", "JAXSPEC_SIMULATE_ACCEPT_LEN", "SIMULATE_ACCEPT_LEN")
    plan = plan_of("NGRAM", env=dict.fromkeys(names, "3"))
    assert plan.simulate_accept_len is None
    assert not notes_of(plan, "simulate_accept_len")
    assert "EngineConfig.simulate_accept_len" in note_of(plan, "SGLANG_SIMULATE_ACC_LEN").reason


@pytest.mark.parametrize(
    ("algorithm", "spec", "says"),
    [
        (None, {}, "needs drafts to accept; set spec"),
        ("NGRAM", {"num_steps": 2}, "more than a round can emit; set at most 3, or num_steps to at least 3"),
        ("NGRAM", {"strict": True}, "THE OUTPUT IS NOT THE MODEL'S"),
    ],
)
def test_where_it_makes_no_sense_it_is_refused(algorithm, spec, says):
    assert says in refusal(algorithm, engine=EngineConfig(simulate_accept_len=3.5), **spec)
