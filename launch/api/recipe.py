"""A recipe made in Python: completed as the command line completes it, so that its hash is the same."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from isobatch.core import recipe
from isobatch.core.errors import UserError
from isobatch.engine import consent
from isobatch.engine.registry import complete

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Recipe(recipe.Recipe):
    """What is learnt: a task, and any of its recipe fields by name.

    >>> isobatch.Recipe(task="classifier", data="reviews/", lr=2e-5, epochs=3)

    Fields that are not given come from the task, its preset and its mode, as on the command line; `isobatch
    describe TASK` lists them all, with `_` for `-`. Raises UserError where a name or a value is wrong.
    """

    __slots__ = ()

    def __init__(self, task: str | Path, **values: Any) -> None:
        if isinstance(task, type):
            raise UserError(
                f"task={task.__name__}: write the class in a file, and task='./file.py:{task.__name__}'"
            )
        task = str(task)
        if "options" in values:  # a complete recipe's fields, as dataclasses.replace gives them
            super().__init__(task=task, **values)
            return
        made, _ = complete(task, values)
        for field in dataclasses.fields(recipe.Recipe):
            object.__setattr__(self, field.name, getattr(made, field.name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> recipe.Recipe:
        """A recipe as recipe.json has it, which is complete: nothing is added."""
        found = recipe.Recipe.from_dict(values)
        consent.received(found)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, recipe.Recipe) and self.to_dict() == other.to_dict()

    __hash__ = recipe.Recipe.__hash__
