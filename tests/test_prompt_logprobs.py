"""Log-probabilities of the prompt's own tokens: those of a dense forward, however the prompt is taken in."""

import random
from typing import Any

import numpy as np
import pytest

from jaxspec.call import Call
from jaxspec.config import SamplingParams
from jaxspec.request import RequestRules
from tests.cases import MAX_LEN, engine_of, target
from tests.dense import dense_logits, log_softmax
from tests.tiny import VOCAB, requests_of, run

LENGTHS = (1, 2, 7, 8, 33, 40)
PROMPTS = [[(3 * index * index + length) % VOCAB for index in range(length)] for length in LENGTHS]


def check(prompt: list[int], found: list[Any], num_top: int) -> None:
    """Against float64; there is nothing before the first token."""
    assert len(found) == len(prompt)
    assert found[0] is None
    exact = log_softmax(dense_logits(target(), prompt))[:-1]
    for token, entry, law in zip(prompt[1:], found[1:], exact, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(law[token], abs=1e-4)
        assert list(entry.top) == np.argsort(-law)[:num_top].tolist()
        np.testing.assert_allclose(list(entry.top.values()), np.sort(law)[::-1][:num_top], atol=1e-4)


@pytest.mark.parametrize(("chunk", "pool_pages"), [(None, None), (7, None), (7, 60)], ids=["whole", "chunks", "crowd"])
def test_they_are_those_of_a_dense_forward(chunk, pool_pages):
    """In a crowd, requests are preempted: what they computed before stays as it is."""
    params = [SamplingParams(temperature=0, max_tokens=18, prompt_logprobs=index % 4) for index in range(len(PROMPTS))]
    engine = engine_of("good", "v2", page_size=1, chunk=chunk, pool_pages=pool_pages)
    requests = run(engine, requests_of(PROMPTS, params, max_model_len=MAX_LEN))
    for request, one in zip(requests, params, strict=True):
        check(request.prompt_ids, request.prompt_logprobs, one.prompt_logprobs or 0)
    assert (engine.metrics.preemptions > 0) == (pool_pages is not None)


def test_they_change_no_token_and_others_have_none():
    params = [SamplingParams(seed=1, max_tokens=12, prompt_logprobs=wanted) for wanted in (None, 2)]
    without, with_ = run(engine_of("good", "v2", page_size=1), requests_of([PROMPTS[4]] * 2, params, max_model_len=96))
    assert without.output_ids == with_.output_ids
    assert without.prompt_logprobs == [None]


def test_a_prompt_has_them_once_for_all_its_completions():
    rules = RequestRules(max_model_len=MAX_LEN, vocab_size=VOCAB)
    settings = [SamplingParams(n=2, seed=3, max_tokens=3, prompt_logprobs=1), SamplingParams(max_tokens=3)]
    prompts: list[Any] = [PROMPTS[2]] * 2
    call = Call(prompts, settings, call_id=0, tokenizer=None, rules=rules, rng=random.Random(0))
    engine = engine_of("good", "v1", page_size=1)
    for request in call.requests:
        engine.add(request)
    while engine.has_work:
        for progress in engine.step():
            call.take(progress)
            if progress.finish is not None:
                call.close(progress.request)
    outputs = {chunk.prompt_index: chunk.output for chunk in call.ready if chunk.output is not None}
    check(PROMPTS[2], outputs[0].prompt_logprobs or [], 1)
    assert [len(completion.token_ids) for completion in outputs[0].completions] == [3, 3]
    assert outputs[1].prompt_logprobs is None
