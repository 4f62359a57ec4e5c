"""Training runs that end early: refused by name, and the files left on disk."""

import dataclasses
import importlib.util
import re
import sys

import pytest
import torch

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.train import liger, run
from moe_patch.train.adapters import add_adapters
from moe_patch.train.build import training_arguments
from tests.support import tiny_models, window
from tests.support.train_nodes import node, small


def test_every_target_of_a_list_has_to_be_somewhere(tmp_path, text_file):
    """Require every target of a list to exist; PEFT accepts a list if one exists."""
    lora = node()["lora"]
    for changed, said in (
        ({"target_modules": ["q_proj", "qq_proj"]}, "target_modules: 'qq_proj' is nowhere; did"),
        ({"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.dwn_proj"]},
         "target_parameters: 'mlp.experts.dwn_proj' is nowhere; did you mean 'down_proj'?"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedOptionError, match=re.escape(said)):
            run.run(small(tmp_path, text_file, lora=lora | changed))
    assert not (tmp_path / "out").exists()


def fake_liger(tmp_path, monkeypatch, *known):
    """Install a fake liger-kernel that lists some model types and has no kernel."""
    folder = tmp_path / "site" / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    table = dict.fromkeys(known)
    (folder / "monkey_patch.py").write_text(f"MODEL_TYPE_TO_APPLY_LIGER_FN = {table}")
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_liger_that_cannot_run_is_refused_before_anything_loads(tmp_path, text_file, monkeypatch):
    config = small(tmp_path, text_file, liger=True)
    args = training_arguments(config, tmp_path)
    assert (args.use_liger_kernel, args.liger_kernel_config) == (True, {"swiglu": False})
    assert not training_arguments(small(tmp_path, text_file), tmp_path).use_liger_kernel
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOptionError, match="liger: liger-kernel is not installed"):
        run.run(config)
    monkeypatch.undo()
    fake_liger(tmp_path, monkeypatch, "qwen3_moe")
    with pytest.raises(UnsupportedOptionError, match="liger: its kernels need a GPU, found cpu"):
        run.run(config)
    training = config.training | {"use_liger_kernel": True}
    with pytest.raises(UnsupportedOptionError, match=r"^training\.use_liger_kernel: `liger: true`"):
        run.run(dataclasses.replace(config, training=training))
    assert not (tmp_path / "out").exists()


def test_a_model_that_liger_would_leave_alone_is_refused(tmp_path, monkeypatch):
    fake_liger(tmp_path, monkeypatch, "qwen3_moe")
    liger.check_liger(torch.device("cuda"), {})
    liger.check_liger_knows("qwen3_moe")
    with pytest.raises(UnsupportedOptionError, match="does nothing for model type 'doge'"):
        liger.check_liger_knows("doge")


@window.old_names
def test_old_names_of_experts_are_targets_as_peft_reads_them():
    """Modules of one expert each, in releases of transformers before the experts were stacked."""
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = add_adapters(tiny_models.build("qwen3_moe"), {"r": 2, "target_modules": names}, seed=0)
    assert model.peft_config["default"].target_parameters == {"gate_up_proj", "down_proj"}


def test_refused_model_leaves_nothing(tmp_path, text_file):
    """Raise an error before the first step for a dense model: nothing to patch."""
    dense = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    config = small(tmp_path, text_file, model=dense, lora=None)
    with pytest.raises(UnsupportedModelError):
        run.run(config)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_interrupted_training_leaves_nothing(tmp_path, text_file, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train_once", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.run(small(tmp_path, text_file))
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_a_check_that_breaks_does_not_cost_what_was_trained(
    tmp_path, text_file, monkeypatch, capsys
):
    def broken(*args, **kwargs):
        raise KeyError("of another library")

    monkeypatch.setattr(run.checks, "reload_unpatched", broken)
    with pytest.raises(KeyError):
        run.run(small(tmp_path, text_file))
    kept = tmp_path / ".out.partial" / "adapter"
    assert f"the trained weights are kept in {kept.parent}" in capsys.readouterr().err
    assert (kept / "adapter_model.safetensors").is_file()
    with pytest.raises(UnsupportedOptionError, match="weights of an interrupted run; move them"):
        run.run(small(tmp_path, text_file))
    assert (kept / "adapter_model.safetensors").is_file()


def test_smk_without_a_trained_router_is_refused_in_words(tmp_path, text_file):
    with pytest.raises(UnsupportedOptionError, match="smk: no router is trained"):
        run.run(small(tmp_path, text_file, smk={"target": "surprise"}))
    measured = run.run(small(tmp_path, text_file, smk={"target": "surprise", "weight": 0}))
    assert len(measured.trained["patched"].losses) == 3


Q_PROJ = {"target_modules": ["q_proj"]}
BAD_BUILDS = [
    ({"lora": {"target_modules": ["nope"]}}, "lora: "),
    (
        {"lora": {**Q_PROJ, "modules_to_save": "lm_head"}},
        "modules_to_save is 'lm_head'; expected a",
    ),
    (
        {"lora": {**Q_PROJ, "modules_to_save": ["lm_haed"]}},
        "'lm_haed' is nowhere; did you mean",
    ),
    ({"lora": {**Q_PROJ, "exclude_modules": ["zzz"]}}, "lora.exclude_modules: 'zzz' is nowhere"),
    (
        {"lora": {**Q_PROJ, "bias": False}},
        "lora.bias is False; expected 'none' or 'all'",
    ),
    (
        {
            "training": {
                "per_device_train_batch_size": 9999,
                "dataloader_drop_last": True,
                "max_steps": 2,
                "use_cpu": True,
                "disable_tqdm": True,
            }
        },
        "training: there is no step to train",
    ),
    (
        {"training": {"num_train_epochs": 0, "use_cpu": True, "disable_tqdm": True}},
        "training: there is no step to train",
    ),
    ({"smk": {"ce": -1}}, "smk.ce is -1; accepted: a finite number >= 0"),
    ({"smk": {"weight": float("nan")}}, "smk.weight is nan"),
    ({"smk": {"kl": float("inf")}}, "smk.kl is inf"),
    ({"lora": {"r": 0, "target_modules": ["q_proj"]}}, "lora: "),
    ({"model": {"path": "./no_such_folder"}, "tokenizer": "train"}, "model: cannot make"),
    ({"tokenizer": "./no_such_folder"}, "tokenizer: cannot load"),
    ({"model": {"model_type": "qwen3_moe", "hidden_size": "wide"}}, "model: cannot make"),
    ({"model": {"model_type": "qwen3_moe", "vocab_size": 10}}, "vocabulary of 10 is smaller"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BUILDS, ids=[m for _, m in BAD_BUILDS])
def test_bad_build_leaves_nothing(tmp_path, text_file, change, message):
    if isinstance(change.get("model"), dict) and "model_type" in change["model"]:
        change = {"model": {**node()["model"], **change["model"]}}
    with pytest.raises(UnsupportedOptionError) as caught:
        run.run(small(tmp_path, text_file, **change))
    assert message in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]
