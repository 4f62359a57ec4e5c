"""Run ``python -m moe_patch train CONFIG.yaml`` from a checkout."""

import sys
from pathlib import Path

# This works from a source tree that was never installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_patch.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
