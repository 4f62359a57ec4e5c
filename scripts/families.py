"""Compare the families of the installed transformers with the registry: new and changed ones.

    python scripts/families.py             print the differences; exit status 1 if there are any
    python scripts/families.py --accept    store the installed sources as checked
    python scripts/families.py --table     write the table into docs/families.md

On a new release: read the differences, correct the entries, run scripts/parity.py, then --accept.
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers

from moe_patch import supported_model_types
from moe_patch.families import families, later_families
from moe_patch.families.drift import accept, differences
from moe_patch.families.table import insert, table

PAGE = Path(__file__).parents[1] / "docs" / "families.md"


def main() -> int:
    """Compare, accept or write the table."""
    parser = argparse.ArgumentParser(description="Families of transformers against the registry.")
    parser.add_argument("--accept", action="store_true", help="store the sources as checked")
    parser.add_argument(
        "--table", action="store_true", help="write the table into docs/families.md"
    )
    options = parser.parse_args()
    if options.accept:
        accept(families(), transformers.__version__)
    if options.table:
        content = table(families(), transformers.__version__)
        PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), content), encoding="utf-8")
    found = differences(families(), later_families())
    for difference in found:
        print(difference)
    tiers = collections.Counter(supported_model_types().values())
    counts = ", ".join(f"{tiers[tier]} {tier}" for tier in ("full", "experts", "refused"))
    print(
        f"transformers {transformers.__version__}: {sum(tiers.values())} MoE model types "
        f"({counts}), {len(found)} differences from what the entries were checked with"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
