"""Prepared data that is written to while it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isobatch.engine.train.hooks import Hook, Signal

if TYPE_CHECKING:
    from isobatch.data.digests import PreparedFolder
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.train.state import Training

DATA_WRITTEN = "data written to"
"""The decision that a file of the data was written to while it was trained on, and holds the same again."""


class DataGuard(Hook):
    """Says and records at every pause, and so before every save, which prepared files were written to."""

    def __init__(self, run: RunFolder, prepared: PreparedFolder, say: Callable[[str], None]) -> None:
        self.run, self.prepared, self.say = run, prepared, say

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> None:  # noqa: ARG002
        self.check(state)

    def check(self, state: Training) -> None:
        """All ranks call this. Raises TrainingError where a file is not as it was prepared: what was learnt
        since then is not saved.
        """
        for name in self.prepared.check_written():
            what = f"prepared file {self.prepared.folder / name} was written to while it trained"
            self.say(f"{what}; it is as it was prepared, but what it held in between is not known")
            if state.world.is_main:
                where = {"at_phase": state.progress.phase, "at_step": state.progress.step}
                self.run.log_decision(DATA_WRITTEN, file=name, **where)
