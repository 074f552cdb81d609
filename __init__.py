"""isobatch: the recipe decides what is learnt, the plan decides how fast.

    import isobatch

    recipe = isobatch.Recipe(task="classifier", data="reviews/")
    run = isobatch.train(recipe)
    print(run.metrics)

A workload of your own is a subclass of `isobatch.Task`; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobatch.core.errors import (
        IsobatchError,
        OutOfMemoryError,
        StopRequestedError,
        TrainingError,
        UserError,
        WorkerLostError,
    )
    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan, PlanOptions
    from isobatch.data.base import ArraySource, Columns, Data, Ragged, Source
    from isobatch.engine.runs.run_options import RunOptions
    from isobatch.engine.train.hooks import Hook
    from isobatch.launch.api.functions import Recipe, Run, Verification, load, plan, replay, train, verify
    from isobatch.models.base import (
        Batch,
        CachedWeightTransform,
        Change,
        Loss,
        ModelSize,
        Noise,
        Phase,
        Rows,
        StepContext,
        Sum,
        Task,
        Teacher,
    )

__all__ = [
    "ArraySource",
    "Batch",
    "CachedWeightTransform",
    "Change",
    "Columns",
    "Data",
    "Facts",
    "Hook",
    "IsobatchError",
    "Loss",
    "ModelSize",
    "Noise",
    "OutOfMemoryError",
    "Phase",
    "Plan",
    "PlanOptions",
    "Ragged",
    "Recipe",
    "Rows",
    "Run",
    "RunOptions",
    "Source",
    "StepContext",
    "StopRequestedError",
    "Sum",
    "Task",
    "Teacher",
    "TrainingError",
    "UserError",
    "Verification",
    "WorkerLostError",
    "load",
    "plan",
    "replay",
    "train",
    "verify",
]
_PLACES = {
    "core.errors": (
        *("IsobatchError", "OutOfMemoryError", "StopRequestedError", "TrainingError", "UserError"),
        "WorkerLostError",
    ),
    "core.facts": ("Facts",),
    "core.plan": ("Plan", "PlanOptions"),
    "data.base": ("ArraySource", "Columns", "Data", "Ragged", "Source"),
    "engine.runs.run_options": ("RunOptions",),
    "engine.train.hooks": ("Hook",),
    "launch.api.functions": ("Recipe", "Run", "Verification", "load", "plan", "replay", "train", "verify"),
    "models.base": (
        *("Batch", "CachedWeightTransform", "Change", "Loss", "ModelSize", "Noise", "Phase", "Rows"),
        *("StepContext", "Sum", "Task", "Teacher"),
    ),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'isobatch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"isobatch.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
