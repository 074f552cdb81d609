"""Chooses the steps that verify redoes: from the beginning and from every kept checkpoint."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from isobatch.engine.checkpointing.checkpoint import checkpoint_name, list_checkpoints
from isobatch.engine.optimization.schedule import CLOSING_STEPS
from isobatch.engine.verification.replay import INITIAL, Window
from isobatch.engine.verification.tolerance import NEAR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.log_audit import LogRecord

CHOICE = random.SystemRandom()
"""Not seeded: who forges a log must not know which steps are redone."""


def closing_windows(log: LogRecord) -> list[Window]:
    """The windows that end where training ended and where the exported weights were saved.

    Runs that are not finished have none. Steps that the beginning's window reaches need none.
    """
    if log.final is None or not log.chains:
        return []
    last = log.phases[-1]
    ends = {log.exported_step, *([last.step] if last.step == last.schedule.steps else [])}
    starts = [end - CLOSING_STEPS for end in sorted(ends) if end > CLOSING_STEPS]
    name = last.schedule.name
    return [Window(checkpoint_name(name, start), name, start, CLOSING_STEPS) for start in starts]


def leading_windows(run: RunFolder, log: LogRecord, steps: int) -> list[Window]:
    """Windows, each from a kept checkpoint to the next, that lead to the first closing one; back to the
    initial weights, as far as that is at most so many `steps`.
    """
    closing, at, place = closing_windows(log), 0, {0: (INITIAL, log.phases[0].schedule.name, 0)}
    kept = {path.name for path in list_checkpoints(run.checkpoints, [p.schedule.name for p in log.phases])}
    for phase, following in zip(log.phases, [*log.phases[1:], None], strict=True):
        name = phase.schedule.name
        for step in range(1, phase.step + 1):
            if (saved := checkpoint_name(name, step)) in kept:
                begins_next = step == phase.step and following is not None
                where = (following.schedule.name, 0) if begins_next and following else (name, step)
                place[at + step] = (saved, *where)
        at += phase.step
    before = at - log.phases[-1].step
    stop = before + min((window.start for window in closing), default=log.phases[-1].step)
    found: list[Window] = []
    for start in sorted((at for at in place if at < stop), reverse=True):
        if (steps := steps - (stop - start)) < 0:
            break
        window = Window(*place[start], stop - start)
        record = log.phase(window.phase)
        if record is None or window.stop > record.step:  # the end of its phase was not kept
            break
        found.append(window)
        stop = start
    return found


def longest(windows: Iterable[Window]) -> list[Window]:
    """The longest window of each beginning: a session has its initial weights once."""
    found: dict[str, Window] = {}
    for window in sorted(windows, key=lambda w: w.count):
        found[window.checkpoint] = window
    return list(found.values())


def trusted_weights(log: LogRecord, redone: Collection[tuple[str, int]]) -> str:
    """Up to where the weights are the run's own word: the last step before the export that was not redone."""
    left_out = {(phase, step) for phase, steps in log.left_out.items() for step in steps}
    steps = [(p.schedule.name, step) for p in log.phases[:-1] for step in range(1, p.step + 1)]
    steps += [(log.phases[-1].schedule.name, step) for step in range(1, log.exported_step + 1)]
    missing = [step for step in steps if step not in redone and step not in left_out]
    return f"the weights up to {missing[-1][0]} step {missing[-1][1]}" if missing else ""


def other_windows(run: RunFolder, log: LogRecord, steps: int) -> list[Window]:
    """A window from the initial weights and one from every other kept checkpoint, within the logged steps.

    `steps`: the least length, twice that from the beginning; up to `steps` more are drawn at random.
    """
    closing = {window.checkpoint for window in closing_windows(log)}
    windows = [_window(log, INITIAL, log.phases[0].schedule.name, 0, 2 * steps, steps)]
    for path in list_checkpoints(run.checkpoints, [phase.schedule.name for phase in log.phases]):
        phase, _, step = path.name.rpartition("-")
        record, start = log.phase(phase), int(step)
        if record is not None and record.complete and start == record.step and record is not log.phases[-1]:
            phase, start = log.phases[log.phases.index(record) + 1].schedule.name, 0
        if path.name not in closing:
            windows.append(_window(log, path.name, phase, start, steps, steps))
    return [window for window in windows if window.count > 0]


def _window(log: LogRecord, origin: str, phase: str, start: int, least: int, more: int) -> Window:
    record = log.phase(phase)
    logged = record.step - start if record is not None else 0
    return Window(origin, phase, start, min(least + CHOICE.randint(0, more), logged))


def short(windows: list[Window]) -> list[Window]:
    """The windows, cut where flipped levels have not spread yet."""
    return [dataclasses.replace(window, count=min(window.count, NEAR)) for window in windows]
