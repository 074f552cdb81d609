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

if TYPE_CHECKING:  # a name that is imported as itself is public for checkers of types
    from isobatch.core.errors import IsobatchError as IsobatchError
    from isobatch.core.errors import OutOfMemoryError as OutOfMemoryError
    from isobatch.core.errors import StopRequestedError as StopRequestedError
    from isobatch.core.errors import TrainingError as TrainingError
    from isobatch.core.errors import UserError as UserError
    from isobatch.core.errors import WorkerLostError as WorkerLostError
    from isobatch.core.facts import Facts as Facts
    from isobatch.core.plan import Plan as Plan
    from isobatch.core.plan import PlanOptions as PlanOptions
    from isobatch.data.base import ArraySource as ArraySource
    from isobatch.data.base import Columns as Columns
    from isobatch.data.base import Data as Data
    from isobatch.data.base import Ragged as Ragged
    from isobatch.data.base import Source as Source
    from isobatch.engine.runs.run_options import RunOptions as RunOptions
    from isobatch.engine.train.hooks import Hook as Hook
    from isobatch.launch.api.functions import Recipe as Recipe
    from isobatch.launch.api.functions import Run as Run
    from isobatch.launch.api.functions import Verification as Verification
    from isobatch.launch.api.functions import load as load
    from isobatch.launch.api.functions import plan as plan
    from isobatch.launch.api.functions import replay as replay
    from isobatch.launch.api.functions import train as train
    from isobatch.launch.api.functions import verify as verify
    from isobatch.models.base import Batch as Batch
    from isobatch.models.base import CachedWeightTransform as CachedWeightTransform
    from isobatch.models.base import Change as Change
    from isobatch.models.base import Loss as Loss
    from isobatch.models.base import ModelSize as ModelSize
    from isobatch.models.base import Noise as Noise
    from isobatch.models.base import Phase as Phase
    from isobatch.models.base import Rows as Rows
    from isobatch.models.base import StepContext as StepContext
    from isobatch.models.base import Sum as Sum
    from isobatch.models.base import Task as Task
    from isobatch.models.base import Teacher as Teacher

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
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'isobatch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"isobatch.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
