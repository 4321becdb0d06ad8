"""Switches among the environment variables."""

from collections.abc import Mapping


def is_on(env: Mapping[str, str], name: str, choice: str) -> bool:
    """Reads a variable that turns off what is on where it is unset or empty.

    Args:
        env: the environment.
        name: of the variable.
        choice: what its values mean, for the error: "set 1 for ... or 0 for ...".

    Raises:
        ValueError: its value is neither yes nor no.
    """
    text = env.get(name, "").strip().lower()
    if text in ("", "1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name}={env[name]!r} is neither yes nor no; {choice}.")
