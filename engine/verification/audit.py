"""Audits a run's records against its recipe and each other, without training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.data.base import fingerprint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, recorded_digest
from isobatch.engine.checkpointing.digests import bytes_digest, folder_digests
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.left_out import left_out_steps, until
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.ledger import read_ledger
from isobatch.engine.task_files import task_file_problem
from isobatch.engine.training.run_context import DATA_WRITTEN
from isobatch.engine.verification.log_audit import LogRecord, audit_log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.engine.loading.sampler import Sampler
    from isobatch.engine.runs.run_folder import RunFolder

DERIVED_DECISIONS = ("best checkpoint", "early stop")
"""Decisions that follow from the logged evaluations."""


@dataclass(slots=True)
class Audit:
    """What the records say, and what is wrong with them."""

    problems: list[str] = field(default_factory=list)
    """A sentence each; empty if all agree."""
    log: LogRecord | None = None
    """None where recipe or data were wrong already."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Rows of decisions.jsonl about changes of the model while it trained."""
    launch_decisions: list[dict[str, Any]] = field(default_factory=list)
    """Decisions of launches: they follow from the machine, and nothing proves them."""

    @property
    def steps(self) -> int:
        """Optimizer steps whose samples were checked."""
        return sum(phase.step for phase in self.log.phases) if self.log else 0

    @property
    def unproven(self) -> list[str]:
        """What the records themselves say was not as it should be, a sentence each."""
        written = [r.get("file", "") for r in self.launch_decisions if r.get("decision") == DATA_WRITTEN]
        return [f"the prepared data was written to while it was trained on: {file}" for file in written]


def recipe_problems(run: RunFolder) -> list[str]:
    """What is wrong with recipe.json, a sentence each; empty if nothing is."""
    recipe, recorded = run.recipe, run.recorded_hash
    if recipe.hash() != recorded:
        return [f"recipe.json was changed: its fields hash to {recipe.hash()}, not {recorded}"]
    changed = task_file_problem(recipe)
    return [changed] if changed else []


def audit_records(run: RunFolder) -> Audit:
    """Check the data and every record of a run."""
    try:
        return _audit(run)
    except UserError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:  # of a run from anyone
        return Audit([f"the records have not the form that a run writes: {error!r}"])


def _audit(run: RunFolder) -> Audit:
    if found := _data_problems(run):
        return Audit(found)
    recipe = run.recipe
    chosen = workload_of(recipe)
    task, data = chosen.make(recipe)
    sampler = make_sampler(recipe, data.open(Path(run.facts.folder), "train"), task.cohort)
    if unread := chosen.unread(recipe, task, data):
        return Audit([f"recipe.json sets {', '.join(unread)}, which changes nothing: no launch writes that"])
    schedules = phase_schedules(recipe, task.phases(), sampler.steps_per_epoch)
    log = audit_log(run, sampler, schedules, task.best_metric)
    audit = Audit(log.problems, log)
    if not audit.problems:
        audit.problems = [
            *_decision_problems(run, audit),
            *_left_out_problems(run, log),
            *_checkpoint_problems(run, log),
            *_ending_problems(run, log),
            *_ledger_problems(run, log, sampler),
        ]
    return audit


def _data_problems(run: RunFolder) -> list[str]:
    """Compare the prepared arrays with facts.json, and facts.json with the one beside the arrays."""
    facts = run.facts
    actual, recorded = fingerprint(Path(facts.folder)), Path(facts.folder) / "facts.json"
    if actual != facts.fingerprint:
        return [f"the data is not what was trained on: {actual}, {facts.fingerprint}"]
    if not recorded.exists():
        return []
    differing = facts.differing_fields(Facts.from_dict(atomic_files.read_json(recorded)))
    return [f"facts.json was changed: {', '.join(differing)} differs from {recorded}"] if differing else []


def _decision_problems(run: RunFolder, audit: Audit) -> list[str]:
    """Derive the decisions that follow from the evaluations, and compare; note the others."""
    assert audit.log is not None
    rows, logged = list(rows_in(run.decisions)), (audit.log.final or {}).get("decisions")
    if logged is not None and logged != (bytes_digest(run.decisions) if rows else ""):
        return ["decisions.jsonl is not what the run wrote"]
    derived = [row for phase in audit.log.phases for row in phase.decisions]
    written = [
        {k: v for k, v in row.items() if k != "reason"}
        for row in rows
        if row.get("decision") in DERIVED_DECISIONS
    ]
    audit.changes = [r for r in rows if "phase" in r and r.get("decision") not in DERIVED_DECISIONS]
    audit.launch_decisions = [r for r in rows if "phase" not in r]
    for row in audit.changes:
        phase = audit.log.phase(row["phase"])
        if phase is None or not 0 < row.get("step", 0) <= phase.step:
            return [f"decisions.jsonl: {row['decision']} at {row['phase']} {row.get('step')}: not a step"]
    for wanted, found in zip(derived, written, strict=False):
        if wanted != found:
            return [f"decisions.jsonl: {found} stands where the evaluations give {wanted}"]
    if len(derived) != len(written):
        return [f"decisions.jsonl: {len(written)} decisions, and the evaluations give {len(derived)}"]
    return []


def _left_out_problems(run: RunFolder, log: LogRecord) -> list[str]:
    """Every step that was left out was decided to be, and the other way round, as far as the log goes."""
    decided = left_out_steps(run)
    for phase in log.phases:
        name = phase.schedule.name
        wanted, found = until(decided, name, phase.step), sorted(log.left_out.get(name, ()))
        if wanted != found:
            step = min({*wanted} ^ {*found})
            how = "left out, and decisions.jsonl does not say so" if step in found else "to be left out"
            return [f"metrics.jsonl: phase {name}, step {step}: is {how}"]
    return []


def _checkpoint_problems(run: RunFolder, log: LogRecord) -> list[str]:
    """Every checkpoint is of this recipe, data and log, and holds what was written."""
    for path in sorted(run.checkpoints.glob("[!.]*/state.json")):
        try:
            saved = SavedCheckpoint(path.parent)
            saved.verify_checksums()
        except TrainingError as error:
            return [str(error)]
        if problem := _checkpoint_problem(run, log, saved):
            return [f"checkpoint {path.parent.name} {problem}"]
    return []


def _checkpoint_problem(run: RunFolder, log: LogRecord, saved: SavedCheckpoint) -> str:
    state, name = saved.state, saved.folder.name
    if (state["recipe_hash"], state["fingerprint"]) != (run.recorded_hash, run.facts.fingerprint):
        return "belongs to another recipe or other data"
    progress = state["progress"]
    phase, step = log.phase(progress["phase"]), progress["step"]
    if phase is None or step > phase.step:
        return f"was saved at step {step}, where metrics.jsonl has none"
    if name != f"{progress['phase']}-{step}":
        return f"holds step {step} of {progress['phase']}"
    if "logs" not in state or log.chains.get((progress["phase"], step)) is None:
        return f"was saved at step {step}, where metrics.jsonl has no seal"
    if log.chains.get((progress["phase"], step)) != (progress["chain"], progress["samples"]):
        return "has seen other samples than metrics.jsonl says"
    digest = log.checkpoints.get(name)
    if digest != recorded_digest(saved.folder) and (digest is not None or log.final is not None):
        return "is not what the run wrote"
    judged = [at for at in phase.judged_at if at <= step]
    if judged and state["judge"] != phase.judged_at[judged[-1]]:
        return "judged other evaluations than metrics.jsonl has"
    return ""


def _ending_problems(run: RunFolder, log: LogRecord) -> list[str]:
    """Compare summary.json, plan.json and final/ with the log of a finished run."""
    summary, last = run.summary(), log.final
    if last is not None and run.status() != "done":
        return [f"metrics.jsonl says that the run is done, and summary.json that it is {run.status()}"]
    if summary is None or summary["status"] != "done":
        return []
    steps = sum(phase.step for phase in log.phases)
    if last is None or steps != summary["steps"] or not log.phases[-1].complete:
        return [f"metrics.jsonl ends at step {steps}, and summary.json says {summary['steps']} steps"]
    if not log.sealed:
        return ["metrics.jsonl ends without a seal"]
    end = f"{log.phases[-1].schedule.name}-{log.exported_step}"
    if last.get("exported", end) != end:
        return [f"metrics.jsonl says that {last['exported']} was exported, and its evaluations say {end}"]
    return _summary_problems(run, log, summary, last) or _final_problems(run, last)


def _summary_problems(
    run: RunFolder, log: LogRecord, summary: Mapping[str, Any], last: Mapping[str, Any]
) -> list[str]:
    logged = last["summary"]
    if differing := sorted(k for k in {*logged, *summary} if logged.get(k) != summary.get(k)):
        return [f"summary.json: {', '.join(differing)} differs from what was logged"]
    if summary["metrics_by_split"].keys() != {row["split"] for row in log.ending}:
        return ["summary.json: its splits are not those that were measured at the end"]
    for split, metrics in summary["metrics_by_split"].items():
        if any(log.splits.get(split, {}).get(k) != v for k, v in metrics.items()):
            return [f"summary.json: the metrics of {split} are not the logged ones"]
    if summary["split"] and summary["metrics"] != summary["metrics_by_split"][summary["split"]]:
        return ["summary.json: the metrics are not the logged ones"]
    plan, row = run.plan, log.phases[-1].last
    trained = last.get("invariance", plan.invariance)
    if trained != plan.invariance:
        return [f"plan.json says {plan.invariance}, and the run was trained as {trained}"]
    measured = last.get("rounding", plan.rounding)
    if (measured and list(measured)) != (plan.rounding and list(plan.rounding)):
        return [f"plan.json says that rounding moves {plan.rounding}, and the run measured {measured}"]
    wanted = {"samples_seen": row.get("samples"), "tokens_seen": row.get("tokens"), "task": run.recipe.task}
    wanted |= {"global_batch": run.recipe.batch_size, "world_size": plan.processes}
    wanted |= {name: getattr(plan, name) for name in ("strategy", "precision", "invariance")}
    if wrong := [name for name, value in wanted.items() if summary.get(name, value) != value]:
        return [f"summary.json: {', '.join(wrong)} does not follow from recipe, plan and log"]
    return []


def _final_problems(run: RunFolder, last: Mapping[str, Any]) -> list[str]:
    recorded = last["final"]
    found = folder_digests(run.final)
    changed = sorted(name for name in recorded if found.get(name) != recorded[name])
    added = sorted(found.keys() - recorded.keys())
    if changed:
        return [f"final/ is not what the run wrote: {', '.join(changed)} is missing or changed"]
    return [f"final/ holds what the run did not write: {', '.join(added)}"] if added else []


def _ledger_problems(run: RunFolder, log: LogRecord, sampler: Sampler) -> list[str]:
    """Steps of the ledger hold the recipe's samples; those that were promised are there."""
    seen: dict[str, list[list[int]]] = {}
    batches = sampler.batches()
    for row in read_ledger(run):
        stretches = seen.setdefault(row.phase, [])
        if stretches and row.step <= stretches[-1][1]:
            return [f"the ledger: phase {row.phase}: step {row.step} stands after {stretches[-1][1]}"]
        expected_step = stretches[-1][1] + 1 if stretches else 0
        while expected_step in log.left_out.get(row.phase, ()):
            expected_step += 1
        if stretches and row.step == expected_step:
            if expected_step > stretches[-1][1] + 1:
                batches = sampler.batches(row.step - 1)
            stretches[-1][1] = row.step
        else:
            stretches.append([row.step, row.step])
            batches = sampler.batches(row.step - 1)
        expected = next(batches)
        if row.samples.tolist() != expected.tolist():
            differing = sorted(set(row.samples.tolist()) ^ set(expected.tolist()))
            return [
                f"the ledger: phase {row.phase}, step {row.step}: not the recipe's samples {differing[:4]}"
            ]
    return [
        f"the ledger lacks steps of phase {phase} between {first} and {last}"
        for phase, first, last in log.ledger
        if not any(low <= first and high >= last for low, high in seen.get(phase, []))
    ]
