"""accelerate's FSDP on processes of a CPU, which it offers only on devices.

    accelerate launch --config_file FILE -m tests.support.fsdp_on_cpu train CONFIG.yaml

runs the commands of ``python -m moe_patch`` that way; FILE has ``use_cpu: true``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accelerate.state import PartialState
from accelerate.utils import DistributedType


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Let accelerate take processes on a CPU for processes with one device each."""
    made = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with mock.patch.object(PartialState, "__init__", init):
        yield


if __name__ == "__main__":
    from moe_patch.cli import main

    with fsdp_on_cpu():
        sys.exit(main())
