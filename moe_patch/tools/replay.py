"""Run a file of ``debug_nan`` again: the same call on this library and on transformers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.debug import nan_file
from moe_patch.debug.nan_file import NanCall
from moe_patch.debug.shadow import merged_weight
from moe_patch.errors import UnsupportedOptionError
from moe_patch.patching.patch import patch_model
from moe_patch.patching.report import patch_report
from moe_patch.runtime.compare import relative_error
from moe_patch.runtime.module_patch import patch_of


@dataclass(frozen=True)
class ReplayResult:
    """The result of replaying a file; prints as a table.

    Attributes:
        path, module: the block's path and the class that was called.
        device, backend: where it ran, and on which backend moe_patch ran.
        ours, theirs: tokens whose output is not finite, as indices, on each path.
        error: relative difference of the tokens that are finite on both.
        inputs, parameters: name -> description, for the arguments and for the parameters that hold
            non-finite values.
        experts: expert id -> how many of the non-finite tokens chose it.
    """

    path: str
    module: str
    device: str
    backend: str
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    tokens: int
    error: float
    inputs: dict[str, str]
    parameters: dict[str, str]
    experts: dict[int, int]

    def __str__(self) -> str:
        lines = [("block", f"{self.path} ({self.module}) on {self.device}")]
        lines += [*self.inputs.items(), *self.parameters.items()]
        lines.append((f"moe_patch ({self.backend})", _count(self.ours, self.tokens)))
        same = ", the same tokens" if self.ours and self.ours == self.theirs else ""
        lines.append(("transformers", _count(self.theirs, self.tokens) + same))
        if self.experts:
            most = sorted(self.experts.items(), key=lambda item: (-item[1], item[0]))[:8]
            lines.append(
                ("experts of these tokens", ", ".join(f"{e} ({count} times)" for e, count in most))
            )
        lines.append(("finite tokens", f"relative difference {self.error:.1e}"))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)


def replay_file(
    path: str | Path, device: str | None = None, backend: str | None = None
) -> ReplayResult:
    """Run the call that ``debug_nan`` has written on both paths, forward only.

    Args:
        path: the file.
        device: default: the first CUDA device, else the CPU.
        backend: as for :func:`moe_patch.patch_model`; default: the option of the file's patch, or
            "auto" if that needs another device.

    Raises:
        UnsupportedOptionError: the file is of another kind, or the installed transformers cannot
            rebuild its block.
    """
    call = nan_file.read(path)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend is None:
        backend = "auto" if call.backend == "triton" and device == "cpu" else call.backend
    args = tuple(a.to(device) for a in call.args)
    theirs = _output(_theirs(call, device), args)
    module = _rebuild(call).to(device)
    patch_model(module, self_check=False, backend=backend)
    factors = {
        name: [f._replace(lhs=f.lhs.to(device), rhs=f.rhs.to(device)) for f in given]
        for name, given in call.factors.items()
    }
    if factors:
        patch = patch_of(module)
        assert patch is not None  # patched above
        patch.factors = factors
    ours = _output(module, args)
    report = patch_report(module)
    bad, ref_bad = _bad(ours), _bad(theirs)
    finite_T = ~(bad | ref_bad)
    return ReplayResult(
        path=call.path,
        module=call.cls,
        device=device,
        backend=report[0].experts_backend,
        ours=tuple(bad.nonzero().flatten().tolist()),
        theirs=tuple(ref_bad.nonzero().flatten().tolist()),
        tokens=len(bad),
        error=relative_error(ours[finite_T], theirs[finite_T]),
        inputs={name: _about(t) for name, t in zip(nan_file.ARGUMENTS, args, strict=False)},
        parameters={
            name: _about(t)
            for name, t in call.parameters.items()
            if t.is_floating_point() and not torch.isfinite(t).all()
        },
        experts=_experts(call, (bad | ref_bad).cpu()),
    )


def _theirs(call: NanCall, device: str) -> nn.Module:
    module = _rebuild(call)
    for name, given in call.factors.items():
        parameter = module.get_parameter(name)
        parameter.data = merged_weight(parameter.data, given)
    for sub in module.modules():
        if "config" in sub.__dict__:
            sub.__dict__["config"]._experts_implementation_internal = "eager"
    return module.to(device)


def _rebuild(call: NanCall) -> nn.Module:
    """Rebuild the module from its class and config, with the file's parameters.

    Raises:
        UnsupportedOptionError: a class is not transformers' own, or does not fit the file.
    """
    if not all(name.startswith("transformers.") for name in (call.module, call.config_module)):
        raise UnsupportedOptionError(
            f"replay: {call.module}.{call.cls} is not one of transformers' own classes; accepted: "
            "blocks of the installed transformers (a file must not choose other code to run)"
        )
    try:
        cls = getattr(importlib.import_module(call.module), call.cls)
        config_cls = getattr(importlib.import_module(call.config_module), call.config_cls)
        with torch.device("meta"):
            module: nn.Module = cls(config_cls.from_dict(call.config))
        module.load_state_dict(call.parameters, assign=True)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise UnsupportedOptionError(
            f"replay: {call.module}.{call.cls} cannot be rebuilt with the installed transformers "
            f"(the file was written with {call.versions['transformers']}): {error}"
        ) from error
    return module.requires_grad_(False).eval()


@torch.no_grad()
def _output(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    """Return the call's output as [T, D]."""
    out: Any = module(*args)
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(-1, out.shape[-1])


def _bad(out_TD: Tensor) -> Tensor:
    return ~torch.isfinite(out_TD).all(-1)


def _experts(call: NanCall, bad_T: Tensor) -> dict[int, int]:
    if len(call.args) < 2 or not bad_T.any():
        return {}
    ids, counts = call.args[1][bad_T].unique(return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def _about(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape))
    text = f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
    if not tensor.is_floating_point() or not tensor.numel():
        return text
    finite = torch.isfinite(tensor)
    if not finite.any():
        return f"{text}, nothing finite"
    largest = f"largest {tensor[finite].abs().max().item():.3g}"
    bad = int((~finite).sum())
    if not bad:
        return f"{text}, finite, {largest}"
    rows = (~finite).flatten(1).any(-1).nonzero().flatten().tolist() if tensor.dim() > 1 else []
    where = f" in rows {', '.join(map(str, rows[:8]))}" if rows else ""
    return f"{text}, {bad} NaN or Inf{where}, {largest} otherwise"


def _count(rows: tuple[int, ...], total: int) -> str:
    if not rows:
        return f"all {total} tokens finite"
    return f"{len(rows)} of {total} tokens not finite (first: {rows[0]})"
