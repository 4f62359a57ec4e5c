"""The ms-swift plugin: ``swift sft --external_plugins PLUGIN --callbacks moe_patch``.

    python -c "from moe_patch.integrations.ms_swift import PLUGIN; print(PLUGIN)"

ms-swift puts the plugin's folder first on ``sys.path``, so that folder holds nothing else.
"""

from __future__ import annotations

from pathlib import Path

PLUGIN = str(Path(__file__).with_name("moe_patch_swift.py"))
