"""The settings of a run, kept in its folder, so that it goes on with them or not at all."""

import json
from pathlib import Path
from typing import Any


def keep_settings(file: Path, settings: dict[str, Any]) -> None:
    """Writes a run's settings into its folder, which is made; a folder that has some must have the same.

    Args:
        file: a JSON file in the folder.
        settings: JSON values.

    Raises:
        FileExistsError: the folder holds something else.
        ValueError: the settings there are others, or damaged.
    """
    folder = file.parent
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(settings))  # as they are when they are read back
    if not file.is_file():
        if any(folder.iterdir()):
            raise FileExistsError(f"{folder} holds files and no {file.name}; give an empty or new folder.")
        new = file.with_suffix(".new")
        new.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(file)
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); give another folder.") from None
    _check_same(before, settings, file)


def _check_same(before: dict[str, Any], now: dict[str, Any], file: Path) -> None:
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            _check_same(old, new, file)
        elif old != new:
            raise ValueError(
                f"{file.parent} is of a run with {name}={old!r}, and {name}={new!r} is set; set it as before, or give "
                "another folder."
            )
