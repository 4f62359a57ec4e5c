"""The file for ``--external_plugins``; ``--callbacks moe_patch`` then patches the model.

ms-swift calls the entry of its map with its arguments and the trainer.
"""

from __future__ import annotations

import logging

from swift.callbacks import callbacks_map

import moe_patch.integrations.transformers  # noqa: F401
from moe_patch.integrations.trainer import MoePatchCallback

# Loggers below "swift" are shown in ms-swift's log.
LOGGER = logging.getLogger("swift.moe_patch")

callbacks_map["moe_patch"] = lambda args, trainer: MoePatchCallback(logger=LOGGER)
