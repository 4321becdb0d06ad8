"""Damaged GGUF files: one line that names the file and what is wrong with it."""

import random
import re

import pytest

from jaxspec.loading import open_checkpoint
from jaxspec.loading.gguf_file import GGUFFile
from tests.loading.files import hf_config, random_tensors, write_gguf
from tests.loading.vocabularies import byte_level_keys, sentencepiece_keys


@pytest.mark.parametrize("keys", [byte_level_keys(), sentencepiece_keys()], ids=["bytes", "pieces"])
def test_a_damaged_gguf_file_is_one_line_that_names_it(tmp_path, keys):
    """Bytes of the header at random: the file reads as some model, or is refused; nothing else is raised."""
    config = hf_config(vocab_size=len(keys["tokenizer.ggml.tokens"]))
    path = write_gguf(tmp_path / "x.gguf", config, random_tensors(config), metadata=keys)
    whole, rng = path.read_bytes(), random.Random(0)
    header = min(tensor.offset for tensor in GGUFFile(path).tensors.values())
    refused = []
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(header)] = rng.choice([0, 1, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            open_checkpoint(path).load_tokenizer()
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(str(path) in message and "\n" not in message for message in refused)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.alignment": 0}, "general.alignment=0; expected a whole number above 0"),
        ({"general.alignment": "x"}, "general.alignment='x'; expected a whole number above 0"),
        ({"split.count": "x"}, "one of x parts"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id='x'; expected a token id"),
        ({"tokenizer.ggml.eot_token_id": 2**32 - 1}, "tokenizer.ggml.eot_token_id=4294967295; expected a token id"),
        ({"llama.attention.head_count": 3}, "num_heads=3 is not a multiple of num_kv_heads=2"),
        ({"llama.rope.freq_base": "x"}, "rope_theta='x'; expected a number"),
        ({"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens is not a list"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of the type"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges is not a list of the type"),
        ({"tokenizer.ggml.merges": ["h e", "he"]}, "tokenizer.ggml.merges has 'he ', which is not of its tokens"),
        ({"tokenizer.ggml.merges": ["h e", "z zz"]}, "tokenizer.ggml.merges has 'z zz', which is not of its tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 268 tokens"),
        ({"tokenizer.ggml.bos_token_id": 1.5}, "tokenizer.ggml.bos_token_id=1.5; expected a token id"),
        (
            {"tokenizer.ggml.bos_token_id": 999, "tokenizer.ggml.add_bos_token": True},
            "token id 999 has a role, and there are 268 tokens",
        ),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template=5; expected text"),
    ],
)
def test_a_damaged_key_of_a_gguf_file_is_named_with_the_file(tmp_path, changes, said):
    config, path = hf_config(), tmp_path / "x.gguf"
    write_gguf(path, config, random_tensors(config), metadata={**byte_level_keys(), **changes})
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        open_checkpoint(path).load_tokenizer()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
