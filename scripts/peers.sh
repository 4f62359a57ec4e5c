#!/usr/bin/env bash
# Prepare the benchmark's third-party peers for a machine that may be offline.
#
#   bash scripts/peers.sh download [DIR]   fetch and pack, on a machine with a package index
#   bash scripts/peers.sh unpack [DIR]     lay out DIR/site, on the machine with the GPU
#   bash scripts/peers.sh                  both
#
# DIR is .peers (ignored by git). Copy DIR/packed, under 64 MB, between the two machines.
# The packages are for CPython 3.12 on x86-64 Linux with CUDA 13. They run beside this library and
# are never part of it. PYTHON names the interpreter (python3), which needs pip and, to download,
# setuptools and wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTHON="${PYTHON:-python3}"
readonly WHEELS=(
  sonic-moe==0.1.2.post1
  quack-kernels==0.3.11
  apache-tvm-ffi==0.1.9
  torch-c-dlpack-ext==0.1.5
  nvidia-cutlass-dsl==4.4.2
  liger-kernel==0.8.5
)
# Its wheel alone is 78 MB; xz with the x86 filter and a dictionary as large as the files makes it 44.
readonly CUTLASS_LIBS=nvidia-cutlass-dsl-libs-cu13==4.4.2
# Its wheel has a library per CUDA version, 43 MB in all.
readonly BITSANDBYTES=bitsandbytes==0.50.2
readonly BITSANDBYTES_LIBS=cuda130
readonly AXOLOTL=axolotl==0.19.0
# The files of axolotl that hold scattermoe and its LoRA kernels, all marked Apache-2.0. The packages'
# own __init__ files are left out, so that importing the kernels does not import axolotl.
readonly KERNELS=axolotl/integrations/kernels/libs/scattermoe_lora
readonly KERNEL_FILES=(
  parallel_experts.py parallel_linear_lora.py mx_weights.py
  kernels/__init__.py kernels/ops.py kernels/lora_ops.py kernels/grouped_gram.py kernels/single.py
)

fetch_wheel() { # REQUIREMENT FOLDER
  local platforms=() n
  for n in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${n}_x86_64"); done
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 --dest "$2" "$1"
}

download() { # DIR
  local packed="$1/packed" work file
  work="$(mktemp -d)"
  trap 'rm -rf "$work"' RETURN
  rm -rf "$packed"
  mkdir -p "$packed"
  for requirement in "${WHEELS[@]}"; do
    echo "peers: $requirement"
    fetch_wheel "$requirement" "$packed"
  done
  echo "peers: $CUTLASS_LIBS (repacking takes a few minutes)"
  fetch_wheel "$CUTLASS_LIBS" "$work"
  "$PYTHON" -m zipfile -e "$work"/nvidia_cutlass_dsl_libs*.whl "$work/libs"
  tar -C "$work/libs" -c . | xz --x86 --lzma2=preset=9,dict=256MiB >"$packed/cutlass_libs.tar.xz"
  echo "peers: $BITSANDBYTES with its $BITSANDBYTES_LIBS library"
  fetch_wheel "$BITSANDBYTES" "$work"
  mkdir "$work/bnb"
  "$PYTHON" -m zipfile -e "$work"/bitsandbytes-*.whl "$work/bnb"
  find "$work/bnb" -name 'libbitsandbytes_*.so' ! -name "*_$BITSANDBYTES_LIBS.so" ! -name '*_cpu.so' \
    -delete
  tar -C "$work/bnb" -cJf "$packed/bitsandbytes.tar.xz" .
  echo "peers: the scattermoe files of $AXOLOTL"
  "$PYTHON" -m pip download --quiet --no-deps --no-binary=:all: --no-build-isolation \
    --dest "$work" "$AXOLOTL"
  mkdir "$work/axolotl"
  tar -C "$work/axolotl" --strip-components=2 -xzf "$work"/axolotl-*.tar.gz
  for file in "${KERNEL_FILES[@]}"; do
    head -5 "$work/axolotl/$KERNELS/$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || {
      echo "peers: $file of $AXOLOTL is not marked Apache-2.0; not taken" >&2
      return 1
    }
  done
  tar -C "$work/axolotl" -cJf "$packed/scattermoe.tar.xz" "${KERNEL_FILES[@]/#/$KERNELS/}"
  du -sh "$packed"
}

unpack() { # DIR
  local packed="$1/packed" site="$1/site" archive
  [[ -d "$packed" ]] || { echo "peers: no $packed; run 'download' first" >&2; return 1; }
  rm -rf "$site"
  mkdir -p "$site"
  for archive in "$packed"/*.whl; do "$PYTHON" -m zipfile -e "$archive" "$site"; done
  for archive in "$packed"/*.tar.xz; do tar -C "$site" -xJf "$archive"; done
  echo "peers: $site is ready"
}

case "${1:-all}" in
  download) download "${2:-.peers}" ;;
  unpack) unpack "${2:-.peers}" ;;
  all) download .peers && unpack .peers ;;
  *) echo "usage: bash scripts/peers.sh [download [DIR] | unpack [DIR]]" >&2; exit 2 ;;
esac
