"""A receipt: what a finished run says of itself, in one small file that somebody else can check.

It holds the recipe, the data's digests, the hash chain over the samples, seals, digests of checkpoints and of
final/, the metrics, and the losses and gradient norms of up to MOST_STEPS logged steps. All of it follows
from the run's folder, so that a receipt and a folder are compared by making the receipt again.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, list_checkpoints
from isobatch.engine.loading.sampler import extend_chain, make_sampler
from isobatch.engine.optimization.left_out import decided
from isobatch.engine.optimization.schedule import learning_rate, phase_schedules
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.metrics_log import LEFT_OUT, SEAL
from isobatch.engine.runs.step_rows import NEEDED, is_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from isobatch.data.base import Source
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.log_audit import LogRecord

FORM = 1
"""Version of the file's form."""
MOST_STEPS = 2000
FIRST_STEPS = 64
"""Of which the first are all there: they can be redone without a checkpoint."""
LARGEST = 1e300
"""Losses, rates and norms are below it."""
DECIDED = ("decision", "of", "first", "last", "reason")
PARTS = (
    *("receipt", "run", "recipe_hash", "recipe", "facts", "plan", "phases", "log_every", "steps", "left_out"),
    *("seals", "checkpoints", "exported", "final", "metrics", "versions"),
)


def make_receipt(run: RunFolder, log: LogRecord) -> dict[str, Any]:
    """The receipt of a finished run whose records were audited. Raises TrainingError where it is not done."""
    if log.final is None:
        raise TrainingError(f"{run.folder} is {run.status()}, and a receipt is of a finished run")
    rows = list(rows_in(run.metrics))
    seals = [row for row in rows if SEAL in row and "split" not in row]
    promised = [row for row in rows if "log_every" in row]
    kept = list_checkpoints(run.checkpoints, [phase.schedule.name for phase in log.phases])
    made = {
        "receipt": FORM,
        "run": run.identity,
        "recipe_hash": run.recorded_hash,
        "recipe": run.recipe.to_dict(),
        "facts": {**run.facts.to_dict(), "folder": ""},
        "plan": run.plan.to_dict(),
        "phases": {phase.schedule.name: phase.step for phase in log.phases},
        "log_every": [[row["phase"], row["step"], row["log_every"]] for row in promised],
        "steps": [],
        "left_out": [{name: row[name] for name in DECIDED} for row in decided(run)],
        "seals": [[row["phase"], row["step"], row[SEAL]] for row in seals],
        "checkpoints": log.checkpoints,
        "exported": log.final.get("exported"),
        "final": log.final["final"],
        "metrics": (run.summary() or {}).get("metrics_by_split", {}),
        "versions": SavedCheckpoint(kept[-1]).state.get("versions", {}) if kept else {},
    }
    steps = {(row["phase"], row["step"]): row for row in rows if is_step(row)}
    return {**made, "steps": [{name: steps[place][name] for name in NEEDED} for place in places_due(made)]}


def places_due(receipt: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(phase, step) of all the figures that a receipt has to have: of each phase the first step and the last,
    those that its log names by `log_every`, without those that are left out, thinned out.
    """
    due, count = [], 1
    every = {(phase, step): count for phase, step, count in receipt["log_every"]}
    for phase, done in receipt["phases"].items():
        left_out = left_out_of(receipt, phase)
        for step in range(1, done + 1):
            count = every.get((phase, step), count)
            if (step in (1, done) or step % count == 0) and not left_out[step]:
                due.append((phase, step))
    return _thinned(due)


def _thinned(steps: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The first, the last, and evenly those between."""
    if len(steps) <= MOST_STEPS:
        return steps
    every, last = math.ceil(len(steps) / (MOST_STEPS - FIRST_STEPS)), len(steps) - 1
    return [step for n, step in enumerate(steps) if n < FIRST_STEPS or n % every == 0 or n == last]


def has_form(content: Mapping[str, Any]) -> bool:
    """Whether a receipt from anyone has the parts that are read, in their form."""
    try:
        Recipe.from_dict(content["recipe"])
        Facts.from_dict(content["facts"])
        Plan.from_dict(content["plan"])
        phases = content["phases"]
        return (
            content.keys() == set(PARTS)
            and all(isinstance(content[name], list) for name in ("steps", "left_out", "log_every"))
            and all(map(_is_count, phases.values()))
            and all(_is_step(row) and row["phase"] in phases for row in content["steps"])
            and all(_is_stretch(row) and row["of"] in phases for row in content["left_out"])
            and all(p in phases and _is_count(s) and _is_count(n) for p, s, n in content["log_every"])
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return False


def _is_count(value: Any) -> bool:
    """Whether it is a whole number from 1."""
    return type(value) is int and value >= 1


def _is_step(row: Mapping[str, Any]) -> bool:
    figures = [row[name] for name in ("loss", "lr", "grad_norm")]
    numbers = all(type(value) in (int, float) and abs(value) < LARGEST for value in figures)
    counts = _is_count(row["step"]) and _is_count(row["samples"])
    return (
        row.keys() == set(NEEDED)
        and numbers
        and row["grad_norm"] >= 0
        and counts
        and type(row["chain"]) is str
    )


def _is_stretch(row: Mapping[str, Any]) -> bool:
    counts = _is_count(row["first"]) and _is_count(row["last"])
    return row.keys() == set(DECIDED) and counts and row["first"] <= row["last"]


def differing_parts(receipt: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the parts in which a receipt differs from that of a run's folder; JSON on both sides."""
    return sorted(name for name in {*receipt, *other} if receipt.get(name) != other.get(name))


def order_problems(receipt: Mapping[str, Any], recipe: Recipe, source: Source) -> Iterator[str]:
    """Compare the steps, samples and learning rates that a receipt claims with recipe and data; the first
    difference.
    """
    task, _ = workload_of(recipe).make(recipe)
    sampler = make_sampler(recipe, source, task.cohort)
    schedules = phase_schedules(recipe, task.phases(), sampler.steps_per_epoch)
    if problem := _length_problem(receipt, recipe, schedules) or _figures_problem(receipt):
        yield problem
        return
    samples, claimed = 0, {(row["phase"], row["step"]): row for row in receipt["steps"]}
    for schedule in schedules:
        left_out, chain = left_out_of(receipt, schedule.name), ""
        for step, batch in enumerate(islice(sampler.batches(), receipt["phases"][schedule.name]), 1):
            if not left_out[step]:
                chain, samples = extend_chain(chain, batch), samples + len(batch)
            row, where = claimed.get((schedule.name, step)), f"phase {schedule.name}, step {step}"
            if row is None:
                continue
            if (row["chain"], row["samples"]) != (chain, samples):
                yield f"{where}: the samples are not those of recipe and data"
                return
            rate = learning_rate(recipe, schedule.lr, step - 1, schedule.steps, schedule.steps_per_epoch)
            if not math.isclose(row["lr"], rate, rel_tol=1e-9):
                yield f"{where}: the learning rate is not the recipe's"
                return


def _length_problem(receipt: Mapping[str, Any], recipe: Recipe, schedules: Sequence[PhaseSchedule]) -> str:
    """Where a receipt claims other phases or steps than the recipe has; empty where it does not."""
    if list(receipt["phases"]) != [schedule.name for schedule in schedules]:
        return f"it names the phases {', '.join(receipt['phases'])}, and the recipe has others"
    for schedule in schedules:
        done = receipt["phases"][schedule.name]
        may_end = recipe.patience and schedule.early_stopping
        if done > schedule.steps or (done < schedule.steps and not may_end):
            return f"phase {schedule.name}: it claims {done} steps, and the recipe has {schedule.steps}"
    return ""


def _figures_problem(receipt: Mapping[str, Any]) -> str:
    """Where a receipt lacks the figures of a step, or has more than it should; empty where it does not."""
    claimed, due = [(row["phase"], row["step"]) for row in receipt["steps"]], places_due(receipt)
    if claimed == due:
        return "" if due else "it leaves out every step"
    if not (differing := sorted({*due} ^ {*claimed})):
        return "it has the figures of a step twice, or not in their order"
    phase, step = differing[0]
    how = "lacks the figures of this step" if differing[0] in due else "has figures of a step that has none"
    return f"phase {phase}, step {step}: it {how}"


def left_out_of(receipt: Mapping[str, Any], phase: str) -> np.ndarray:
    """Whether each step of a phase is left out; the index is the step, from 1. Shape (steps + 1,)."""
    found = np.zeros(receipt["phases"][phase] + 1, bool)
    for row in receipt["left_out"]:
        if row["of"] == phase:
            found[row["first"] : row["last"] + 1] = True
    return found


def log_rows(receipt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows as a run's log has them, for a folder in which steps are redone."""
    rows = [dict(row) for row in receipt["steps"]]
    for phase in receipt["phases"]:
        left = np.flatnonzero(left_out_of(receipt, phase)).tolist()
        rows += [{"phase": phase, "step": step, LEFT_OUT: True} for step in left]
    return rows
