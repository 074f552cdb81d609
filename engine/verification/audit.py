"""Audit a run: check its records against its recipe and each other, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.facts import Facts
from isobatch.data.base import fingerprint
from isobatch.engine.loading.sampler import Sampler, extend_chain
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.metrics_log import SEAL, seal_row
from isobatch.engine.task_files import task_file_problem
from isobatch.engine.training.session import make_sampler

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder


def recipe_problems(run: RunFolder) -> list[str]:
    """What is wrong with recipe.json, a sentence each; empty if nothing is."""
    recipe, recorded = run.recipe, run.recorded_hash
    if recipe.hash() != recorded:
        return [f"recipe.json was changed: its fields hash to {recipe.hash()}, not {recorded}"]
    changed = task_file_problem(recipe)
    return [changed] if changed else []


def record_problems(run: RunFolder) -> list[str]:
    """What is wrong with the data and the records, a sentence each; empty if all agree."""
    if found := _data_problems(run):
        return found
    recipe, rows = run.recipe, atomic_files.read_jsonl(run.metrics)
    if not all(isinstance(row, dict) and "phase" in row for row in rows):
        return ["metrics.jsonl holds lines that no run wrote"]
    task, data = workload_of(recipe).make(recipe)
    sampler = make_sampler(recipe, data.open(Path(run.facts.folder), "train"), task.cohort)
    return [
        *_checkpoint_problems(run),
        *_seal_problems(rows),
        *_missing_rows(run, rows),
        *_outcome_problems(run, rows),
        *_chain_problems(rows, sampler),
        *_ledger_problems(run, rows, sampler),
    ]


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


def _checkpoint_problems(run: RunFolder) -> list[str]:
    """Every checkpoint must be of this recipe and data."""
    expected, problems = (run.recorded_hash, run.facts.fingerprint), []
    for path in sorted(run.checkpoints.glob("*/state.json")):
        state = atomic_files.read_json(path)
        if (state["recipe_hash"], state["fingerprint"]) != expected:
            problems.append(f"checkpoint {path.parent.name} belongs to another recipe or other data")
    return problems


def _seal_problems(rows: list[dict[str, Any]]) -> list[str]:
    seal = ""
    for row in rows:
        seal = seal_row(seal, row)
        if row.get(SEAL) != seal:
            return [
                f"metrics.jsonl was changed at or before phase {row.get('phase')}, step {row.get('step')}"
            ]
    return []


def _missing_rows(run: RunFolder, rows: list[dict[str, Any]]) -> list[str]:
    """The last step and the step of each checkpoint must be logged."""
    logged = {(r["phase"], r["step"]) for r in rows if "chain" in r}
    last = sum(max(s for p, s in logged if p == phase) for phase in {p for p, _ in logged})
    for path in run.checkpoints.glob("[!.]*/state.json"):
        progress = atomic_files.read_json(path)["progress"]
        if progress["step"] and (progress["phase"], progress["step"]) not in logged:
            return [f"metrics.jsonl lacks step {progress['step']}, where {path.parent.name} was saved"]
    summary = run.summary()
    if summary is None or summary["status"] != "done" or last >= summary["steps"]:
        return []
    return [f"metrics.jsonl ends at step {last}, and summary.json says {summary['steps']} steps"]


def _outcome_problems(run: RunFolder, rows: list[dict[str, Any]]) -> list[str]:
    """Compare summary.json, plan.json and final/ with the last rows, which have seals."""
    summary, last = run.summary(), _final_row(rows)
    if last is not None and run.status() != "done":
        return [f"metrics.jsonl says that the run is done, and summary.json that it is {run.status()}"]
    if summary is None or summary["status"] != "done":
        return []
    for split, metrics in summary["metrics_by_split"].items():
        measured = [r for r in rows if r.get("split") == split]
        if not measured or any(measured[-1].get(k) != v for k, v in metrics.items()):
            return [f"summary.json: the metrics of {split} are not the logged ones"]
    if summary["split"] and summary["metrics"] != summary["metrics_by_split"][summary["split"]]:
        return ["summary.json: the metrics are not the logged ones"]
    found = atomic_files.folder_checksums(run.final)
    if last is None or any(found.get(name) != crc for name, crc in last["final"].items()):
        return ["final/ is not what the run wrote"]
    trained, planned = last.get("invariance"), run.plan.invariance
    if trained not in (None, planned):
        return [f"plan.json says {planned}, and the run was trained as {trained}"]
    return []


def _final_row(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last row of a finished run, with the checksums of final/; None where there is none."""
    return next((r for r in reversed(rows) if "final" in r), None)


def _chain_problems(rows: list[dict[str, Any]], sampler: Sampler) -> list[str]:
    """Recompute the hash over all samples and compare it with every logged one."""
    chain, step, phase = "", 0, None
    for row in rows:
        if "chain" not in row:
            continue
        if row["phase"] != phase:
            chain, step, phase = "", 0, row["phase"]
        while step < row["step"]:
            chain, step = extend_chain(chain, sampler.batch(step)), step + 1
        if row["chain"] != chain:
            return [
                f"phase {phase}, step {step}: the samples seen are not the recipe's ({row['chain']}, {chain})"
            ]
    return []


def _ledger_problems(run: RunFolder, rows: list[dict[str, Any]], sampler: Sampler) -> list[str]:
    ledger = atomic_files.read_jsonl(run.samples)
    return _wrong_ledger_rows(ledger, sampler) or (
        _missing_ledger_rows(ledger, rows) if run.options().ledger else []
    )


def _missing_ledger_rows(ledger: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    """Every logged step must be in the ledger, where it is written first."""
    in_ledger = {r["phase"]: r["step"] for r in ledger}
    logged = {r["phase"]: r["step"] for r in rows if "chain" in r}
    return [
        f"samples.jsonl: phase {phase} ends at step {in_ledger.get(phase, 0)}, and in metrics.jsonl at {step}"
        for phase, step in logged.items()
        if in_ledger.get(phase, 0) < step
    ]


def _wrong_ledger_rows(ledger: list[dict[str, Any]], sampler: Sampler) -> list[str]:
    """Steps must follow each other, with the samples of the recipe."""
    step, phase = 0, None
    for row in ledger:
        step, phase = (step + 1 if row["phase"] == phase else 1), row["phase"]
        if row["step"] != step:
            return [f"samples.jsonl: phase {phase}: step {row['step']} stands where {step} should"]
        expected = sampler.batch(step - 1).tolist()
        if row["samples"] != expected:
            differing = sorted(set(row["samples"]) ^ set(expected))
            return [f"samples.jsonl: phase {phase}, step {step}: not the recipe's samples {differing[:4]}"]
    return []
