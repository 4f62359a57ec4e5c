"""A Triton driver that compiles for a chosen GPU on any machine and launches nothing."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

# The scripts that compile import this first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from moe_patch.kernels.common.device import Device
from moe_patch.kernels.common.versions import HOPPER, hopper_module, known_triton
from moe_patch.tools.wgmma_operands import overwritten_operands

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Usage(NamedTuple):
    """Resources of a compiled kernel, and instructions that make its results undefined.

    Attributes:
        name, registers, stack, shared: of the kernel; bytes of stack and shared memory.
        descriptors: whether it uses tensor descriptors.
        overwritten: see :func:`moe_patch.tools.wgmma_operands.overwritten_operands`.
    """

    name: str
    registers: int
    stack: int
    shared: int
    descriptors: bool
    overwritten: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.name} registers={self.registers} stack={self.stack} shared={self.shared}"
            f"{' descriptors' if self.descriptors else ''}"
        )


class _NoLaunch:
    def __init__(self, src: object, metadata: object) -> None:
        pass

    def __call__(self, *args: object) -> None:
        pass


class _Utilities:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}

    @staticmethod
    def load_binary(
        name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    @staticmethod
    def unload_module(module: int) -> None:
        """Do nothing, because no module was loaded. Triton 3.8 calls this for every kernel."""


@dataclass
class CompileOnly:
    """A Triton driver that compiles for ``target`` and launches nothing."""

    target: GPUTarget
    launcher_cls = _NoLaunch
    utils = _Utilities

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def compiling_for(
    capability: tuple[int, int], shared_memory: int, measured: bool = True
) -> Iterator[list[Usage]]:
    """Compile kernels launched inside for ``capability`` only; yield the usage of each.

    Args:
        capability, shared_memory: of the GPU; bytes per block.
        measured: disassemble each kernel for its usage; without it, the list stays empty.
    """
    usages: list[Usage] = []
    device = Device(capability, shared_memory, 132)
    initialise = CompiledKernel._init_handles
    if known_triton():  # import them before their switches are set below
        for name in HOPPER:
            hopper_module(name)

    def record(kernel: CompiledKernel) -> None:
        if measured and kernel.module is None:
            usages.append(usage_of(kernel))
        initialise(kernel)

    triton.runtime.driver.set_active(
        CompileOnly(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("moe_patch.kernels.common.device.INTERPRETER", device))
        for name, module in list(sys.modules.items()):
            if name.startswith("moe_patch.kernels.") and hasattr(module, "approximate"):
                stack.enter_context(
                    mock.patch.object(module, "approximate", lambda t: t.dtype.itemsize == 2)
                )
        stack.enter_context(mock.patch.object(CompiledKernel, "_init_handles", record))
        yield usages


def usage_of(kernel: CompiledKernel) -> Usage:
    """Return registers and stack from the binary, and shared memory from Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    ptx = kernel.asm["ptx"]
    return Usage(
        kernel.name,
        int(found[1]),
        int(found[2]),
        kernel.metadata.shared,
        "cp.async.bulk.tensor" in ptx,
        tuple(overwritten_operands(ptx)),
    )
