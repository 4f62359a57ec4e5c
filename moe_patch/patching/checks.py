"""Run a patch's self-checks: one block of each kind, or its experts if only those fit."""

from __future__ import annotations

from moe_patch.config import PatchConfig
from moe_patch.errors import EntryMismatchError, UnsupportedModelError
from moe_patch.families import is_shipped
from moe_patch.patching import selfcheck
from moe_patch.patching.bindings import bindings_of
from moe_patch.patching.blockcheck import check_block
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.fp8_check import check_fp8
from moe_patch.patching.resolve import falls_to_experts


def self_checks(
    blocks: list[FoundBlock], config: PatchConfig, refused: dict[str, str]
) -> dict[str, str]:
    """Return self-check results by block path; without ``strict``, add failures to ``refused``.

    If an entry fits only a block's experts, the experts replace the block in ``blocks``.
    """
    results: dict[tuple, tuple[str, str]] = {}
    by_path = {}
    for place, block in enumerate(blocks):
        if block.path in refused:
            continue
        kind = selfcheck.kind_of(block)
        if not is_shipped(block.spec):
            # Classes of a user-registered entry may differ from layer to layer.
            kind = (*kind, block.path)
        # Do not reuse a skipped result for other blocks of this kind.
        if not results.get(kind, ("", ""))[0].endswith("passed"):
            try:
                results[kind] = _self_check(block, config)
            except UnsupportedModelError as error:
                if config.strict:
                    raise
                refused[block.path] = str(error)
                continue
        by_path[block.path], mismatch = results[kind]
        if mismatch and not block.mismatch:
            blocks[place] = block.experts_only(mismatch)
    return by_path


def _self_check(block: FoundBlock, config: PatchConfig) -> tuple[str, str]:
    """Return the result and, if only the experts could be checked, why the entry does not fit."""
    if not block.mismatch:
        try:
            return _compare(block, config), ""
        except EntryMismatchError as error:
            if not falls_to_experts(block):
                raise UnsupportedModelError(f"{block.path}: self-check: {error}") from error
            block = block.experts_only(str(error))
    try:
        return _compare(block, config), block.mismatch
    except UnsupportedModelError as error:
        # If the experts themselves cause the mismatch, both messages are the same: keep one.
        why = "; nor do the experts pass alone: ".join(dict.fromkeys((block.mismatch, str(error))))
        raise UnsupportedModelError(f"{block.path}: self-check: {why}") from error


def _compare(block: FoundBlock, config: PatchConfig) -> str:
    # Experts that will be in host memory are checked where they are, on whatever runs there.
    backend = "auto" if config.offload_experts else config.backend
    # Shipped entries cover train mode; check user entries in train mode too.
    for training in (False,) if is_shipped(block.spec) else (False, True):
        result = selfcheck.check(block, backend, training)
        if result == "passed" and block.spec.checked_as_block:
            with selfcheck.sandbox(block, training):
                check_block(block, [b for _, b in bindings_of(block, config)])
    if result == "skipped: experts stored in fp8" and (also := check_fp8(block, config)):
        return f"{result}; {also}"
    return result
