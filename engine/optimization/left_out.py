"""Steps that a run leaves out: decisions in decisions.jsonl, by the rule on spikes or by hand.

A step that is left out computes nothing and moves no weight; the steps behind it are what they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.models.base import Task
from isobatch.models.capabilities import ChangesModel

LEAVE_OUT = "leave out steps"
"""The decision. It names no step of its own, so that `resume` keeps it."""
ASKED = "asked for"
"""The reason of a decision by hand."""
LeftOut = dict[str, frozenset[int]]
"""Phase -> its steps, from 1, that are left out."""


def leave_out(run: RunFolder, phase: str, first: int, last: int, reason: str) -> None:
    """Decide that a run leaves out steps `first` to `last` of a phase."""
    run.log_decision(LEAVE_OUT, of=phase, first=first, last=last, reason=reason)


def decided(run: RunFolder) -> list[dict[str, Any]]:
    """The decisions by hand, and by the rule on spikes: rows with `of` (a phase), `first` and `last`."""
    return [row for row in rows_in(run.decisions) if row.get("decision") == LEAVE_OUT]


def left_out_steps(run: RunFolder) -> LeftOut:
    """What a run has decided to leave out."""
    found: dict[str, set[int]] = defaultdict(set)
    for row in decided(run):
        found[str(row["of"])].update(range(int(row["first"]), int(row["last"]) + 1))
    return {phase: frozenset(steps) for phase, steps in found.items()}


def copy_asked(run: RunFolder, fresh: RunFolder) -> None:
    """Let another run of the recipe leave out what was decided by hand; the rule on spikes decides anew."""
    for row in decided(run):
        if row.get("reason") == ASKED:
            leave_out(fresh, str(row["of"]), int(row["first"]), int(row["last"]), ASKED)


def until(steps: Collection[int], step: int) -> list[int]:
    """Those of the steps that are left out up to `step`; ascending."""
    return sorted(one for one in steps if one <= step)


def is_consistent(steps: LeftOut, state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was saved by a run that left out the same steps of its phase before it."""
    progress = state["progress"]
    return until(steps.get(progress["phase"], ()), progress["step"]) == list(state.get("left_out", ()))


def refuse_where_steps_matter(task: Task) -> None:
    """Raise UserError for a task that changes its model after certain steps: none can be left out."""
    if isinstance(task, ChangesModel):
        name = type(task).__name__
        raise UserError(f"{name} changes its model by the step's number, so that no step can be left out")
