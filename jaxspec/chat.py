"""Chat messages as templates expect them: a role and a string of content."""

from collections.abc import Mapping, Sequence
from typing import Any


def as_template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, with content given in parts of text joined to one string; other keys stay as they are.

    Raises:
        TypeError: a message is no mapping, or its role or content has another type.
        ValueError: a message lacks its role or content, or has a part that is not text.
    """
    return [_as_template_message(message, f"chat message {index}") for index, message in enumerate(messages)]


def _as_template_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} is a {type(message).__name__}; give a dict with 'role' and 'content'.")
    for key in ("role", "content"):
        if key not in message:
            keys = ", ".join(map(repr, message)) or "nothing"
            raise ValueError(f"{name} needs 'role' and 'content'; it has {keys}.")
    if not isinstance(message["role"], str):
        raise TypeError(f"{name} has role={message['role']!r}; give a string, such as 'user'.")
    return {**message, "content": _text_of(message["content"], name)}


def _text_of(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise TypeError(f"{name} has content of type {type(content).__name__}; give a string.")
    return "".join(_text_of_part(part, name) for part in content)


def _text_of_part(part: object, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(
            f"{name} has a content part of type {kind!r}" + (" without its text" if kind == "text" else "") + "; "
            'give a string, or parts {"type": "text", "text": ...}.'
        )
    return text
