"""Tokenizers: text and chats to ids and back, without surprises, and fingerprints that tell tables apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.loading.gguf_tokenizer import build_tokenizer, special_tokens
from jaxspec.tokenizer import Tokenizer
from tests.loading.vocabularies import (
    BYTES,
    CHAT,
    MERGED,
    MERGES,
    SPECIAL,
    TEXTS,
    byte_level,
    byte_level_keys,
    from_metadata,
)


def test_a_character_split_over_tokens_is_whole_when_decoded_together():
    tokenizer = byte_level()
    ids = tokenizer.encode("🎉")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "🎉"
    assert "\ufffd" in tokenizer.decode(ids[:2])


def test_special_tokens_are_one_token_and_can_be_skipped():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|start|>he<|stop|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>he<|stop|>"


def test_ids_beyond_the_vocabulary_decode_to_nothing():
    tokenizer = byte_level()
    assert tokenizer.decode([*tokenizer.encode("he"), tokenizer.vocab_size, 10**6]) == "he"


def test_spaces_are_never_cleaned_up():
    tokenizer = byte_level()
    text = "he said , ' no ' . do n't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_goes_through_the_template_without_a_second_bos():
    tokenizer = from_metadata(byte_level_keys(add_bos_token=True), chat_template=CHAT)
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "u", "content": "hello"}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|start|>u:hello<|stop|><|start|>a:"


def test_chat_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="no chat template"):
        byte_level().encode_chat([{"role": "user", "content": "x"}])
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = from_metadata(byte_level_keys(), chat_template=template)
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="needs 'role' and 'content'"):
        tokenizer.encode_chat([{"content": "x"}])


def test_fingerprints_tell_tables_and_merges_apart():
    base = byte_level().fingerprint
    tokens = byte_level_keys()["tokenizer.ggml.tokens"]
    swapped = [*tokens[:-2], tokens[-1], tokens[-2]]
    assert byte_level().fingerprint == base
    assert byte_level(tokens=swapped).fingerprint != base
    assert byte_level(merges=MERGES[::-1]).fingerprint != base


def write_folder(folder: Path) -> PreTrainedTokenizerFast:
    """The same vocabulary as `byte_level_keys`, as Hugging Face stores it."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *BYTES, *MERGED])}
    backend = Backend(models.BPE(vocab=vocab, merges=[(a, b) for a, b in (merge.split(" ") for merge in MERGES)]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|stop|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return fast


def test_a_folder_and_a_gguf_file_of_one_model_agree(tmp_path):
    write_folder(tmp_path)
    folder, file = Tokenizer.from_folder(tmp_path), from_metadata(byte_level_keys(), chat_template=CHAT)
    assert folder.fingerprint == file.fingerprint
    assert folder.vocab_size == file.vocab_size
    assert folder.eos_token_ids == file.eos_token_ids == (2,)
    for text in TEXTS:
        assert folder.encode(text) == file.encode(text)
        assert folder.decode(folder.encode(text), False) == text
    chat = [{"role": "u", "content": "hello"}]
    assert folder.encode_chat(chat) == file.encode_chat(chat)


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_tokenizer_json_decides_whatever_class_the_config_names(tmp_path, named, pre):
    keys = byte_level_keys(pre, add_bos_token=True)
    backend = build_tokenizer(keys, "x.gguf")
    PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens(keys)).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": named, "add_bos_token": True}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    folder, file = Tokenizer.from_folder(tmp_path), from_metadata(keys)
    for text in (*TEXTS, "120 2024 café"):
        assert folder.encode(text) == file.encode(text)
    assert folder.encode("he").count(1) == 1
    assert folder.fingerprint == file.fingerprint


def test_a_folder_without_a_readable_tokenizer_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer .* skip_tokenizer_init=True"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path)
    for text in ("{oops", "{}", '{"model": {"type": "Mystery"}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=r"the tokenizer of .* cannot be read"):
            Tokenizer.from_folder(tmp_path)


def test_importing_the_tokenizer_loads_neither_jax_nor_transformers():
    code = "import sys, jaxspec.tokenizer; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_building_a_tokenizer_says_nothing(tmp_path):
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from jaxspec.tokenizer import Tokenizer; from pathlib import Path\n"
        "Tokenizer.from_folder(Path(sys.argv[1])).encode('x ' * 10000)"
    )
    write_folder(tmp_path)
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (done.stdout, done.stderr) == ("", "")
