"""A head on disk, drafting for a target on disk: chains and trees, v1 and v2, emit the tokens of plain decoding."""

import json
from typing import Any

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpecConfig
from tests.loading.heads import write_head
from tests.scripts.tiny_model import write_tiny_model

PROMPTS = ["one two", "a longer prompt, in chunks of sixteen"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True),
]
CHAIN: dict[str, Any] = {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6}
# Algorithm, dialect, shape, whether v1 is set, overlap_trees, and what runs.
RUNS = {
    "EAGLE3 chain v1": ("EAGLE3", "speculators", CHAIN, True, False, 0),
    "EAGLE3 chain v2": ("EAGLE3", "speculators", CHAIN, False, False, 1),
    "EAGLE3 tree v1": ("EAGLE3", "sglang", TREE, False, False, 0),
    "EAGLE3 tree v2": ("EAGLE3", "sglang", TREE, False, True, 1),
    "EAGLE tree v2": ("EAGLE", "eagle", TREE, False, True, 1),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a head of each kind; what they lack is the target's tied table."""
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_model(root / "target")
    config = json.loads((target / "config.json").read_text())
    write_head(root / "eagle", "eagle", config)
    write_head(root / "sglang", "sglang", config, own=["lm_head"], draft_vocab=100)
    write_head(root / "speculators", "speculators", config, norm_before_residual=True, norm_output=True)
    return root


def small_engine(*, v1: bool = False) -> EngineConfig:
    return EngineConfig(
        max_model_len=64,
        page_size=16,
        max_running_requests=2,
        chunked_prefill_size=16,
        prefill_chunk_buckets=(16,),
        decode_row_buckets=(2,),
        disable_overlap_schedule=v1,
        warmup=False,
        compilation_cache_dir=None,
    )


def tokens(folders, spec, engine) -> tuple[list[list[int]], LLM]:
    with LLM(folders / "target", spec=spec, engine=engine) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)], llm


@pytest.fixture(scope="module")
def plain(folders):
    return tokens(folders, None, small_engine())[0]


@pytest.mark.parametrize(("algorithm", "head", "shape", "v1", "overlap", "in_flight"), RUNS.values(), ids=RUNS)
def test_a_head_emits_the_tokens_of_plain_decoding(
    folders, plain, algorithm, head, shape, v1, overlap, in_flight, monkeypatch, caplog
):
    """A random head accepts next to nothing, which is said; here sooner, and of more, than is usual."""
    monkeypatch.setattr("jaxspec.acceptance.MANY_ROUNDS", 6)
    monkeypatch.setattr("jaxspec.acceptance.NEAR_NOTHING", 1.0)
    spec = SpecConfig(algorithm=algorithm, draft_model=folders / head, overlap_trees=overlap, **shape)
    found, llm = tokens(folders, spec, small_engine(v1=v1))
    assert found == plain
    assert llm.plan.rounds_in_flight == in_flight
    said = [record.getMessage() for record in caplog.records if "drafts were accepted" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"{algorithm}: ")
    # A head's trained length (16 here) limits nothing.
    assert not [note for note in llm.plan.notes if note.field == "draft_max_position"]


TREES: dict[str, dict[str, Any]] = {
    "a head and a lookup": {"algorithm": "EAGLE3", "draft_model": "sglang", "merge": "NGRAM", "merge_num_steps": 4},
    "a head and a model": {"algorithm": "EAGLE", "draft_model": "eagle", "merge": "STANDALONE"},
    "a fixed form": {"algorithm": "EAGLE", "draft_model": "eagle", "static_tree": [[0], [1], [0, 0]]},
    "several matches": {"algorithm": "NGRAM", "num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6},
}


@pytest.mark.parametrize("name", TREES)
def test_every_kind_of_tree_emits_the_tokens_of_plain_decoding(folders, plain, name):
    settings = dict(TREES[name])
    if "draft_model" in settings:
        settings["draft_model"] = folders / settings["draft_model"]
    if settings.get("merge") == "STANDALONE":
        settings["merge_draft_model"] = folders / "target"
    found, llm = tokens(folders, SpecConfig(overlap_trees=True, **settings), small_engine())
    assert found == plain
    assert llm.plan.rounds_in_flight == 1
    if settings.get("merge") == "STANDALONE":  # the target itself: its chain is right to the end
        assert llm.metrics.accept_length is not None
        assert llm.metrics.accept_length > 5


def test_the_wrong_algorithm_is_refused_before_anything_is_loaded(folders):
    spec = SpecConfig(algorithm="EAGLE", draft_model=folders / "sglang")
    with pytest.raises(ValueError, match="set algorithm='EAGLE3'"):
        LLM(folders / "target", spec=spec, engine=small_engine())


def test_what_a_head_leaves_open_is_a_note_of_the_plan(folders, tmp_path):
    config = json.loads((folders / "target" / "config.json").read_text())
    head = write_head(tmp_path, "sglang", config, rope_theta=None)
    spec = SpecConfig(algorithm="EAGLE3", draft_model=head, strict=True, **CHAIN)
    with LLM(folders / "target", spec=spec, engine=small_engine()) as llm:
        assert [note.after for note in llm.plan.notes if note.field == "draft_rope_theta"] == [10000.0]
