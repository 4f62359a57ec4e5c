"""The wheel: what the package needs and nothing else, one version, the promised extras."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import moe_patch
from moe_patch._version import __version__
from scripts import matrix
from tests.support.limits import HANG_S

ROOT = Path(moe_patch.__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Wheel built from this checkout, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_holds_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "moe_patch").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == here
    assert "moe_patch/py.typed" in names
    assert "moe_patch/cli/__init__.py" in names


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    found = Parser().parsestr(archive.read(name).decode())
    assert found["Name"] == "moe-patch"
    assert found["Version"] == __version__
    assert set(found.get_all("Provides-Extra")) >= {"train", "plots", "dev"}
    assert found["Requires-Python"] == ">=3.11"
    entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "moe-patch = moe_patch.cli:main" in entry_points


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    written = [
        path
        for path in (ROOT / "moe_patch").rglob("*.py")
        if f'"{__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert [path.name for path in written] == ["_version.py"]


def test_runs_from_the_wheel_alone(wheel, tmp_path):
    """Neither the checkout nor an installed moe_patch is on the path."""
    code = (
        "import sys; wheel, root = sys.argv[1:]\n"
        "sys.path = [wheel] + [place for place in sys.path if place not in ('', root)]\n"
        "import moe_patch; from moe_patch.cli import main; print(moe_patch.__file__)\n"
        "assert main(['bench', 'experts']) == 2\n"
        "sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(wheel), str(ROOT)],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(wheel))
    assert "usage: moe-patch" in done.stdout
    assert "is part of a source checkout" in done.stderr


def test_pages_name_the_lower_bounds_of_the_dependencies():
    """Pages name the lower bounds that the version matrix installs."""
    bounds = dict(pin.split("==") for pin in matrix.lower_bounds())
    names = {"torch": "torch", "transformers": "transformers", "peft": "PEFT"}
    for page in (ROOT / "README.md", ROOT / "docs" / "getting-started.md"):
        text = page.read_text(encoding="utf-8")
        for package, name in names.items():
            assert f"{name} {bounds[package]}" in text, f"{page.name}: {name} {bounds[package]}"


def test_the_matrix_covers_the_promised_pythons():
    assert {environment.python for environment in matrix.ENVIRONMENTS} == {"3.11", "3.12"}
    assert {environment.oldest for environment in matrix.ENVIRONMENTS} == {True, False}


def test_the_matrix_says_what_to_do_without_a_python():
    with pytest.raises(SystemExit, match=r"no Python 2\.99 here: install it"):
        matrix.find_python("2.99")
