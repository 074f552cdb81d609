"""Audits a run's records against its recipe and each other, without training."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.data.base import fingerprint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, recorded_digest
from isobatch.engine.checkpointing.digests import bytes_digest
from isobatch.engine.hooks.data_guard import DATA_WRITTEN
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.optimization.left_out import left_out_steps, until
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.ledger import read_ledger
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.summary import before_training, changed_fields
from isobatch.engine.verification.log_audit import LogRecord, WrongRecordError, check
from isobatch.engine.verification.run_order import RunOrder

DERIVED_DECISIONS = ("best checkpoint", "early stop")
"""Decisions that follow from the logged evaluations."""


def recipe_problems(run: RunFolder) -> list[str]:
    """What is wrong with recipe.json, a sentence each; empty if nothing is."""
    found, recorded = run.recipe.hash(), run.recorded_hash
    wrong = f"recipe.json was changed: its fields hash to {found}, not {recorded}"
    return [wrong] if found != recorded else []


def audit_records(run: RunFolder) -> tuple[list[str], LogRecord | None]:
    """Check recipe, data and every record of a run: (what is wrong, a sentence; what the log says, where
    nothing is wrong).
    """
    try:
        return [], _check_records(run)
    except WrongRecordError as error:
        return [str(error)], None
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # from anyone
        return [f"the records have not the form that a run writes: {error!r}"], None


def _check_records(run: RunFolder) -> LogRecord:
    """As all checks here raises WrongRecordError, with the first that is wrong."""
    for problem in recipe_problems(run):
        raise WrongRecordError(problem)
    _check_data(run)
    recipe = run.recipe
    order = RunOrder.of(run.here, run.facts)
    unread = ", ".join(workload_of(recipe).unread(recipe, order.task, order.data))
    check(not unread, f"recipe.json sets {unread}, which changes nothing: no launch writes that")
    log = LogRecord(run, order)
    _check_decisions(run, log)
    _check_left_out(run, log)
    for path in sorted(run.checkpoints.glob("[!.]*/state.json")):
        _check_checkpoint(run, log, path.parent)
    summary, last = run.summary() or {}, log.final
    said = f"metrics.jsonl says that the run is {'' if last else 'not '}done, and summary.json {run.status()}"
    check((run.status() == "done") == (last is not None), said)
    if last is None and run.final.exists():
        log.unproven.append("final/ is there, and metrics.jsonl has no end of training that wrote it")
    if last is not None:
        said = f"metrics.jsonl ends at step {log.steps}, and summary.json says {summary['steps']} steps"
        check(log.steps == summary["steps"] and log.phases[-1].complete, said)
        check(log.sealed, "metrics.jsonl ends without a seal")
        end = f"{log.phases[-1].schedule.name}-{log.exported_step}"
        said = f"metrics.jsonl says that {last['exported']} was exported, and its evaluations say {end}"
        check(last["exported"] == end, said)
        _check_summary(run, log, summary, last)
        changed = ", ".join(run.changed_export(final=last["final"]))
        check(not changed, f"missing, changed or added since the run wrote it: {changed}")
    _check_ledger(run, log, order.sampler)
    return log


def _check_data(run: RunFolder) -> None:
    """Compare the prepared arrays with facts.json, and facts.json with the one beside the arrays."""
    facts = run.facts
    actual, recorded = fingerprint(Path(facts.folder)), Path(facts.folder) / "facts.json"
    check(actual == facts.fingerprint, f"the data is not what was trained on: {actual}, {facts.fingerprint}")
    if recorded.exists():
        differing = ", ".join(facts.differing_fields(Facts.from_dict(atomic_files.read_json(recorded))))
        check(not differing, f"facts.json was changed: {differing} differs from {recorded}")


def _check_decisions(run: RunFolder, log: LogRecord) -> None:
    """Derive the decisions that follow from the evaluations, and compare; note the others."""
    rows, logged = list(atomic_files.rows_in(run.decisions)), (log.final or {}).get("decisions")
    is_same = logged is None or logged == (bytes_digest(run.decisions) if rows else "")
    check(is_same, "decisions.jsonl is not what the run wrote")
    derived = [row for phase in log.phases for row in phase.decisions]
    of_log = [row for row in rows if row.get("decision") in DERIVED_DECISIONS]
    written = [{k: v for k, v in row.items() if k != "reason"} for row in of_log]
    for wanted, found in itertools.zip_longest(derived, written):
        stands = f"{found} stands where the evaluations give {wanted}"
        check(wanted == found, f"decisions.jsonl: {stands}")
    log.changes = [r for r in rows if "phase" in r and r.get("decision") not in DERIVED_DECISIONS]
    for row in log.changes:
        phase, place = log.phase(row["phase"]), f"{row['phase']} {row.get('step')}"
        is_step = phase is not None and 0 < row.get("step", 0) <= phase.step
        check(is_step, f"decisions.jsonl: {row['decision']} at {place}: not a step")
    written_to = [r.get("file", "") for r in rows if r.get("decision") == DATA_WRITTEN]
    log.unproven = [f"the prepared data was written to while it was trained on: {f}" for f in written_to]


def _check_left_out(run: RunFolder, log: LogRecord) -> None:
    """Every step that was left out was decided to be, and the other way round, as far as the log goes."""
    decided = left_out_steps(run)
    for phase in log.phases:
        name = phase.schedule.name
        wanted, found = until(decided.get(name, ()), phase.step), log.left_out.get(name, set())
        for step in sorted({*wanted} ^ found)[:1]:
            how = "left out, and decisions.jsonl does not say so" if step in found else "to be left out"
            raise WrongRecordError(f"metrics.jsonl: phase {name}, step {step}: is {how}")


def _check_checkpoint(run: RunFolder, log: LogRecord, folder: Path) -> None:
    """A checkpoint is of this recipe, data and log, and holds what was written."""
    try:
        saved = SavedCheckpoint(folder)
        saved.verify_checksums()
    except TrainingError as error:
        raise WrongRecordError(str(error)) from None
    state, name = saved.state, f"checkpoint {folder.name}"
    is_own = (state["recipe_hash"], state["fingerprint"]) == (run.recorded_hash, run.facts.fingerprint)
    check(is_own, f"{name} belongs to another recipe or other data")
    progress = state["progress"]
    phase, step = log.phase(progress["phase"]), progress["step"]
    if phase is None or step > phase.step:
        raise WrongRecordError(f"{name} was saved at step {step}, where metrics.jsonl has none")
    place = progress["phase"], step
    check(folder.name == f"{place[0]}-{step}", f"{name} holds step {step} of {place[0]}")
    is_sealed = "logs" in state and place in log.chains
    check(is_sealed, f"{name} was saved at step {step}, where metrics.jsonl has no seal")
    is_same = log.chains[place] == (progress["chain"], progress["samples"])
    check(is_same, f"{name} has seen other samples than metrics.jsonl says")
    digest = log.checkpoints.get(folder.name)
    is_unknown = digest is None and log.final is None
    check(is_unknown or digest == recorded_digest(folder), f"{name} is not what the run wrote")
    judged = [at for at in phase.judged_at if at <= step]
    is_same = not judged or state["hooks"]["evaluate"] == phase.judged_at[judged[-1]]
    check(is_same, f"{name} judged other evaluations than metrics.jsonl has")


def _check_summary(
    run: RunFolder, log: LogRecord, summary: Mapping[str, Any], last: Mapping[str, Any]
) -> None:
    """Compare summary.json and plan.json with the log of a finished run."""
    logged, splits = last["summary"], summary["metrics_by_split"]
    differing = ", ".join(changed_fields(summary, logged))
    check(not differing, f"summary.json: {differing} differs from what was logged")
    is_same = splits.keys() == {row["split"] for row in log.ending}
    check(is_same, "summary.json: its splits are not those that were measured at the end")
    for split, metrics in splits.items():
        is_same = all(log.splits.get(split, {}).get(k) == v for k, v in metrics.items())
        check(is_same, f"summary.json: the metrics of {split} are not the logged ones")
    plan, row = run.plan, log.phases[-1].last
    for name in ("invariance", "rounding"):
        said, trained = getattr(plan, name), last[name]
        is_same = tuple(said or ()) == tuple(trained or ())
        check(is_same, f"plan.json says {name} {said}, and the run was trained with {trained}")
    wanted = {f"{what}_seen": row.get(what, 0) for what in ("samples", "tokens")}
    wanted |= {"task": run.recipe.task}
    wanted |= {"global_batch": run.recipe.batch_size, "world_size": plan.processes}
    wanted |= {name: getattr(plan, name) for name in ("strategy", "precision", "invariance")}
    wanted |= {"before": before_training(log.before)}
    wanted |= {"metrics": splits[summary["split"]]} if summary["split"] else {}
    wrong = ", ".join(name for name, value in wanted.items() if summary.get(name, value) != value)
    check(not wrong, f"summary.json: {wrong} does not follow from recipe, plan and log")


def _check_ledger(run: RunFolder, log: LogRecord, sampler: Sampler) -> None:
    """Steps of the ledger hold the recipe's samples; those that were promised are there."""
    seen: dict[str, set[int]] = defaultdict(set)
    last, batches = ("", 0), sampler.batches()
    for row in read_ledger(run):
        where = f"the ledger: phase {row.phase}, step {row.step}"
        check(row.step not in seen[row.phase], f"{where}: stands there twice")
        if (row.phase, row.step - 1) != last:
            batches = sampler.batches(row.step - 1)
        differing = {*row.samples.tolist()} ^ {*(wanted := next(batches)).tolist()}
        is_same = row.samples.tolist() == wanted.tolist()
        check(is_same, f"{where}: not the recipe's samples {sorted(differing)[:4]}")
        seen[row.phase].add(row.step)
        last = row.phase, row.step
    for phase, first, end in log.ledger:
        missing = {*range(first, end + 1)} - seen[phase] - log.left_out.get(phase, set())
        check(not missing, f"the ledger lacks steps of phase {phase} between {first} and {end}")
