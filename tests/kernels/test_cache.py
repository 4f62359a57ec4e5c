"""Kernels compile although Triton's cache is unwritable; a writable cache is used."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
import triton
from triton.runtime.cache import get_cache_manager

import moe_patch.kernels
from moe_patch.kernels.common import cache
from moe_patch.kernels.common.cache import compiling
from moe_patch.kernels.common.launcher import Launcher

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_WARNED", [])
    cache._folder_of_process.cache_clear()


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder that cannot be created, not even by root."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def store(content: bytes = b"code") -> str:
    """Store a compiled kernel as Triton does, and return its file."""
    return get_cache_manager(KEY).put(content, "kernel.cubin")


def test_without_a_cache_triton_raises(unwritable: Path) -> None:
    with pytest.raises(OSError, match="Not a directory"):
        store()


def test_a_folder_of_the_process_takes_its_place(unwritable: Path) -> None:
    with pytest.warns(UserWarning, match="cannot write its cache .* TRITON_CACHE_DIR") as said:
        first = compiling(store)
    assert str(unwritable) in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiling(store, b"other") == first
    assert Path(first).read_bytes() == b"other"
    # Nothing process-wide is left.
    assert triton.knobs.cache.dir == str(unwritable) == os.environ["TRITON_CACHE_DIR"]


def test_a_cache_that_can_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Path(compiling(store)).is_relative_to(tmp_path)


def test_a_full_disk_is_a_cache_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Treat a full disk like an unwritable cache, although its error names no file."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    full: list[OSError] = [OSError(28, "No space left on device")]

    def launch() -> str:
        if triton.knobs.cache.dir == str(tmp_path):
            raise full[0]
        return store()

    with monkeypatch.context() as disk:
        disk.setattr(cache.tempfile, "TemporaryFile", _raising(full[0]))
        with pytest.warns(UserWarning, match="No space left on device"):
            assert not Path(compiling(launch)).is_relative_to(tmp_path)


def _raising(error: OSError) -> Callable[..., None]:
    def raising(*_: object, **__: object) -> None:
        raise error

    return raising


def test_other_errors_go_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="ptxas"):
        compiling(_raising(FileNotFoundError(2, "No such file", "/opt/bin/ptxas")))
    with pytest.raises(RuntimeError, match="device"):
        compiling(_raising(RuntimeError("device")))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:moe_patch. Triton cannot write")
def test_a_launch_survives(unwritable: Path) -> None:
    class Kernel:
        def __getitem__(self, grid: tuple) -> Callable[..., str]:
            return lambda *_, **__: stored.append(store())

    stored: list[str] = []
    Launcher(Kernel())((1,), (torch.zeros(1),), (), ())
    assert Path(stored[0]).exists()


def test_every_launch_goes_this_way() -> None:
    """Launch by the launcher, or by ``compiling`` around ``kernel[grid]``."""
    launch = re.compile(r"^\s*\w*kernel\w*\[.*\]\($", re.MULTILINE)
    for path in Path(moe_patch.kernels.__file__).parent.rglob("*.py"):
        assert not launch.search(path.read_text(encoding="utf-8")), path
    assert launch.search("        _sums_kernel[(programs,)](\n")
