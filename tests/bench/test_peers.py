"""Third-party peers of the benchmark: absent ones, the folder, results in another layout."""

import dataclasses
import importlib
import subprocess
import sys
import types
import zipfile

import bench
import pytest
import torch
from bench_lib import child, measure
from bench_lib.ops import OPS
from bench_lib.ops.routing import ROUTING
from bench_lib.shapes import Point
from bench_lib.spec import Impl

from tests.support import bench_cases
from tests.support.bench_cases import ROOT, TINY

pytestmark = bench_cases.NEEDS_GROUPED_MM


def test_an_absent_peer_is_skipped_with_the_reason():
    op = OPS["experts"]
    absent = Impl("liger", lambda inputs, point: importlib.import_module("no_such_peer"))
    op = dataclasses.replace(op, impls=(absent,))
    cache = child.Cache(op, torch.device("cpu"), bench.DRY_SETTINGS)
    found = child.perform(op, child.Task("liger", TINY), cache, bench.DRY_SETTINGS)
    assert found == {"skipped": "not installed: No module named 'no_such_peer'"}


def peers_script(*arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "scripts" / "peers.sh"), *arguments]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_peers_unpack(tmp_path):
    assert "run 'download' first" in peers_script("unpack", str(tmp_path)).stderr
    (tmp_path / "packed").mkdir()
    with zipfile.ZipFile(tmp_path / "packed" / "a-1.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "x = 1")
    kernels = tmp_path / "kernels" / "other"
    kernels.mkdir(parents=True)
    (kernels / "k.py").write_text("y = 2")
    archive = tmp_path / "packed" / "k.tar.xz"
    subprocess.run(["tar", "-C", tmp_path / "kernels", "-cJf", archive, "other"], check=True)
    assert peers_script("unpack", str(tmp_path)).returncode == 0
    assert (tmp_path / "site" / "peer" / "__init__.py").read_text() == "x = 1"
    assert (tmp_path / "site" / "other" / "k.py").read_text() == "y = 2"
    assert peers_script("fetch").returncode == 2


def dense_router(logits_TE, top_k, before, groups, top_groups, scale, score, bias_E):
    """The documented result of Transformer Engine's router; the highest ids win ties."""
    assert not before
    score_TE = logits_TE.float() if score == "softmax" else logits_TE.float().sigmoid()
    chosen_by_TE = score_TE if bias_E is None else score_TE + bias_E
    if groups is not None:
        of_group = chosen_by_TE.unflatten(1, (groups, -1)).topk(top_k // top_groups).values.sum(2)
        kept = torch.zeros_like(of_group).scatter_(1, of_group.topk(top_groups).indices, 1.0)
        left_out = kept.repeat_interleave(logits_TE.shape[1] // groups, dim=1) == 0
        chosen_by_TE = chosen_by_TE.masked_fill(left_out, -torch.inf)
    order_TE = chosen_by_TE.flip(1).sort(dim=1, descending=True, stable=True).indices
    ids_TK = logits_TE.shape[1] - 1 - order_TE[:, :top_k]
    picked_TK = score_TE.gather(1, ids_TK)
    if score == "softmax":
        weights_TK = picked_TK.softmax(1)
    else:
        weights_TK = picked_TK / picked_TK.sum(1, keepdim=True)
    weights_TK = (weights_TK * (scale or 1.0)).to(logits_TE.dtype)
    chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, ids_TK, True)
    return torch.zeros_like(logits_TE).scatter(1, ids_TK, weights_TK), chosen_TE


def te_router(monkeypatch, router):
    """Return the te_router implementation, with a fake module in place of Transformer Engine."""
    module = types.ModuleType("transformer_engine.pytorch.router")
    module.fused_topk_with_score_function = router
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return ROUTING.impl("te_router")


POINTS = [
    Point("E128_K8", 300, "fwd+bwd", "bf16"),
    Point("E256_K8_G8", 300, "fwd+bwd", "fp32"),
]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.shape)
def test_a_dense_router_is_checked_whatever_its_rule_for_ties(monkeypatch, point):
    inputs = ROUTING.make_inputs(point, torch.device("cpu"))
    expected = ROUTING.reference(point, inputs)
    if point.dtype == "bf16":
        logits = inputs.copies[0]["logits"].detach()
        best = logits.sort(dim=1, descending=True).values
        assert (best[:, 7] == best[:, 8]).any(), "some rows have two candidates for the last place"
    program = te_router(monkeypatch, dense_router).build(inputs, point)
    assert measure.check(ROUTING, point, program, inputs, expected) < 1e-2

    def next_best(logits_TE, top_k, *options):
        """Choose one expert fewer, so that the last place gets another expert."""
        return dense_router(logits_TE, top_k - 1, *options)

    program = te_router(monkeypatch, next_best).build(inputs, point)
    with pytest.raises(measure.WrongResultError):
        measure.check(ROUTING, point, program, inputs, expected)


def test_the_routing_op_names_a_router_that_is_not_installed():
    cache = child.Cache(ROUTING, torch.device("cpu"), bench.DRY_SETTINGS)
    found = child.perform(ROUTING, child.Task("te_router", POINTS[0]), cache, bench.DRY_SETTINGS)
    assert found == {"skipped": "not installed: No module named 'transformer_engine'"}
