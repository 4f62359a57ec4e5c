"""``selftest``: the operators on this machine's device against fp64."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from moe_patch.cli.output import add_json, print_json, print_table
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.errors import UnsupportedOptionError

# Processes on a GPU: each has imports and a context to pay for before it compiles anything.
_JOBS = 4


def add(subparsers: Any) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "selftest",
        help="check the kernels on this machine against fp64",
        description="Plan, routing, experts and adapters, forward and backward, against the plain "
        "reference in fp64, and twice for equal bits. Status 1 if a check fails.",
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda where there is one")
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help=f"processes that share the checks; default: {_JOBS} on a GPU, else 1",
    )  # fmt: skip
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run it; status 1 when a check fails."""
    from moe_patch.cli.models import device_of
    from moe_patch.tools.selftest import selftest

    device = device_of(args)
    jobs = args.jobs
    if jobs is not None and jobs < 1:
        raise UnsupportedOptionError(f"--jobs {jobs}: at least 1")
    if jobs is None:
        jobs = min(_JOBS, os.cpu_count() or 1) if device.type == "cuda" else 1
    result = selftest(device, progress=sys.stderr.isatty(), jobs=jobs)
    if args.json:
        print_json(result.as_dict())
    else:
        print(f"{result.device}, backend {result.backend}")
        print_table(
            ("check", "", "error / limit", "seconds", "detail"),
            [
                (c.name, "ok" if c.passed else "FAILED", f"{c.error:.2f}", c.seconds, c.detail)
                for c in result.checks
            ],
        )
        failed = sum(not check.passed for check in result.checks)
        print(f"{len(result.checks) - failed} of {len(result.checks)} checks hold")
        if result.note:
            print(f"note: {result.note}")
    return 0 if result.passed else CHECK_FAILED
