"""Whatever requests ask for, and however they are drafted and scheduled, the output is that of plain decoding.

Hypothesis makes up the requests and, where one differs, shrinks them to the least that does. 300 examples by default;
JAXSPEC_PROPERTY_EXAMPLES sets another number, and more than 300 are drawn anew in each run.
"""

import os
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from tests.cases import MAX_LEN, engine_of
from tests.processors import PROCESSORS
from tests.tiny import VOCAB, WIDTHS, requests_of, run

IN_CI = 300
NUM_EXAMPLES = int(os.environ.get("JAXSPEC_PROPERTY_EXAMPLES", IN_CI))
MOST_TOKENS = 16
LAST = VOCAB - 1  # always allowed, so that there is something to emit
TOKENS = st.integers(0, LAST - 1)
# Few different tokens repeat themselves: then lookups find something and penalties bite.
FEW_TOKENS = st.integers(0, 5)


def one_of(off: Any, *values: Any) -> st.SearchStrategy[Any]:
    """Off in half of the cases."""
    return st.one_of(st.just(off), st.sampled_from(values))


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    budget = draw(st.integers(1, MOST_TOKENS))
    words = st.lists(st.one_of(TOKENS, FEW_TOKENS), min_size=1, max_size=WIDTHS.bad_word_len)
    allowed = st.lists(TOKENS, min_size=5, max_size=20).map(lambda tokens: [*tokens, LAST])
    numbers = st.tuples(st.integers(0, VOCAB), st.floats(-50, 50, width=32))
    return SamplingParams(
        temperature=draw(one_of(0.0, 0.3, 0.8, 1.0, 1.6)),
        top_k=draw(one_of(-1, 1, 3, 20)),
        top_p=draw(one_of(1.0, 0.3, 0.8, 0.95)),
        min_p=draw(one_of(0.0, 0.02, 0.2)),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=budget,
        min_tokens=draw(st.one_of(st.just(0), st.integers(0, budget))),
        stop_token_ids=draw(st.lists(TOKENS, max_size=8)),
        logprobs=draw(one_of(None, 0, 4)),
        presence_penalty=draw(one_of(0.0, -2.0, 0.7, 2.0)),
        frequency_penalty=draw(one_of(0.0, -1.5, 0.4, 2.0)),
        repetition_penalty=draw(one_of(1.0, 0.6, 1.3, 5.0)),
        logit_bias=draw(st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=WIDTHS.num_biases)),
        allowed_token_ids=draw(st.one_of(st.none(), allowed)),
        bad_words_ids=draw(st.lists(words, max_size=WIDTHS.num_bad_words)),
        logits_processors=draw(st.dictionaries(st.sampled_from(list(PROCESSORS)), numbers, max_size=2)),
        speculate=draw(one_of(True, False)),
    )


PROMPTS = st.one_of(st.lists(FEW_TOKENS, min_size=1, max_size=30), st.lists(TOKENS, min_size=1, max_size=12))
REQUESTS = st.lists(st.tuples(PROMPTS, params()), min_size=1, max_size=5)


def said(engine: Engine, pairs: list[tuple[list[int], SamplingParams]]) -> list[tuple]:
    """What is said to each prompt, and the log-probabilities of it."""
    prompts, settings_ = zip(*pairs)
    requests = run(engine, requests_of(prompts, settings_, max_model_len=MAX_LEN))
    chosen = [np.array([entry.logprob for entry in request.logprobs]) for request in requests]
    return [((one.output_ids, one.finish_reason, one.stop_reason), logs) for one, logs in zip(requests, chosen)]


@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=NUM_EXAMPLES <= IN_CI,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    pairs=REQUESTS,
    draft=st.sampled_from(["ngram", "good", "sure-5-4-8"]),
    schedule=st.sampled_from(["v1", "v2"]),
    chunk=st.sampled_from([None, 7]),
    pool_pages=st.sampled_from([None, 60]),
)
def test_speculation_changes_nothing(pairs, draft, schedule, chunk, pool_pages):
    expected = said(engine_of("plain", "v1", page_size=1), pairs)
    engine = engine_of(draft, schedule, page_size=1, chunk=chunk, pool_pages=pool_pages)
    for (mine, logs), (theirs, their_logs) in zip(said(engine, pairs), expected, strict=True):
        assert mine == theirs
        np.testing.assert_allclose(logs, their_logs, atol=1e-4)
