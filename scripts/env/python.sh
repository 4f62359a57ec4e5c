# quickstart.sh and test.sh source this; it makes or reuses .venv and installs this package into it.
# Needs Python >= 3.11 (with venv) and bash; sets venv_python.

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "moe_patch: no Python >= 3.11 found; install one, or name it: PYTHON=/path/to/python3.12" >&2
    return 1
}

has_nvidia_gpu() {
    compgen -G '/dev/nvidia[0-9]*' >/dev/null ||
        { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
}

# Print one line if pip is about to install CUDA packages on a machine that cannot use them.
warn_about_cuda() {
    local report
    report=$(mktemp)
    "$venv_python" -m pip install --dry-run --quiet --report "$report" "$@"
    "$venv_python" - "$report" "$0" <<'PY'
import json
import sys

report, script = sys.argv[1:]
with open(report, encoding="utf-8") as file:
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.load(file)["install"]}
cuda = sorted(name for name in found if name.startswith(("nvidia-", "cuda-")))
if cuda:
    print(
        f"moe_patch: no NVIDIA GPU here, but pip chose the CUDA build of torch {found.get('torch')} and will "
        f"download {len(cuda)} CUDA packages with it ({', '.join(cuda[:3])}, ...; several GB). For the small "
        f"CPU build stop now and run: PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheel index> bash {script} "
        "(a folder of wheels works too: PIP_FIND_LINKS=<folder>). Going on."
    )
PY
    rm -f "$report"
}

# install_moe_patch EXTRAS: do nothing if .venv already has this pyproject.toml with these extras.
install_moe_patch() {
    local extras=$1 venv=.venv python stamp wanted
    local -a what=(--disable-pip-version-check -e ".[$extras]")
    # The caller's PYTHONPATH or user site must not shadow the packages installed here.
    unset PYTHONPATH PYTHONHOME
    export PYTHONNOUSERSITE=1
    python=$(find_python)
    venv_python=$PWD/$venv/bin/python
    has_nvidia_gpu || what+=(-c scripts/env/constraints-cpu.txt)
    stamp=$venv/moe_patch_installed_${extras//,/_}
    wanted="$PWD ${what[*]} $(cksum <pyproject.toml) $(cksum <scripts/env/constraints-cpu.txt)"
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && "$venv_python" -c 'import moe_patch' 2>/dev/null; then
        return
    fi
    if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
        echo "moe_patch: making $venv with $("$python" --version)"
        if ! "$python" -m venv --clear "$venv"; then
            echo "moe_patch: $python cannot make a virtual environment (Debian: apt-get install python3-venv)" >&2
            return 1
        fi
    fi
    rm -f "$stamp"
    has_nvidia_gpu || warn_about_cuda "${what[@]}"
    echo "moe_patch: installing moe-patch[$extras] into $venv (the first time takes minutes)"
    "$venv_python" -m pip install --quiet "${what[@]}"
    echo "$wanted" >"$stamp"
}
