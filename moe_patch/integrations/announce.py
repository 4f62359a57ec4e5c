"""Log one line for every model that an integration has patched."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist
from torch import nn

from moe_patch.patching.report import patch_report

LOGGER = logging.getLogger("moe_patch")


def on_first_rank() -> bool:
    """Return whether this process logs for all ranks; works before a process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def announce(model: nn.Module, known: str = "", logger: logging.Logger = LOGGER) -> str:
    """Log which parts of a model are patched, on the first rank; return the line.

    Args:
        model: a patched model.
        known: the previous line of this model; an equal line is not logged again.
        logger: the logger to use; a host library may show only loggers with its own prefix.
    """
    line = patch_report(model).summary()
    if line != known and on_first_rank():
        logger.info("moe_patch: %s", line)
    return line
