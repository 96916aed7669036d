#!/usr/bin/env bash
# A short Python suite with the extension under AddressSanitizer and UndefinedBehaviorSanitizer.
#   run_under_asan.sh PYTHON BUILD_DIR
# The build goes to a folder of its own; the editable install's finder is put aside, so that this build is imported.
set -euo pipefail
python=$1
target=$2
"$python" -m pip install --quiet --no-deps --upgrade --target "$target" \
  --config-settings=cmake.define.JMO_SANITIZE=address --config-settings=build-dir=build/asan-wheel .
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  "$python" - "$target" <<'PYTHON'
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path[:0] = [sys.argv[1]]
import jax_mlp_offload
import pytest

assert jax_mlp_offload.__file__.startswith(sys.argv[1]) or sys.argv[1] in jax_mlp_offload.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_smoke.py"]))
PYTHON
