"""The test that enables the Hopper kernels: search, comparisons and the decision."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
import triton

from moe_patch import UnsupportedOptionError
from moe_patch.cli import main
from moe_patch.kernels.common import trusted, versions
from moe_patch.kernels.common.trusted import Marker
from moe_patch.kernels.common.versions import PORTABLE, Gates, gates
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.tools import trust as trust_module
from moe_patch.tools import trust_checks
from moe_patch.tools.selftest_checks import Failed, Layer
from moe_patch.tools.trust import DECODING, forget, searching, trust
from tests.kernels.test_wgmma_operands import FROM_REGISTERS, WRITE, kernel, wait
from tests.support.cli_calls import answer, only_config
from tests.support.trust_cases import HAZARD, decided_anew, pretend_card, unknown  # noqa: F401

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_a_search_reads_what_triton_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Search the code that Triton compiles, and call the previous listener too."""
    sound, bad = tmp_path / "sound.ptx", tmp_path / "bad.ptx"
    sound.write_text(kernel(FROM_REGISTERS, wait(0), WRITE))
    bad.write_text(kernel(FROM_REGISTERS, WRITE, wait(0)))
    told: list[dict] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **said: told.append(said))
    listener = triton.knobs.compilation.listener
    with searching() as scanned:
        for place in (sound, bad):
            files = {place.name: str(place), f"{place.stem}.json": "/nowhere"}
            triton.knobs.compilation.listener(
                src=None, metadata={}, metadata_group=files, times=None, cache_hit=False
            )
    assert scanned == {"sound": [], "bad": list(HAZARD)}
    assert len(told) == 2
    assert triton.knobs.compilation.listener is listener


@pytest.mark.parametrize("group", list(trust_checks.groups_of(CPU)), ids=lambda group: group[0][0])
def test_the_comparisons_hold_on_a_cpu(group: list) -> None:
    """Pairs that are compared agree in shape and dtype: the torch backend passes against itself."""
    for _, check in group:
        assert 0 < check() <= 1


def only_when_open(bend: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The operator, wrong where the Hopper kernels would run."""

    def bent(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return experts_mlp(bend(x) if gates().hopper else x, *args, **options)

    return bent


@pytest.mark.parametrize(
    ("bend", "said"),
    [
        (lambda x: x * 1.02, "times as far from fp64 as allowed"),
        (lambda x: x * float("nan"), "differs between two runs"),
        (lambda x: x + torch.randn_like(x) * 0.01, "differs between two runs"),
    ],
    ids=["scaled", "nan", "noise"],
)
def test_a_wrong_hopper_kernel_is_found(
    bend: Callable, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "moe_patch.tools.selftest_checks.experts_mlp", only_when_open(bend)
    )  # fmt: skip
    with pytest.raises(Failed, match=said):
        trust_checks.compare(Layer(CPU, BF16, 40), in_front=False)


def test_decoding_in_front_is_compared_with_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Gates] = []

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(gates())
        return experts_mlp(*args, **options)

    monkeypatch.setattr(trust_checks, "experts_mlp", noted)
    trust_checks.compare(trust_checks.Stored(CPU, BF16, 40, "fp8"), in_front=True)
    assert set(seen[:-1]) == {Gates(hopper=True, in_front=True)}
    assert seen[-1] == PORTABLE


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return partial(pretend_card, monkeypatch)


def _fails() -> float:
    raise Failed("h is 7.0 times as far from fp64 as allowed")


def _does_not_compile() -> float:
    raise AttributeError("'shared_memory_descriptor' object has no attribute '_reinterpret'")


def test_what_holds_is_opened(card: Callable[..., None]) -> None:
    card()
    result = trust(progress=False)
    assert (result.passed, result.in_front, result.fp8, result.hazards) == (True, True, True, [])
    assert result.marker == str(trusted.path())
    assert gates() == Gates(hopper=True, in_front=True, fp8=True), "in this process as well"
    assert json.loads(json.dumps(result.as_dict()))["passed"] is True
    assert json.loads(trusted.path().read_text())["checks"][0] == "experts"
    assert forget() == result.marker
    assert forget() == ""
    assert not decided_anew().hopper


@pytest.mark.filterwarnings("ignore:moe_patch. packed experts")
@pytest.mark.parametrize("in_front", [lambda: 0.5, _fails], ids=["right", "wrong"])
def test_a_hazard_in_the_decoding_product_is_recorded(
    in_front: Callable, card: Callable[..., None]
) -> None:
    """Keep the product off after a hazard, even if the comparison passes by chance."""
    card({DECODING: HAZARD}, in_front=in_front)
    result = trust(progress=False)
    assert (result.passed, result.in_front) == (True, False)
    assert result.hazards == [f"{DECODING}: {HAZARD[0]}"]
    assert "off: nf4 in front of the product" in [check.name for check in result.checks]
    kept = json.loads(Path(result.marker).read_text())
    assert kept["in_front"] is False
    assert kept["fp8"] is False
    assert "FP8 products stay off: registers are overwritten" in result.note
    assert "stay off" in versions.why_no_fp8()
    assert kept["hazards"] == result.hazards
    assert gates()[:2] == (True, False)


@pytest.mark.parametrize(
    ("pretended", "said"),
    [
        ({"fp8": _fails}, "FP8 products stay off: their results are wrong"),
        (
            {"hazards": {"_hopper_fp8_up_kernel": HAZARD}},
            "products that decode their weights stay off: registers are overwritten; "
            "FP8 products stay off: registers are overwritten",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:moe_patch. packed experts")
def test_wrong_fp8_products_stay_off(pretended: dict, said: str, card: Callable[..., None]) -> None:
    card(**pretended)
    result = trust(progress=False)
    sound = "hazards" not in pretended
    assert (result.passed, result.in_front, result.fp8) == (True, sound, False)
    assert result.note == said
    assert f"off: experts {trust_checks.IN_FP8}" in [check.name for check in result.checks]
    assert gates()[:2] == (True, sound)
    assert not gates().fp8


def test_fp8_products_are_compared_with_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass the definition in 16 bits; refuse decoded weights, a wrong scale and other bits."""
    layer = trust_checks.Fp8Layer(CPU, BF16, 40)
    with pytest.raises(Failed, match="times as far from fp64 as allowed"):
        trust_checks.compare_fp8(layer)
    seen: list[Gates] = []

    def results(factor: float, tensors: Any, *rest: Any) -> Any:
        seen.append(gates())
        tensors = layer.cast(tensors, BF16) | {"weights": tensors["weights"].float() * factor}
        return layer.reference(tensors, *rest)

    monkeypatch.setattr(layer, "results", partial(results, 1.0))
    assert 0.5 < trust_checks.compare_fp8(layer) <= 1
    assert set(seen) == {Gates(hopper=True, in_front=False, fp8=True)}
    monkeypatch.setattr(layer, "results", partial(results, 1.1))
    with pytest.raises(Failed, match="times as far from fp64 as allowed"):
        trust_checks.compare_fp8(layer)


@pytest.mark.filterwarnings("ignore:moe_patch. portable kernels")
@pytest.mark.parametrize(
    ("pretended", "said"),
    [
        ({"hopper": _fails}, "7.0 times as far"),
        ({"hopper": _does_not_compile}, "AttributeError: 'shared_memory_descriptor' object has no"),
        ({"in_front": _fails}, "7.0 times as far"),
        ({"hazards": {"_hopper_dh_kernel": HAZARD}}, "overwritten in _hopper_dh_kernel"),
        ({"hazards": {"_rows_kernel": HAZARD, DECODING: HAZARD}}, "overwritten in _rows_kernel"),
        ({"unseen": DECODING}, f"no code of {DECODING} was seen"),
    ],
)
def test_what_does_not_hold_is_refused(
    pretended: dict, said: str, card: Callable[..., None]
) -> None:
    """Refuse, and remove an earlier marker, such as one from before a change of driver."""
    earlier = trusted.write(Marker(True, ()))
    card(**pretended)
    result = trust(progress=False)
    assert not result.passed
    assert result.marker == ""
    failed = [check.detail for check in result.checks if not check.passed]
    assert any(said in detail for detail in failed), failed
    assert not earlier.exists()
    assert not gates().hopper


def test_a_tested_release_needs_no_trust(
    card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card(hopper=_fails)
    monkeypatch.setitem(versions.TRITON_VERSIONS, "9.9", versions.Tested(hopper=True, direct=False))
    monkeypatch.setattr(triton, "__version__", "9.9.77")
    versions._tested.cache_clear()
    result = trust(progress=False)
    versions._tested.cache_clear()
    assert (result.passed, result.checks, result.marker) == (True, [], "")
    assert "is a tested release" in result.note


def test_a_folder_that_cannot_be_written_is_refused_before_the_test(
    card: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late() -> float:
        raise AssertionError("the comparison ran")

    card(hopper=late)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UnsupportedOptionError, match="cannot be written"):
        trust(progress=False)


def test_other_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedOptionError, match="no CUDA device at cuda; accepted: .* 9.0"):
        trust(progress=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(
        trust_module, "choose_backend", lambda *_: type("C", (), {"name": "triton"})
    )
    with pytest.raises(UnsupportedOptionError, match="A100 has capability 8.0; accepted"):
        trust("cuda:0", progress=False)


@pytest.mark.filterwarnings("ignore:moe_patch. portable kernels")
def test_the_command(card: Callable[..., None], capsys: pytest.CaptureFixture) -> None:
    card({DECODING: HAZARD})
    assert main(["selftest", "--trust"]) == 0
    said = capsys.readouterr().out
    assert f"overwritten: {DECODING}" in said
    assert f"the Hopper kernels run from now on: {trusted.path()}" in said
    assert main(["selftest", "--forget"]) == 0
    assert f"removed {trusted.path()}" in capsys.readouterr().out
    assert main(["selftest", "--forget", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": None}
    card(hopper=_fails)
    assert main(["selftest", "--trust"]) == 1
    assert "the Hopper kernels stay off" in capsys.readouterr().out
    assert main(["selftest", "--trust", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
    with pytest.raises(SystemExit) as exited:
        main(["selftest", "--trust", "--forget"])
    assert exited.value.code == 2


@pytest.mark.filterwarnings("ignore:moe_patch. portable kernels")
@pytest.mark.parametrize(("hopper", "status"), [(lambda: 0.5, 0), (_fails, 1)], ids=["ok", "not"])
def test_warmup_with_trust(
    hopper: Callable, status: int, card: Callable[..., None], capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Test the kernels first, and warm up the blocks whatever the result."""
    card(hopper=hopper)
    (tmp_path / "model").mkdir()
    model = only_config(tmp_path / "model", "qwen3_moe")
    argv = ["warmup", model, "--trust", "--device", "cpu"]
    assert main(argv) == status
    said = capsys.readouterr().out
    assert ("run from now on" in said, "stay off" in said) == (status == 0, status == 1)
    assert "nothing to compile on the torch backend" in said
    found = answer(capsys, *argv, status=status)
    assert found["trust"]["passed"] == (status == 0)
    assert len(found["blocks"]) == 1


def test_the_command_without_a_card(capsys: pytest.CaptureFixture) -> None:
    assert main(["selftest", "--trust", "--device", "cpu"]) == 2
    assert "trust: no CUDA device at cpu" in capsys.readouterr().err


INSTALLED = triton.__version__


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:moe_patch. ")
def test_gpu_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the installed Triton as if the table lacked it, then run the enabled kernels."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels run on capability 9.0")
    monkeypatch.setattr(triton, "__version__", INSTALLED)
    entry = versions.tested()
    monkeypatch.setattr(versions, "tested", lambda: entry._replace(hopper=False))
    assert gates()[:2] == (False, False)
    result = trust("cuda", progress=False, jobs=4)
    assert result.passed, [check for check in result.checks if not check.passed]
    assert decided_anew()[:2] == (True, not result.hazards)
    assert gates().fp8 == result.fp8
    assert result.fp8 == (not result.hazards)
    launched: list[str] = []
    original = versions.hopper_module

    def noted(name: str) -> Any:
        launched.append(name)
        return original(name)

    for name in ("up", "dh", "dw", "linear"):
        monkeypatch.setattr(f"moe_patch.kernels.experts.{name}.hopper_module", noted)
    Layer(torch.device("cuda"), BF16, 200).check()
    assert set(launched) == {"up", "dh", "dw", "linear"}
    launched.clear()
    assert forget() == result.marker
    assert gates()[:2] == (False, False)
    Layer(torch.device("cuda"), BF16, 200).check()
    assert launched == []
