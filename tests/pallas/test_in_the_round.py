"""Whole prefills and rounds over the kernels, in the interpreter: the same tokens as over XLA's two parts."""

import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxspec.draft.feature import Feature
from jaxspec.draft.shape import TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.sampling_params import SamplingParams
from tests.tiny import VOCAB, chain, engine_over, make_runner, requests_of, run, tiny_head, tiny_model

TARGET = tiny_model(0)
DRAFT = tiny_model(1, num_hidden_layers=1)
HEAD = tiny_head(1, fused=True)
METHODS = {
    "chain": (Standalone(DRAFT[0], chain(1), VOCAB), DRAFT[1]),
    "tree": (Feature(HEAD[0], TreeShape(2, 2, 5)), HEAD[1]),
}
PROMPTS = [[5, 9, 3, 7, 2] * 4, [11]]


def outputs(name: str, backend: str) -> list[list[int]]:
    """Tokens of a greedy and a sampled request; the prompt takes several chunks, and the output crosses pages."""
    runner = make_runner(TARGET, *METHODS[name], num_rows=2, page_size=8, num_pages=12, attention_backend=backend)
    engine = engine_over(runner, chunked_prefill_size=16, prefill_chunk_buckets=[16], decode_row_buckets=[2])
    params = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, temperature=1.0, seed=3)]
    return [request.output_ids for request in run(engine, requests_of(PROMPTS, params))]


@pytest.mark.parametrize("name", METHODS)
def test_kernels_give_the_tokens_of_xla(name):
    expected = outputs(name, "xla")
    with pltpu.force_tpu_interpret_mode():
        assert outputs(name, "pallas_tpu") == expected
