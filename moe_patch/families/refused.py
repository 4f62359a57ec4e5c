"""Families that stay with transformers, each with the reason."""

from moe_patch.runtime.spec import FamilySpec

_CAPACITY = (
    "routes with a capacity limit (tokens past it are dropped by their position in the sequence), "
    "and each expert is a module of its own, not a slice of stacked weights"
)

NLLB_MOE = FamilySpec(
    model_types=("nllb-moe",),
    module="nllb_moe",
    block="NllbMoeSparseMLP",
    tier="refused",
    reason=f"NLLB-MoE {_CAPACITY}",
)

SWITCH_TRANSFORMERS = FamilySpec(
    model_types=("switch_transformers",),
    module="switch_transformers",
    block="SwitchTransformersSparseMLP",
    tier="refused",
    reason=f"Switch Transformers {_CAPACITY}",
)

VITPOSE_BACKBONE = FamilySpec(
    model_types=("vitpose_backbone",),
    module="vitpose_backbone",
    block="VitPoseBackboneMoeMLP",
    tier="refused",
    reason=(
        "ViTPose has no router: the caller names one expert per image, and an expert is one Linear "
        "for part of the output features"
    ),
)

FAMILIES = (NLLB_MOE, SWITCH_TRANSFORMERS, VITPOSE_BACKBONE)
