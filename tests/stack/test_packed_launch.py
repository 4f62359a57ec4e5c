"""``accelerate launch`` with configs/accelerate/fsdp2.yaml and packed experts: losses and resume.

Rank 0 reads the checkpoint, accelerate sends it; the file is changed only to use the CPU.
"""

from __future__ import annotations

import pytest
import yaml
from safetensors.torch import load_file

from moe_patch.train.config import make_config
from moe_patch.train.run import run
from tests.stack.test_launch import LAUNCH, launch
from tests.support.dist_helpers import needs_cards
from tests.support.numerics import FP32, assert_close
from tests.support.quant_models import build
from tests.support.train_nodes import node

FILE, ADAPTER = LAUNCH / "fsdp2.yaml", "out/adapter/adapter_model.safetensors"


def check(folder, launch_file, **launched):
    """Compare two processes with one, and steps after a resume with the same steps before."""
    build(num_experts=5, output_router_logits=False, vocab_size=300).save_pretrained(folder / "5")
    more = {"model": {"path": str(folder / "5"), "dtype": "float32"}, "quantize_experts": "nf4"}
    options = {
        "max_steps": 3, "gradient_checkpointing": True, "save_strategy": "steps", "save_steps": 1,
        "report_to": "none", "use_cpu": "program" in launched,
        # With its usual 1e-8, Adam makes full steps of gradients that are rounding errors.
        "adam_epsilon": 1e-3,
    }  # fmt: skip
    launched |= {"more": more, "compare": False, "per_device_train_batch_size": 2}
    shown, record, losses = launch(folder / "two", launch_file, **launched, **options)
    assert "quantize_experts: nf4" in (folder / "two/c.yaml").read_text()
    assert len(record["checks"]) == 1
    data = {"source": str(folder / "two/text.txt"), "block_size": 16}
    # One process may see one card alone, and the losses of a CPU are as good.
    training = {**node()["training"], **options, "per_device_train_batch_size": 4, "use_cpu": True}
    one = node(data=data, training=training, output_dir=str(folder / "one/out"), **more)
    expected = run(make_config(one | {"compare_unpatched": False})).trained["patched"].losses
    assert losses == pytest.approx(expected, rel=1e-5)
    of_one, of_two = (load_file(folder / name / ADAPTER) for name in ("one", "two"))
    assert of_one.keys() == of_two.keys()
    for name, value in of_one.items():
        assert_close(of_two[name], value, FP32, name)
    options["resume_from_checkpoint"] = str(folder / "two/out/checkpoints/checkpoint-1")
    *_, rest = launch(folder / "rest", launch_file, **launched, **options)
    assert rest == pytest.approx({step: losses[step] for step in (2, 3)}, rel=1e-6)


@pytest.mark.slow
def test_two_processes_of_a_cpu(tmp_path):
    config = yaml.safe_load(FILE.read_text()) | {"use_cpu": True}
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(config))
    check(tmp_path, tmp_path / "fsdp2.yaml", program="tests.support.fsdp_on_cpu")


@pytest.mark.gpu
@needs_cards(2)
def test_two_cards(tmp_path):
    check(tmp_path, FILE)
