"""PatchConfig: all options of patch_model, under the same names as the YAML keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_patch.errors import UnsupportedOptionError
from moe_patch.ops.backend import BACKENDS
from moe_patch.schema import check_choice, check_fields, check_known

COMPUTES = ("decoded", "fp8", "fp8_copy")
_CHOICES = {
    "backend": BACKENDS,
    "fuse_lora": ("auto", "require", "off"),
    "ties": ("lower", "torch"),
    "compute": COMPUTES,
}
_PATTERNS = ("include", "exclude")


@dataclass(frozen=True)
class PatchConfig:
    """Options of :func:`moe_patch.patch_model`.

    Attributes:
        backend: "auto" (Triton on CUDA, torch elsewhere), "torch" or "triton".
        strict: raise an error for an MoE block that cannot be patched. If False, leave the block
            alone, warn once and list it in the report.
        self_check: compare each distinct kind of block with transformers before binding anything.
        fuse_lora: "auto" runs PEFT adapters on experts without the merged weight where possible.
            "require" makes an adapter that cannot be fused an error. "off" leaves them to PEFT.
        recompute: keep no expert activations between forward and backward.
        chunk_tokens: run the experts on more tokens than this one chunk after another, which limits
            the memory of a block. "auto" cuts more than 65,536 tokens, into chunks whose rows take
            1 to 3 GiB, depending on what is trained; 0 runs all at once, as the torch backend
            always does.
        batch_invariant: make a token's output independent, bit for bit, of the number of tokens
            and of the other tokens. Needs the Triton backend. Covers only what this library
            computes, from router logits to the sum over experts. The router's linear and the rest
            of the model run in torch.
        ties: "lower" prefers the lower expert id among equal scores, "torch" takes whatever
            torch.topk picks.
        compute: how experts stored in FP8 (128 x 128 blocks) are multiplied on Hopper cards.
            "decoded" decodes them to the dtype of the hidden states. "fp8" quantises the rows of
            forward to FP8 as well, and multiplies in FP8. "fp8_copy" also computes backward in
            FP8, from a transposed copy of the packed weights. Other experts and cards always
            decode; :func:`moe_patch.patch_report` says so.
        shadow_check: interval in training forwards. At every interval one block's live call is
            compared with transformers and the errors are logged; 0 disables the check. The result
            of the step does not change. A checked step synchronises with the device and runs both
            paths of that block.
        debug_nan: write the call of the first block with a non-finite output to a file, which
            ``python -m moe_patch replay`` runs. Synchronises once per block and forward.
        debug_dir: folder for that file.
        offload_experts: keep the experts' weights in page-locked host memory, in any storage. The
            device holds copies of two blocks' at a time; the next block's are copied while one
            computes. The results are the same bits. Experts are frozen; adapters on them stay on
            the device. ``model.to`` then moves everything but these weights.
        include, exclude: glob pattern or patterns on block paths, stored as a tuple; an empty
            ``include`` means every block. Patterns may omit the path components that PEFT, DDP or
            torch.compile add. A pattern that matches no block is an error, or a warning if
            ``strict`` is off.
    """

    backend: str = "auto"
    strict: bool = True
    self_check: bool = True
    fuse_lora: str = "auto"
    recompute: bool = False
    chunk_tokens: int | str = "auto"
    batch_invariant: bool = False
    ties: str = "lower"
    compute: str = "decoded"
    shadow_check: int = 0
    debug_nan: bool = False
    debug_dir: str = "."
    offload_experts: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            check_choice(f"moe_patch: {name}", getattr(self, name), accepted)
        check_fields("moe_patch", self)
        if self.batch_invariant and self.ties == "torch":
            raise UnsupportedOptionError(
                "moe_patch: batch_invariant=True needs ties='lower': torch.topk may break ties "
                "differently for another number of rows"
            )
        if self.offload_experts:
            self._check_offload()
        if self.chunk_tokens != "auto" and (
            isinstance(self.chunk_tokens, str) or self.chunk_tokens < 0
        ):
            raise UnsupportedOptionError(
                f"moe_patch: chunk_tokens is {self.chunk_tokens!r}; accepted: 'auto', a number of "
                "tokens, or 0 to run all tokens at once"
            )
        if self.compute != "decoded" and self.chunk_tokens not in ("auto", 0):
            raise UnsupportedOptionError(
                f"moe_patch: chunk_tokens={self.chunk_tokens} with compute={self.compute!r}: FP8 "
                "products run all tokens at once; accepted: chunk_tokens='auto' (no chunks then)"
            )
        if self.shadow_check < 0:
            raise UnsupportedOptionError(
                f"moe_patch: shadow_check is {self.shadow_check!r}; accepted: a number of steps, "
                "or 0 to disable it"
            )
        for name in _PATTERNS:
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))

    def _check_offload(self) -> None:
        """Refuse options under which other code would compute with the experts' weights."""
        for name, needed in (("fuse_lora", ("auto", "require")), ("shadow_check", (0,))):
            if getattr(self, name) not in needed:
                raise UnsupportedOptionError(
                    f"moe_patch: offload_experts=True with {name}={getattr(self, name)!r}: "
                    f"transformers or PEFT would compute with weights in host memory; accepted: "
                    f"{name}={' or '.join(map(repr, needed))}"
                )
        if self.compute != "decoded":
            raise UnsupportedOptionError(
                f"moe_patch: offload_experts=True with compute={self.compute!r}: FP8 products need "
                "the experts on the card; accepted: compute='decoded'"
            )

    @classmethod
    def parse(cls, value: Any = None, **options: Any) -> PatchConfig | None:
        """Build a config from a user's or a YAML file's value; return None for "do not patch".

        Args:
            value: None or True (defaults), False (do not patch), a PatchConfig, a mapping, or a
                YAML node of one of these.
            options: overrides of single keys.

        Raises:
            UnsupportedOptionError: a wrong value or an unknown key. For an unknown key the message
                suggests the nearest one, or lists all.
        """
        if type(value).__module__ == "yaml.nodes":
            from yaml.constructor import SafeConstructor

            value = SafeConstructor().construct_document(value)
        if value is False:
            if options:
                raise UnsupportedOptionError(
                    f"moe_patch: found false together with options {sorted(options)}; accepted: "
                    "false alone, or the options alone"
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

    def chunks(self, backend: str) -> str:
        """Return how ``backend`` runs long contexts, worded for the report; empty for "auto"."""
        if self.chunk_tokens == "auto":
            return ""
        if self.chunk_tokens == 0:
            return "experts run all tokens at once (chunk_tokens)"
        if backend != "triton":
            return f"chunk_tokens={self.chunk_tokens} has no effect on {backend}"
        return f"experts run more than {self.chunk_tokens} tokens in chunks"

    def unlike(self, other: PatchConfig) -> str:
        """Return the options that differ from another config's, as arguments of patch_model."""
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
