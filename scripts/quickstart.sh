#!/usr/bin/env bash
# Run the main job on a bare machine: make an environment, then train LoRA on a tiny patched model.
# Usage: bash scripts/quickstart.sh [options of `python -m moe_patch train`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env/python.sh
install_moe_patch train
# The model is tiny: a second thread gains a fifth, and loses all of it on a busy machine.
exec env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    "$venv_python" -m moe_patch train configs/quickstart.yaml --overwrite "$@"
