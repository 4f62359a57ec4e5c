#!/usr/bin/env bash
# Run CUDA's memory checker over the kernels. First run it over a kernel that reads, and one that
# writes, past its tensor: a checker that misses those would prove nothing.
# Usage: bash scripts/tiles/memcheck.sh [tests...]     (tests/kernels/test_canaries.py)
# Do not use it for tests of torch's memory cache, which is off here. Put options of pytest into
# PYTEST_ADDOPTS.
# SANITIZER names compute-sanitizer if it is not on the PATH, TOOL one of its tools (memcheck), and
# PYTHON the interpreter (python3). Status 1 if the checker finds anything or a test fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly python="${PYTHON:-python3}" tool="${TOOL:-memcheck}" found=99
sanitizer="${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}"
[[ -x "$sanitizer" ]] || { echo "memcheck: no compute-sanitizer at $sanitizer: name it in SANITIZER"; exit 2; }
# Without torch's cache each tensor is an allocation of its own, so the checker can see its end.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 HF_HUB_OFFLINE=1 PYTHONPATH="${PYTHONPATH:-.}"

check() { "$sanitizer" --tool "$tool" --error-exitcode "$found" --print-limit 20 "$python" "$@"; }

if [[ "$tool" == memcheck ]]; then
  for stray in read write; do
    status=0
    said="$(check tests/support/memcheck_control.py "$stray" 2>&1)" || status=$?
    if ! ((status == found)) || ! grep -q "Invalid __global__ $stray" <<<"$said"; then
      echo "memcheck: the checker missed a stray $stray (status $status):"
      echo "$said"
      exit 1
    fi
  done
  echo "memcheck: a stray read and a stray write are found"
fi
(($#)) || set -- tests/kernels/test_canaries.py
check -m pytest -q -m gpu -p no:cacheprovider "$@" || { echo "memcheck: FAILED"; exit 1; }
