"""Whether a run's own records agree with its recipe: no training, only reading and counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.base import fingerprint
from engine import files
from engine.journal import SEAL, seal
from engine.registry import workload
from engine.run import Run
from engine.sampler import Sampler, chain
from engine.session import make_sampler


def problems(run: Run) -> list[str]:
    """What is wrong with the records, a sentence each; nothing if all agree."""
    recipe = run.recipe()
    if recipe.hash() != run.recorded_hash():
        return [f"recipe.json was changed: its fields hash to {recipe.hash()}, not {run.recorded_hash()}"]
    if found := _data_problems(run):
        return found
    task, data = workload(recipe.task).make(recipe)
    sampler = make_sampler(recipe, data.open(Path(run.facts().folder), "train"), task.cohort)
    rows = files.read_lines(run.metrics)
    return [
        *_checkpoint_problems(run),
        *_seal_problems(rows),
        *_missing_rows(run, rows),
        *_chain_problems(rows, sampler),
        *_ledger(run, sampler),
    ]


def _data_problems(run: Run) -> list[str]:
    facts = run.facts()
    actual = fingerprint(Path(facts.folder))
    return (
        []
        if actual == facts.fingerprint
        else [f"the data is not what was trained on: {actual}, {facts.fingerprint}"]
    )


def _checkpoint_problems(run: Run) -> list[str]:
    wanted, found = (run.recorded_hash(), run.facts().fingerprint), []
    for path in sorted(run.checkpoints.glob("*/state.json")):
        state = files.read_json(path)
        if (state["recipe_hash"], state["fingerprint"]) != wanted:
            found.append(f"checkpoint {path.parent.name} belongs to another recipe or other data")
    return found


def _seal_problems(rows: list[dict[str, Any]]) -> list[str]:
    before = ""
    for row in rows:
        before = seal(before, row)
        if row.get(SEAL) != before:
            return [
                f"metrics.jsonl was changed at or before phase {row.get('phase')}, step {row.get('step')}"
            ]
    return []


def _missing_rows(run: Run, rows: list[dict[str, Any]]) -> list[str]:
    """The last step of a run is always logged."""
    summary = run.summary()
    last = max((r["step"] for r in rows if "chain" in r), default=0)
    if summary is None or summary["status"] != "done" or last >= summary["steps"]:
        return []
    return [f"metrics.jsonl ends at step {last}, and summary.json says {summary['steps']} steps"]


def _chain_problems(rows: list[dict[str, Any]], sampler: Sampler) -> list[str]:
    """Recompute the hash over all samples and compare it where it was logged."""
    link, step, phase = "", 0, None
    for row in rows:
        if "chain" not in row:
            continue
        if row["phase"] != phase:
            link, step, phase = "", 0, row["phase"]
        while step < row["step"]:
            link, step = chain(link, sampler.batch(step)), step + 1
        if row["chain"] != link:
            return [
                f"phase {phase}, step {step}: the samples seen are not the recipe's ({row['chain']}, {link})"
            ]
    return []


def _ledger(run: Run, sampler: Sampler) -> list[str]:
    for row in files.read_lines(run.samples):
        wanted = sampler.batch(row["step"] - 1).tolist()
        if row["samples"] != wanted:
            odd = sorted(set(row["samples"]) ^ set(wanted))
            return [
                f"samples.jsonl: phase {row['phase']}, step {row['step']}: not the recipe's samples {odd[:4]}"
            ]
    return []
