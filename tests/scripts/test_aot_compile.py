"""`scripts/aot_compile.py`: what it counts, reads and refuses; `tests/test_aot.py` compiles."""

import json

import pytest

import aot_compile
from aot_round import RoundSettings, make_round, model_shape
from jaxspec.draft.shape import TreeShape

SMOL = model_shape("SmolLM2-135M")


def test_plain_decoding_reads_the_weights_and_the_cache_once():
    made = make_round(RoundSettings(model=SMOL, algorithm="NONE", shape=TreeShape(0, 1, 1), num_rows=2, backend="xla"))
    work = aot_compile.round_work(made, length=100)
    assert work.weight_bytes == 134515008 * 2  # SmolLM2-135M's parameters, in bfloat16
    assert work.cache_bytes == 2 * 100 * 30 * 2 * 3 * 64 * 2
    matrices = 134515008 - 576 * (2 * 30 + 1)
    assert work.flops == 2 * 2 * matrices + 4 * 2 * 100 * 30 * 576


def test_a_draft_adds_a_pass_for_every_level():
    rounds = {
        steps: make_round(
            RoundSettings(model=SMOL, algorithm="STANDALONE", draft=SMOL, shape=TreeShape(steps, 1, steps + 1))
        )
        for steps in (1, 3)
    }
    one, three = (aot_compile.round_work(made, length=100) for made in rounds.values())
    assert three.weight_bytes - one.weight_bytes == 2 * 134515008 * 2
    assert one.weight_bytes == 2 * 134515008 * 2


def test_a_table_that_is_no_head_is_not_read():
    llama = model_shape("Llama-3.1-8B", num_hidden_layers=1)
    made = make_round(RoundSettings(model=llama, algorithm="NONE", shape=TreeShape(0, 1, 1)))
    held = sum(leaf.size for leaf in made.params.target)
    assert aot_compile.round_work(made, length=1).weight_bytes == 2 * (held - 128256 * 4096)


def test_collectives_are_counted_by_kind():
    text = """
      %a = f32[16,4]{1,0:T(8,128)} all-reduce(%b), channel_id=1
      %c = (bf16[8]{0}, bf16[64]{0}) all-gather-start(%d), dimensions={0}
      %e = f32[2]{0} add(%a, %all-reduce.3)
      %f = bf16[16,4]{1,0} all-reduce(%g)
    """
    assert aot_compile.collectives(text) == {"all-reduce": (2, 384), "all-gather": (1, 144)}


def test_a_model_may_be_a_config(tmp_path):
    config = {**json.loads(json.dumps(aot_compile.MODEL_SHAPES["Qwen3-0.6B"])), "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert aot_compile._model(str(tmp_path)).num_layers == 2
    assert aot_compile._model(str(tmp_path / "config.json")) == aot_compile._model(str(tmp_path))
    with pytest.raises(ValueError, match=r"--model nothing is neither a file nor one of SmolLM2-135M"):
        aot_compile._model("nothing")


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"algorithm": "STANDALONE"}, "set --draft-model"), ({"algorithm": "EAGLE"}, "NONE, NGRAM, STANDALONE, EAGLE3")],
)
def test_what_cannot_be_made_says_so(settings, says):
    with pytest.raises(ValueError, match=says):
        make_round(RoundSettings(model=SMOL, **settings))
