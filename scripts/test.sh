#!/usr/bin/env bash
# Runs the test suite: scripts/test.sh [pytest arguments]
# Makes .venv if it is missing and installs what the tests need. PYTHON=... chooses the Python to make it with.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_environment test
cd "$ROOT"
# Two processes, a class of tests or a file at a time: more would need more than the 8 GB of a small machine.
exec "$VENV_PYTHON" -m pytest --numprocesses 2 --dist loadscope "$@"
