"""Everything that a page shows runs: Python and shell blocks, YAML, links between pages.

Blocks of a page run one after the other, like a notebook. Python may use what a reader has
anyway: `model` (a tiny Qwen3-MoE), `batch`, `loss` and `policy`. Shell blocks run between them, in
a folder that looks like the checkout.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from glob import glob
from pathlib import Path

import pytest
import transformers
import yaml

from moe_patch import PatchConfig
from moe_patch.cli import bench, main
from moe_patch.train import data
from moe_patch.train.config import make_config
from scripts import docs
from tests.support import docs_blocks, interpreted, tiny_models
from tests.support.docs_blocks import BLOCKS, LANGUAGES, MARKS, OTHERS, PAGES, ROOT, Block, commands
from tests.support.limits import HANG_S
from tests.support.train_nodes import TEXT

# The two set-up commands, the reader's first step, download packages; they are only parsed.
SETUP = ("bash scripts/quickstart.sh", "bash scripts/test.sh")
OWN = ("moe-patch", "python -m moe_patch")


def pages() -> list:
    """Return each page's unmarked blocks in order, and each marked block but `network` alone."""
    found = []
    for page in PAGES:
        mine = [b for b in BLOCKS if b.page == page.name and b.language in ("python", "bash")]
        if plain := [b for b in mine if not b.marks]:
            found.append(pytest.param(plain, id=page.name))
        for block in mine:
            if block.marks and not {"network", "interpreted"} & set(block.marks):
                marks = [getattr(pytest.mark, mark) for mark in block.marks]
                found.append(pytest.param([block], id=str(block), marks=marks))
    return found


def test_every_block_says_what_it_is():
    for block in BLOCKS:
        assert block.language in (*LANGUAGES, *OTHERS), f"{block}: language {block.language!r}"
        assert set(block.marks) <= set(MARKS), f"{block}: marks {block.marks}"
    assert sum(block.language == "python" for block in BLOCKS) > 10
    assert sum(block.language == "bash" for block in BLOCKS) > 5


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return an empty folder that looks like the checkout: links to its entries, own outputs."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "outputs":
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    # Reading the whole standard library is tested elsewhere.
    monkeypatch.setattr(data, "stdlib_docstrings", lambda: iter([TEXT]))
    monkeypatch.setattr(bench, "MIN_SECONDS", 0.01)
    return tmp_path


@pytest.mark.parametrize("blocks", pages())
def test_blocks_run(blocks: list[Block], checkout, capfd):
    model = tiny_models.build("qwen3_moe", num_hidden_layers=4)
    names = {
        "__name__": "__docs__",
        "model": model,
        "policy": model,
        "batch": tiny_models.inputs(model),
        "loss": lambda out: out.loss,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            if block.language == "python":
                # The page and line show up in a traceback.
                source = "\n" * block.line + block.text
                exec(compile(source, block.path, "exec"), names)
                continue
            for command in commands(block.text):
                status = 0 if command.startswith(SETUP) else _run(command, checkout)
                said = capfd.readouterr()
                assert status == 0, f"{block}: {command}: status {status}\n{said.out}{said.err}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if "interpreted" in b.marks], ids=str)
def test_interpreted_blocks_pass_every_case(block: Block, tmp_path: Path):
    """Check a page's example kernel, as printed, against its own definition."""
    interpreted.skip_without_histogram()
    file = tmp_path / "test_example.py"
    file.write_text(block.text, encoding="utf-8")
    outcomes = interpreted.run(str(file))
    assert outcomes
    assert not any(outcomes.values()), "\n".join(outcomes.values())


@pytest.mark.parametrize("block", [b for b in BLOCKS if "interpreted" in b.marks], ids=str)
@pytest.mark.parametrize(
    ("good", "bad"),
    [("x * scale,", "x + scale,"), ("mask=column < D)\n\n", "mask=column < D - 1)\n\n")],
)
def test_interpreted_blocks_fail_with_a_wrong_kernel(block: Block, tmp_path: Path, good, bad):
    interpreted.skip_without_histogram()
    assert good in block.text
    file = tmp_path / "test_example.py"
    file.write_text(block.text.replace(good, bad), encoding="utf-8")
    assert any(interpreted.run(str(file)).values())


def _run(command: str, cwd: Path) -> int:
    """Run the command line in this process if it needs no shell, and all else by bash."""
    if command.startswith(OWN) and not set("|>&$`") & set(command):
        words = shlex.split(command)[1 if command.startswith(OWN[0]) else 3 :]
        return main([each for word in words for each in (sorted(glob(word)) or [word])])
    return _shell(command, cwd)


def _shell(command: str, cwd: Path) -> int:
    """Run a command by bash, with this interpreter as `python` and the command line installed."""
    tools = cwd / ".bin"
    tools.mkdir(exist_ok=True)
    script = tools / "moe-patch"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moe_patch "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.call(["bash", "-euc", command], cwd=cwd, env=environment, timeout=HANG_S)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_shell_blocks_parse_and_name_files_that_exist(block: Block):
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for command in commands(block.text):
        for word in shlex.split(command):
            if re.fullmatch(r"(scripts|configs|tests|benchmarks)/[\w./-]+", word):
                assert (ROOT / word).exists(), f"{block}: {word}"


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh"])
def test_set_up_commands_are_there_and_parse(script):
    assert f"bash {script}" in (ROOT / "README.md").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_yaml_blocks_are_accepted(block: Block):
    node = yaml.safe_load(block.text)
    assert isinstance(node, dict), f"{block}: a mapping"
    if {"model", "data"} <= set(node):
        make_config(node, str(block))
    elif "moe_patch" in node:
        PatchConfig.parse(node["moe_patch"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = docs_blocks.FENCE.sub("", page.read_text(encoding="utf-8"))
    anchors = {p: _anchors(p) for p in PAGES}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors[path], f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the usual Markdown hosts form them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_generated_parts_are_current():
    """Generated parts are current for the transformers that the page names."""
    for name, parts in docs.PARTS.items():
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        release = re.search(r"^As of transformers ([\w.]+)\.$", text, re.MULTILINE)
        if release is None or release[1] == transformers.__version__:
            assert docs.generated(text, parts) == text, f"{name}: python scripts/docs.py --write"


def test_every_page_is_reached_from_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in text, page.name
