#!/usr/bin/env bash
# Run GPU tests and benchmarks in one go, on a card that is available for minutes. The tests come
# first, while compilers fill the caches beside them; then the benchmarks run alone on the machine.
# Usage: bash scripts/gpu.sh OUT_DIR [TEST_SECONDS [BENCH_SECONDS [pytest targets...]]]
# OUT_DIR gets tests.txt, tests.xml, warm.txt, bench.txt and the rows, one file per op. tests.txt has
# each outcome as it happens and all failures at the end, even if a limit interrupts pytest. COMMIT
# names the commit if the tree was copied without its .git; PYTHON names the interpreter (python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly out="${1:?usage: bash scripts/gpu.sh OUT_DIR [TEST_SECONDS [BENCH_SECONDS [targets...]]]}"
readonly test_seconds="${2:-300}" bench_seconds="${3:-300}" python="${PYTHON:-python3}"
shift $(($# < 3 ? $# : 3))
commit=()
[[ -z "${COMMIT:-}" ]] || commit=(--commit "$COMMIT")
export PYTHONPATH=.:scripts:benchmarks HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$out"

# A session of its own lets the kill below end workers that outlive a limit, before any timing.
limited() { # SECONDS LOG COMMAND...
  local seconds="$1" log="$2" leader status=0
  shift 2
  setsid timeout --signal=INT --kill-after=20 "$seconds" "$@" >"$log" 2>&1 &
  leader=$!
  wait "$leader" || status=$?
  kill -KILL -- "-$leader" 2>/dev/null || true
  return "$status"
}

[[ ! -d .peers/packed || -d .peers/site ]] || bash scripts/peers.sh unpack

limited "$test_seconds" "$out/warm.txt" nice "$python" scripts/bench.py all --preset h100 --warm-only \
  --warm-jobs $(($(nproc) / 3 + 1)) --warm-limit "$test_seconds" "${commit[@]}" &
warming=$!
tests=0
limited "$test_seconds" "$out/tests.txt" "$python" -m pytest -v -m gpu -n $(($(nproc) / 2 + 1)) \
  --tb=short --show-capture=no --junitxml="$out/tests.xml" "$@" || tests=$?
tail -n 3 "$out/tests.txt"
wait "$warming" || echo "gpu.sh: not everything was compiled ahead, see $out/warm.txt"

limited "$((bench_seconds + 10))" "$out/bench.txt" "$python" scripts/bench.py all --preset h100 \
  --rep 60 --total "$bench_seconds" --out-dir "$out" "${commit[@]}" ||
  echo "gpu.sh: the benchmarks ended early, see $out/bench.txt"
tail -n 3 "$out/bench.txt"
exit "$tests"
