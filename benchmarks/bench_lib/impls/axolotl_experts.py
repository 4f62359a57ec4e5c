"""axolotl's scattermoe experts in a whole model, installed as its own integration does.

The peers folder then holds ``axolotl/integrations/kernels/libs/scattermoe_lora`` and
``axolotl/utils/logging.py`` of axolotl 0.21.0 (Apache-2.0), without the packages' own __init__
files above. Source of the two calls: axolotl/integrations/kernels/plugin.py, ``pre_model_load``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from bench_lib.impls.axolotl_lora import tune_quickly

NAME = "peft_scattermoe"


@contextlib.contextmanager
def installed(model: Any) -> Iterator[None]:
    """Let axolotl's kernels run a PEFT model's experts, adapters included.

    Raises:
        ImportError: the peers folder has no axolotl.
    """
    from axolotl.integrations.kernels.libs.scattermoe_lora import experts
    from axolotl.integrations.kernels.libs.scattermoe_lora.kernels import lora_ops, ops

    experts.register_scattermoe_experts()
    tune_quickly(lora_ops, ops)
    base = model.get_base_model()
    before = base.config._experts_implementation
    base.set_experts_implementation("scattermoe")
    try:
        yield
    finally:
        base.set_experts_implementation(before)
