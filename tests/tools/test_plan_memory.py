"""Each part of a plan against real tensors: weights, adapters, states, and what autograd keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from moe_patch import lora_targets, patch_model, quantize_experts
from moe_patch.cli.plan_sizes import read_sizes
from moe_patch.formats.tensor import QuantTensor
from moe_patch.ops import routing_op  # noqa: F401  (defines the operators)
from moe_patch.ops.routing_fields import SPEC_FIELDS
from moe_patch.runtime.peft_release import rewrites_targets
from moe_patch.tools import plan_memory as parts
from moe_patch.tools import plan_weights as lasting
from moe_patch.tools.plan_fp8 import forward_moments
from moe_patch.tools.plan_types import KINDS, Moe, Recipe
from moe_patch.train.frozen import quantize_embedding
from moe_patch.types import RouteSpec
from tests.support import tiny_models

WIDE = {"hidden_size": 64, "moe_intermediate_size": 64}
FAMILIES = [
    pytest.param(name, marks=pytest.mark.families(name))
    for name in ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "mixtral")
]
T = 48


def sizes_of(model, full=False):
    return read_sizes(model, {} if full else lora_targets(model))


def with_adapters(model, rank, **options):
    return get_peft_model(model, LoraConfig(r=rank, **lora_targets(model)), **options)


def nbytes(parameter: Tensor) -> int:
    return parameter.weight.nbytes() if isinstance(parameter, QuantTensor) else parameter.nbytes


@pytest.mark.parametrize("storage", ["bf16", "nf4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_by_kind(family, storage):
    widths = {"intermediate_size": 64} if family in ("gpt_oss", "mixtral", "olmoe") else {}
    over = {"hidden_size": 64, **(widths or {"moe_intermediate_size": 64})}
    model = tiny_models.build(family, torch.bfloat16, **over)
    planned = lasting.weight_bytes(sizes_of(model), Recipe(storage=storage))
    if storage != "bf16":
        quantize_experts(model, storage)
    found = dict.fromkeys(KINDS, 0)
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(p) for m in embeddings for p in m.parameters()}
    for name, p in model.named_parameters():
        if id(p) in own:
            kind = "embeddings"
        elif ".experts." in name:
            kind = "experts"
        elif name.endswith("sinks"):
            kind = "other"
        elif "norm" in name:
            kind = "norms"
        elif ".gate." in name or ".router." in name:
            kind = "router"
        else:
            kind = "linear"
        found[kind] += nbytes(p)
    assert planned == found


def test_transposed_copies_of_fp8_experts_take_as_much_again():
    widths = {"hidden_size": 128, "moe_intermediate_size": 128}
    sizes = sizes_of(tiny_models.build("qwen3_moe", torch.bfloat16, **widths))
    once = lasting.weight_bytes(sizes, Recipe(storage="fp8"))
    for compute, factor in (("fp8", 1), ("fp8_copy", 2)):
        found = lasting.weight_bytes(sizes, Recipe(storage="fp8", compute=compute))
        assert found["experts"] == factor * once["experts"]
        assert found["linear"] == once["linear"]
    sharded = Recipe(storage="fp8", compute="fp8_copy", ranks=2)
    assert lasting.weight_bytes(sizes, sharded)["experts"] < once["experts"]
    plain = Recipe(storage="bf16", compute="fp8_copy")
    assert lasting.weight_bytes(sizes, plain) == lasting.weight_bytes(sizes, Recipe())


def test_a_linear_in_4_bits_is_what_bitsandbytes_makes():
    functional = pytest.importorskip("bitsandbytes").functional
    model = tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE)
    planned = lasting.weight_bytes(sizes_of(model), Recipe(linear="nf4"))["linear"]
    found = 0
    for name, module in model.named_modules():
        if type(module) is nn.Linear and "layers" in name:
            packed, state = functional.quantize_4bit(
                module.weight.data, quant_type="nf4", compress_statistics=True
            )
            nested = state.state2
            tensors = (packed, state.absmax, state.code, state.offset, nested.absmax, nested.code)
            found += sum(t.nbytes for t in tensors)
    assert planned == found


def test_an_embedding_in_4_bits_is_what_bitsandbytes_makes():
    pytest.importorskip("bitsandbytes")
    model = tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE, tie_word_embeddings=False)
    sizes = sizes_of(model)
    planned = lasting.weight_bytes(sizes, Recipe(embedding="nf4"))["embeddings"]
    quantize_embedding(model)
    packed = model.get_input_embeddings().weight
    state = packed.quant_state
    found = sum(t.nbytes for t in (packed.data, state.absmax, state.code))
    assert planned == found + model.get_output_embeddings().weight.nbytes
    tied = sizes_of(tiny_models.build("qwen3_moe", torch.bfloat16, tie_word_embeddings=True))
    plain, same = (lasting.weight_bytes(tied, Recipe(embedding=e)) for e in ("bf16", "nf4"))
    assert plain == same


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_their_gradients(family):
    model = tiny_models.build(family, torch.bfloat16)
    planned = lasting.trained_bytes(sizes_of(model), Recipe(rank=3))
    batch = tiny_models.inputs(model)
    adapted = with_adapters(model, 3)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert planned == sum(p.nbytes for p in trained)
    adapted(**batch).logits.float().square().mean().backward()
    assert planned == sum(p.grad.nbytes for p in trained)


def states(optimizer) -> int:
    found = {
        t.untyped_storage().data_ptr(): t.nbytes
        for state in optimizer.state.values()
        for name, t in state.items()
        if isinstance(t, Tensor) and name != "step" and not name.startswith("qmap")
    }
    return sum(found.values())


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_states_of_adamw(full):
    model = tiny_models.build("qwen3_moe", torch.bfloat16)
    sizes, batch = sizes_of(model, full), tiny_models.inputs(model)
    model = model if full else with_adapters(model, 3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(**batch).logits.float().square().mean().backward()
    optimizer.step()
    assert lasting.optimizer_bytes(sizes, Recipe(rank=3, full=full)) == states(optimizer)
    assert lasting.optimizer_bytes(sizes, Recipe(rank=3, full=full, optimizer="sgd")) == 0


def test_states_of_8_bit_adamw():
    bnb = pytest.importorskip("bitsandbytes")
    model = tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE)
    sizes = sizes_of(model)
    adapted = with_adapters(model, 16)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert {p.numel() < 4096 for p in trained} == {True, False}
    optimizer = bnb.optim.AdamW8bit(trained)
    for i, p in enumerate(trained):
        optimizer.init_state(optimizer.param_groups[0], p, 0, i)
    recipe = Recipe(rank=16, optimizer="adamw_8bit")
    assert lasting.optimizer_bytes(sizes, recipe) == states(optimizer)


def kept_by(call, known) -> int:
    """Bytes of the storages that autograd keeps and that grow with the tokens."""
    held: dict[int, int] = {}
    skipped = {t.untyped_storage().data_ptr() for t in known}

    def note(tensor: Tensor) -> Tensor:
        if isinstance(tensor, QuantTensor):
            return tensor
        storage = tensor.untyped_storage()
        grows = T in tensor.shape or (tensor.dim() and tensor.shape[0] in (T, 2 * T))
        if storage.data_ptr() not in skipped and grows:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    return sum(held.values())


def prepared(family, mode, **over):
    """The last layer of a patched model, its plan's layer, recipe, and arguments of attention."""
    model = tiny_models.build(family, torch.bfloat16, **over)
    model.set_attn_implementation("sdpa")
    sizes = sizes_of(model, mode == "full")
    recipe = Recipe(
        tokens=T, rank=3, full=mode == "full", adapters="bf16" if mode == "bf16" else "fp32"
    )
    base = model
    if mode != "full":
        model = with_adapters(model, 3, autocast_adapter_dtype=mode == "fp32")
    patch_model(model)
    x = torch.randn(1, T, base.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = base.model.rotary_emb(x, torch.arange(T)[None])
    return base.model, sizes, recipe, x, positions


@pytest.mark.parametrize("mode", ["fp32", "bf16", "full"])
@pytest.mark.parametrize("family", FAMILIES[:1] + FAMILIES[3:])
@pytest.mark.parametrize("at", [0, -1])
def test_attention_and_norms_keep(family, mode, at):
    base, sizes, recipe, x, positions = prepared(family, mode)
    layer, planned = base.layers[at], sizes.layers[at]
    known = [*base.parameters(), *positions]
    with torch.autocast("cpu", torch.bfloat16, enabled=mode != "bf16"):

        def attention():
            hidden = layer.input_layernorm(x)
            out, _ = layer.self_attn(hidden, position_embeddings=positions, attention_mask=None)
            return layer.post_attention_layernorm(x + out)

        found = kept_by(attention, known)
    part = planned._replace(inputs=planned.inputs[:2])  # q, k and v; then the output's
    token = (
        parts.norm_bytes(part, recipe, 2)
        + parts.linear_bytes(part, recipe, 2)
        + parts.attention_bytes(part, recipe, 2)
    )
    assert found == T * token


@pytest.mark.families("gpt_oss")
def test_attention_with_sinks_keeps_its_probabilities_once():
    model = tiny_models.build("gpt_oss", torch.bfloat16)
    layer, planned = model.model.layers[0], sizes_of(model).layers[0]
    x = torch.randn(1, T, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = model.model.rotary_emb(x, torch.arange(T)[None])
    mask = torch.zeros(1, 1, T, T, dtype=torch.bfloat16)

    def attention():
        layer.self_attn(x, position_embeddings=positions, attention_mask=mask)

    model.requires_grad_(False)
    found = kept_by(attention, [*model.parameters(), *positions])
    heads, width = model.config.num_attention_heads, 2
    probabilities = heads * T * (T + 1) * width  # the sink's column as well
    recipe = Recipe(tokens=T)
    assert planned.eager == width
    # q, k and v are kept as well, the latter two once a head.
    assert probabilities < found < 2 * T * parts.attention_bytes(planned, recipe, 2)
    fused = parts.attention_bytes(planned._replace(eager=0), recipe, 2)
    assert T * (parts.attention_bytes(planned, recipe, 2) - fused) == pytest.approx(
        probabilities + 8 * heads * T, rel=0.1
    )


@pytest.mark.parametrize("mode", ["fp32", "bf16", "full"])
@pytest.mark.parametrize("family", FAMILIES[3:4])
def test_shared_experts_and_dense_layers_keep(family, mode):
    base, sizes, recipe, x, _ = prepared(family, mode)
    seen = 0
    for layer, planned in zip(base.layers, sizes.layers, strict=True):
        mlp = layer.mlp if planned.moe is None else layer.mlp.shared_experts
        part = planned._replace(inputs=planned.inputs[2:])
        with torch.autocast("cpu", torch.bfloat16, enabled=mode != "bf16"):
            found = kept_by(lambda mlp=mlp: mlp(x), [*base.parameters()])
        token = parts.mlp_bytes(part, 2) + parts.linear_bytes(part, recipe, 2)
        # x, which the routed experts keep; adapters that are modules keep casts of it to fp32.
        if planned.moe is not None and (rewrites_targets() or mode != "fp32"):
            token += 2 * sizes.hidden
        assert found == T * token
        seen += 1
    assert seen == len(sizes.layers)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "full"])
def test_experts_keep(mode, recompute):
    model = tiny_models.build("qwen3_moe", torch.bfloat16)
    sizes = sizes_of(model, mode == "full")
    base, moe = model, sizes.layers[-1].moe
    if mode != "full":
        model = with_adapters(model, 3)
    patch_model(model, recompute=recompute)
    recipe = Recipe(tokens=T, rank=3, full=mode == "full", recompute=recompute)
    experts = base.model.layers[-1].mlp.experts
    x = torch.randn(T, moe.hidden, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.rand(T, moe.experts).argsort(1)[:, : moe.top_k]
    weights = torch.rand(T, moe.top_k).bfloat16().requires_grad_()
    found = kept_by(lambda: experts(x, ids, weights), [*base.parameters(), ids, weights])
    offsets = 4 * (moe.experts + 1)
    assert found == parts.experts_bytes(moe, recipe, 2) - offsets


def test_the_router_keeps():
    """Tensors that the kernels' operator keeps, on the meta device."""
    moe, held = Moe(8, 2, 32, 32, 16, 2), []
    logits = torch.empty(T, moe.experts, dtype=torch.bfloat16, device="meta", requires_grad=True)
    spec = RouteSpec(top_k=moe.top_k, weights_dtype=torch.bfloat16)
    fields = [getattr(spec, name) for name in SPEC_FIELDS]

    def note(tensor):
        held.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _, weights = torch.ops.moe_patch.route_forward(logits, None, torch.int64, *fields)
    assert T * parts.router_bytes(moe, 2) == sum(held) + weights.nbytes


def test_the_loss_holds_three_times_the_logits_in_fp32():
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers.loss.loss_utils import ForCausalLMLoss

    sizes = replace(sizes_of(tiny_models.build("qwen3_moe", torch.bfloat16)), vocab=1000)
    hidden = torch.randn(1, T, 8, dtype=torch.bfloat16)
    head = torch.randn(1000, 8, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, T, dtype=torch.int64)
    with MemTracker() as tracker:
        ForCausalLMLoss(hidden @ head.T, labels, 1000).backward()
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert found == pytest.approx(parts.logits_bytes(sizes, Recipe(tokens=T)), rel=0.05)


def rows(op, since="", **wanted):
    """The newest row of each shape and storage."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / f"{op}.jsonl"
    wanted |= {"impl": "moe_patch", "T": 16384}
    found = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if row["date"] >= since and row.items() >= wanted.items():
            found[row["shape"], row["dtype"]] = row
    assert found
    return found.values()


def planned_block(row):
    """(kept beside x, peak) of a measured call: weights, factors and dout were there as well."""
    D, F, E, R = row["D"], row["F"], row["E"], row["R"]
    moe = Moe(E, row["K"], D, 2 * F, F, 2 if R else 0)
    recipe = Recipe(
        tokens=row["T"], rank=R or 0, storage=row["dtype"], full=not R, adapters="bf16", hopper=True
    )
    values = 3 * E * D * F
    weights = {"bf16": 2, "nf4": 0.5158, "fp8": 1.00025}[row["dtype"]] * values
    factors = 2 * E * (R or 0) * (2 * D + 3 * F)
    x = row["T"] * D * 2
    kept = parts.experts_bytes(moe, recipe, 2)
    return kept - x, weights + factors + x + kept + parts.block_bytes(moe, recipe, 2)


@pytest.mark.parametrize("op", ["experts", "lora"])
def test_a_forward_as_measured(op):
    for row in rows(op, **{"pass": "fwd"}):
        kept, peak = planned_block(row)
        lower = {kept, kept - row["T"] * row["K"] * 2 * (row["R"] or 0) * 2}
        assert any(abs(row["saved_bytes"] / n - 1) < 1e-5 for n in lower), row["shape"]
        assert peak == pytest.approx(row["peak_bytes"], rel=0.01), row["shape"]


def test_quantised_experts_as_measured():
    since = "2026-11-29T14"  # from then on w a is freed before the rows of dx are allocated
    for row in rows("quantised", since, **{"pass": "fwd+bwd"}):
        _, peak = planned_block(row)
        assert peak == pytest.approx(row["peak_bytes"], rel=0.05), (row["shape"], row["dtype"])


def test_products_in_fp8_as_measured():
    """Forward of FP8 holds the quantised rows beside what bf16 holds."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "fp8.jsonl"
    peaks = {}
    for row in map(json.loads, path.read_text().splitlines()):
        # Replayed launches of fewer tokens free the quantised x before the peak.
        if row["pass"] == "fwd" and row["T"] == 16384:
            peaks[row["impl"], row["shape"]] = row
    seen = 0
    for (impl, shape), row in peaks.items():
        if impl == "moe_patch:fp8":
            more = row["peak_bytes"] - peaks["moe_patch", shape]["peak_bytes"]
            T = row["T"]
            D, F, N = row["D"], row["F"], row["K"] * T
            moe = Moe(row["E"], row["K"], D, 2 * F, F, 2)
            recipe = Recipe(tokens=T, storage="fp8", compute="fp8")
            a, y, out = 2 * N * F, 2 * N * D, 2 * T * D
            (planned,) = forward_moments(moe, recipe, a, y, out)
            assert planned - (a + y + out) == pytest.approx(more, rel=0.02), row
            seen += 1
    assert seen >= 3


def test_products_in_fp8_decode_nothing_and_run_at_once():
    """With copies; without, backward decodes. Where experts are decoded, nothing changes."""
    moe = Moe(128, 8, 2048, 1536, 768, 2)
    recipe = Recipe(tokens=16384, storage="fp8", compute="fp8_copy")
    decoded = replace(recipe, compute="decoded")
    assert parts.decode_bytes(moe, recipe, 2) == (0, 0)
    assert parts.decode_bytes(moe, replace(recipe, compute="fp8"), 2) != (0, 0)
    other = moe._replace(decoded="why")
    for name in ("decode_bytes", "block_bytes"):
        function = getattr(parts, name)
        assert function(other, recipe, 2) == function(moe, decoded, 2) != function(moe, recipe, 2)
    long = replace(recipe, tokens=1 << 20)
    assert parts.chunk_of(moe, long, 2) == 1 << 20 > parts.chunk_of(other, long, 2)


def test_long_contexts_as_measured():
    """Calls of long_context.py on a card, in chunks and at once."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "long_context.jsonl"
    seen = set()
    for row in map(json.loads, path.read_text().splitlines()):
        full, recompute = row["train"] == "full", row["mode"] == "recompute"
        trains = row["mode"] in ("kept", "recompute") and row["train"] != "qlora"
        if not trains:
            continue
        moe = Moe(128, 8, 2048, 1536, 768, 0 if full else 2)
        chunks = 45875 if row["date"] < "2026-11-29T21" else "auto"  # until then for all calls
        recipe = Recipe(
            tokens=row["T"], rank=16, full=full, recompute=recompute,
            chunk=0 if row["chunk"] == "0" else chunks,
        )  # fmt: skip
        kept = parts.experts_bytes(moe, recipe, 2) - row["T"] * moe.hidden * 2
        planned = (kept + parts.block_bytes(moe, recipe, 2)) / 2**30
        planned += GRADIENTS[full, recompute, row["chunk"]] * row["gradients_gib"]
        limit = 0.02 if row["chunk"] == "0" else 0.1
        assert planned == pytest.approx(row["peak_gib"], rel=limit), row
        seen.add((row["train"], row["mode"], row["chunk"]))
    assert len(seen) == 8


# Share of the trained tensors' gradients that exist at the peak. Those of full weights in chunks
# with recompute are fp32 sums before; at once, only w2's is there when the rows of dx are.
GRADIENTS = {
    (False, False, "0"): 0, (False, True, "0"): 0,
    (False, False, "auto"): 1, (False, True, "auto"): 1,
    (True, False, "0"): 0, (True, True, "0"): 1 / 3,
    (True, False, "auto"): 1, (True, True, "auto"): 0,
}  # fmt: skip


def scaled(factor):
    return lambda right: lambda *args: int(factor * right(*args))


MUTANTS = [
    # (function, what it returns instead, the test that finds it)
    ("held_bytes", scaled(0.5), lambda: test_weights_by_kind("qwen3_moe", "nf4")),
    ("trained_bytes", scaled(2), lambda: test_adapters_and_their_gradients("qwen3_moe")),
    ("optimizer_bytes", scaled(0.5), lambda: test_states_of_adamw(False)),
    ("norm_bytes", scaled(0.5), lambda: test_attention_and_norms_keep("qwen3_moe", "fp32", -1)),
    ("linear_bytes", scaled(0), lambda: test_attention_and_norms_keep("qwen3_moe", "full", -1)),
    ("attention_bytes", scaled(2), lambda: test_attention_and_norms_keep("glm4_moe", "bf16", -1)),
    ("mlp_bytes", scaled(0), lambda: test_shared_experts_and_dense_layers_keep("glm4_moe", "fp32")),
    ("experts_bytes", scaled(0.9), lambda: test_experts_keep("fp32", False)),
    ("router_bytes", scaled(0.5), test_the_router_keeps),
    ("logits_bytes", scaled(2 / 3), test_the_loss_holds_three_times_the_logits_in_fp32),
    ("block_bytes", scaled(0), lambda: test_a_forward_as_measured("lora")),
    ("chunk_of", scaled(4), lambda: test_long_contexts_as_measured()),
    ("decode_bytes", lambda _: lambda *args: (0, 0), test_quantised_experts_as_measured),
]


@pytest.mark.parametrize(("name", "wrong", "check"), MUTANTS, ids=[m[0] for m in MUTANTS])
@pytest.mark.families("glm4_moe")
def test_a_part_left_out_or_with_another_factor_is_found(monkeypatch, name, wrong, check):
    check()
    module = parts if hasattr(parts, name) else lasting
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    with pytest.raises(AssertionError):
        check()
