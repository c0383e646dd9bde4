#!/bin/bash
# Runs the Python tests that drive the engine, under ASan and UBSan. The instrumented extension goes into a copy of the tree
# (build/asan/tree), so the ordinary one stays as it is and worker processes load the instrumented one too. Called by `make sanitize`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=$PWD/${VENV:-.venv}/bin/python
TREE=$PWD/build/asan/tree
SUBSET=${SANITIZE_TESTS:-tests/unit/engine_c tests/unit/workers tests/golden/test_parity_f32.py tests/golden/test_parity_cli.py tests/fault}
FLAGS="-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"

mkdir -p "$TREE"
for part in engine_c workers service ops proto colibri tests pyproject.toml Makefile; do
  [ ! -e "$part" ] || { rm -rf "${TREE:?}/$part"; cp -r "$part" "$TREE/"; }
done
cd "$TREE"
rm -f engine_c/_engine*.so
echo "asan: building the engine"
CC=gcc COLIBRI_CFLAGS=$FLAGS COLIBRI_LDFLAGS="-fsanitize=address,undefined" "$PYTHON" engine_c/build_engine.py

# Leaks are off: CPython never frees its interned objects. The runtime must come first in every process of the test.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export LD_PRELOAD
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$TREE PYTHONMALLOC=malloc COLIBRI_SANITIZER=asan  # tests with time limits read it
tests=()
for path in $SUBSET; do
  if [ -e "$path" ]; then tests+=("$path"); else echo "NOTE: no $path to run under sanitizers" >&2; fi
done
echo "asan: pytest ${tests[*]}"
# -p no:cacheprovider: the copy is thrown away. Time limits are for uninstrumented code; instrumented it is several times slower.
# Not here: what bounds or limits the memory of processes, which instrumented ones take several times as much of.
"$PYTHON" -m pytest -q -p no:cacheprovider -o timeout=600 "${tests[@]}" --ignore=tests/fault/test_soak.py \
  --deselect=tests/fault/test_front_end.py::test_a_worker_more_costs_at_most_25_mib
