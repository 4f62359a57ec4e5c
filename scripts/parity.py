"""Parity of every family with transformers: one line per recipe, then the counts.

    python scripts/parity.py [RECIPE ...]

Exit status 1 when a recipe is wrong.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.all_families import check
from tests.tiny_recipes import FAMILIES


def main() -> int:
    """Run the recipes named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Parity of every family with transformers.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    names = parser.parse_args().recipes or list(FAMILIES)
    if unknown := sorted(set(names) - set(FAMILIES)):
        parser.error(f"unknown recipes {unknown}; known: {', '.join(FAMILIES)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: collections.Counter[str] = collections.Counter()
    begin = time.perf_counter()
    for name in names:
        start = time.perf_counter()
        result = check(name)
        counts["wrong" if result.problem else result.tier] += 1
        state = f"WRONG  {result.problem}" if result.problem else f"worst {result.worst:.1e}"
        print(
            f"{name:24s} {result.tier:8s} {time.perf_counter() - start:5.1f} s  {state}", flush=True
        )
    tiers = ", ".join(f"{tier} {counts[tier]}" for tier in ("full", "experts", "refused", "wrong"))
    print(f"{len(names)} recipes: {tiers}; {time.perf_counter() - begin:.0f} s")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
