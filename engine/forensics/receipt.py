"""A receipt: what a finished run says of itself, in one small file that somebody else can check.

It holds the recipe, the data's digests, the hash chain over the samples, seals, digests of checkpoints and of
final/, the metrics, and the losses and gradient norms of up to MOST_STEPS logged steps. All of it follows
from the run's folder, so that a receipt and a folder are compared by making the receipt again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.engine.optimization.left_out import decided
from isobatch.engine.optimization.schedule import learning_rate
from isobatch.engine.runs.metrics_log import LEFT_OUT, SEAL
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.train.figures import NEEDED, extend_chain, is_step
from isobatch.engine.verification.log_audit import SEAL_ROW, LogRecord, WrongRecordError, check
from isobatch.engine.verification.run_order import RunOrder

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
    *("seals", "checkpoints", "exported", "final", "exports", "metrics", "versions"),
)


def make_receipt(run: RunFolder, log: LogRecord) -> dict[str, Any]:
    """The receipt of a finished run whose records were audited. Raises TrainingError where it is not done."""
    if log.final is None:
        raise TrainingError(f"{run.folder} is {run.status()}, and a receipt is of a finished run")
    rows = list(rows_in(run.metrics))
    steps = {(row["phase"], row["step"]): row for row in rows if is_step(row)}
    made = {
        "receipt": FORM,
        "run": run.identity,
        "recipe_hash": run.recorded_hash,
        "recipe": run.recipe.to_dict(),
        "facts": {**run.facts.to_dict(), "folder": ""},
        "plan": run.plan.to_dict(),
        "phases": {phase.schedule.name: phase.step for phase in log.phases},
        "log_every": [[row["phase"], row["step"], row["log_every"]] for row in rows if "log_every" in row],
        "left_out": [{name: row[name] for name in DECIDED} for row in decided(run)],
        "seals": [[row["phase"], row["step"], row[SEAL]] for row in rows if row.keys() == SEAL_ROW],
        "checkpoints": log.checkpoints,
        "exported": log.final.get("exported"),
        "final": log.final["final"],
        "exports": {name: digests for name, digests in run.exports().items() if digests},
        "metrics": (run.summary() or {}).get("metrics_by_split", {}),
        "versions": run.environment(),
    }
    return {**made, "steps": [{name: steps[place][name] for name in NEEDED} for place in places_due(made)]}


def places_due(receipt: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(phase, step) of all the figures that a receipt has to have: of each phase the first step and the last,
    and those that its log names by `log_every`, but for those that are left out. Of a long run the first, the
    last, and evenly those between.
    """
    due, count = [], 1
    every = {(phase, step): count for phase, step, count in receipt["log_every"]}
    for phase, done in receipt["phases"].items():
        left_out = left_out_of(receipt, phase)
        for step in range(1, done + 1):
            count = every.get((phase, step), count)
            if (step in (1, done) or step % count == 0) and not left_out[step]:
                due.append((phase, step))
    apart = 1 if len(due) <= MOST_STEPS else math.ceil(len(due) / (MOST_STEPS - FIRST_STEPS))
    return [place for n, place in enumerate(due) if n < FIRST_STEPS or n % apart == 0 or place == due[-1]]


def has_form(content: Any) -> bool:
    """Whether a receipt from anyone has the parts that are read, in their form."""
    try:
        for part, kind in (("recipe", Recipe), ("facts", Facts), ("plan", Plan)):
            kind.from_dict(content[part])
        phases, steps, left_out = content["phases"], content["steps"], content["left_out"]
        counts = [row[name] for row in steps for name in ("step", "samples")]
        counts += [number for _, *numbers in content["log_every"] for number in numbers]
        counts += [row[name] for row in left_out for name in ("first", "last")]
        figures = [row[name] for row in steps for name in ("loss", "lr", "grad_norm")]
        named = [*(row["phase"] for row in steps), *(row["of"] for row in left_out)]
        named += [phase for phase, _, _ in content["log_every"]]
        return (
            (content["receipt"], content.keys() | {"exports"}) == (FORM, set(PARTS))  # older ones lack them
            and type(chosen_elsewhere(content)) is str
            and type(steps) is type(left_out) is list
            and all(row.keys() == set(DECIDED) for row in left_out)
            and all(row.keys() == set(NEEDED) for row in steps)
            and all(type(number) is int and number >= 1 for number in counts)
            and all(type(number) is int and number >= 0 for number in phases.values())
            and all(type(figure) in (int, float) and abs(figure) < LARGEST for figure in figures)
            and phases.keys() >= set(named)
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def check_order(receipt: Mapping[str, Any], recipe: Recipe, facts: Facts) -> None:
    """Compare the steps, samples and learning rates that a receipt claims with recipe and data. Raises
    WrongRecordError.
    """
    order, done = RunOrder.of(recipe, facts), receipt["phases"]
    is_same = list(done) == [schedule.name for schedule in order.schedules]
    check(is_same, f"it names the phases {', '.join(done)}, and the recipe has others")
    for schedule in order.schedules:
        steps, may_end = done[schedule.name], recipe.patience and schedule.early_stopping
        fits = steps == schedule.steps or (steps < schedule.steps and may_end)
        said = f"it claims {steps} steps, and the recipe has {schedule.steps}"
        check(bool(fits), f"phase {schedule.name}: {said}")
    claimed, due = {(row["phase"], row["step"]): row for row in receipt["steps"]}, places_due(receipt)
    has_steps = any(schedule.steps for schedule in order.schedules)
    check(bool(due or claimed or not has_steps), "it leaves out every step")
    for phase, step in sorted({*due} ^ claimed.keys())[:1]:
        how = "lacks the figures of this step" if (phase, step) in due else "has figures of what is no step"
        raise WrongRecordError(f"phase {phase}, step {step}: it {how}")
    in_order = [(row["phase"], row["step"]) for row in receipt["steps"]] == due
    check(in_order, "it has the figures of a step twice, or not in their order")
    samples = 0
    for schedule in order.schedules:
        left_out, chain = left_out_of(receipt, schedule.name), ""
        for step, batch in enumerate(islice(order.sampler.batches(), done[schedule.name]), 1):
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


def chosen_elsewhere(receipt: Mapping[str, Any]) -> str:
    """That chosen/ is another run's model: it has files that are none of this one's; else empty."""
    written = {**receipt.get("exports", {}), "final": receipt["final"]}
    chosen = set(written.pop("chosen", {}).values())
    own = {digest for files in written.values() for digest in files.values()}
    return (
        "" if chosen <= own else "chosen/ is another stage's model: how it was trained, its own receipt says"
    )


def log_rows(receipt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows as a run's log has them, for a folder in which steps are redone."""
    rows = list(receipt["steps"])
    for phase in receipt["phases"]:
        left = np.flatnonzero(left_out_of(receipt, phase)).tolist()
        rows += [{"phase": phase, "step": step, LEFT_OUT: True} for step in left]
    return rows
