"""The launch line of configs/accelerate/ddp_cpu.yaml, as written there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.train_nodes import TEXT, node

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_accelerate_launch_on_two_cpu_processes(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    source = {"source": str(tmp_path / "text.txt"), "block_size": 16}
    options = {**node()["training"], "max_steps": 2}
    config = node(data=source, training=options, output_dir=str(tmp_path / "out"))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    launcher = ROOT / "configs" / "accelerate" / "ddp_cpu.yaml"
    command = ["-m", "accelerate.commands.launch", "--config_file", str(launcher)]
    command += ["--main_process_port", "0", "-m", "moe_patch", "train", str(tmp_path / "c.yaml")]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results: ") == done.stdout.count("softmax_topk") == 1
    assert all(
        c["passed"] for c in json.loads((tmp_path / "out" / "run.json").read_text())["checks"]
    )
