"""``moe-patch run -- COMMAND``: runs the command in this process, with the model patched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands import launch
from transformers import trainer

from moe_patch.cli import CHECK_FAILED, UNUSABLE, main
from moe_patch.integrations import commands
from moe_patch.patching import window
from tests.support import tiny_models
from tests.support.limits import HANG_S

TRAIN = """
import sys
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def main():
    model = AutoModelForCausalLM.from_pretrained("tiny")
    arguments = TrainingArguments("out", max_steps=1, report_to=[], use_cpu=True,
                                  save_strategy="no", disable_tqdm=True)
    ids = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    Trainer(model, arguments, train_dataset=ids).train()
    print("argv", sys.argv, "main", __name__)
    return STATUS

if __name__ == "__main__":
    sys.exit(main())
"""
PATCHED = "moe-patch run: 2 of 2 MoE blocks patched (2 full), experts on torch, LoRA none\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_models.build("qwen3_moe").save_pretrained(folder / "tiny")
    return folder


@pytest.fixture
def at(tiny, monkeypatch):
    """Return a folder that holds the model and is the working directory."""
    monkeypatch.chdir(tiny)
    return tiny


def state() -> tuple:
    return (
        list(trainer.DEFAULT_CALLBACKS), launch.launch_command, list(sys.argv), list(sys.path),
        sys.modules["__main__"],
    )  # fmt: skip


def run(*argv: str) -> int:
    """Run a command and return its exit status; the interpreter must be left unchanged."""
    before = state()
    try:
        return main(["run", *argv])
    finally:
        assert state() == before


def write(path: Path, status: str = "0", text: str = TRAIN) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace("STATUS", status))
    return path


def install(folder: Path, name: str, value: str) -> None:
    """Write a distribution with one console command, as pip installs it."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {value}\n")


def last_line(capfd) -> str:
    return capfd.readouterr().err.splitlines(keepends=True)[-1]


def test_a_script(at, capfd):
    write(at / "train.py")
    assert run("--set", "ties=torch", "--", "train.py", "--flag", "--", "x") == 0
    out, err = capfd.readouterr()
    assert err.endswith(PATCHED)
    assert "argv ['train.py', '--flag', '--', 'x'] main __main__" in out


def test_a_module(at, capfd):
    write(at / "package" / "job.py")
    assert run("--", "-m", "package.job", "a") == 0
    out, err = capfd.readouterr()
    assert err.endswith(PATCHED)
    assert f"argv ['{at}/package/job.py', 'a'] main __main__" in out


def test_a_console_command(at, capfd, monkeypatch):
    write(at / "lib" / "console_job.py", "3")
    install(at / "lib", "console-job", "console_job:main")
    monkeypatch.syspath_prepend(at / "lib")
    monkeypatch.setattr(sys, "path", [sys.path[1], *sys.path])  # the first is the command's folder
    assert run("--", "console-job", "a") == 3
    out, err = capfd.readouterr()
    assert err.endswith(PATCHED)
    assert "bin/console-job', 'a'] main console_job" in out


def test_nothing_patched_is_status_1(at, capfd):
    (at / "idle.py").write_text("print('done')\n")
    assert run("--", "idle.py") == CHECK_FAILED
    assert "nothing was patched: COMMAND built no transformers Trainer" in last_line(capfd)


def test_a_refused_model_alone_is_status_1(at, capfd):
    """Return status 1 without strict: the refused model is no error, but nothing is patched."""
    text = TRAIN.replace('AutoModelForCausalLM.from_pretrained("tiny")', "dense()").replace(
        "def main", "from transformers import LlamaConfig, LlamaForCausalLM\n\n"
        "def dense():\n    return LlamaForCausalLM(LlamaConfig(hidden_size=8, vocab_size=32,\n"
        "        intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))\n\ndef main",
    )  # fmt: skip
    write(at / "dense.py", text=text)
    with pytest.warns(UserWarning, match="no MoE block"):
        assert run("--set", "strict=false", "--", "dense.py") == CHECK_FAILED
    assert "nothing was patched" in last_line(capfd)


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(7)", 7), ("sys.exit()", CHECK_FAILED), ("sys.exit('no')", 1)]
)
def test_exit_codes_are_the_commands(at, capfd, end, status):
    (at / "ends.py").write_text(f"import sys\n{end}\n")
    assert run("--", "ends.py") == status
    assert ("no" in capfd.readouterr().err.splitlines()) == ("'no'" in end)


def test_exceptions_pass_through(at, capfd):
    (at / "fails.py").write_text("raise ValueError('of the command')\n")
    with pytest.raises(ValueError, match="of the command"):
        run("--", "fails.py")
    assert "nothing was patched" in last_line(capfd)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run"], "expected -- COMMAND"),
        (["run", "--", "no-such-command"], "'no-such-command' names 0 Python console commands"),
        (["run", "--", "absent.py"], "'absent.py' names 0"),
        (["run", "--", "-m"], "-m needs"),
        (["run", "--set", "tie=torch", "--", "x.py"], "did you mean 'ties'"),
        (["run", "--set", "ties", "--", "x.py"], "expected KEY=VALUE"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_one_line(at, capfd, argv, said):
    assert run(*argv[1:]) == UNUSABLE
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "handed"),
    [(["train.py", "x"], ["train.py", "x"]), (["-m", "package.job"], ["-m", "package.job"])],
    ids=["script", "module"],
)
def test_what_accelerate_launches_runs_under_the_command(at, monkeypatch, given, handed):
    """`trl sft` makes accelerate's launcher start its script in another process."""
    started = []
    monkeypatch.setattr(commands, "_LAUNCH", started.append)
    monkeypatch.setattr(launch, "launch_command", started.append)
    (at / "cli.py").write_text(
        "import sys\nfrom accelerate.commands.launch import launch_command, launch_command_parser\n"
        "launch_command(launch_command_parser().parse_args(sys.argv[1:]))\n"
    )
    assert run("--set", "ties=torch", "--", "cli.py", "--cpu", *given) == 0
    (args,) = started
    assert (args.module, args.training_script) == (True, "moe_patch")
    assert args.training_script_args == ["run", "--set", "ties=torch", "--", *handed]


SWIFT = """
import os
ROUTE_MAPPING = {"sft": "swift.cli.sft"}
cli_main = None
def use_torchrun():
    return "NPROC_PER_NODE" in os.environ
def parse_yaml_args(argv):
    argv[:1] = ["--from", argv[0]]
"""


def test_ms_swifts_command_runs_its_script_here(at, monkeypatch, capfd):
    """`swift sft FILE` reads the file and starts swift/cli/sft.py in another process."""
    package = at / "own" / "swift" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(SWIFT)
    (package / "sft.py").write_text(
        "import sys\nfrom transformers import trainer\nimport swift.trainers.patcher\n"
        "print(type(trainer.DEFAULT_CALLBACKS[-1]).__name__, sys.argv[1:])\nsys.exit(43)\n"
    )
    (package.parent / "trainers").mkdir()
    (package.parent / "trainers" / "patcher.py").write_text(
        "from transformers import trainer\ntrainer.DEFAULT_CALLBACKS = []\n"
    )
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", list(trainer.DEFAULT_CALLBACKS))
    install(at / "own", "swift", "swift.cli.main:cli_main")
    monkeypatch.setattr(sys, "path", [str(at / "own"), str(at / "own"), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["run", "--", "swift", "sft", "x.yaml", "--model", "tiny"]) == 43
    assert capfd.readouterr().out == "RunCallback ['--from', 'x.yaml', '--model', 'tiny']\n"
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert run("--", "swift", "sft", "x.yaml") == UNUSABLE
    assert "--external_plugins" in capfd.readouterr().err
    for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
        sys.modules.pop(name)


def launched(at, *command: str) -> subprocess.CompletedProcess[str]:
    """Two processes of accelerate's launcher, on the CPU."""
    root = Path(__file__).parents[2]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launcher += [str(root / "configs/accelerate/ddp_cpu.yaml"), "--main_process_port", "0"]
    return subprocess.run(
        [*launcher, "-m", "moe_patch", "run", "--", *command], cwd=at, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}, timeout=HANG_S,
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"), [("0", 0), ("3 * (os.environ['RANK'] == '1')", 1)], ids=["good", "rank 1"]
)
def test_two_processes_of_a_launcher(at, end, status):
    write(at / "train.py", end, "import os\n" + TRAIN)
    done = launched(at, "train.py")
    assert done.returncode == status, done.stderr
    assert done.stderr.count("moe-patch run: ") == done.stderr.count(PATCHED) == 1
    assert done.stdout.count("main __main__") == 2


@pytest.mark.slow
def test_two_processes_that_patch_nothing(at):
    (at / "idle.py").write_text("print('done')\n")
    done = launched(at, "idle.py")
    assert done.returncode == 1
    assert done.stderr.count("moe-patch run: nothing was patched") == 1


def test_an_older_transformers_is_refused_before_the_command_starts(at, capfd, monkeypatch):
    monkeypatch.delitem(sys.modules, "moe_patch.integrations.transformers", raising=False)
    monkeypatch.setattr(window, "too_old", lambda *args: "needs transformers 5.9, found 5.8")
    write(at / "never.py", text="raise AssertionError")
    assert run("--", "never.py") == UNUSABLE
    assert "moe_patch needs transformers 5.9, found 5.8; install a newer" in last_line(capfd)
