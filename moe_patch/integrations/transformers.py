"""Register ``moe_patch`` with transformers as an experts implementation.

    import moe_patch.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_patch")

The import registers the name and does nothing else; see :mod:`moe_patch.patching.by_name`.
With a transformers that is too old it raises UnsupportedModelError. axolotl would skip a plugin
that raises ImportError, and train unpatched.
"""

from __future__ import annotations

from moe_patch.patching.by_name import register_experts
from moe_patch.patching.window import require_transformers
from moe_patch.runtime.forward import EXPERTS_NAME

__all__ = ["EXPERTS_NAME"]

require_transformers(f'experts_implementation="{EXPERTS_NAME}"')
register_experts()
