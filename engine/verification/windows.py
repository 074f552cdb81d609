"""Windows of steps to redo: what they are and what comes of them, and those that verify chooses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import checkpoint_name, list_checkpoints, phase_and_step
from isobatch.engine.optimization.schedule import CLOSING_STEPS
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.train.figures import LossAndNorm, StepRow, differences
from isobatch.engine.verification.log_audit import LogRecord

INITIAL = "the initial weights"
CHOICE = random.SystemRandom()
"""Not seeded: who forges a log must not know which steps are redone."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive steps to redo."""

    checkpoint: str
    """Name of the checkpoint to start from; INITIAL for the weights before training."""
    phase: str
    """The phase of the steps: the checkpoint's own, or the next one where it is the last of its phase."""
    start: int
    """Steps of this phase before the first that is redone."""
    count: int

    @property
    def stop(self) -> int:
        """The last step that is redone, from 1."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Job:
    """What to redo under one plan. As JSON it goes to worker processes."""

    windows: list[Window] = field(default_factory=list)
    held_out: bool = False
    """Whether to measure the held-out splits with the exported weights, and to export them again."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        return cls([Window(**window) for window in values["windows"]], values["held_out"])


@dataclass(slots=True)
class Redone:
    """What a job found. Each field is JSON."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Each redone step that is in the log: see `redone_step`."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """What the task changed in its model in redone steps, as decisions.jsonl has it."""
    covered: list[list[Any]] = field(default_factory=list)
    """[phase, first step, last step] of each window, from 1."""
    weights: dict[str, dict[str, float]] = field(default_factory=dict)
    """Checkpoint that a window reached -> how the redone weights differ: see `compare_weights`."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Held-out split -> its metrics."""
    export: dict[str, Any] = field(default_factory=dict)
    """How the new export differs from final/: see `compare_export`."""
    parts: list[str] = field(default_factory=list)
    """Names of the parts of the loss."""
    judged: float | None = None
    """The best evaluation of training measured again; None where none chose what was exported."""
    foreign_noise: bool = False
    """Whether the model draws from torch's own generators."""


def redone_step(
    row: StepRow, found: LossAndNorm, start: str, after: int, parts: dict[str, float] | None = None
) -> dict[str, Any]:
    """A step as logged and as redone, as JSON. `start`: INITIAL, or the checkpoint where the replay began;
    `after`: steps since then, with this one; `parts`: of a loss that has several, how each differs.
    """
    loss, norm = differences(found, row.figures)
    return {
        **{"phase": row.phase, "step": row.step, "start": start, "after": after},
        **{"logged_loss": row.loss, "loss": found[0], "logged_norm": row.grad_norm, "norm": found[1]},
        **{"parts": parts or {}, "loss_difference": loss, "norm_difference": norm},
    }


def window_to(run: RunFolder, phases: list[str], phase: str, step: int) -> Window:
    """From the nearest kept state before a step of a phase to that step. Raises UserError where none leads
    there: a phase that is not the first, with nothing kept before it.
    """
    kept, found = list_checkpoints(run.checkpoints, phases), None
    for path in kept:
        name, number = phase_and_step(path.name)
        if name == phase and number < step:
            found = Window(path.name, phase, number, step - number)
        elif phases.index(name) == phases.index(phase) - 1:
            found = Window(path.name, phase, 0, step)
    if found is None and phase != phases[0]:
        names = ", ".join(path.name for path in kept) or "none"
        said = f"no kept checkpoint leads to step {step} of {phase} (kept: {names})"
        raise UserError(f"{run.folder}: {said}; `--keep 20` keeps more of the next run")
    return found or Window(INITIAL, phase, 0, step)


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


def _starts(run: RunFolder, log: LogRecord) -> list[Window]:
    """Where a replay can begin, in order: the initial weights, and every kept checkpoint, from which the next
    phase begins where it is the last of its own. Windows up to the last step of their phase.
    """
    names = [phase.schedule.name for phase in log.phases]
    logged = {phase.schedule.name: phase.step for phase in log.phases}
    found = [Window(INITIAL, names[0], 0, logged[names[0]])]
    for path in list_checkpoints(run.checkpoints, names):
        phase, step = phase_and_step(path.name)
        record, following = log.phase(phase), names[names.index(phase) + 1 :]
        if record is not None and record.complete and step == record.step and following:
            phase, step = following[0], 0
        found.append(Window(path.name, phase, step, logged[phase] - step))
    return found


def leading_windows(run: RunFolder, log: LogRecord, steps: int) -> list[Window]:
    """Windows, each from a kept checkpoint to the next, that lead to the first closing one; back to the
    initial weights, as far as that is at most so many `steps`.
    """
    last = next((phase for phase in reversed(log.phases) if phase.step), log.phases[0])
    found: list[Window] = []
    stop = min((window.start for window in closing_windows(log)), default=last.step)
    phase = last.schedule.name
    for start in reversed(_starts(run, log)):
        is_later = start.phase == phase and start.start >= stop
        if is_later or start.count <= 0:  # the end of a phase, after which nothing is logged
            continue
        if start.phase != phase:  # the end of its phase was not kept
            break
        if (steps := steps - (stop - start.start)) < 0:
            break
        found.append(dataclasses.replace(start, count=stop - start.start))
        is_first = start.checkpoint == INITIAL  # else go on with what led to the checkpoint
        phase, stop = (start.phase, 0) if is_first else phase_and_step(start.checkpoint)
    return found


def longest(windows: Iterable[Window]) -> list[Window]:
    """The longest window of each beginning: a session has its initial weights once."""
    return list({w.checkpoint: w for w in sorted(windows, key=lambda w: w.count)}.values())


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
    found = []
    for start in _starts(run, log):
        least = 2 * steps if start.checkpoint == INITIAL else steps
        if start.checkpoint not in closing and start.count > 0:
            count = min(least + CHOICE.randint(0, steps), start.count)
            found.append(dataclasses.replace(start, count=count))
    return found
