"""Run the self-checks of a patch: one block of each kind, or the experts alone where these fit."""

from __future__ import annotations

from moe_patch.config import PatchConfig
from moe_patch.errors import EntryMismatchError, UnsupportedModelError
from moe_patch.families import is_shipped
from moe_patch.patching import selfcheck
from moe_patch.patching.bindings import bindings_of
from moe_patch.patching.blockcheck import check_block
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.resolve import falls_to_experts


def self_checks(
    blocks: list[FoundBlock], config: PatchConfig, refused: dict[str, str]
) -> dict[str, str]:
    """Results of the self-check by block path; without ``strict`` it may refuse more blocks.

    Where an entry fits a block's experts alone, these take the block's place in ``blocks``.
    """
    results: dict[tuple, tuple[str, str]] = {}
    by_path = {}
    for place, block in enumerate(blocks):
        if block.path in refused:
            continue
        kind = selfcheck.kind_of(block)
        if not is_shipped(block.spec):
            # Classes of a user's own entry may differ from layer to layer.
            kind = (*kind, block.path)
        # Do not reuse a skipped result for other blocks of this kind.
        if results.get(kind, ("", ""))[0] != "passed":
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
    """The result, and why it is that of the experts alone where the entry does not fit the rest."""
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
        # Where the experts are what the entry does not fit, both say so.
        why = "; nor do the experts pass alone: ".join(dict.fromkeys((block.mismatch, str(error))))
        raise UnsupportedModelError(f"{block.path}: self-check: {why}") from error


def _compare(block: FoundBlock, config: PatchConfig) -> str:
    # Shipped entries cover train mode; check user entries in train mode too.
    for training in (False,) if is_shipped(block.spec) else (False, True):
        result = selfcheck.check(block, config.backend, training)
        if result == "passed" and block.spec.checked_as_block:
            with selfcheck.sandbox(block, training):
                check_block(block, [b for _, b in bindings_of(block, config)])
    return result
