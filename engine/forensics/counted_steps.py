"""How many steps of each phase a run counts by its log: it may have been stopped, or resumed earlier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.metrics_log import SEAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.run_folder import RunFolder


def counted_steps(run: RunFolder, schedules: Sequence[PhaseSchedule]) -> dict[str, int]:
    """Phase -> the last step of it in the log; 0 for one that has not begun.

    A phase is logged after the one before it. So the end of the log says it all, but where early stopping
    may have cut an earlier phase. Raises UserError where the log has other phases.
    """
    names = [schedule.name for schedule in schedules]
    first = next((row["phase"] for row in rows_in(run.metrics) if "chain" in row), names[0])
    if first != names[0]:  # as with --pruned MODEL, which spares a phase if it is a finished classifier
        raise UserError(
            f"{run.folder}: its log begins with phase {first}, and its task would begin with {names[0]} here:"
            " bring the model it began with to this machine"
        )
    last = _last_steps(newest_rows(run.metrics))
    reached = max((names.index(name) for name in last if name in names), default=-1)
    may_be_cut = run.recipe.patience and any(s.early_stopping for s in schedules[: max(0, reached)])
    if reached < 0 or may_be_cut:
        last = _last_steps(rows_in(run.metrics))
        reached = max((names.index(name) for name in last if name in names), default=-1)
    passed = {schedule.name: schedule.steps for schedule in schedules[: max(0, reached)]}
    return {**dict.fromkeys(names, 0), **passed, **{k: v for k, v in last.items() if k in names}}


def _last_steps(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Phase -> the last step that a row of a step, or a seal, names."""
    found: dict[str, int] = {}
    for row in rows:
        if "phase" in row and ("chain" in row or (SEAL in row and "split" not in row)):
            found[str(row["phase"])] = int(row["step"])
    return found
