"""Markers of trust, and Gluon, which enable the Hopper kernels on a release of Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
import triton

from moe_patch import UnsupportedOptionError, patch_model, patch_report, quantize_experts
from moe_patch.formats.packed import pack
from moe_patch.kernels.common import device, trusted, versions
from moe_patch.kernels.common.device import Device
from moe_patch.kernels.common.trusted import Marker
from moe_patch.kernels.common.versions import Gates
from moe_patch.kernels.packed.linear import decoding_tile
from moe_patch.ops.backend import BackendChoice
from moe_patch.patching import report
from tests.support import tiny_models
from tests.support.limits import HANG_S
from tests.support.trust_cases import HAZARD, decided_anew, unknown  # noqa: F401

ROOT = Path(__file__).parents[2]
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_a_marker_opens_exactly_its_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided_anew()[:2] == (False, False)
    place = trusted.write(Marker(True, ()), device="a card")
    assert json.loads(place.read_text())["device"] == "a card"
    assert decided_anew() == Gates(hopper=True, in_front=True)
    for where, name in ((triton, "__version__"), (torch, "__version__"), (trusted, "__version__")):
        with monkeypatch.context() as other:
            other.setattr(where, name, "9.9.2")
            found = decided_anew()
            assert not found.hopper, name
            assert "--trust" in found.reason
    versions._GATES.clear()
    assert decided_anew().hopper
    assert trusted.forget() == place
    assert trusted.forget() is None
    assert not decided_anew().hopper


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("triton", "9.9.2"), ("torch", "2.0.0"), ("capability", [10, 0]), ("moe_patch", "0"),
        ("torch", None),
    ],
)  # fmt: skip
def test_a_marker_of_another_combination_is_ignored(field: str, value: object) -> None:
    """Ignore a marker of another combination under this name: copied, or of a like-named build."""
    place = trusted.write(Marker(True, ()))
    place.write_text(json.dumps(json.loads(place.read_text()) | {field: value}))
    found = decided_anew()
    assert not found.hopper
    assert not found.in_front
    assert f"the marker {place} is ignored: it is for {field} {value}, found" in found.reason


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "not a JSON object"),
        ({"in_front": "true"}, "in_front"),
        ({"fp8": None}, "fp8"),
        ({"hazards": None}, "hazards"),
        ({"hazards": ["k: line 5"]}, "despite hazards"),
        ({"in_front": False, "fp8": True, "hazards": ["k: line 5"]}, "despite hazards"),
    ],
)
def test_a_damaged_marker_is_ignored(content: Any, said: str) -> None:
    place = trusted.write(Marker(True, ()))
    if isinstance(content, dict):
        content = json.dumps(json.loads(place.read_text()) | content).encode()
    place.write_bytes(content)
    found = decided_anew()
    assert not found.hopper
    assert f"the marker {place} is ignored" in found.reason
    assert said in found.reason


def test_a_marker_that_is_a_folder_or_lies_below_a_file_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted.path().mkdir(parents=True)
    assert "cannot be read" in decided_anew().reason
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "ignored" not in decided_anew().reason
    assert trusted.forget() is None
    for refused in (trusted.check_writable, lambda: trusted.write(Marker(True, ()))):
        with pytest.raises(UnsupportedOptionError, match="cannot be written .*XDG_CACHE_HOME"):
            refused()


def test_a_marker_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    place = trusted.write(Marker(True, ()))
    before = place.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UnsupportedOptionError, match="No space left on device"):
        trusted.write(Marker(False, HAZARD))
    assert list(place.parent.iterdir()) == [place]
    assert place.read_bytes() == before


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert trusted.path().parent == tmp_path / "moe_patch"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/folder"):  # as the XDG specification has it
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert trusted.path().parent == tmp_path / "home" / ".cache" / "moe_patch"


def test_a_hazard_keeps_decoding_in_front_of_the_product_off() -> None:
    w = pack(torch.randn(4, 128, 192), "nf4", CPU, "w").to(BF16)
    hopper = Device((9, 0), 227 << 10, 132)
    trusted.write(Marker(True, ()))
    assert decided_anew() == Gates(hopper=True, in_front=True)
    assert decoding_tile(w, BF16, hopper, 4) is not None
    trusted.write(Marker(False, HAZARD))
    found = decided_anew()
    assert found[:2] == (True, False)
    assert "packed experts are decoded into a buffer" in found.reason
    assert decoding_tile(w, BF16, hopper, 4) is None


@pytest.mark.filterwarnings("ignore:moe_patch. packed")
def test_the_report_names_what_a_hazard_keeps_off(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device((9, 0), 227 << 10, 132)
    monkeypatch.setattr(device, "_cuda_device", lambda index: card)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    triton_runs = BackendChoice("triton", "")
    monkeypatch.setattr(report, "choose_backend", lambda *_: triton_runs)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    model = tiny_models.build("qwen3_moe", dtype=BF16, **sizes)
    patch_model(quantize_experts(model, "fp8"), self_check=False, compute="fp8_copy")
    decoded, off = "decoded into a buffer", "compute='fp8_copy' has no effect: FP8 products stay"
    for marker, said in (
        (Marker(True, (), fp8=True), ()),
        (Marker(True, (), fp8=False), (off,)),
        (Marker(False, HAZARD), (decoded, off)),
    ):
        trusted.write(marker)
        versions.decide_again()
        (row,) = patch_report(model, torch.device("cuda"))
        assert all(each in row.reason for each in said)
        assert bool(said) == bool(row.reason)
    trusted.forget()
    versions.decide_again()
    with pytest.warns(UserWarning, match="portable kernels"):
        (row,) = patch_report(model, torch.device("cuda"))
    assert "FP8 products need a Triton on which the Hopper kernels may run" in row.reason


WITHOUT_GLUON = """
import sys
import triton
triton.__version__ = "9.9.0"
sys.modules["triton.experimental"] = None
from moe_patch.kernels.common import versions
versions.TRITON_VERSIONS["9.9"] = versions.Tested(hopper=True, direct=True)
import moe_patch.kernels.experts.experts
from moe_patch.kernels.common.launcher import _DIRECT
found = [name for name in sys.modules if name.startswith("moe_patch") and "hopper" in name]
open_gate = versions.known_triton()
sys.exit(f"{found}, directly: {_DIRECT}, {open_gate}" if found or open_gate or not _DIRECT else 0)
"""


def test_another_triton_needs_no_gluon() -> None:
    """The portable kernels import without it; direct launches have a column of their own."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_GLUON]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
