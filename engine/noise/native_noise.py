"""Draws for tasks when the recipe chose torch's own noise: there are none that a cut would not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor


class NativeNoise:
    """Refuses every draw of a task, and says what to do."""

    def _refuse(self, site: str, *_: object) -> Tensor:
        raise TrainingError(f"this task draws noise ({site}) of its own: use --noise keyed")

    uniform = normal = integers = _refuse
