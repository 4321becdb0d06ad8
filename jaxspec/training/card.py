"""The card of a trained draft: what it is, and how it was made."""

import json
from typing import Any


def model_card(kind: str, settings: dict[str, Any], about: dict[str, Any], epochs: int) -> str:
    """Markdown for README.md beside the weights.

    Args:
        kind: what the draft is.
        settings: of the run, by part; JSON values. settings["draft"]["model"] is the target.
        about: what it was trained on, and what was chosen.
        epochs: passes done.
    """
    chosen = "".join(f"- {name}: {json.dumps(value)}\n" for name, value in about.items())
    return f"""# {kind} for {settings["draft"]["model"]}

Drafts for speculative decoding; trained with jaxspec on text that the target wrote, {epochs} epochs.

{chosen}
```json
{json.dumps(settings, indent=2, ensure_ascii=False)}
```
"""
