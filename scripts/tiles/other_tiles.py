"""Run the tiles of older cards on the card at hand, and check them against fp64.

A cubin runs only on its own kind of card, but the driver compiles PTX for any newer one. Triton
therefore makes PTX for the given capability, and that text is loaded in place of a cubin. The
package's self-test then runs with the tiles that such a card would choose. This shows that the
kernels are right and fit that card's shared memory. It says nothing about their speed.

    python scripts/tiles/other_tiles.py 8.0 8.6 8.9
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

KIB = 1024
# Bytes of shared memory that one block may have, by capability (CUDA's programming guide).
SHARED_MEMORY = {(8, 0): 163 * KIB, (8, 6): 99 * KIB, (8, 9): 99 * KIB}
STORAGES = ("nf4", "fp8", "mxfp4")
T, E, K, D, F, RANK = 200, 8, 4, 256, 128, 16
LIMIT = 2e-2


def ptx_for_the_driver(self: Any, src: str, *_: Any) -> bytes:
    """Return a kernel's PTX, in place of ``CUDABackend.make_cubin``."""
    return src.encode() + b"\0"


def stored_as(storage: str, weight_EOI: torch.Tensor) -> Any:
    """Pack the weight in a storage; MXFP4, which comes from checkpoints, gets random bytes."""
    from moe_patch.formats import mxfp4
    from moe_patch.formats.packed import PackedWeight, pack

    if storage != "mxfp4":
        return pack(weight_EOI.bfloat16(), storage, weight_EOI.device, where=storage)
    E, O, I = weight_EOI.shape
    random = partial(torch.randint, dtype=torch.uint8, device=weight_EOI.device)
    # Scales are exponents of two, with 127 for 1; the values are up to 6.
    scales = random(122, 126, (E, O, I // mxfp4.BLOCK))
    return PackedWeight(storage, random(0, 256, (E, O, I // 2)), (scales,), torch.bfloat16)


def packed_errors(device: torch.device) -> dict[str, float]:
    """Return relative errors of LoRA over packed experts, output and gradients, by storage."""
    from moe_patch.ops.experts import definition
    from moe_patch.ops.experts.op import experts_mlp
    from moe_patch.types import ExpertWeights, Glu, Lora

    torch.manual_seed(0)
    normal = partial(torch.randn, device=device)
    x_TD, ids_TK = normal(T, D), torch.rand(T, E, device=device).argsort(1)[:, :K]
    weights_TK, glu = torch.rand(T, K, device=device), Glu("silu")
    stored = normal(E, 2 * F, D) * D**-0.5, normal(E, D, F) * F**-0.5
    sizes = (E, RANK, D), (E, 2 * F, RANK), (E, RANK, F), (E, D, RANK)
    factors = [(normal(size) * size[2] ** -0.5).bfloat16() for size in sizes]

    def results(function: Any, dtype: torch.dtype, weights: list) -> list[torch.Tensor]:
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (x_TD, *factors)]
        x, a13, b13, a2, b2 = leaves
        out = function(
            x, ids_TK, weights_TK.to(dtype if dtype == torch.float64 else torch.float32),
            ExpertWeights(*weights), glu, lora13=Lora(a13, b13, 0.5), lora2=Lora(a2, b2, 2.0),
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    found = {}
    for storage in STORAGES:
        packed = [stored_as(storage, w) for w in stored]
        exact = [torch.stack([w[e] for e in range(E)]).double() for w in packed]
        ours = results(experts_mlp, torch.bfloat16, packed)
        theirs = results(definition.experts, torch.float64, exact)
        pairs = zip(ours, theirs, strict=True)
        found[storage] = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    return found


def run_as(capability: tuple[int, int]) -> int:
    """Run every check as a card of that capability would; return the exit status."""
    limit = SHARED_MEMORY[capability]
    from moe_patch.kernels.common import device as devices
    from moe_patch.tools.selftest import selftest

    card = torch.device("cuda", 0)
    count = torch.cuda.get_device_properties(card).multi_processor_count
    device = devices.Device(capability, limit, count)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    made: dict[str, int] = {}
    initialise = CompiledKernel._init_handles

    def note(kernel: CompiledKernel) -> None:
        made[kernel.hash] = kernel.metadata.shared
        assert f".target sm_{target.arch}" in kernel.asm["ptx"], kernel.name
        if kernel.metadata.shared > limit:
            raise SystemExit(f"{kernel.name} takes {kernel.metadata.shared} of {limit} bytes")
        initialise(kernel)

    driver = triton.runtime.driver.active
    with (
        mock.patch.object(driver, "get_current_target", return_value=target),
        mock.patch.object(CUDABackend, "make_cubin", ptx_for_the_driver),
        mock.patch.object(CompiledKernel, "_init_handles", note),
        mock.patch.object(devices, "_cuda_device", return_value=device),
    ):
        result = selftest(card, progress=False)
        errors = packed_errors(card)
    name = ".".join(map(str, capability))
    for each in result.checks:
        print(f"{name} {each.name}: {'ok' if each.passed else 'FAILED'} {each.error} {each.detail}")
    for storage, error in errors.items():
        print(f"{name} experts {storage} lora: {'ok' if error <= LIMIT else 'FAILED'} {error:.1e}")
    held = sum(check.passed for check in result.checks) + sum(e <= LIMIT for e in errors.values())
    count = len(result.checks) + len(errors)
    print(
        f"{name} on {result.device}: {held} of {count} checks hold, {len(made)} kernels, "
        f"shared memory at most {max(made.values())} of {limit} bytes"
    )
    return 0 if held == count else 1


def main() -> int:
    """Run each capability in its own process, with its own cache, all at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capability", nargs="+", choices=[f"{a}.{b}" for a, b in SHARED_MEMORY])
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        major, _, minor = options.capability[0].partition(".")
        return run_as((int(major), int(minor)))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="other-tiles-") as folder:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--here", name],
                env=os.environ | {"TRITON_CACHE_DIR": f"{folder}/{name}"},
            )
            for name in options.capability
        ]
        status = max(process.wait() for process in running)
    print(f"{time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
