"""The launch lines of configs/accelerate/, as written there, with the training command."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch as launcher

from tests.support.dist_helpers import needs_cards
from tests.support.limits import HANG_S
from tests.support.train_nodes import TEXT, node
from tests.support.window import resumed_ddp_cpu

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "configs" / "accelerate"


def launch(folder, launch_file, lora=True, compare=True, program="moe_patch", more=None, **options):
    """Run steps of the small node in new processes; return output, run.json and losses.

    ``options`` are the node's training, ``more`` its other keys.
    """
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    training = {**node()["training"], "max_steps": 2, **options}
    source = {"source": str(folder / "text.txt"), "block_size": 16}
    changes = {"compare_unpatched": compare, **(more or {})} | ({} if lora else {"lora": None})
    config = node(data=source, training=training, output_dir=str(folder / "out"), **changes)
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    command = ["-m", "accelerate.commands.launch", "--config_file", str(launch_file)]
    command += ["--main_process_port", "0", "-m", program, "train", str(folder / "c.yaml")]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    record = json.loads((folder / "out" / "run.json").read_text())
    assert all(check["passed"] for check in record["checks"])
    with (folder / "out" / "losses.csv").open(newline="") as file:
        losses = {int(row["step"]): float(row["loss_patched"]) for row in csv.DictReader(file)}
    return done.stdout, record, losses


def train(folder, launcher, lora=True, **options):
    """Train two steps, with and without the patch, and return the output."""
    shown, record, _ = launch(folder, launcher, lora, **options)
    assert shown.count("results: ") == shown.count("softmax_topk") == 1
    # Checks: equal losses, and equal logits of the saved model, reloaded without a patch.
    assert len(record["checks"]) == 3
    return shown


def resume(folder, launcher, lora=True, **options):
    """Repeat two of three steps, from the checkpoint after the first."""
    options |= {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    _, _, whole = launch(folder / "whole", launcher, lora, compare=False, **options)
    options["resume_from_checkpoint"] = str(folder / "whole" / "out/checkpoints/checkpoint-1")
    _, _, rest = launch(folder / "rest", launcher, lora, compare=False, **options)
    assert list(whole) == [1, 2, 3]
    assert rest == pytest.approx({step: whole[step] for step in (2, 3)}, rel=1e-6)


def need_deepspeed(name):
    if name == "zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


def test_accelerate_starts_two_processes_for_ddp_cpu():
    """For MULTI_CPU it starts one, whatever num_processes says."""
    given = ["--config_file", str(LAUNCH / "ddp_cpu.yaml"), "x.py"]
    args, *_ = launcher._validate_launch_command(launcher.launch_command_parser().parse_args(given))
    assert (args.multi_gpu, args.num_processes) == (True, 2)


@pytest.mark.slow
def test_ddp_cpu_on_two_processes(tmp_path):
    train(tmp_path, LAUNCH / "ddp_cpu.yaml")


@pytest.mark.gpu
@needs_cards(2)
@pytest.mark.parametrize("what", ["full", "lora"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_two_cards(tmp_path, name, what):
    need_deepspeed(name)
    shown = train(tmp_path, LAUNCH / f"{name}.yaml", what == "lora", use_cpu=False)
    assert " triton " in shown


@pytest.mark.gpu
@needs_cards(2)
@pytest.mark.parametrize("what", ["full", "lora"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_resumed_on_two(tmp_path, name, what):
    need_deepspeed(name)
    resume(tmp_path, LAUNCH / f"{name}.yaml", what == "lora", use_cpu=False)


def zero3_of_a_cpu(folder):
    """Write the file with the CPU as device: DeepSpeed's collectives then run on gloo."""
    need_deepspeed("zero3")
    config = yaml.safe_load((LAUNCH / "zero3.yaml").read_text())
    (folder / "zero3.yaml").write_text(yaml.safe_dump(config | {"use_cpu": True}))
    return folder / "zero3.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_zero3_on_two_processes_of_a_cpu(tmp_path, lora):
    train(tmp_path, zero3_of_a_cpu(tmp_path), lora)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [pytest.param("ddp", "lora", marks=resumed_ddp_cpu), ("zero3", "full"), ("zero3", "lora")],
)
def test_resumed_by_processes_of_a_cpu(tmp_path, name, what):
    launcher = zero3_of_a_cpu(tmp_path) if name == "zero3" else LAUNCH / "ddp_cpu.yaml"
    resume(tmp_path, launcher, what == "lora")
