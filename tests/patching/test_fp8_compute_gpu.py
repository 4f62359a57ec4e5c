"""The option compute on a Hopper card: whole models, and what is around them.

The products themselves are in tests/ops/test_experts_fp8_gpu.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_patch import patch_model, patch_report, quantize_experts, record, unpatch_model
from moe_patch.cli import main
from moe_patch.quant.memory import experts_memory
from moe_patch.runtime.module_patch import patch_of
from tests.support import tiny_models
from tests.support.adapters import (
    EXPERTS,
    adapt,
    adapter_gradients,
    attention,
    expert_modules,
    lora_config,
    step,
)
from tests.support.dist_helpers import device, free_port, needs_cards, run_ranks
from tests.support.numerics import FP32, assert_bits, assert_close, rel_err
from tests.support.packed_ranks import layers, shard
from tests.support.signals_cases import last_layer

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "output_router_logits": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 products need compute capability 9.0")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def on_device(where: str | torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a bf16 model with experts in FP8 and adapters, unpatched, and a batch."""
    base = tiny_models.build("qwen3_moe", dtype=torch.bfloat16, **SIZES)
    batch = {name: t.to(where) for name, t in tiny_models.inputs(base, 2, 96).items()}
    model = quantize_experts(base.to(where), "fp8")
    return adapt(model, lora_config(EXPERTS, attention("qwen3_moe"), r=8)), batch


@pytest.fixture(scope="module")
def quantised() -> tuple[nn.Module, dict[str, Tensor]]:
    return on_device("cuda")


def patched(quantised: Any, compute: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    model = patch_model(copy.deepcopy(quantised[0]), compute=compute, **options).train()
    return model, quantised[1]


def results(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"logits": step(model, batch)}
    return found | {name: g.clone() for name, g in adapter_gradients(model).items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert len(found) == len(wanted)
    # Wrappers rename parameters and keep their order.
    for (name, value), mine in zip(wanted.items(), found.values(), strict=True):
        assert_bits(mine, value, name)


def copies(model: nn.Module) -> list[Any]:
    return [copy for e in expert_modules(model) for _, _, copy in patch_of(e).copies.made.values()]


def test_what_runs_is_fp8_and_reported_so(quantised: Any) -> None:
    """Results differ from those of decoded weights, by no more than two layers of FP8 explain."""
    decoded = results(*patched(quantised, "decoded"))
    for compute, made in (("fp8", 0), ("fp8_copy", 4)):
        model, batch = patched(quantised, compute)
        assert {row.reason for row in patch_report(model)} == {""}
        said = "skipped: experts stored in fp8; FP8 products passed"
        assert {row.self_check for row in patch_report(model)} == {said}
        with torch.no_grad():
            model(**batch)
        assert copies(model) == [], "no copy without gradients"
        found = results(model, batch)
        assert len(copies(model)) == made
        held = sum(tensor.nbytes for copy in copies(model) for tensor in copy)
        assert held == (experts_memory(model).stored if made else 0), "what plan and inspect say"
        assert_same(results(model, batch), found)
        # Routers of the second layer may choose otherwise, so look at what follows them.
        for name, value in decoded.items():
            if name == "logits" or "layers.1.mlp.experts" in name:
                error = rel_err(found[name], value)
                print(f"{compute}, {name}: {error}")
                assert 0.005 < error < 0.3, f"{compute}, {name}: {error}"


@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_checkpointing_and_recomputation_give_the_same_bits(quantised: Any, compute: str) -> None:
    wanted = results(*patched(quantised, compute))
    assert_same(results(*patched(quantised, compute, recompute=True)), wanted)
    for reentrant in (False, True):
        model, batch = patched(quantised, compute)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert_same(results(model, batch), wanted)


def test_recorded_norms_are_those_of_what_ran(quantised: Any) -> None:
    """One block alone, so that no other router sees the difference."""
    T, D = 192, SIZES["hidden_size"]
    x_TD, direction_TD = (torch.randn(T, D, device="cuda").bfloat16() for _ in range(2))
    ids_TK = torch.rand(T, 8, device="cuda").argsort(-1)[:, :2].contiguous()
    weights_TK = torch.rand(T, 2, device="cuda").bfloat16()
    found = {}
    for compute in ("decoded", "fp8", "fp8_copy"):
        model, _ = patched(quantised, compute)
        with record(model) as recorder:
            out = last_layer(model).mlp.experts(x_TD.clone().requires_grad_(), ids_TK, weights_TK)
            out.backward(direction_TD)
        found[compute] = list(recorder.layers.values())[-1]
    for compute in ("fp8", "fp8_copy"):
        for name in ("act_norm", "grad_norm_params", "grad_norm_lora"):
            error = rel_err(getattr(found[compute], name), getattr(found["decoded"], name))
            print(f"{compute}, {name}: {error}")
            assert 1e-4 < error < 0.05, f"{compute}, {name}: {error}"
        assert_bits(found[compute].grad_norm_output, found["decoded"].grad_norm_output)


@pytest.fixture
def group() -> Iterator[None]:
    """One process in a group of its own."""
    address = f"tcp://127.0.0.1:{free_port()}"
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_data_parallel_gives_the_bits_of_one_process(
    group: None, quantised: Any, compute: str
) -> None:
    model, batch = patched(quantised, compute)
    wanted = results(model, batch)
    assert_same(results(DistributedDataParallel(model), batch), wanted)


def test_fsdp2_keeps_no_copy(group: None, quantised: Any) -> None:
    """Backward is then that of fp8."""
    wanted = results(*patched(quantised, "fp8"))
    model, batch = patched(quantised, "fp8_copy")
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)
    assert all(row.reason.startswith("backward is decoded") for row in patch_report(model))
    assert_bits(step(model, batch), wanted.pop("logits"))
    assert copies(model) == []
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    assert_same(gradients, wanted)


def on_ranks(rank: int, compute: str) -> dict[str, dict[str, Tensor]]:
    """Return the results of a rank's own tokens: alone, under DDP, and under FSDP2."""
    pair = on_device(device(2, rank))
    batch = {name: t.roll(7 * rank, -1) for name, t in pair[1].items()}
    found = {kind: results(patched(pair, kind)[0], batch) for kind in {"fp8", compute}}
    wrapped = DistributedDataParallel(patched(pair, compute)[0])
    ddp = dict(zip(found[compute], results(wrapped, batch).values(), strict=True))
    model = shard(patched(pair, compute)[0])
    fsdp2 = {"logits": step(model, batch)}
    for name, p in model.named_parameters():
        if p.requires_grad:
            fsdp2[name] = p.grad.full_tensor()
    return found | {"ddp": ddp, "fsdp2": fsdp2}


@needs_cards(2)
@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_two_ranks_give_the_mean_of_their_gradients(compute: str) -> None:
    """Logits are those of each rank alone, bit for bit. FSDP2 keeps no copy for backward."""
    both = run_ranks(on_ranks, compute)
    assert rel_err(both[0]["ddp"]["logits"], both[1]["ddp"]["logits"]) > 0.1
    for kind, alone in (("ddp", compute), ("fsdp2", "fp8")):
        wanted = [found[alone] for found in both]
        for rank, found in enumerate(both):
            assert found[kind].keys() == wanted[rank].keys()
            assert_bits(found[kind]["logits"], wanted[rank]["logits"], f"{kind} {rank}")
            for name in found[kind].keys() - {"logits"}:
                mean = (wanted[0][name] + wanted[1][name]) / 2
                assert_close(found[kind][name], mean, FP32, f"{kind} {rank} {name}")


@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_compiled_code_gives_the_same_bits(quantised: Any, compute: str) -> None:
    """Make copies inside or use those of an eager forward, but never those of other weights."""
    eager, batch = patched(quantised, compute)
    model, _ = patched(quantised, compute)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    wanted = results(eager, batch)
    for _ in range(2):
        assert_same(results(compiled, batch), wanted)
    assert copies(model) == []
    assert_same(results(model, batch), wanted)
    assert len(copies(model)) == 4 * (compute == "fp8_copy")
    assert_same(results(compiled, batch), wanted)
    other = copy.deepcopy(model.state_dict())
    for name in [n for n in other if n.endswith(("gate_up_proj", "down_proj"))]:
        other[name] = other[name].flip(0)
    for each in (eager, model):
        each.load_state_dict(other)
    assert copies(model) == []
    assert_same(found := results(compiled, batch), results(eager, batch))
    assert rel_err(found["logits"], wanted["logits"]) > 0.1


def test_what_decodes_as_today_is_named(quantised: Any) -> None:
    """Widths that are no multiples of 128, and fp32: the bits of decoded, no copy, a line."""
    sizes = SIZES | {"moe_intermediate_size": 192}
    narrow = tiny_models.build("qwen3_moe", dtype=torch.bfloat16, **sizes).to("cuda")
    wide = tiny_models.build("qwen3_moe", **SIZES).to("cuda")
    for base, said in ((narrow, "multiples of 128"), (wide, "bf16 and fp16, found torch.float32")):
        model = adapt(quantize_experts(base, "fp8"), lora_config(EXPERTS, []))
        wanted = results(patch_model(model).train(), quantised[1])
        unpatch_model(model)
        patch_model(model, compute="fp8_copy")
        for row in patch_report(model):
            assert said in row.reason
        assert_same(results(model, quantised[1]), wanted)
        assert not any(copies(model))


@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_verify(compute: str, tmp_path: Any, capsys: Any) -> None:
    """Pass with the limits of FP8, at errors that bf16 alone would not have."""
    tiny_models.config("qwen3_moe", **SIZES).save_pretrained(tmp_path)
    command = ["verify", str(tmp_path), "--compute", compute, "--dtype", "bfloat16", "--json"]
    command += ["--device", "cuda", "--length", "96"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["reason"] for row in found["blocks"]} == {""}
    errors = {check["name"]: check["error"] for check in found["checks"]}
    print(errors)
    assert main([*command, "--limit", "0.002"]) == 1
