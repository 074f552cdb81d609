"""`report`: what models came to, side by side: accuracy with its noise, size, and speed measured here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.engine.planning.detect import detect
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.engine.training.evaluate import host_batches
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.report.html import page
from isobatch.launch.report.tables import COLUMNS, SIGNIFICANT, caption, plain, runs_table, table

POINTS = 400
"""Of a curve; more cannot be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Flags of `report`."""

    to: str | None = None
    """Folder for report.md, report.json and report.html; by default report/ in the last run's folder."""
    json: bool = False
    """report.json on standard output."""


def report(words: Sequence[str]) -> int:
    """Usage: report RUN... [--to FOLDER] [--json]: Markdown, JSON and one HTML page that opens offline.

    The first run is the baseline that the others are compared with.
    """
    positional, flags = split_words(words)
    own = command_options(flags, ReportOptions, "report")
    if not positional:
        raise UserError("report: give the folders of one or more runs, the baseline first")
    runs = [RunFolder.open(place) for place in positional]
    folder = Path(own.to).expanduser() if own.to else runs[-1].folder / "report"
    made = write(runs, folder)
    text = f"{markdown(made)}\n\n{folder}/report.html"
    print(json.dumps(made, ensure_ascii=False) if own.json else text)
    return 0


def write(runs: Sequence[RunFolder], folder: Path) -> dict[str, Any]:
    """Measure, compare and write the three files; what report.json holds."""
    if unfinished := [r for r in runs if r.status() != "done"]:
        raise UserError(
            f"report: {unfinished[0].folder} is {unfinished[0].status()}: finish it with `resume`"
        )
    made = {
        "machine": detect().describe(),
        "runs": [_run(run) for run in runs],
        "models": compared([row for run in runs for row in _models(run)]),
    }
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(folder / "report.json", made)
    atomic_files.write_text(folder / "report.md", markdown(made) + "\n")
    atomic_files.write_text(folder / "report.html", page(made))
    return made


def _run(run: RunFolder) -> dict[str, Any]:
    """A run's own records: its metrics, and the curves of its training."""
    summary = run.summary() or {}
    rows = atomic_files.read_jsonl(run.metrics)
    kept = (
        "train_seconds", "steps", "samples_seen", "parameters", "trainable_parameters", "metrics", "split",
        "world_size", "precision", "peak_memory_bytes", "sample",
    )  # fmt: skip
    steps = [r for r in rows if "lr" in r]
    starts = _starts(steps)
    return {
        "run": run.folder.name,
        "task": run.recipe.task,
        **{name: summary.get(name) for name in kept},
        "training": _curve(steps, ("loss", "sparsity"), starts),
        "evaluations": _curve([r for r in rows if "split" in r], ("loss", "accuracy"), starts),
    }


def _starts(steps: list[dict[str, Any]]) -> dict[str, int]:
    """Phase -> steps of the phases before it."""
    last = {row["phase"]: row["step"] for row in steps}
    return {phase: sum(list(last.values())[:place]) for place, phase in enumerate(last)}


def _curve(
    rows: list[dict[str, Any]], names: tuple[str, ...], starts: dict[str, int]
) -> dict[str, list[Any]]:
    """Columns of rows, thinned; steps count through all phases."""
    thinned = rows[:: max(1, len(rows) // POINTS)]
    found = {"step": [starts.get(row["phase"], 0) + row["step"] for row in thinned]}
    found |= {name: [row.get(name) for row in thinned] for name in names}
    return {k: v for k, v in found.items() if any(x is not None for x in v)}


def _models(run: RunFolder) -> list[dict[str, Any]]:
    """A row for each form in which the run's model runs."""
    from isobatch.launch.local.run_setup import locate_data
    from isobatch.launch.report.latency_worker import measured
    from isobatch.models.encoder import evaluation

    recipe = run.recipe
    locate_data(run, recipe, None)
    facts, (task, data) = run.facts, workload(recipe.task).make(recipe)
    held_out = next((s for s in HELD_OUT_SPLITS if s in facts.samples), None)
    rows = []
    for form in task.forms(run.final, run.folder / "exports") if held_out else []:
        samples = data.open(Path(facts.folder), str(held_out))
        found = evaluation.predict(form.open(), host_batches(samples))
        right = int(found.is_correct.sum())
        rows.append(
            {
                "run": run.folder.name,
                "task": recipe.task,
                "form": form.name,
                "split": held_out,
                "samples": len(found.labels),
                "accuracy": right / len(found.labels),
                "accuracy_ci95": evaluation.wilson_interval(right, len(found.labels)),
                **form.size_metrics(),
                **measured(
                    form.runtime, form.model_path, facts.extra["vocabulary"], evaluation.has_text_pairs(facts)
                ),
                "train_seconds": (run.summary() or {}).get("train_seconds"),
                "right": found.is_correct.tolist(),
                "labels": found.labels.tolist(),
            }
        )
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each model held against the first one: McNemar's test, and how much faster it is."""
    import numpy as np

    from isobatch.models.encoder import evaluation

    for row in rows:
        first = rows[0]
        same = row["labels"] == first["labels"]
        p = evaluation.mcnemar(np.array(row["right"]), np.array(first["right"])) if same else None
        row["mcnemar_p"] = p
        row["accuracy_verdict"] = _accuracy_verdict(row, first, p)
        row["speedup"] = round(first["batch_1"]["p50"] / row["batch_1"]["p50"], 3)
        row["speed_verdict"] = _speed_verdict(row["batch_1"], first["batch_1"])
    for row in rows:
        del row["right"], row["labels"]
    return rows


def _accuracy_verdict(row: dict[str, Any], first: dict[str, Any], p: float | None) -> str:
    if row is first:
        return "baseline"
    if p is None:
        return "another evaluation set: not comparable"
    if p >= SIGNIFICANT:
        return "within the noise"
    return "better" if row["accuracy"] > first["accuracy"] else "worse"


def _speed_verdict(mine: dict[str, float], first: dict[str, float]) -> str:
    """Where the middle halves of the measurements overlap, a difference says nothing."""
    if mine is first:
        return "baseline"
    if mine["p75"] < first["p25"]:
        return "faster"
    return "slower" if mine["p25"] > first["p75"] else "within the noise"


def markdown(made: dict[str, Any]) -> str:
    lines = ["# Report", "", caption(made)]
    for head, *rows in filter(
        None, ([list(COLUMNS), *table(made)] if made["models"] else [], runs_table(made))
    ):
        lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    for run in made["runs"]:
        known = {k: v for k, v in (run["metrics"] or {}).items() if isinstance(v, float | int | list)}
        lines += ["", f"## {run['run']} ({run['task']})", ""]
        lines += [f"- {name}: {plain(value)}" for name, value in known.items()]
        if run["sample"]:
            lines += ["", "What it writes:", "", *(f"    {line}" for line in run["sample"].splitlines())]
    return "\n".join(lines)
