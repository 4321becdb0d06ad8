"""The embedded model itself, float32: speculative output equals plain output on real text."""

import json
from pathlib import Path

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpecConfig
from jaxspec.loading.embedded import find_embedded_model
from tests.conftest import REPO

# One shape of each kind, so that each engine compiles two programs.
ENGINE = EngineConfig(
    max_running_requests=8,
    max_model_len=384,
    decode_row_buckets=(8,),
    prefill_chunk_buckets=(64,),
    chunked_prefill_size=64,
    progress=False,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=128)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, min_p=0.02, seed=11, max_tokens=128)


@pytest.fixture(scope="module", autouse=True)
def _embedded():
    try:
        find_embedded_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def chats(shared: Path) -> list[list[dict[str, str]]]:
    """The first 8 GSM8K test questions, as chats."""
    lines = (shared / "data" / "gsm8k_test_first1000.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    return [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]


@pytest.fixture(scope="module")
def plain(chats) -> dict[str, list[list[int]]]:
    with LLM("smollm2", engine=ENGINE) as llm:
        return {name: _tokens(llm, chats, params) for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))}


def _tokens(llm: LLM, chats, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(chats, params)]


def test_ngram_equals_plain_decoding_on_gsm8k(chats, plain):
    with LLM("smollm2", spec=SpecConfig(algorithm="NGRAM"), engine=ENGINE) as llm:
        assert _tokens(llm, chats, GREEDY) == plain["greedy"]
        greedy = llm.metrics.accept_length
        assert _tokens(llm, chats, SAMPLED) == plain["sampled"]
    assert greedy is not None
    assert greedy > 1.2


def test_the_shipped_head_equals_plain_decoding_where_sampled_and_greedy_requests_share_a_batch(chats, plain):
    """sglang-jax PR #1293 review: one request's parameters must not serve the whole batch."""
    params = [GREEDY if index % 2 else SAMPLED for index in range(8)]
    expected = [plain["greedy" if index % 2 else "sampled"][index] for index in range(8)]
    head = REPO / "checkpoints" / "smollm2-135m-instruct-eagle3"
    with LLM("smollm2", spec=SpecConfig(algorithm="EAGLE3", draft_model=head), engine=ENGINE) as llm:
        assert _tokens(llm, chats, params) == expected
        assert llm.metrics.accept_length is not None
        assert llm.metrics.accept_length > 1.6


def test_standalone_with_the_target_as_its_own_draft_accepts_everything(chats, plain):
    spec = SpecConfig(algorithm="STANDALONE", draft_model="smollm2", num_steps=3)
    with LLM("smollm2", spec=spec, engine=ENGINE) as llm:
        outputs = llm.generate(chats[:3], GREEDY)
        assert [output.token_ids for output in outputs] == plain["greedy"][:3]
        sampled = llm.generate(chats[:3], SAMPLED)
        assert [output.token_ids for output in sampled] == plain["sampled"][:3]
    # Only the round that a stop token or the budget cuts short commits fewer than 4.
    for output in outputs + sampled:
        assert output.rounds == -(-(len(output.token_ids) - 1) // 4)
