"""`scripts/environment.sh`: what it says when there is no Python that it can use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def _run(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Runs `prepare_environment` of a bare checkout with PYTHON=python, from another working directory."""
    (checkout / "scripts").mkdir(exist_ok=True)
    shutil.copy(REPO / "scripts" / "environment.sh", checkout / "scripts")
    command = f'set -euo pipefail; source "{checkout}/scripts/environment.sh"; prepare_environment test'
    env = {**os.environ, "PYTHON": python}
    return subprocess.run(["bash", "-c", command], cwd="/", env=env, capture_output=True, text=True, check=False)


def _only_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    return line


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
    assert _only_line(done).startswith("error: there is no command 'no-such-python' here; install Python 3.11 or newer")
    assert "PYTHON=/path/to/python" in done.stderr


def test_missing_python_is_named_where_there_is_an_environment(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    done = _run(tmp_path, "no-such-python")
    assert done.returncode == 1
    assert _only_line(done).startswith("error: there is no command 'no-such-python' here; install")


def test_command_without_a_python_behind_it_is_named(tmp_path):
    shim = tmp_path / "python3.99"
    shim.write_text("#!/usr/bin/env bash\necho 'shim: python3.99: not found' >&2\necho more >&2\nexit 127\n")
    shim.chmod(0o755)
    done = _run(tmp_path, str(shim))
    assert done.returncode == 1
    assert f"'{shim}' does not run (shim: python3.99: not found); install Python" in _only_line(done)


def test_environment_without_a_python_is_to_be_removed(tmp_path):
    (tmp_path / ".venv").mkdir()
    done = _run(tmp_path, "")
    assert done.returncode == 1
    assert _only_line(done).endswith(f"; remove {tmp_path / '.venv'} to make it anew")


def test_old_python_is_refused_with_its_version(tmp_path):
    done = _run(tmp_path, _fake_python(tmp_path, venv_works=True, version="3.9.2"))
    assert done.returncode == 1
    assert "Python 3.9.2, and jaxspec needs Python 3.11 or newer; install" in _only_line(done)
    assert not (tmp_path / ".venv").exists()


def test_failed_venv_leaves_no_half_made_folder(tmp_path):
    done = _run(tmp_path, _fake_python(tmp_path, venv_works=False))
    assert done.returncode == 1
    assert "no ensurepip" in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()
