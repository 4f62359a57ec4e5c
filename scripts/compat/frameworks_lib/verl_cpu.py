"""A platform for a machine without a card, which verl 0.9 has none of: VERL_PLATFORM=cpu.

``VERL_USE_EXTERNAL_MODULES=verl_cpu`` has verl import this file. It seeds too, so that adapters of
two runs begin equal.
"""

from __future__ import annotations

import contextlib
import os

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

# Read by verl from every device's module; the CPU's module has none of them.
ABSENT = (
    "empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated",
    "max_memory_reserved", "reset_peak_memory_stats",
)  # fmt: skip
for name in ABSENT:
    setattr(torch.cpu, name, lambda *args: 0)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The methods that the SFT trainer calls."""

    device_name = vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_name(self) -> str:
        return "CPU"

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None


PlatformCPU.__abstractmethods__ = frozenset()


def start_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
    """Stand in for verl's own, which names the CPU twice."""
    torch.distributed.init_process_group("gloo")
    return tuple(int(os.environ[key]) for key in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))


from verl.utils import distributed  # noqa: E402

distributed.initialize_global_process_group = start_process_group
torch.manual_seed(0)
