"""Check parity of every family with transformers: one line per recipe, then the counts.

    python scripts/parity.py [--jobs N] [RECIPE ...]

The exit status is 1 if a recipe is wrong.
"""

from __future__ import annotations

import argparse
import collections
import logging
import multiprocessing
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.all_families import Result, check
from tests.support.tiny_recipes import FAMILIES


def quiet() -> None:
    """Silence libraries that warn about configs which are tiny on purpose."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def line(result: Result) -> str:
    """Return one recipe's line."""
    if result.problem:
        return f"{result.name:24s} {result.tier:8s} WRONG  {result.problem}"
    lora = f"  lora: {result.lora}" if result.lora else ""
    return f"{result.name:24s} {result.tier:8s} worst {result.worst:.1e}{lora}"


def main() -> int:
    """Run the recipes named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Parity of every family with transformers.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args()
    names = options.recipes or list(FAMILIES)
    if unknown := sorted(set(names) - set(FAMILIES)):
        parser.error(f"unknown recipes {unknown}; known: {', '.join(FAMILIES)}")
    begin = time.perf_counter()
    counts: collections.Counter[str] = collections.Counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, quiet) as pool:
        for result in pool.map(check, names):
            counts["wrong" if result.problem else result.tier] += 1
            print(line(result), flush=True)
    tiers = ", ".join(f"{tier} {counts[tier]}" for tier in ("full", "experts", "refused", "wrong"))
    print(f"{len(names)} recipes: {tiers}; {time.perf_counter() - begin:.0f} s")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
