#!/usr/bin/env bash
# Runs the test suite: scripts/test.sh [pytest arguments]
# Makes .venv if it is missing and installs what the tests need. PYTHON=... chooses the Python to make it with.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_environment test
cd "$ROOT"
exec "$VENV_PYTHON" -m pytest "$@"
