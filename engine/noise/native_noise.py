"""The noise object given to tasks under `--noise native`: it refuses every draw.

Draws of torch's generators would depend on the division into micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor


class NativeNoise:
    """Raises TrainingError at every draw of a task."""

    def _refuse(self, site: str, *_: object) -> Tensor:
        raise TrainingError(f"this task draws noise ({site}) of its own: use --noise keyed")

    uniform = normal = integers = _refuse
