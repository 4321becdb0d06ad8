"""Checks of single settings, shared by everything that takes settings from a user.

Each returns the value in its plain Python type (so that `numpy.int64(4)` becomes `4`), raises TypeError for a wrong
Python type and ValueError for a value out of range. Messages say the value, the limit and what to set.
"""

import math
import numbers
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

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
