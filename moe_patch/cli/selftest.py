"""``selftest``: check the operators on this machine's device against fp64."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from moe_patch.cli.output import add_json, print_json, print_table
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from moe_patch.tools.selftest import Check
    from moe_patch.tools.trust import Trust

# Number of processes on a GPU: each must import and create a context before it can compile.
_JOBS = 4


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "selftest",
        help="check the kernels on this machine against fp64",
        description="Plan, routing, experts and adapters, forward and backward, against the plain "
        "reference in fp64, and twice for equal bits. Status 1 if a check fails.",
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda if available")
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help=f"processes that share the checks; default: {_JOBS} on a GPU, else 1",
    )  # fmt: skip
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--trust",
        action="store_true",
        help="on a Triton that this library was not tested with: check the Hopper kernels instead, "
        "and enable them for this Triton, torch and library if they hold",
    )
    other.add_argument(
        "--forget", action="store_true", help="undo --trust: disable the kernels again"
    )
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run the checks; return status 1 if one fails."""
    from moe_patch.cli.models import device_of
    from moe_patch.tools.selftest import selftest

    if args.forget:
        return _forget(args.json)
    device = device_of(args)
    jobs = jobs_for(device, args.jobs)
    if args.trust:
        trusted = trust_on(device, jobs)
        if args.json:
            print_json(trusted.as_dict())
        else:
            print_trust(trusted)
        return 0 if trusted.passed else CHECK_FAILED
    result = selftest(device, progress=sys.stderr.isatty(), jobs=jobs)
    if args.json:
        print_json(result.as_dict())
    else:
        print(f"{result.device}, backend {result.backend}")
        print_checks(result.checks)
        if result.note:
            print(f"note: {result.note}")
    return 0 if result.passed else CHECK_FAILED


def jobs_for(device: torch.device, asked: int | None = None) -> int:
    """Return the number of processes that share the checks.

    Raises:
        UnsupportedOptionError: ``asked`` is below one.
    """
    if asked is not None and asked < 1:
        raise UnsupportedOptionError(f"--jobs {asked}: at least 1")
    if asked is not None:
        return asked
    return min(_JOBS, os.cpu_count() or 1) if device.type == "cuda" else 1


def trust_on(device: torch.device, jobs: int) -> Trust:
    """Run :func:`moe_patch.tools.trust.trust` with the settings of a command."""
    from moe_patch.tools.trust import trust

    return trust(device, progress=sys.stderr.isatty(), jobs=jobs)


def print_trust(result: Trust) -> None:
    """Print the comparisons, and whether the Hopper kernels run from now on."""
    print(f"{result.device}, triton {result.triton}")
    if result.checks:
        print_checks(result.checks)
    for hazard in result.hazards:
        print(f"overwritten: {hazard}")
    if result.note:
        print(f"note: {result.note}")
    if result.marker:
        print(f"the Hopper kernels run from now on: {result.marker}")
    elif not result.passed:
        print("the Hopper kernels stay off; the portable ones run")


def print_checks(checks: list[Check]) -> None:
    """Print a row for each check, and how many hold."""
    print_table(
        ("check", "", "error / limit", "seconds", "detail"),
        [
            (c.name, "ok" if c.passed else "FAILED", f"{c.error:.2f}", c.seconds, c.detail)
            for c in checks
        ],
    )
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} checks hold")


def _forget(as_json: bool) -> int:
    from moe_patch.tools.trust import forget

    removed = forget()
    if as_json:
        print_json({"removed": removed or None})
    else:
        print(f"removed {removed}" if removed else "there is no marker of this Triton and torch")
    return 0
