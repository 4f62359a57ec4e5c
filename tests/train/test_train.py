"""Whole small runs of the training command."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

import moe_patch
from moe_patch import UnsupportedModelError
from moe_patch.tools.base_identity import known_base, read_record
from moe_patch.train import checks, data, run
from moe_patch.train.build import build_base
from moe_patch.train.config import load_config, make_config
from moe_patch.train.output import MARKER
from tests.support.limits import HANG_S
from tests.support.numerics import assert_close, rel_err
from tests.support.train_nodes import TEXT, node, small

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_quickstart_scaled_down(tmp_path, capsys):
    """Train the shipped configuration, all its targets included, at a fraction of its size."""
    config = load_config(
        QUICKSTART,
        {
            "model.num_hidden_layers": 2,
            "model.hidden_size": 32,
            "tokenizer": {"source": "train", "vocab_size": 400},
            "data.block_size": 32,
            "training.max_steps": 3,
            "training.disable_tqdm": True,
            "output_dir": str(tmp_path / "out"),
        },
    )
    result = run.run(config)
    assert result.failed == []
    assert [check.name for check in result.checks] == [
        "losses, steps 1-3, median",
        "losses, steps 1-3, largest",
        "logits, reloaded and unpatched",
    ]
    patched, unpatched = (result.trained[k].losses for k in ("patched", "unpatched"))
    assert list(patched) == list(unpatched) == [1, 2, 3]
    assert patched[1] != patched[2] != patched[3]
    names = {p.name for p in result.folder.iterdir()}
    assert {"adapter", "base", "losses.csv", MARKER} <= names
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    printed = capsys.readouterr().out
    megabytes = float(re.search(r"documents, ([\d.]+) M characters", printed)[1])
    assert 0.5 < megabytes < 5
    assert printed.count("softmax_topk") == 2
    assert "fused" in printed
    summary = json.loads((result.folder / MARKER).read_text())
    assert [row["tier"] for row in summary["patch"]] == ["full", "full"]


def test_saved_adapter_is_portable(tmp_path, text_file):
    """Load the adapter like another program: unlike its base, and equal when patched."""
    config = small(tmp_path, text_file)
    result = run.run(config)
    assert [check.name for check in result.checks] == ["logits, reloaded and unpatched"]
    adapter = result.folder / "adapter"
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    tokenizer = data.train_tokenizer([TEXT], 300)
    blocks = data.make_blocks([TEXT], tokenizer, 16)
    trained = checks.probe_logits(loaded, blocks)
    with loaded.disable_adapter():
        base = checks.probe_logits(loaded, blocks)
    assert not checks.check_logits(trained, base, torch.float32).passed
    moe_patch.patch_model(loaded)
    assert checks.check_logits(trained, checks.probe_logits(loaded, blocks), torch.float32).passed


def test_full_fine_tuning(tmp_path, text_file):
    config = small(tmp_path, text_file, lora=None, compare_unpatched=True)
    result = run.run(config)
    assert result.failed == []
    assert (result.folder / "model" / "model.safetensors").is_file()
    assert not (result.folder / "base").exists()


def test_router_losses_of_the_yaml_are_transformers_own(tmp_path, text_file):
    """Match the auxiliary loss of an unpatched transformers model by the key of the YAML file."""
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    theirs = {"model": {**node()["model"], **routers}, "moe_patch": False}
    losses = {}
    for name, changes in (
        ("ours", {"router_losses": {"load_balance": 0.3}}),
        ("with z", {"router_losses": {"load_balance": 0.3, "z": 0.1}}),
        ("none", {}),
        ("theirs", theirs),
    ):
        source = {"source": str(text_file), "block_size": 16}
        changed = node(data=source, lora=None, output_dir=str(tmp_path / name), **changes)
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(changed))
        result = run.run(load_config(tmp_path / "c.yaml"))
        assert result.failed == []
        (trained,) = result.trained.values()
        losses[name] = torch.tensor(list(trained.losses.values()))
    assert len(losses["theirs"]) == 3
    assert_close(losses["ours"], losses["theirs"], 1e-5)
    assert rel_err(losses["none"], losses["ours"]) > 1e-2, "the loss would not show"
    assert rel_err(losses["with z"], losses["ours"]) > 1e-3, "the z loss would not show"


def test_local_model_path(tmp_path, text_file):
    """Train on weights and tokenizer from a folder, as with a real checkpoint."""
    tokenizer = data.train_tokenizer([TEXT], 300)
    base = build_base(make_config(node()).model, tokenizer, seed=7)
    base.save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    config = small(tmp_path, text_file, model=str(tmp_path / "checkpoint"), tokenizer=None)
    result = run.run(config)
    assert result.failed == []
    saved = json.loads((result.folder / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "checkpoint")


def test_comparison_over_a_prefix_keeps_the_schedule(tmp_path, text_file):
    """Compare two of three steps; a shorter schedule would change the learning rate at step 1."""
    config = small(tmp_path, text_file, compare_unpatched=2)
    result = run.run(config)
    assert result.failed == []
    assert list(result.trained["unpatched"].losses) == [1, 2]
    assert list(result.trained["patched"].losses) == [1, 2, 3]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_mixed_precision_over_fp32_weights_passes_its_checks(tmp_path, text_file, lora):
    """Use bf16 limits: a trained model stays under autocast, which rounds its logits."""
    options = {**node()["training"], "bf16": True}
    changes = {} if lora else {"lora": None}
    config = small(tmp_path, text_file, training=options, compare_unpatched=True, **changes)
    result = run.run(config)
    assert result.failed == []
    assert [check.limit for check in result.checks] == [1e-2, 5e-2, 5e-2]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_resume_goes_on_where_the_checkpoint_was(tmp_path, text_file, lora):
    """Resume at the checkpoint and restore experts too; Trainer alone leaves them as built."""
    options = {**node()["training"], "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    changes = {} if lora else {"lora": None}
    whole = run.run(small(tmp_path, text_file, training=options, **changes))
    checkpoint = tmp_path / "checkpoint-2"
    (whole.folder / "checkpoints" / "checkpoint-2").rename(checkpoint)
    options["resume_from_checkpoint"] = str(checkpoint)
    rest = run.run(small(tmp_path, text_file, training=options, **changes), overwrite=True)
    assert list(rest.trained["patched"].losses) == [3, 4]
    for step, loss in rest.trained["patched"].losses.items():
        assert loss == pytest.approx(whole.trained["patched"].losses[step], rel=1e-6)


def test_adapters_note_their_base_and_do_not_resume_on_another(tmp_path, text_file):
    """A base that was drawn at random and saved beside the adapter, and one from a folder."""
    options = {**node()["training"], "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    first = run.run(small(tmp_path, text_file))
    assert read_record(first.folder / "adapter") == known_base(first.folder / "base")
    base, other = tmp_path / "base", tmp_path / "other"
    (first.folder / "base").rename(base)
    model = {"path": str(base)}
    tokenizer = {"source": str(base)}
    second = run.run(
        small(tmp_path, text_file, model=model, tokenizer=tokenizer, training=options),
        overwrite=True,
    )
    noted = read_record(second.folder / "adapter")
    assert noted == known_base(base)
    checkpoint = tmp_path / "checkpoint-2"
    (second.folder / "checkpoints" / "checkpoint-2").rename(checkpoint)
    assert read_record(checkpoint) == noted
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] *= 2
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    config = small(
        tmp_path, text_file, model={"path": str(other)}, tokenizer=tokenizer,
        training=options | {"resume_from_checkpoint": str(checkpoint)},
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"another base \(.*base\), not on .*other"):
        run.run(config, overwrite=True)
    assert read_record(second.folder / "adapter") == noted


def test_a_run_in_which_nothing_is_patched_does_not_say_so(tmp_path, text_file, capsys):
    options = {"exclude": "*", "strict": False}
    result = run.run(small(tmp_path, text_file, moe_patch=options, compare_unpatched=True))
    assert "moe_patch: 0 MoE blocks patched, 1 refused (" in capsys.readouterr().out
    assert list(result.trained) == ["unpatched"]


@pytest.mark.slow
def test_two_processes(tmp_path, text_file):
    """Print and write in one process only, with data parallelism on the CPU."""
    options = {**node()["training"], "ddp_backend": "gloo", "max_steps": 2}
    source = {"source": str(text_file), "block_size": 16}
    out = tmp_path / "out"
    changed = node(data=source, training=options, output_dir=str(out), compare_unpatched=True)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(changed))
    launch = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint"
    command = [*launch.split(), "127.0.0.1:0", "-m", "moe_patch", "train"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "c.yaml")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(QUICKSTART.parents[1])},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results: ") == done.stdout.count("softmax_topk") == 1
    assert json.loads((out / MARKER).read_text())["checks"][0]["passed"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.yaml", "out", "text.txt"]


def test_patch_off(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.setattr(run, "patch_model", None)
    result = run.run(small(tmp_path, text_file, moe_patch=False, compare_unpatched=True))
    assert list(result.trained) == ["unpatched"]
    assert "moe_patch: off" in capsys.readouterr().out


def test_checks_catch_a_wrong_patch(tmp_path, text_file, monkeypatch):
    """Fail the comparison for a patch that scales the experts' output by 1% (negative control)."""

    def wrong(model, config):
        moe_patch.patch_model(model, config)
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_hook(lambda m, args, out: out * 1.01)
        return model

    monkeypatch.setattr(run, "patch_model", wrong)
    result = run.run(small(tmp_path, text_file, compare_unpatched=True))
    median, _, logits = result.checks
    assert result.failed == [median, logits]
