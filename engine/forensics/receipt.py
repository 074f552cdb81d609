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
from isobatch.engine.loading.sampler import extend_chain
from isobatch.engine.optimization.left_out import decided
from isobatch.engine.optimization.schedule import learning_rate
from isobatch.engine.runs.metrics_log import LEFT_OUT, SEAL
from isobatch.engine.runs.step_rows import NEEDED, is_step
from isobatch.engine.verification.log_audit import WrongRecordError, check
from isobatch.engine.verification.run_order import RunOrder

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def check_order(receipt: Mapping[str, Any], recipe: Recipe, facts: Facts) -> None:
    """Compare the steps, samples and learning rates that a receipt claims with recipe and data. Raises
    WrongRecordError.
    """
    order = RunOrder.of(recipe, facts)
    sampler, schedules = order.sampler, order.schedules
    done = receipt["phases"]
    is_same = list(done) == [schedule.name for schedule in schedules]
    check(is_same, f"it names the phases {', '.join(done)}, and the recipe has others")
    for schedule in schedules:
        steps, may_end = done[schedule.name], recipe.patience and schedule.early_stopping
        fits = steps == schedule.steps or (steps < schedule.steps and may_end)
        said = f"it claims {steps} steps, and the recipe has {schedule.steps}"
        check(bool(fits), f"phase {schedule.name}: {said}")
    claimed, due = {(row["phase"], row["step"]): row for row in receipt["steps"]}, places_due(receipt)
    check(bool(due or claimed), "it leaves out every step")
    for phase, step in sorted({*due} ^ claimed.keys())[:1]:
        is_due = (phase, step) in due
        how = "lacks the figures of this step" if is_due else "has figures of a step that has none"
        raise WrongRecordError(f"phase {phase}, step {step}: it {how}")
    in_order = [(row["phase"], row["step"]) for row in receipt["steps"]] == due
    check(in_order, "it has the figures of a step twice, or not in their order")
    samples = 0
    for schedule in schedules:
        left_out, chain = left_out_of(receipt, schedule.name), ""
        for step, batch in enumerate(islice(sampler.batches(), done[schedule.name]), 1):
            if not left_out[step]:
                chain, samples = extend_chain(chain, batch), samples + len(batch)
            if (row := claimed.get((schedule.name, step))) is None:
                continue
            where = f"phase {schedule.name}, step {step}"
            is_same = (row["chain"], row["samples"]) == (chain, samples)
            check(is_same, f"{where}: the samples are not those of recipe and data")
            rate = learning_rate(recipe, schedule.lr, step - 1, schedule.steps, schedule.steps_per_epoch)
            is_same = math.isclose(row["lr"], rate, rel_tol=1e-9)
            check(is_same, f"{where}: the learning rate is not the recipe's")


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
