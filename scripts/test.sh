#!/usr/bin/env bash
# Run linters, type checker, the site of the pages and the CPU tests on a bare machine, in their own
# environment. This leaves out tests marked `slow`; scripts/matrix.py runs them too, and so does this with -m "not gpu".
# Usage: bash scripts/test.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env/python.sh
install_moe_patch train,dev

failed=()
"$venv_python" -m ruff check . || failed+=("ruff check")
"$venv_python" -m ruff format --check . || failed+=("ruff format")
# Check cyclomatic complexity, including `and` and `or`.
"$venv_python" -m lizard moe_patch -l python -C 14 -w -W scripts/env/complexity_allowed.txt ||
    failed+=("complexity")
"$venv_python" -m mypy || failed+=("mypy")
env NO_MKDOCS_2_WARNING=1 "$venv_python" -m mkdocs build --strict --quiet || failed+=("mkdocs")
# Two workers with one thread each: more threads than cores make small tensors many times slower.
env HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 \
    "$venv_python" -m pytest -n 2 -m "not gpu and not slow" "$@" || failed+=("pytest")
if ((${#failed[@]})); then
    printf 'scripts/test.sh: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
