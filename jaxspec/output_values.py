"""Completions as JSON values."""

import dataclasses
from typing import Any

from jaxspec.outputs import Completion


def completion_values(completion: Completion) -> dict[str, Any]:
    """Everything but the timings."""
    names = [field.name for field in dataclasses.fields(completion) if field.name != "timings"]
    values = {name: getattr(completion, name) for name in names}
    return {**values, "logprobs": completion.logprobs and [dataclasses.asdict(entry) for entry in completion.logprobs]}
