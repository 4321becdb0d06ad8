"""Reads values of command-line flags; argparse names a reader in its messages."""

import argparse
from collections.abc import Callable
from typing import Any


def read_int(text: str) -> int:
    """Reads a number that fits into the device's 32 bits."""
    value = int(text)
    if not -(2**31) <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text} does not fit into 32 bits; the most is {2**31 - 1}")
    return value


read_int.__name__ = "int"  # argparse names the type in its message


def read_bool(text: str) -> bool:
    """Reads `true` or `false`."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def read_ints(text: str) -> list[int]:
    """Reads `1,4,16`."""
    try:
        return [read_int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,4,16") from None


def read_biases(text: str) -> dict[int, float]:
    """Reads `5:1.5,7:-2`."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {read_int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of biases such as 5:1.5,7:-2") from None


def or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a reader of a value or the word `none`."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else parse(text)

    read.__name__ = parse.__name__  # argparse names the type in its message
    return read


def read_literal(text: str) -> int | float | bool | str:
    """Reads a value of a flag whose type is not known here, so that SGLang's default is seen to be that."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            pass
    return text
