"""GGUF metadata of two small vocabularies, and tokenizers made of it."""

from typing import Any

from tokenizers import pre_tokenizers

from jaxspec.loading.gguf_tokenizer import build_tokenizer, special_tokens
from jaxspec.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = ["<|end|>", "<|start|>", "<|stop|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ċ Ċ", "2 0", "20 2", "h e", "l l", "he ll", "hell o", "Ġ w", "Ċ ĊĊ"]
MERGED = [merge.replace(" ", "") for merge in MERGES]
CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>a:{% endif %}"
)
TEXTS = [
    "",
    " ",
    "hello world",
    "\n\n1.",
    "2024",
    "naïve café",
    "日本語 🎉 ok",
    "<|start|>hi<|stop|>",
    "a  b\t\n c",
    "\x00\x7f",
]


def byte_level_keys(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary with a few merges."""
    tokens = [*SPECIAL, *BYTES, *MERGED]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL)),
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items() if value is not None}


def byte_level(pre: str = "smollm", **changes: Any) -> Tokenizer:
    return from_metadata(byte_level_keys(pre, **changes))


def from_metadata(metadata: dict[str, Any], chat_template: str | None = None) -> Tokenizer:
    return Tokenizer.from_backend(
        build_tokenizer(metadata, "x.gguf"), special_tokens=special_tokens(metadata), chat_template=chat_template
    )


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.encode(text)]


def sentencepiece_keys(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary: unknown, bos, eos, 256 bytes, characters, and pieces ranked by score."""
    characters = list("▁ehlowrd")
    merged = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "ld", "▁wor", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *merged]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-1000.0] * len(characters) + [-float(rank) for rank in range(len(merged))]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}
