"""The card of a trained head: what it is, and how it was made."""

import dataclasses
import json
from typing import Any


def model_card(head: Any, objective: Any, settings: Any, data: dict[str, Any], epochs: int) -> str:
    """Markdown for README.md beside the weights.

    Args:
        head, objective, settings: dataclasses of the run.
        data: what was trained on: "examples", "answer_tokens", "draft_vocab", "coverage", "layers".
        epochs: passes done.
    """
    values = {name: dataclasses.asdict(part) for name, part in (("head", head), ("objective", objective))}
    values["training"] = dataclasses.asdict(settings)
    return f"""# EAGLE-3 head for {head.model}

A draft head for speculative decoding, trained with jaxspec by training-time test (EAGLE-3, arXiv 2503.01840).

- Reads the outputs of layers {", ".join(map(str, data["layers"]))} of the target (0-based), and chooses from
  {data["draft_vocab"]} tokens, which are {data["coverage"]:.2%} of what the target wrote in the training text.
- Trained on {data["examples"]} texts with {data["answer_tokens"]} tokens that the target wrote, {epochs} epochs.

```json
{json.dumps(values, indent=2, ensure_ascii=False)}
```
"""
