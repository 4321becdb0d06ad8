"""`scripts/environment.sh`: what it says when there is no Python that it can use."""

import os
import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def _run(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Runs `prepare_environment` of a bare checkout with PYTHON=python, from another working directory."""
    (checkout / "scripts").mkdir(exist_ok=True)
    shutil.copy(REPO / "scripts" / "environment.sh", checkout / "scripts")
    command = f'set -euo pipefail; source "{checkout}/scripts/environment.sh"; prepare_environment test'
    env = {**os.environ, "PYTHON": python}
    return subprocess.run(["bash", "-c", command], cwd="/", env=env, capture_output=True, text=True, check=False)


def _fake_python(folder: Path, *, venv_works: bool, version: str = "3.12.0") -> str:
    """A stand-in that is some version of Python, and whose `-m venv` leaves a folder behind and may then fail."""
    script = folder / "python"
    new_enough = int(version.split(".")[1]) >= 11
    script.write_text(
        "#!/usr/bin/env bash\n"
        f'case "$1" in\n  --version) echo "Python {version}" ;;\n  -c) exit {0 if new_enough else 1} ;;\n'
        f'  -m) mkdir -p "$3/bin"; echo "no ensurepip" >&2; exit {0 if venv_works else 1} ;;\nesac\n'
    )
    script.chmod(0o755)
    return str(script)


def test_missing_python_is_named(tmp_path):
    done = _run(tmp_path, "no-such-python")
    assert done.returncode == 1
    assert "no 'no-such-python' here; install Python 3.11 or newer" in done.stderr


def test_old_python_is_refused_with_its_version(tmp_path):
    done = _run(tmp_path, _fake_python(tmp_path, venv_works=True, version="3.9.2"))
    assert done.returncode == 1
    assert "Python 3.9.2, and jaxspec needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_failed_venv_leaves_no_half_made_folder(tmp_path):
    done = _run(tmp_path, _fake_python(tmp_path, venv_works=False))
    assert done.returncode == 1
    assert "no ensurepip" in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()
