"""A model to copy, until a test replaces code of transformers that builds it."""

from __future__ import annotations

import copy
import operator
import sys
from typing import Any

from torch import nn


class Built:
    """A model, and the code that it was built from.

    The code is that of transformers' folders of models: every global of their files, and every
    attribute of their classes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        classes = {type(model.config), *map(type, model.modules())}
        self._files = [
            sys.modules[name]
            for name in {cls.__module__ for cls in classes}
            if name.startswith("transformers.models.")
        ]
        copy.deepcopy(model)  # adds __slotnames__ to classes
        self._code = self._code_now()

    def copy(self) -> nn.Module:
        """Return a copy of the model."""
        return copy.deepcopy(self._model)

    def changed(self) -> bool:
        """Return whether a part of the code is another object than when the model was built."""
        now = self._code_now()
        return len(now) != len(self._code) or not all(map(operator.is_, now, self._code))

    def _code_now(self) -> list[Any]:
        found: list[Any] = []
        for value in (value for file in self._files for value in vars(file).values()):
            found.append(value)
            if isinstance(value, type):
                found += vars(value).values()
        return found
