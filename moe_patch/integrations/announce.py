"""One line in the log for every model that an integration has patched."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist
from torch import nn

from moe_patch.patching.report import patch_report

LOGGER = logging.getLogger("moe_patch")


def on_first_rank() -> bool:
    """Return whether this process speaks for all, also before a process group is there."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def announce(model: nn.Module, known: str = "", logger: logging.Logger = LOGGER) -> str:
    """Log what of a model is patched, on the first rank; returns the line.

    Args:
        model: a patched model.
        known: the line of the model before; an equal one is not logged.
        logger: where to; a host library may show loggers of its own name only.
    """
    line = patch_report(model).summary()
    if line != known and on_first_rank():
        logger.info("moe_patch: %s", line)
    return line
