"""Run the command line: ``python -m moe_patch``."""

import sys

from moe_patch.cli import main

if __name__ == "__main__":
    sys.exit(main())
