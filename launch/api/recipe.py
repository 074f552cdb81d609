"""A recipe made in Python: completed as the command line completes it, so that its hash is the same."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from isobatch.core import recipe
from isobatch.engine.registry import complete

if TYPE_CHECKING:
    from pathlib import Path


class Recipe(recipe.Recipe):
    """What is learnt: a task, and any of its recipe fields by name.

    >>> isobatch.Recipe(task="classifier", data="reviews/", lr=2e-5, epochs=3)

    Fields that are not given come from the task, its preset and its mode, as on the command line; `isobatch
    describe TASK` lists them all, with `_` for `-`. Raises UserError where a name or a value is wrong.
    """

    __slots__ = ()

    def __init__(self, task: str | Path, **values: Any) -> None:
        task = str(task)
        if "options" in values:  # a complete recipe's fields, as dataclasses.replace gives them
            super().__init__(task=task, **values)
            return
        made, _ = complete(task, values)
        for field in dataclasses.fields(recipe.Recipe):
            object.__setattr__(self, field.name, getattr(made, field.name))
