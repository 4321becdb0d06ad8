"""What an error says."""

import pytest


def assert_says(error: pytest.ExceptionInfo[Exception], *parts: str):
    message = str(error.value)
    assert "\n" not in message, "one line"
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
