"""python by_name.py -m openrlhf.cli.train_sft ...: the command, with "moe_patch" registered."""

import runpy
import sys

import moe_patch.integrations.transformers  # noqa: F401

sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
