"""Values of a config.json, each of the type that it should have; null counts as absent. Imports no jax."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

_Value = TypeVar("_Value", int, float)


def read_number(values: Mapping[str, Any], name: str, kind: type[_Value], *, default: _Value | None = None) -> _Value:
    """values[name] as an int or float.

    Raises:
        ValueError: it is something else, or absent without a default.
    """
    value = read_optional(values, name, kind)
    if value is not None:
        return value
    if default is None:
        raise ValueError(f"the model's config lacks {name!r}.")
    return default


def read_optional(values: Mapping[str, Any], name: str, kind: type[_Value]) -> _Value | None:
    """values[name] as an int or float, None where it is absent."""
    value = values.get(name)
    if value is not None and not _is_number(value, kind):
        raise _unexpected(name, value, "a whole number" if kind is int else "a number")
    return None if value is None else kind(value)


def read_switch(values: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """values[name] as a bool."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise _unexpected(name, value, "true or false")
    return default if value is None else value


def read_text(values: Mapping[str, Any], name: str) -> str | None:
    """values[name] as a string, None where it is absent."""
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise _unexpected(name, value, "a string")
    return value


def read_object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """values[name] as a mapping, empty where it is absent."""
    value = values.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise _unexpected(name, value, "an object, or null")
    return {} if value is None else value


def read_names(values: Mapping[str, Any], name: str) -> list[str]:
    """values[name] as a list of strings, empty where it is absent."""
    value = values.get(name)
    if value is not None and not (_is_list(value) and all(isinstance(part, str) for part in value)):
        raise _unexpected(name, value, "a list of names")
    return [] if value is None else list(value)


def read_ints(values: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """values[name] as a tuple of ints, None where it is absent."""
    value = values.get(name)
    if value is not None and not (_is_list(value) and all(_is_number(part, int) for part in value)):
        raise _unexpected(name, value, "a list of whole numbers")
    return None if value is None else tuple(map(int, value))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_number(value: object, kind: type[int] | type[float]) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and (kind is float or value == int(value))
    except OverflowError:  # an integer that no float holds
        return False


def _unexpected(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"the model's config has {name}={value!r}; expected {expected}.")
