"""Enable the Hopper kernels on a release of Triton that this library was not tested with.

On the user's own card, the Hopper kernels are compiled and compared with the portable ones. The
code of every kernel is searched for registers that are overwritten while a matrix instruction may
read them. The result is kept in a marker (:mod:`moe_patch.kernels.common.trusted`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_patch.errors import UnsupportedOptionError
from moe_patch.ops.backend import choose_backend
from moe_patch.tools.fp8_checks import IN_FP8
from moe_patch.tools.selftest import Check, each_group, run_check
from moe_patch.tools.trust_checks import IN_FRONT, groups_of
from moe_patch.tools.wgmma_operands import overwritten_operands

# Kernels whose code the search must have seen; otherwise its result means nothing.
DECODING = "_packed_rows_kernel"
FP8_PRODUCTS = {f"_hopper_fp8_{name}_kernel" for name in ("up", "rows", "dh")}
SEARCHED = {f"_hopper_{name}_kernel" for name in ("up", "rows", "dh", "dw")} | {DECODING}
SEARCHED |= FP8_PRODUCTS
# Kernel name -> lines that moe_patch.tools.wgmma_operands found in its code; none if it is sound.
Scanned = dict[str, list[str]]


@dataclass
class Trust:
    """The outcome of :func:`trust`; ``as_dict()`` is JSON.

    Attributes:
        device: the device's name.
        triton: the release.
        note: why nothing was tested, or what stays off; or "".
        marker: the file that enables the kernels, or "".
        in_front: packed weights are decoded in front of the product.
        fp8: experts are multiplied in FP8 on request.
        hazards: registers that are overwritten while they may be read, by kernel and line.
        checks: one per comparison, and the search. Names that begin with "off: " do not count
            towards the verdict, because the feature they check stays off.
    """

    device: str
    triton: str
    note: str = ""
    marker: str = ""
    in_front: bool = False
    fp8: bool = False
    hazards: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether the Hopper kernels may run."""
        return all(check.passed for check in self.checks if not check.name.startswith("off: "))

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, with the versions that they hold for."""
        found = asdict(self) | {"passed": self.passed, "torch": torch.__version__}
        return found | {"checks": [check._asdict() for check in self.checks]}


def trust(
    device: str | torch.device | None = None, *, progress: bool = True, jobs: int = 1
) -> Trust:
    """Test the Hopper kernels on a device and enable them there if they hold.

    Args:
        device: of capability 9.0; default: the current CUDA device.
        progress: show a progress bar on stderr.
        jobs: processes that share the comparisons. They are spawned by :mod:`multiprocessing`,
            which must be able to import the program's main module.

    Raises:
        UnsupportedOptionError: no such device, or the marker's folder cannot be written.
        MoePatchError: a process died.
    """
    where, name = _card(device)
    import triton

    from moe_patch.kernels.common import trusted, versions

    result = Trust(name, triton.__version__)
    if versions.tested().hopper:
        result.in_front = result.fp8 = True
        result.note = f"triton {triton.__version__} is a tested release: nothing to enable"
        return result
    trusted.check_writable()
    scanned: Scanned = {}
    from tqdm import tqdm

    count = len(list(groups_of(where)))
    with tqdm(total=count, desc="Hopper kernels", disable=not progress) as bar:
        for checks, found in each_group(partial(_run_group, where), count, jobs, "trust"):
            result.checks += checks
            scanned |= {k: scanned.get(k, []) + lines for k, lines in found.items()}
            bar.update()
    _judge(result, scanned)
    _mark(result)
    versions.decide_again()
    return result


def forget() -> str:
    """Remove the marker of this Triton, torch and library; return its path, or "" without one.

    Raises:
        UnsupportedOptionError: Triton is not installed, or the marker's folder cannot be written.
    """
    if (why := _no_triton()) is not None:
        raise UnsupportedOptionError(f"forget: {why}")
    from moe_patch.kernels.common import trusted, versions

    place = trusted.forget()
    versions.decide_again()
    return "" if place is None else str(place)


def _no_triton() -> str | None:
    import importlib.util

    return None if importlib.util.find_spec("triton") else "triton is not installed"


def _card(device: str | torch.device | None) -> tuple[torch.device, str]:
    """Return the device and its name.

    Raises:
        UnsupportedOptionError: the Hopper kernels cannot run on this device.
    """
    where = torch.device(device or "cuda")
    accepted = "accepted: a CUDA device of capability 9.0 (H100, H200), on which they run"
    if where.type != "cuda" or not torch.cuda.is_available():
        raise UnsupportedOptionError(f"trust: no CUDA device at {where}; {accepted}")
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    choice = choose_backend("auto", where, torch.bfloat16)
    if choice.name != "triton":
        raise UnsupportedOptionError(f"trust: no kernel runs on {where}: {choice.reason}")
    capability, name = torch.cuda.get_device_capability(where), torch.cuda.get_device_name(where)
    if capability != (9, 0):
        found = ".".join(map(str, capability))
        raise UnsupportedOptionError(f"trust: {name} has capability {found}; {accepted}")
    return where, name


def _run_group(device: torch.device, index: int) -> tuple[list[Check], Scanned]:
    group = list(groups_of(device))[index]
    found = []
    with searching() as scanned:
        for title, check in group:
            torch.manual_seed(0)
            found.append(run_check(title, partial(_compiled, check)))
    return found, scanned


def _compiled(check: Any) -> float:
    """Run a check; turn the errors that an unknown release may raise into a failure."""
    from triton.errors import TritonError

    from moe_patch.tools.selftest_checks import Failed

    try:
        error: float = check()
    except (TritonError, ImportError, AttributeError, TypeError, ValueError, RuntimeError) as wrong:
        said = str(wrong).split()
        raise Failed(" ".join([f"{type(wrong).__name__}:", *said])[-300:]) from wrong
    return error


@contextmanager
def searching() -> Iterator[Scanned]:
    """Search the code of each kernel that Triton compiles inside, or takes from its cache."""
    import triton

    scanned: Scanned = defaultdict(list)
    before = triton.knobs.compilation.listener

    def listen(*, metadata_group: dict[str, str], **others: Any) -> None:
        if before is not None:
            before(metadata_group=metadata_group, **others)
        for name, place in metadata_group.items():
            if name.endswith(".ptx"):
                code = Path(place).read_text(encoding="utf-8")
                scanned[name.removesuffix(".ptx")] += overwritten_operands(code)

    triton.knobs.compilation.listener = listen
    try:
        yield scanned
    finally:
        triton.knobs.compilation.listener = before


def _judge(result: Trust, scanned: Scanned) -> None:
    """Turn the search's results into a check and hazards, and decide which features stay off.

    After a hazard both features stay off: the release failed the search.
    """
    lines = [f"{name}: {line}" for name in sorted(scanned) for line in scanned[name]]
    result.hazards = list(dict.fromkeys(lines))
    result.in_front = not lines
    result.fp8 = not lines and all(c.passed for c in result.checks if IN_FP8 in c.name)
    optional = {DECODING} | FP8_PRODUCTS
    wrong = sorted(name for name, lines in scanned.items() if lines and name not in optional)
    unseen = sorted(SEARCHED - set(scanned))
    details = [f"registers are overwritten in {', '.join(wrong)}"] * bool(wrong)
    if unseen:
        details.append(f"no code of {', '.join(unseen)} was seen: run it in a new process")
    detail = "; ".join(details)
    result.checks.append(Check("operands of wgmma", not detail, 0.0, 0.0, detail))
    why = "registers are overwritten" if lines else "their results are wrong"
    if not result.in_front:
        _stays_off(result, IN_FRONT, "products that decode their weights", why)
    if not result.fp8:
        _stays_off(result, IN_FP8, "FP8 products", why)


def _stays_off(result: Trust, title: str, feature: str, why: str) -> None:
    result.note = "; ".join([*filter(None, [result.note]), f"{feature} stay off: {why}"])
    result.checks = [
        check._replace(name=f"off: {check.name}") if title in check.name else check
        for check in result.checks
    ]


def _mark(result: Trust) -> None:
    """Write the marker, or remove an earlier one if the kernels do not hold."""
    from moe_patch.kernels.common import trusted

    if not result.passed:
        trusted.forget()
        return
    hazards = tuple(result.hazards)
    checks = [check.name for check in result.checks]
    marker = trusted.Marker(result.in_front, hazards, result.fp8)
    result.marker = str(trusted.write(marker, device=result.device, checks=checks))
