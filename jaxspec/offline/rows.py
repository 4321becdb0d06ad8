"""A line of a batch file: a prompt, how it is continued, and the name that its answer gets."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxspec.call import Prompt
from jaxspec.offline import openai_batch
from jaxspec.sampling_params import UNSUPPORTED, SamplingParams

PROMPT_FIELDS = ("prompt", "messages", "prompt_ids")
_PARAMS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


class Reading(NamedTuple):
    """How the lines of a file are read.

    Attributes:
        params: of rows that do not say otherwise.
        field: which field holds the prompt; None looks for one of `PROMPT_FIELDS`.
        copied: fields that are copied into the output row.
        is_chat: whether a text is a user's message, after `system` where there is one.
    """

    params: SamplingParams
    field: str | None = None
    copied: Collection[str] = ()
    is_chat: bool = False
    system: str | None = None


class Name(NamedTuple):
    """Which row it is."""

    id: str | int  # as the row gives it, or "line-N"
    is_openai: bool = False

    @property
    def key(self) -> str:
        """What must not come twice: 7 and "7" are one name."""
        return str(self.id)

    def as_output(self) -> dict[str, Any]:
        """The beginning of its output row."""
        return {openai_batch.ID if self.is_openai else "id": self.id}


class Row(NamedTuple):
    """A row that can be asked."""

    name: Name
    prompt: Prompt
    params: SamplingParams
    copied: Mapping[str, Any]
    kind: openai_batch.Kind | None  # None: not of the OpenAI batch format

    @property
    def size(self) -> int:
        """About how long the prompt is, to sort by; characters and ids are not the same, and need not be."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(str(part)) if isinstance(part, dict) else 4 for part in self.prompt)


def name_of(line: bytes, number: int) -> Name:
    """The name of a line, whatever else is wrong with it."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # also what is not UTF-8, or nested too deeply to be read
        values = None
    if not isinstance(values, dict):
        return Name(f"line-{number}")
    is_openai = openai_batch.ID in values or "body" in values
    given = values.get(openai_batch.ID if is_openai else "id")
    if isinstance(given, str) or (isinstance(given, int) and not isinstance(given, bool) and not is_openai):
        return Name(given, is_openai)
    return Name(f"line-{number}", is_openai)


def read_row(line: bytes, number: int, reading: Reading) -> Row:
    """The row in a line.

    Raises:
        ValueError: it is not a JSON object, or a field is missing, unknown, or has a value that cannot be.
        TypeError: a value has the wrong type.
    """
    name = name_of(line, number)
    try:
        values = json.loads(line)
    except RecursionError:
        raise ValueError(f"line {number} is nested too deeply to be read; give a flat object.") from None
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON ({error}); each line must be one JSON object.") from None
    if not isinstance(values, dict):
        raise ValueError(f"line {number} is a {type(values).__name__}; each line must be one JSON object.")
    if name.is_openai:
        kind, prompt, asked = openai_batch.read_request(values, number)
        return Row(name, _check(prompt, number), _params(reading.params, asked, number, name), {}, kind)
    if "id" in values and name.id != values["id"]:
        raise TypeError(f"line {number} has id={values['id']!r}; give a string or an integer, or leave it out.")
    fields = PROMPT_FIELDS if reading.field is None else (reading.field,)
    found = [field for field in fields if field in values]
    if len(found) != 1:
        raise ValueError(
            f"line {number} has {' and '.join(found) or 'no prompt'}; give one of {', '.join(fields)}, "
            f"beside {sorted(set(values) - set(fields))}."
        )
    if found == ["messages"] and not isinstance(values["messages"], list):
        raise TypeError(f"line {number} has messages={values['messages']!r}; give a list of chat messages.")
    prompt = _in_chat(_check(values.pop(found[0]), number), reading)
    copied = {field: values.pop(field) for field in reading.copied if field in values}
    values.pop("id", None)
    return Row(name, prompt, _params(reading.params, values, number, name), copied, None)


def _check(prompt: Any, number: int) -> Any:
    """Returns what may be one prompt; what is in a list is checked when it is encoded."""
    if not isinstance(prompt, str | list):
        raise TypeError(f"line {number} has a prompt of {prompt!r}; give a string, token ids or chat messages.")
    return prompt


def _in_chat(prompt: Any, reading: Reading) -> Any:
    """A text as a user's message, where that is wanted."""
    if not reading.is_chat or not isinstance(prompt, str):
        return prompt
    system = [] if reading.system is None else [{"role": "system", "content": reading.system}]
    return [*system, {"role": "user", "content": prompt}]


def _params(defaults: SamplingParams, asked: Mapping[str, Any], number: int, name: Name) -> SamplingParams:
    """The row's own parameters over the defaults; each row has a seed of its own."""
    unknown = sorted(set(asked) - _PARAMS - set(UNSUPPORTED))
    if unknown:
        raise ValueError(
            f"line {number} has {', '.join(map(repr, unknown))}, which is no field of a prompt and no setting of "
            "SamplingParams; leave it out, or name it as one to be copied."
        )
    seed = seed_of(defaults.seed, name.key)
    # Built anew, so that a setting that is refused by name is refused here as well.
    values = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    asked = {key: _with_ids(value) if key == "logit_bias" else value for key, value in asked.items()}
    return SamplingParams(**{**values, "seed": seed, **asked})


def _with_ids(bias: Any) -> Any:
    """An object's keys as the token ids that they spell: in JSON they are strings."""
    if not isinstance(bias, dict) or not all(key.isascii() and key.isdecimal() for key in bias):
        return bias
    return {int(key): value for key, value in bias.items()}


def seed_of(seed: int | None, key: str) -> int:
    """A row's seed: it depends on nothing that was answered before the row, or with it."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(errors="surrogatepass"), digest_size=8).digest())
