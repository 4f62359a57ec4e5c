"""The command line: help at every level, one line and an exit status for every mistake."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from moe_patch._version import __version__
from moe_patch.cli import CHECK_FAILED, INTERRUPTED, UNUSABLE, main
from moe_patch.train import run
from moe_patch.train.checks import Check
from tests.support import tiny_models
from tests.support.limits import HANG_S
from tests.support.train_nodes import TEXT, node

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config_file(tmp_path):
    """File of a valid configuration of a small run, with absolute paths."""
    (tmp_path / "text.txt").write_text(TEXT)
    source = {"source": str(tmp_path / "text.txt"), "block_size": 16}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(node(data=source, output_dir=str(tmp_path / "out"))))
    return path


def test_help_from_a_bare_source_tree_without_triton(tmp_path):
    """Print help with only PYTHONPATH pointing at the package, and without triton."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "moe_patch", tmp_path / "src" / "moe_patch", ignore=skipped)
    code = (
        "import runpy, sys; sys.modules['triton'] = None; import moe_patch; "
        "print(moe_patch.__file__); sys.argv = ['moe_patch', '--help']; "
        "runpy.run_module('moe_patch', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "src" / "moe_patch"))
    assert re.search(r"^ +train +fine-tune", done.stdout, re.MULTILINE)


def test_no_command_prints_help_and_version(capsys):
    assert main([]) == 0
    assert "usage: moe-patch" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"moe-patch {__version__}\n"


USAGE_MISTAKES = [
    # (arguments, what stderr must say, whose help it names)
    (["nonsense"], "invalid choice: 'nonsense'", "moe-patch --help"),
    (["inspect"], "required: MODEL", "moe-patch inspect --help"),
    (["verify", "x", "--dtype", "int8"], "invalid choice: 'int8'", "moe-patch verify --help"),
    (["warmup", "x", "--tokens", "a"], "invalid int value: 'a'", "moe-patch warmup --help"),
    (["replay", "x", "--fast"], "unrecognized arguments: --fast", "moe-patch --help"),
]


@pytest.mark.parametrize(("argv", "message", "see"), USAGE_MISTAKES, ids=lambda v: str(v)[:20])
def test_a_command_line_that_cannot_be_read_is_one_line(capsys, argv, message, see):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == UNUSABLE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moe-patch: error: ")
    assert message in err
    assert err.endswith(f"; see {see}\n")
    assert err.count("\n") == 1


MISTAKES = [
    # (arguments after the configuration, what stderr must say)
    (["--set", "trainin.max_steps=3"], "did you mean 'training'?"),
    (["--set", "training.max_step=3"], "did you mean 'max_steps'?"),
    (["--set", "training"], "--set training: expected KEY=VALUE"),
    (["--set", "training=[1"], "--set training: while parsing"),
    (["--set", "seed.x=1", "--set", "seed=1"], "seed is 0; expected a mapping"),
    (["--set", "data=nowhere.txt"], "data: no such file: nowhere.txt"),
    (["--set", "moe_patch={backend: cuda}"], "backend is 'cuda'; accepted:"),
    (["--set", "seed=-1"], "seed is -1; accepted: 0 to"),
    (["--set", "tiny=true", "--set", "tiny_values={training: null}"], "training is None"),
    (["--set", "training.learning_rate=-1"], "training.learning_rate is -1; at least 0"),
    (["--set", f"seed={2**64}"], f"seed is {2**64}; accepted: 0 to"),
    (["--set", f"training.data_seed={2**64}"], f"data_seed is {2**64}; accepted: 0 to"),
    (["--set", "training.data_seed=-1"], "data_seed is -1; accepted: 0 to"),
    (["--set", "training.per_device_train_batch_size=0"], "batch_size is 0; at least 1"),
    (["--set", "training.eval_strategy=steps"], "eval_dataset"),
    (["--set", "training.report_to=nobody"], "training: nobody is not supported"),
    (["--set", "model.hidden_act=nothing"], "cannot make 'qwen3_moe': no 'nothing' is known"),
    (["--set", "model.attn_implementation=flash_attention_2"], "cannot make 'qwen3_moe': Flash"),
    (["--set", "model.num_attention_heads=0"], "cannot make 'qwen3_moe'"),
    (["--output-dir", "/"], "output_dir /: name a folder"),
    (["--output-dir", "FILE/out"], "cannot be written"),
    (["--output-dir", "TAKEN"], "is not empty"),
    (["--output-dir", "TAKEN", "--overwrite"], "left alone"),
]


@pytest.mark.parametrize(("extra", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_mistake(config_file, tmp_path, capsys, extra, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").touch()
    if "seed.x=1" in extra:
        config_file.write_text(config_file.read_text() + "seed: 0\n")
    places = {"FILE": str(tmp_path / "text.txt"), "TAKEN": str(tmp_path / "taken")}
    for name, place in places.items():
        extra = [item.replace(name, place) for item in extra]
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(config_file), *extra]) == UNUSABLE
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("moe-patch: error: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_of_remote_code_and_a_broken_file(config_file, tmp_path, monkeypatch, capsys):
    """Exit with an error, never with a prompt to run the code or a traceback."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    about = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(about))
    tiny_models.config("qwen3_moe").save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors at all")
    for folder, said in (("own", "contains custom code"), ("broken", "deserializing header")):
        argv = ["train", str(config_file), "--set", f"model={tmp_path / folder}"]
        assert main(argv) == UNUSABLE
        err = capsys.readouterr().err
        assert err.startswith(f"moe-patch: error: model: cannot make '{tmp_path / folder}': ")
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_train_then_overwrite(config_file, tmp_path, capsys):
    command = ["train", str(config_file), "--set", "training.max_steps=1"]
    assert main(command) == 0
    assert main(command) == UNUSABLE
    assert main([*command, "--overwrite"]) == 0
    assert "results: " in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.yaml", "out", "text.txt"]


def test_failed_check_is_status_1(config_file, tmp_path, monkeypatch, capsys):
    bad = run.RunResult(tmp_path, {}, [Check("logits", 0.5, 1e-4), Check("fine", 0.0, 1e-4)])
    monkeypatch.setattr(run, "run", lambda config, overwrite: bad)
    assert main(["train", str(config_file)]) == CHECK_FAILED
    err = capsys.readouterr().err
    assert "failed: logits: 5.0e-01 relative (limit 1e-04)" in err
    assert "fine" not in err


def test_interrupt_is_status_130(config_file, monkeypatch, capsys):
    def interrupt(config, overwrite):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupt)
    assert main(["train", str(config_file)]) == INTERRUPTED
    assert capsys.readouterr().err == "moe-patch: interrupted\n"


def test_pinned_tools_are_the_same_everywhere():
    """The linter of the pre-commit hooks is the one of the extra `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {d for d in project["optional-dependencies"]["dev"] if d.startswith("ruff==")}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    used = {
        dependency
        for repo in hooks["repos"]
        for hook in repo["hooks"]
        for dependency in hook.get("additional_dependencies", [])
    }
    assert used == pinned
    assert {repo["repo"] for repo in hooks["repos"]} == {"local"}
