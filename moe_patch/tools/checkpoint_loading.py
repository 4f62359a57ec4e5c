"""Load a checkpoint's own names into a model in memory that has merged or renamed its weights.

transformers' Trainer (5.9 to 5.24) calls ``model.load_state_dict`` with the contents of the files.
It does so to resume a full fine-tuning and to load the best model at the end. Files have the hub's
names: one per expert, or another name for a router. Weights with other names in the model keep
their initial values, with only one warning about missing keys. A hook on the model converts such
entries before loading, with transformers' own conversions. The hook does nothing if the entries
already have the model's names.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedOptionError

logger = logging.getLogger("moe_patch")

_LAYER = re.compile(r"^.*?\.\d+\.")


class Group(NamedTuple):
    """Weights of one layer whose stored names or layouts differ from the model's.

    Attributes:
        files: names in a checkpoint.
        targets: names in the model's state dict.
    """

    files: frozenset[str]
    targets: frozenset[str]


class CheckpointHook:
    """Pre-hook of ``load_state_dict`` that converts entries with a checkpoint's own names.

    If a layer's entries arrive in several calls, one per shard, they are kept until the last.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.groups: list[Group] = []
        self.twin: Any = None

    def __call__(self, model: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Replace stored entries by entries with the model's names."""
        given = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
        own = model.state_dict().keys()
        if given.keys() <= own:
            return
        if not self.groups:
            self.groups = list(conversion_groups(model))
        # Entries with the model's own names may come with entries that the model lacks.
        if not any(name in given for group in self.groups for name in group.files - own):
            return
        for group in self.groups:
            for name in group.files & given.keys():
                self.kept[name] = state_dict.pop(given[name])
        found = self._whole_groups(model)
        state_dict.update({prefix + name: value for name, value in found.items()})
        if not self.kept:
            self.groups, self.twin = [], None

    def _whole_groups(self, model: Any) -> dict[str, Tensor]:
        """Convert the groups that are complete, and forget their entries."""
        done = [group for group in self.groups if group.files <= self.kept.keys()]
        if not done:
            return {}
        stored = {name: self.kept.pop(name) for group in done for name in group.files}
        if self.twin is None:
            self.twin = _twin(model)
        targets = {name for group in done for name in group.targets}
        found = _converted(self.twin, stored, targets, _mapping(model))
        logger.info("moe_patch: %d weights put back by their stored names", len(found))
        return found

    def check(self) -> None:
        """Raise if a load ended before all entries of a layer arrived.

        Raises:
            UnsupportedOptionError: names the first missing entry; nothing is kept.
        """
        if not self.kept:
            return
        begun = [group for group in self.groups if group.files & self.kept.keys()]
        missing = sorted({name for group in begun for name in group.files} - self.kept.keys())
        self.kept, self.groups, self.twin = {}, [], None
        raise UnsupportedOptionError(
            f"checkpoint: {missing[0]} is missing (first of {len(missing)}), so layers that need "
            "missing weights were not loaded; accepted: a complete checkpoint of this model"
        )


def watch_loading(model: nn.Module) -> None:
    """Make a model's ``load_state_dict`` accept a checkpoint's own names; idempotent.

    Only transformers models get the hook. PEFT's models load their adapters themselves.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and watching(model) is None:
        model.register_load_state_dict_pre_hook(CheckpointHook())


def watching(model: nn.Module) -> CheckpointHook | None:
    """Return the hook of a model, or None."""
    for wrapped in model._load_state_dict_pre_hooks.values():
        found: Any = wrapped
        if isinstance(found.hook, CheckpointHook):
            return found.hook
    return None


def check_loaded(model: nn.Module) -> None:
    """Raise if a load into a watched model is incomplete; see :meth:`CheckpointHook.check`."""
    if (hook := watching(model)) is not None:
        hook.check()


def conversion_groups(model: Any) -> Iterator[Group]:
    """Yield groups of weights that ``save_pretrained`` renames or converts.

    There is one group per layer if no conversion spans layers, so at most one layer is kept.
    """
    # Files hold a tied weight only once.
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    state_dict = model.state_dict()
    own = {name: _meta(value) for name, value in state_dict.items() if name not in left_out}
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in own.items():
        found = _LAYER.match(name)
        layers.setdefault(found.group() if found else "", {})[name] = value
    parts = list(layers.values())
    whole = _stored(model, own)
    stored = [_stored(model, part) for part in parts]
    if sorted(name for one in stored for name in one) != sorted(whole):
        parts, stored = [own], [whole]
    for part, files in zip(parts, stored, strict=True):
        same = {name for name, value in files.items() if part.get(name) is value}
        if converted := files.keys() - same:
            yield Group(frozenset(converted), frozenset(part.keys() - same))


def _stored(model: Any, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return entries with the names of ``save_pretrained``."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(state_dict)))


def _meta(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="meta")


def _twin(model: Any) -> Any:
    """Return a copy of the model on the meta device, with the same dtypes."""
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    like = {name: _meta(value) for name, value in model.state_dict().items()}
    twin.load_state_dict(like, strict=False, assign=True)
    return twin


def _mapping(model: Any) -> list[Any]:
    """Return the conversions with which the model was loaded, or those of its class."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return vars(model).get("_weight_conversions") or list(get_model_conversion_mapping(model))


def _converted(
    twin: Any, stored: dict[str, Tensor], targets: Iterable[str], mapping: list[Any]
) -> dict[str, Tensor]:
    """Convert stored entries to the model's entries with transformers' own loader.

    Raises:
        UnsupportedOptionError: the loader cannot convert them, or sizes differ.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    how = LoadStateDictConfig(weight_mapping=mapping)
    with _no_bar():
        # In releases before 5.20 the fourth argument is a tensor-parallel plan.
        info = convert_and_load_state_dict_in_model(twin, stored, how, None)[0]
    if info.conversion_errors:
        name, why = next(iter(info.conversion_errors.items()))
        raise UnsupportedOptionError(
            f"checkpoint: {name} cannot be converted: {why}; accepted: a checkpoint of this model"
        )
    loaded = twin.state_dict()
    found = {name: loaded[name] for name in targets}
    if unfit := sorted(name for name, value in found.items() if value.is_meta):
        raise UnsupportedOptionError(
            f"checkpoint: {unfit[0]} does not have the model's shape "
            f"{tuple(found[unfit[0]].shape)} (first of {len(unfit)}); accepted: a checkpoint of "
            "this model"
        )
    twin.load_state_dict({name: _meta(v) for name, v in found.items()}, strict=False, assign=True)
    return found


@contextmanager
def _no_bar() -> Iterator[None]:
    from transformers.utils import logging as theirs

    shown = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            theirs.enable_progress_bar()
