"""Text and chats to token ids and back."""

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.chat import as_template_messages

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

# A folder with none of these has no tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A model's tokenizer.

    Args:
        fast: a transformers tokenizer backed by the `tokenizers` library.
        eos_token_ids: ids that end a text; the tokenizer's own by default.
    """

    def __init__(self, fast: "PreTrainedTokenizerFast", *, eos_token_ids: Sequence[int] | None = None):
        self._fast = fast
        # Length is checked against the engine's limit, with an error; transformers would only log a warning.
        fast.model_max_length = 1 << 60
        own = fast.eos_token_id
        if eos_token_ids is None:
            eos_token_ids = [own] if isinstance(own, int) else []
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads the tokenizer files of a Hugging Face folder; nothing is downloaded and no code of it runs.

        Raises:
            FileNotFoundError: the folder has no tokenizer files.
            ValueError: they cannot be read, or only by a tokenizer without a fast version.
        """
        if not any((folder / name).is_file() for name in _FILES):
            raise FileNotFoundError(
                f"{folder} has no tokenizer ({', '.join(_FILES)}); add its files, or set skip_tokenizer_init=True to "
                "work on token ids."
            )
        with _quiet_import():
            from transformers import AutoTokenizer, PreTrainedTokenizerFast
        # tokenizer.json is the whole truth. AutoTokenizer builds the class that tokenizer_config.json names around its
        # vocabulary, and a "GPT2Tokenizer" (SmolLM2's) then lacks the digit rule that the file has.
        reader = PreTrainedTokenizerFast if (folder / _FILES[0]).is_file() else AutoTokenizer
        try:
            fast = reader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ValueError(f"the tokenizer of {folder} cannot be read: {error}") from error
        if not getattr(fast, "is_fast", False):
            raise ValueError(
                f"the tokenizer of {folder} ({type(fast).__name__}) has no fast version; add tokenizer.json."
            )
        return cls(fast)

    @classmethod
    def from_backend(
        cls,
        backend: "tokenizers.Tokenizer",
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> "Tokenizer":
        """Wraps a tokenizer built in memory.

        Args:
            backend: encodes and decodes.
            special_tokens: role to token, by transformers' names: bos_token, eos_token, ...
            chat_template: jinja2 text, None if there is none.
            eos_token_ids: ids that end a text; that of eos_token by default.
        """
        with _quiet_import():
            from transformers import PreTrainedTokenizerFast
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
        fast.chat_template = chat_template
        return cls(fast, eos_token_ids=eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokens that the model expects around it (often a bos).

        Raises:
            ValueError: the text has half of a surrogate pair, which no encoding has.
        """
        return list(self._fast.encode(_check_text(text)))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat, up to where the assistant's next message begins.

        Args:
            messages: each with "role" and "content". Content is a string, or parts {"type": "text", "text": ...} that
                are joined as they are.
            add_generation_prompt: whether that beginning is part of it.

        Raises:
            TypeError: a message, role or content has another type.
            ValueError: the model has no chat template, a message lacks something or is not text, or the template
                refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError("this model has no chat template; pass a string or token ids instead of messages.")
        chat = as_template_messages(messages)
        from jinja2 import TemplateError

        try:
            text = self._fast.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            said = " ".join(str(error).split())
            raise ValueError(f"the model's chat template refuses the messages: {said}") from error
        # The template writes every special token itself.
        return list(self._fast.encode(_check_text(str(text)), add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the vocabulary lacks (its padding) give nothing."""
        # Cleaning up would change spaces by what follows them: text streamed in pieces would differ.
        text = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def save(self, folder: Path, *, max_len: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which holds the chat template and `max_len`."""
        ours = self._fast.model_max_length
        self._fast.model_max_length = max_len
        try:
            self._fast.save_pretrained(str(folder), save_jinja_files=False)
        finally:
            self._fast.model_max_length = ours
        # transformers 5 writes a name that only it knows; this one every version reads, from tokenizer.json alone.
        path = folder / "tokenizer_config.json"
        said = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        said.pop("backend", None)
        path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._fast.get_vocab().values(), default=-1)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._fast.chat_template)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers with the same table of tokens and ids and the same merges, whatever their files.

        Padding of a model's embedding beyond the table plays no part.
        """
        table = sorted(self._fast.get_vocab().items(), key=lambda item: item[1])
        merges = json.loads(self._fast.backend_tokenizer.to_str())["model"].get("merges", [])
        text = json.dumps([table, [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]])
        return hashlib.sha256(text.encode()).hexdigest()


def _check_text(text: str) -> str:
    """Returns the text if UTF-8 has it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!r} at position {error.start}, half of a surrogate pair; remove it, or "
            'read the text with errors="replace".'
        ) from error
    return text


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Importing transformers without torch says so on stderr; here it is meant to be so."""
    logger = logging.getLogger("transformers")

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
