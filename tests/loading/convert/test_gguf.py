"""A GGUF file becomes a Hugging Face folder with the same weights, tokens and stop ids."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoTokenizer

from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.convert import gguf_to_hf
from jaxspec.loading.load import load_model
from jaxspec.models.config import ModelConfig
from tests.loading.files import hf_config, random_tensors, write_folder, write_gguf
from tests.loading.vocabularies import CHAT, TEXTS, byte_level_keys

FAMILIES = ("llama", "qwen2", "qwen3")
VOCABULARY = byte_level_keys(padding_token_id=0) | {"tokenizer.chat_template": CHAT}
KINDS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def write(path: Path, family: str = "llama", kind: str = "F32", **changes) -> Path:
    """A GGUF file with a vocabulary."""
    config = hf_config(family, vocab_size=len(VOCABULARY["tokenizer.ggml.tokens"]), **changes)
    kinds = GGMLQuantizationType[kind]
    return write_gguf(path, config, random_tensors(config), kind=kinds, metadata=VOCABULARY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_tensors_keep_their_dtype_and_bits(tmp_path, family, kind, tied):
    source = write(tmp_path / "x.gguf", family, kind, tie_word_embeddings=tied)
    summary = gguf_to_hf(source, tmp_path / "out")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert after.shapes == before.shapes
    assert ModelConfig.from_hf(after.config) == ModelConfig.from_hf(before.config)
    for name, shape in before.shapes.items():
        value = after.read(name)
        assert value.dtype == (KINDS[kind] if len(shape) == 2 else np.float32)
        np.testing.assert_array_equal(value.astype(np.float32), before.read(name))
    assert f"{len(before.shapes)} kept bit for bit" in summary.changes
    assert after.config["torch_dtype"] == np.dtype(KINDS[kind]).name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_both_load_to_the_same_leaves(tmp_path, kind, dtype):
    source = write(tmp_path / "x.gguf", kind=kind)
    gguf_to_hf(source, tmp_path / "out", dtype=dtype)
    one, two = (
        load_model(open_checkpoint(path), dtype=dtype, scan_layers=False) for path in (source, tmp_path / "out")
    )
    assert one.config == two.config
    for left, right in zip(one.leaves, two.leaves, strict=True):
        np.testing.assert_array_equal(left, right)


def test_what_was_quantised_is_said_and_takes_the_dtype_asked_for(tmp_path):
    source = write(tmp_path / "x.gguf", kind="Q8_0")
    summary = gguf_to_hf(source, tmp_path / "out", dtype="float16")
    matrices = sum(len(shape) == 2 for shape in open_checkpoint(source).shapes.values())
    assert f"{matrices} Q8_0 dequantised to float16" in summary.changes
    assert summary.dtypes == {"float16": matrices, "float32": summary.num_tensors - matrices}


def test_the_tokenizer_comes_along(tmp_path):
    source = write(tmp_path / "x.gguf")
    gguf_to_hf(source, tmp_path / "out")
    before, after = (open_checkpoint(path) for path in (source, tmp_path / "out"))
    ours, theirs = before.load_tokenizer(), after.load_tokenizer()
    auto = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert ours.fingerprint == theirs.fingerprint
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text) == auto.encode(text)
    chat = [{"role": "user", "content": "hello"}]
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
    assert auto.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == ours.encode_chat(chat)
    assert auto.model_max_length == 512
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (1, 2, 0)
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said["chat_template"] == CHAT
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_stop_ids_and_config_are_what_others_read(tmp_path):
    source = write(tmp_path / "x.gguf", "qwen3")
    gguf_to_hf(source, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").eos_token_ids == open_checkpoint(source).eos_token_ids == (2,)
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert said == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2]}
    config = AutoConfig.from_pretrained(str(tmp_path / "out"))
    assert (config.model_type, config.head_dim, config.num_key_value_heads) == ("qwen3", 16, 2)


def test_both_say_the_same_tokens(tmp_path):
    source = write(tmp_path / "x.gguf", kind="F16")
    gguf_to_hf(source, tmp_path / "out")
    engine = EngineConfig(max_running_requests=1, max_model_len=64, chunked_prefill_size=32, warmup=False)
    said = []
    for path in (source, tmp_path / "out"):
        with LLM(path, engine=engine) as llm:
            (output,) = llm.generate(["hello world"], SamplingParams(temperature=0, max_tokens=8))
            said.append(output.completions[0].token_ids)
    assert said[0] == said[1]


def test_without_a_tokenizer_only_on_request(tmp_path):
    config = hf_config()
    source = write_gguf(tmp_path / "x.gguf", config, random_tensors(config))
    with pytest.raises(ValueError, match="--skip-tokenizer converts the weights alone"):
        gguf_to_hf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    summary = gguf_to_hf(source, tmp_path / "out", skip_tokenizer=True)
    assert "no tokenizer" in summary.changes
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_rope_divisors_become_part_of_the_config(tmp_path):
    config = hf_config(vocab_size=len(VOCABULARY["tokenizer.ggml.tokens"]))
    extra = {"rope_freqs.weight": np.ones(4, np.float32)}
    source = write_gguf(tmp_path / "x.gguf", config, random_tensors(config), metadata=VOCABULARY, extra=extra)
    summary = gguf_to_hf(source, tmp_path / "out")
    assert "rope_freqs.weight" not in open_checkpoint(tmp_path / "out").shapes
    assert summary.num_tensors == len(random_tensors(config))


def test_other_input_is_refused(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    with pytest.raises(ValueError, match="is a Hugging Face folder already"):
        gguf_to_hf(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="dtype='int8' is not known; set one of float32, bfloat16, float16"):
        gguf_to_hf(write(tmp_path / "x.gguf"), tmp_path / "out", dtype="int8")
    tensors = random_tensors(config)
    tensors.pop("model.norm.weight")
    extra = {"strange.weight": np.ones(2, np.float32)}
    source = write_gguf(tmp_path / "y.gguf", config, tensors, metadata=VOCABULARY, extra=extra)
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight and has strange\.weight"):
        gguf_to_hf(source, tmp_path / "out")
