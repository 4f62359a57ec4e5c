#!/usr/bin/env bash
# The main job on a bare machine: own environment, then LoRA on a tiny MoE model, patched.
# Usage: bash scripts/quickstart.sh [options of `python -m moe_patch train`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh
install_moe_patch train
exec "$venv_python" -m moe_patch train configs/quickstart.yaml --overwrite "$@"
