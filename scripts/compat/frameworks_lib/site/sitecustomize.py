"""Count moe_patch's calls of the experts in every Python process with this folder on its path.

``$MOE_PATCH_TRACE`` is a folder; each process that computed experts leaves a JSON file there.
"""

import atexit
import importlib.machinery
import json
import os
import sys

MODULES = ("moe_patch.ops.experts.torch_backend", "moe_patch.kernels.experts.experts")
COUNTED = ("experts_forward", "experts_backward")
calls = dict.fromkeys(COUNTED, 0)


def counted(function):
    def run(*args, **kwargs):
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    run.__name__ = function.__name__
    return run


class Finder:
    """Wraps the two functions in counters when a backend is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for function in COUNTED:
                setattr(module, function, counted(getattr(module, function)))

        spec.loader.exec_module = exec_module
        return spec


def leave():
    if any(calls.values()):
        path = os.path.join(os.environ["MOE_PATCH_TRACE"], f"{os.getpid()}.json")
        with open(path, "w") as file:
            json.dump(calls, file)


if "MOE_PATCH_TRACE" in os.environ:
    sys.meta_path.insert(0, Finder)
    atexit.register(leave)
