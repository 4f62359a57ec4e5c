"""PatchConfig: every option of patch_model, with the same names as the YAML keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_patch.errors import UnsupportedOptionError
from moe_patch.ops.backend import BACKENDS
from moe_patch.schema import check_choice, check_fields, check_known

_CHOICES = {
    "backend": BACKENDS,
    "fuse_lora": ("auto", "require", "off"),
    "ties": ("lower", "torch"),
}
_PATTERNS = ("include", "exclude")


@dataclass(frozen=True)
class PatchConfig:
    """Options of :func:`moe_patch.patch_model`.

    Attributes:
        backend: "auto" (Triton on CUDA, torch elsewhere), "torch" or "triton".
        strict: an MoE block that cannot be patched is an error; otherwise it is left alone, with
            one warning and a row in the report.
        self_check: compare each distinct kind of block with transformers before binding anything.
        fuse_lora: "auto" runs PEFT adapters on experts without the merged weight where possible,
            "require" makes an adapter that cannot be fused an error, "off" leaves them to PEFT.
        recompute: keep no expert activations between forward and backward.
        batch_invariant: what an expert gives a token is the same bits for any number of tokens and
            any neighbours; needs the Triton backend. Covers what this library computes, from router
            logits to the experts' sum: the router's own linear and the rest of the model are torch.
        ties: "lower" gives equal scores to the lower expert id, "torch" whatever torch.topk picks.
        shadow_check: every so many training forwards, one block's live call is compared with
            transformers and the errors are logged; 0 never. The step is not changed; the one that
            is compared waits for the device and for both paths of that block.
        debug_nan: the call of the first block with a non-finite output is written to a file that
            ``python -m moe_patch replay`` runs. Waits for the device once per block and forward.
        debug_dir: the folder of that file.
        include, exclude: glob pattern or patterns on block paths, kept as a tuple; an empty
            ``include`` means every block. What PEFT, DDP or torch.compile puts into a path may be
            left out. A pattern that matches no block is an error, with ``strict`` off a warning.
    """

    backend: str = "auto"
    strict: bool = True
    self_check: bool = True
    fuse_lora: str = "auto"
    recompute: bool = False
    batch_invariant: bool = False
    ties: str = "lower"
    shadow_check: int = 0
    debug_nan: bool = False
    debug_dir: str = "."
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            check_choice(f"moe_patch: {name}", getattr(self, name), accepted)
        check_fields("moe_patch", self)
        if self.batch_invariant and self.ties == "torch":
            raise UnsupportedOptionError(
                "moe_patch: batch_invariant=True needs ties='lower': torch.topk's choice among "
                "equal scores may change with the number of rows"
            )
        if self.shadow_check < 0:
            raise UnsupportedOptionError(
                f"moe_patch: shadow_check is {self.shadow_check!r}; accepted: a number of steps, "
                "or 0 for never"
            )
        for name in _PATTERNS:
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))

    @classmethod
    def parse(cls, value: Any = None, **options: Any) -> PatchConfig | None:
        """A config from what a user or a YAML file gives; None means "do not patch".

        Args:
            value: None or True (defaults), False (do not patch), a PatchConfig, a mapping, or a
                YAML node of these.
            options: override single keys.

        Raises:
            UnsupportedOptionError: unknown key (the nearest is named, or all where none is near)
                or a wrong value.
        """
        if type(value).__module__ == "yaml.nodes":
            from yaml.constructor import SafeConstructor

            value = SafeConstructor().construct_document(value)
        if value is False:
            if options:
                raise UnsupportedOptionError(
                    f"moe_patch: false together with options {sorted(options)}"
                )
            return None
        if isinstance(value, PatchConfig):
            return dataclasses.replace(value, **_normalise(options))
        if value is None or value is True:
            return cls(**_normalise(options))
        if not isinstance(value, Mapping):
            raise UnsupportedOptionError(
                f"moe_patch: found {value!r} ({type(value).__name__}); accepted: true, false or a "
                "mapping of options"
            )
        return cls(**_normalise({**value, **options}))

    def unlike(self, other: PatchConfig) -> str:
        """The options of this config that another has otherwise, as arguments of patch_model."""
        return ", ".join(
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != getattr(other, field.name)
        )


def _normalise(options: Mapping[str, Any]) -> dict[str, Any]:
    for key in options:
        check_known("moe_patch: unknown option", key, PatchConfig.__dataclass_fields__)
    if options.get("fuse_lora") is False:
        return {**options, "fuse_lora": "off"}  # YAML 1.1 reads a bare `off` as false
    return dict(options)


def _patterns(key: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
        raise UnsupportedOptionError(
            f"moe_patch: {key} is {value!r}; accepted: a glob pattern or a list of them"
        )
    return tuple(patterns)
