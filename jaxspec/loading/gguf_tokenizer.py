"""Builds a tokenizer from GGUF metadata with the `tokenizers` library.

Two kinds of vocabulary: "gpt2" (byte-level BPE with merges; `tokenizer.ggml.pre` says how text is cut first) and
"llama" (SentencePiece BPE with scores and byte tokens).
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxspec.checks import is_token_id

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# How Llama 3 and Qwen2 cut text before byte-level BPE; they differ in the length of a run of digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> family.
_PRE_TOKENIZERS = {
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "gpt-2": "gpt2",
}
_SPACE = "\u2581"  # SentencePiece's stand-in for a space


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that a GGUF file's `tokenizer.ggml.*` keys describe.

    Args:
        metadata: the file's keys and values.
        source: the file's name, for errors.

    Raises:
        ValueError: no vocabulary, one that is damaged, or a model or pre-tokenizer that is not known.
    """
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model = keys.get("model")
    if "tokens" not in keys or model not in ("gpt2", "llama"):
        raise ValueError(
            f"{source}: tokenizer model {model!r} is not supported; the known ones are 'gpt2' and 'llama'."
        )
    _check_vocabulary(keys, source)
    kinds = keys.get("token_type") or [1] * len(keys["tokens"])
    # Files pad the vocabulary to the embedding's size with tokens marked unused: text never becomes one.
    vocab = {token: index for index, (token, kind) in enumerate(zip(keys["tokens"], kinds)) if kind != _UNUSED}
    build = _byte_level_bpe if model == "gpt2" else _sentencepiece_bpe
    tokenizer = build(keys, vocab, source)
    for kind in (_CONTROL, _USER_DEFINED):
        special = kind == _CONTROL
        added = [token for token, of_kind in zip(keys["tokens"], kinds) if of_kind == kind]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in added])
    _add_ends(tokenizer, keys, source)
    return tokenizer


def _check_vocabulary(keys: Mapping[str, Any], source: str) -> None:
    """Raises ValueError, naming the key, for lists and ids of the wrong type or length."""
    num_tokens = len(keys["tokens"]) if isinstance(keys["tokens"], list) else 0
    for name, kind in {"tokens": str, "merges": str, "token_type": int, "scores": (int, float)}.items():
        values = keys.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ValueError(f"{source}: tokenizer.ggml.{name} is not a list of the type that it should have.")
        if name in ("token_type", "scores") and name in keys and len(values) != num_tokens:
            raise ValueError(f"{source}: tokenizer.ggml.{name} has {len(values)} entries for {num_tokens} tokens.")
    for name in (f"{role}_token_id" for role in ("bos", "eos", "unknown", "padding")):
        if keys.get(name) is not None and not is_token_id(keys[name]):
            raise ValueError(f"{source}: tokenizer.ggml.{name}={keys[name]!r}; expected a token id.")


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """The chat template, None if there is none.

    Raises:
        ValueError: it is no text.
    """
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template={template!r}; expected text.")
    return template


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that play a role, by transformers' names: bos_token, eos_token, unk_token, pad_token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, role in roles.items()}
    return {role: tokens[index] for role, index in found.items() if index is not None and index < len(tokens)}


def _byte_level_bpe(keys: Mapping[str, Any], vocab: dict[str, int], source: str) -> Tokenizer:
    pre = keys.get("pre")
    family = _PRE_TOKENIZERS.get(str(pre))
    if family is None:
        raise ValueError(
            f"{source}: pre-tokenizer {pre!r} is not supported; the known ones are {', '.join(_PRE_TOKENIZERS)}."
        )
    if "merges" not in keys:
        raise ValueError(f"{source} has a 'gpt2' vocabulary and no tokenizer.ggml.merges.")
    # Tokens are written in the byte alphabet, which has no space: the first one always parts the pair.
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in keys["merges"])]
    wrong = next((pair for pair in merges if not {*pair, "".join(pair)} <= vocab.keys()), None)
    if wrong is not None:
        raise ValueError(f"{source}: tokenizer.ggml.merges has {' '.join(wrong)!r}, which is not of its tokens.")
    # Llama 3 takes a whole word that is a token before it tries any merge.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=family == "llama3"))
    if family in ("smollm", "gpt2"):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        # Digits first: the byte-level pattern then sees "\n\n" without the "1." that follows, and keeps it whole.
        before = [pre_tokenizers.Digits(individual_digits=True)] if family == "smollm" else []
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pattern = _WORDS.replace("DIGITS", "{1,3}" if family == "llama3" else "")
        before = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(keys: Mapping[str, Any], vocab: dict[str, int], source: str) -> Tokenizer:
    if "scores" not in keys:
        raise ValueError(f"{source} has a 'llama' vocabulary and no tokenizer.ggml.scores.")
    unknown = keys.get("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, keys["scores"]),
            unk_token=None if unknown is None else _token(keys, unknown, source),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = keys.get("add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores best: every split of a token is a merge of its rank."""
    ranked = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_ends(tokenizer: Tokenizer, keys: Mapping[str, Any], source: str) -> None:
    """Makes encoding add the tokens that the file wants before and after a text."""
    # What a file that says nothing means: SentencePiece vocabularies and Llama 3 begin with bos.
    begins = keys["model"] == "llama" or _PRE_TOKENIZERS.get(str(keys.get("pre"))) == "llama3"
    bos = keys.get("bos_token_id") if keys.get("add_bos_token", begins) else None
    eos = keys.get("eos_token_id") if keys.get("add_eos_token", False) else None
    before, after = ([] if index is None else [(_token(keys, index, source), index)] for index in (bos, eos))
    if before or after:
        template = [token for token, _ in before] + ["$A"] + [token for token, _ in after]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=before + after)


def _token(keys: Mapping[str, Any], index: int, source: str) -> str:
    if index >= len(keys["tokens"]):
        raise ValueError(f"{source}: token id {index} has a role, and there are {len(keys['tokens'])} tokens.")
    return keys["tokens"][index]
