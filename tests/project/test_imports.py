"""The package from a source tree on PYTHONPATH, in a process without triton and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import moe_patch
from moe_patch._version import __version__
from tests.support.limits import HANG_S

ROOT = Path(moe_patch.__file__).parents[1]
PUBLIC = {
    "BlockReport",
    "FamilySpec",
    "MoePatchError",
    "PatchConfig",
    "PatchStateError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "patch_model",
    "patch_report",
    "patched",
    "register_family",
    "supported_model_types",
    "unpatch_model",
}


class Section(NamedTuple):
    """Exit status and output of one of SECTIONS."""

    status: int
    stdout: str
    stderr: str


RUN = """
import contextlib, io, json, sys, traceback
found = {}
for name, source in json.loads(sys.argv[1]).items():
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(compile(source, name, "exec"), {"__name__": name})
        except SystemExit as stopped:
            status = stopped.code or 0
        except Exception:
            traceback.print_exc()
            status = 1
    found[name] = status, out.getvalue(), err.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sections(tmp_path_factory) -> dict[str, Section]:
    """Run SECTIONS in order in one process: empty folder, unimportable triton, no visible GPU."""
    folder = tmp_path_factory.mktemp("bare")
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "triton.py").write_text("raise ImportError('triton is blocked in this test')\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON"))}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(blocked), str(ROOT)]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(SECTIONS)],
        env=env, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Section(*each) for name, each in found.items()}


def test_public_names():
    assert set(moe_patch.__all__) >= PUBLIC
    assert all(hasattr(moe_patch, name) for name in moe_patch.__all__)
    assert moe_patch.__version__ == __version__
    for error in (
        moe_patch.UnsupportedModelError,
        moe_patch.UnsupportedOptionError,
        moe_patch.PatchStateError,
    ):
        assert issubclass(error, moe_patch.MoePatchError)


IMPORT = """
import sys
import moe_patch
names = [name for name, module in sys.modules.items() if module is not None]
loaded = {name.partition(".")[0] for name in names}
print(moe_patch.__file__)
print(sorted(loaded & {"triton", "transformers", "peft", "accelerate"}))
print(sorted({"torch._dynamo", "torch.distributed.tensor"} & {*names}))
"""

COMMANDS = """
import runpy, sys
for arguments in (["--version"], ["--help"], []):
    sys.argv[1:] = arguments
    try:
        runpy.run_module("moe_patch", run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        assert not stopped.code, (arguments, stopped.code)
    print("END")
"""

ERROR = """
import runpy, sys
sys.argv[1:] = ["train", "missing.yaml"]
runpy.run_module("moe_patch", run_name="__main__", alter_sys=True)
"""

PATCH = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from moe_patch import UnsupportedOptionError, patch_model, patch_report, unpatch_model
config = Qwen3MoeConfig(
    vocab_size=16, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, head_dim=8,
    num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
)
model = Qwen3MoeForCausalLM(config)
ids = torch.arange(8)[None]
plain = model(ids, labels=ids)
patch_model(model)
ours = model(ids, labels=ids)
ours.loss.backward()
assert (ours.logits - plain.logits).norm() <= 1e-5 * plain.logits.norm()
assert all(p.grad is not None for p in model.parameters())
print(patch_report(model)[0].experts_backend)
unpatch_model(model)
try:
    patch_model(model, backend="triton")
except UnsupportedOptionError as error:
    print(error)
"""

# The first one sees what an import alone loads.
SECTIONS = {"import": IMPORT, "commands": COMMANDS, "error": ERROR, "patch": PATCH}


def test_import_loads_neither_triton_nor_transformers_nor_peft(sections):
    """Nor torch's compiler and its sharded tensors, which take longer than all else."""
    done = sections["import"]
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines() == [moe_patch.__file__, "[]", "[]"]


def test_command_line(sections):
    """Run the code of ``python -m moe_patch`` several times in one process."""
    done = sections["commands"]
    assert done.status == 0, done.stderr
    version, shown, nothing, rest = done.stdout.split("END\n")
    assert __version__ in version
    assert "train" in shown
    assert "train" in nothing
    assert not rest
    assert not done.stderr


def test_command_line_error_is_one_line_and_status_2(sections):
    done = sections["error"]
    assert done.status == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "missing.yaml" in done.stderr


def test_patching_works_and_triton_is_refused_by_name(sections):
    done = sections["patch"]
    assert done.status == 0, done.stderr
    backend, refusal = done.stdout.splitlines()
    assert backend == "torch"
    assert refusal.startswith("backend='triton' cannot hold: ")
