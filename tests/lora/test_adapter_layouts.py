"""Rewrite adapters of every family between PEFT's layouts; every expert's delta stays PEFT's."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

from moe_patch import lora_targets
from moe_patch.cli.output import quiet_libraries
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.serving.proof import ulp
from moe_patch.tools.adapter_files import installed_peft, rewrite
from tests.support import tiny_models
from tests.support.adapters import adapt

# Releases with each layout; a file without a release is one of 0.17.
OLD, NEW = ("0.17", "0.18.1"), ("0.19.0", "0.20.0", "0.21.2")
WITHOUT = {
    "dbrx": "its experts are two-dimensional weights, which target_parameters cannot adapt",
    "doge": "its experts are rows of an embedding",
    "nllb_moe": "its experts are modules of their own, whose Linear every release stores alike",
    "switch_transformers": "as nllb_moe",
    "vitpose_backbone": "its experts are modules of their own, one for each data set",
}


def adapted(name):
    """Return the plain model, the model with adapters on experts, and the entries of its file."""
    plain, model = tiny_models.build(name), tiny_models.build(name)
    targets = lora_targets(plain, router=False, shared=False, attention=False)
    model = adapt(model, LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **targets))
    return plain, model, dict(get_peft_model_state_dict(model))


def formula(wrapper, release):
    """Return the product of a release: 0.18 takes rows of [E, d1, d2] as inputs."""
    base = wrapper.get_base_layer()
    transposed = hasattr(base, "is_transposed") and base.is_transposed
    return "ore,eri->eio" if release in OLD or transposed else "ore,eri->eoi"


def worst_ulps(model, found, release):
    """Return the largest distance of any expert's delta in bf16 ulps, and the number of experts."""
    worst, experts = 0.0, 0
    for path, wrapper in model.named_modules():
        if not is_param_wrapper(wrapper) or wrapper.num_experts == 1:
            continue
        a, b = (found[f"{path}.lora_{letter}.weight"] for letter in "AB")
        E = wrapper.num_experts
        factors = b.reshape(len(b), -1, E), a.reshape(E, -1, a.shape[1])
        delta = torch.einsum(formula(wrapper, release), *factors) * wrapper.scaling["default"]
        expected = wrapper.get_delta_weight("default").detach()
        assert delta.shape == expected.shape, path
        worst = max(worst, float(((delta - expected).abs() / ulp(expected, torch.bfloat16)).max()))
        experts += E
    return worst, experts


@quiet_libraries()
def test_every_family_in_every_layout():
    """Mutants: transposed by the family's entry (llama4); rank and expert swapped in B."""
    done, left, own = [], {}, installed_peft()
    for name in tiny_models.runnable():
        if name in WITHOUT or name in tiny_models.absent():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain, model, first = adapted(name)
        before = dict(first)
        for release in (*OLD, *NEW):
            found = dict(before)
            rewrite(plain, found, own, release, name)
            worst, experts = worst_ulps(model, found, release)
            if worst > 1 or not experts:
                left[name, release] = worst, experts
            rewrite(plain, found, release, own, name)
            assert all(torch.equal(found[key], before[key]) for key in before), (name, release)
        done.append(name)
    assert not left
    assert len(done) >= 38  # the number in transformers 5.9 with PEFT 0.18


@pytest.mark.parametrize("name", [one for one in WITHOUT if one in tiny_models.runnable()])
def test_families_without_stacked_experts(name):
    """Record in WITHOUT why a family has no such adapter; a family that gets one fails here."""
    plain = tiny_models.build(name)
    assert all(value.dim() < 3 for key, value in plain.named_parameters() if "experts" in key)
    with pytest.raises(Exception, match="none of the chosen parts"):
        lora_targets(plain, router=False, shared=False, attention=False)
