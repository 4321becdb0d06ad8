"""Checks of single settings, shared by everything that takes settings from a user.

Each returns the value in its plain Python type (so that `numpy.int64(4)` becomes `4`), raises TypeError for a wrong
Python type and ValueError for a value out of range. Messages say the value, the limit and what to set.
"""

import math
import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

# What the device's integers hold.
MAX_INT32 = 2**31 - 1

_Kind = TypeVar("_Kind")


def check_instance(name: str, value: object, kind: type[_Kind], *, hint: str = "") -> _Kind:
    """Returns `value` if it is a `kind`; `hint` ends the message of one that is not."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        end = f"; {hint}." if hint else "."
        raise TypeError(f"{name}={value!r} must be {article} {kind.__name__}, not {type(value).__name__}{end}")
    return value


def check_bool(name: str, value: object) -> bool:
    """Returns `value`; only True and False pass, so that the string "false" is not taken for true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}.")
    return value


def check_int(name: str, value: object, *, low: int, high: int | None = None, hint: str = "") -> int:
    """Returns `value` as an int in [low, high]; `hint` ends the message of a value out of range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}.")
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={number} must be {limit}" + (f"; {hint}." if hint else "."))
    return number


def is_token_id(value: object) -> bool:
    """Whether it can be a token of some vocabulary; files are asked this, so that only plain integers are."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT32


def check_real(name: str, value: object) -> float:
    """Returns `value` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}.")
    try:
        number = float(value)
    except OverflowError:  # an integer that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} must be a finite number; leave it out for the default.")
    return number


def check_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Returns `value` if it is one of `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, not {type(value).__name__}.")
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; set one of {', '.join(choices)}.")
    return value


def check_path(name: str, value: object, *, hint: str = "leave it out if there is none") -> str:
    """Returns a path or name as a string that is not empty; `hint` ends the message of an empty one."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} must be a path, not {type(value).__name__}.")
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise ValueError(f"{name}={path!r} must be a path that is not empty; {hint}.")
    if "\0" in path:
        raise ValueError(f"{name}={path!r} holds a NUL, which no path can; {hint}.")
    return path


def check_ints(name: str, values: object, *, low: int) -> tuple[int, ...]:
    """Returns the distinct members of a sequence of ints, each at least `low`, in the order given."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r} must be a sequence of integers, not {type(values).__name__}.")
    return tuple(dict.fromkeys(check_int(f"{name}[{i}]", value, low=low) for i, value in enumerate(values)))


def check_sequences(name: str, values: object) -> tuple[tuple[int, ...], ...]:
    """Returns the distinct members of a sequence of sequences of token ids, none of them empty."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r} must be a sequence of sequences of integers, not {type(values).__name__}.")
    found: dict[tuple[int, ...], None] = {}
    for i, sequence in enumerate(values):
        if isinstance(sequence, (str, bytes)) or not isinstance(sequence, Iterable):
            raise TypeError(f"{name}[{i}]={sequence!r} must be a sequence of integers, not {type(sequence).__name__}.")
        tokens = tuple(check_int(f"{name}[{i}][{j}]", token, low=0) for j, token in enumerate(sequence))
        if not tokens:
            raise ValueError(f"{name}[{i}] is empty; give each at least one token id.")
        found[tokens] = None
    return tuple(found)


def _pairs(name: str, values: object, what: str) -> list[tuple[Any, Any]]:
    """The items of a mapping, or of a sequence of pairs."""
    items = list(values.items()) if isinstance(values, Mapping) else values
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise TypeError(f"{name}={values!r} must be a mapping of {what}, not {type(values).__name__}.")
    pairs: list[tuple[Any, Any]] = []
    for item in items:
        if isinstance(item, (str, bytes)) or not isinstance(item, Sequence) or len(item) != 2:
            raise TypeError(f"{name}={values!r} must be a mapping of {what}; {item!r} is no pair of these.")
        pairs.append((item[0], item[1]))
    return pairs


def check_biases(name: str, values: object, most: float) -> tuple[tuple[int, float], ...]:
    """Returns a mapping of token ids to numbers from -most to most as pairs, sorted by id."""
    found: dict[int, float] = {}
    for key, value in _pairs(name, values, "token ids to numbers"):
        token, bias = check_int(f"{name} key", key, low=0), check_real(f"{name}[{key}]", value)
        if abs(bias) > most:
            raise ValueError(f"{name}[{token}]={bias} must be from -{most:g} to {most:g}.")
        found[token] = bias
    return tuple(sorted(found.items()))


def check_arguments(name: str, values: object) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Returns a mapping of names to sequences of numbers as pairs, sorted by name; a sequence of names gives none."""
    if not isinstance(values, (str, bytes, Mapping)) and isinstance(values, Iterable):
        values = [(item, ()) if isinstance(item, str) else item for item in values]
    found: dict[str, tuple[float, ...]] = {}
    for key, numbers_ in _pairs(name, values, "names to sequences of numbers"):
        if not isinstance(key, str):
            raise TypeError(f"{name} key {key!r} must be a string, not {type(key).__name__}.")
        if isinstance(numbers_, (str, bytes)) or not isinstance(numbers_, Iterable):
            kind = type(numbers_).__name__
            raise TypeError(f"{name}[{key!r}]={numbers_!r} must be a sequence of numbers, not {kind}.")
        found[key] = tuple(check_real(f"{name}[{key!r}][{i}]", number) for i, number in enumerate(numbers_))
    return tuple(sorted(found.items()))


def check_functions(name: str, values: object) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Returns a mapping of names to functions as pairs, in its order."""
    for key, value in (pairs := _pairs(name, values, "names to functions")):
        if not isinstance(key, str) or not callable(value):
            raise TypeError(f"{name} has {key!r}: {value!r}; give a name (a string) and a function.")
    return tuple(dict(pairs).items())


def check_strings(name: str, values: object) -> tuple[str, ...]:
    """Returns the distinct members of a string, or of a sequence of strings, none of them empty."""
    if isinstance(values, str):
        values = (values,)
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r} must be a string or a sequence of strings, not {type(values).__name__}.")
    strings = tuple(values)
    for i, string in enumerate(strings):
        if not isinstance(string, str):
            raise TypeError(f"{name}[{i}]={string!r} must be a string, not {type(string).__name__}.")
        if not string:
            raise ValueError(f"{name}[{i}]='' is empty and would stop every text at once; leave it out.")
    return tuple(dict.fromkeys(strings))


def check_optional_ints(settings: object, lows: Mapping[str, int], hint: str, *, high: int | None = None) -> None:
    """Checks the named fields of a frozen dataclass that are not None against their least values, and `high`."""
    for name, low in lows.items():
        if getattr(settings, name) is not None:
            set_checked(settings, **{name: check_int(name, getattr(settings, name), low=low, high=high, hint=hint)})


def set_checked(settings: object, **values: object) -> None:
    """Writes checked values back into a frozen dataclass while it is being built."""
    for name, value in values.items():
        object.__setattr__(settings, name, value)
