"""Chooses the steps that verify redoes: from the beginning and from every kept checkpoint."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from isobatch.engine.checkpointing.checkpoint import checkpoint_name, list_checkpoints
from isobatch.engine.training.run_context import CLOSING_STEPS
from isobatch.engine.verification.replay import INITIAL, Window
from isobatch.engine.verification.tolerance import NEAR

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.log_audit import LogRecord

CHOICE = random.SystemRandom()
"""Not seeded: who forges a log must not know which steps are redone."""


def closing_window(log: LogRecord) -> Window | None:
    """The window from the closing checkpoint to the end of training; None where the run has not one.

    Runs that stopped early, are not finished or are no longer than the window have none.
    """
    last = log.phases[-1]
    if last.step != last.schedule.steps or last.step <= CLOSING_STEPS or not log.chains:
        return None
    return Window(checkpoint_name(last.schedule.name, last.step - CLOSING_STEPS), CLOSING_STEPS)


def other_windows(run: RunFolder, log: LogRecord, steps: int) -> list[Window]:
    """A window from the initial weights and one from every kept checkpoint but the closing and the last one.

    `steps`: the least length, twice that from the beginning; up to `steps` more are drawn at random.
    """
    phases = [phase.schedule.name for phase in log.phases]
    closing, last = closing_window(log), log.phases[-1]
    spared = {closing.checkpoint if closing else "", checkpoint_name(last.schedule.name, last.schedule.steps)}
    kept = [p.name for p in list_checkpoints(run.checkpoints, phases) if p.name not in spared]
    windows = [Window(INITIAL, 2 * steps + CHOICE.randint(0, steps))]
    return windows + [Window(name, steps + CHOICE.randint(0, steps)) for name in kept]


def short(windows: list[Window]) -> list[Window]:
    """The windows, cut where flipped levels have not spread yet."""
    return [Window(window.checkpoint, min(window.count, NEAR)) for window in windows]
