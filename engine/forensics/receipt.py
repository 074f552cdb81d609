"""A receipt: what a finished run says of itself, in one small file that somebody else can check.

It holds the recipe, the data's digests, the hash chain over the samples, seals, digests of checkpoints and of
final/, the metrics, and the losses and gradient norms of up to MOST_STEPS logged steps. All of it follows
from the run's folder, so that a receipt and a folder are compared by making the receipt again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.engine.loading.sampler import extend_chain, make_sampler
from isobatch.engine.optimization.left_out import LEAVE_OUT
from isobatch.engine.optimization.schedule import learning_rate, phase_schedules
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.metrics_log import LEFT_OUT, SEAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from isobatch.data.base import Source
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.log_audit import LogRecord

FORM = 1
"""Version of the file's form."""
MOST_STEPS = 2000
FIRST_STEPS = 64
"""Of which the first are all there: they can be redone without a checkpoint."""
FIGURES = ("phase", "step", "loss", "grad_norm", "lr", "samples", "chain")


def make_receipt(run: RunFolder, log: LogRecord) -> dict[str, Any]:
    """The receipt of a finished run whose records were audited. Raises TrainingError where it is not done."""
    if log.final is None:
        raise TrainingError(f"{run.folder} is {run.status()}, and a receipt is of a finished run")
    rows = list(rows_in(run.metrics))
    steps = [row for row in rows if "chain" in row]
    decisions = list(rows_in(run.decisions)) if run.decisions.exists() else []
    return {
        "receipt": FORM,
        "run": run.identity,
        "recipe_hash": run.recorded_hash,
        "recipe": run.recipe.to_dict(),
        "facts": {**run.facts.to_dict(), "folder": ""},
        "plan": run.plan.to_dict(),
        "phases": {phase.schedule.name: phase.step for phase in log.phases},
        "steps": [{name: row[name] for name in FIGURES} for row in _thinned(steps)],
        "left_out": [
            {name: row[name] for name in ("decision", "of", "first", "last", "reason")}
            for row in decisions
            if row.get("decision") == LEAVE_OUT
        ],
        "seals": [
            [row["phase"], row["step"], row[SEAL]] for row in rows if SEAL in row and "split" not in row
        ],
        "checkpoints": log.checkpoints,
        "exported": log.final.get("exported"),
        "final": log.final["final"],
        "metrics": (run.summary() or {}).get("metrics_by_split", {}),
        "versions": _versions(run),
    }


def _thinned(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first rows, the last, and evenly those between."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    every = math.ceil(len(steps) / (MOST_STEPS - FIRST_STEPS))
    last = len(steps) - 1
    return [row for n, row in enumerate(steps) if n < FIRST_STEPS or n % every == 0 or n == last]


def _versions(run: RunFolder) -> dict[str, str]:
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, list_checkpoints

    names = [phase.name for phase in workload_of(run.recipe).make(run.recipe)[0].phases()]
    saved = list_checkpoints(run.checkpoints, names)
    found: dict[str, str] = SavedCheckpoint(saved[-1]).state.get("versions", {}) if saved else {}
    return found


def has_form(content: Mapping[str, Any]) -> bool:
    """Whether a receipt from anyone has the parts that are read, in their form."""
    try:
        Recipe.from_dict(content["recipe"])
        Facts.from_dict(content["facts"])
        Plan.from_dict(content["plan"])
        numbers = [
            row[name] for row in content["steps"] for name in FIGURES if name not in ("phase", "chain")
        ]
        numbers += [row[name] for row in content["left_out"] for name in ("first", "last")]
        named = {row["phase"] for row in content["steps"]} | {row["of"] for row in content["left_out"]}
        return (
            all(isinstance(value, int | float) for value in (*numbers, *content["phases"].values()))
            and named <= content["phases"].keys()
            and {"run", "recipe_hash", "final", "metrics"} <= content.keys()
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return False


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
    if list(receipt["phases"]) != [schedule.name for schedule in schedules]:
        yield f"it names the phases {', '.join(receipt['phases'])}, and the recipe has others"
        return
    samples = 0
    for schedule in schedules:
        done = receipt["phases"][schedule.name]
        if done > schedule.steps or (
            done < schedule.steps and not (recipe.patience and schedule.early_stopping)
        ):
            yield f"phase {schedule.name}: it claims {done} steps, and the recipe has {schedule.steps}"
            return
        claimed = {row["step"]: row for row in receipt["steps"] if row["phase"] == schedule.name}
        left_out = _left_out(receipt, schedule.name)
        chain, batches = "", sampler.batches()
        for step in range(1, done + 1):
            batch = next(batches)
            if step not in left_out:
                chain, samples = extend_chain(chain, batch), samples + len(batch)
            row = claimed.pop(step, None)
            if row is None:
                continue
            if (row["chain"], row["samples"]) != (chain, samples):
                yield f"phase {schedule.name}, step {step}: the samples are not those of recipe and data"
                return
            rate = learning_rate(recipe, schedule.lr, step - 1, schedule.steps, schedule.steps_per_epoch)
            if not math.isclose(row["lr"], rate, rel_tol=1e-9):
                yield f"phase {schedule.name}, step {step}: the learning rate is not the recipe's"
                return
        if claimed:
            yield f"phase {schedule.name}: it has a step {min(claimed)}, after the end at {done}"
            return


def _left_out(receipt: Mapping[str, Any], phase: str) -> set[int]:
    rows = [row for row in receipt["left_out"] if row["of"] == phase]
    return {step for row in rows for step in range(row["first"], row["last"] + 1)}


def log_rows(receipt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows as a run's log has them, for a folder in which steps are redone."""
    rows = [dict(row) for row in receipt["steps"]]
    for row in receipt["left_out"]:
        left = range(row["first"], row["last"] + 1)
        rows += [{"phase": row["of"], "step": step, LEFT_OUT: True} for step in left]
    return rows
