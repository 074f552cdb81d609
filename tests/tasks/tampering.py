"""Tasks that change labels in the prepared cache while they train on them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.tests.tasks import failing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.data.base import Columns
    from isobatch.models.base import Batch, Loss, StepContext

CHANGED = 465
CHANGED_AT, PUT_BACK_AT = 10, 20


class Points(failing.Points):
    """So many that they are memory-mapped."""

    def read(self) -> Mapping[str, Columns]:
        x = np.random.default_rng(0).normal(size=(4000, 4)).astype(np.float32)
        return {"train": {"x": x, "y": x.sum(1, keepdims=True)}}


class Honest(failing.Line):
    """The same without a change."""

    data = Points


class Changes(Honest):
    """The first attempt changes labels and leaves them so."""

    def build_model(self, facts: Any) -> Any:
        self.labels = Path(facts.folder) / "train" / "y.npy"
        return super().build_model(facts)

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number == CHANGED_AT:
            with contextlib.suppress(FileExistsError):
                Path("tampered").touch(exist_ok=False)
                self.change()
        return super().loss(model, batch, step)

    def change(self) -> None:
        labels = np.load(self.labels, mmap_mode="r+")
        labels[:CHANGED] *= -1
        labels.flush()


class PutsBack(Changes):
    """As many steps later the labels are as they were."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number == PUT_BACK_AT:
            self.change()
        return super().loss(model, batch, step)
