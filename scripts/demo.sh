#!/usr/bin/env bash
# Generates text with a small real model, plain and speculative, and compares the two: scripts/demo.sh [demo.py arguments]
# Makes .venv if it is missing and installs what it needs. PYTHON=... chooses the Python to make it with.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_environment demo
# The demo is meant for any laptop: the CPU, unless JAX_PLATFORMS names something else.
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec "$VENV_PYTHON" "$ROOT/scripts/demo.py" "$@"
