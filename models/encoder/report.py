"""The report of classifiers: accuracy with its noise, size, and speed, each model against the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.facts import Facts
from isobatch.core.measures import format_bytes, format_p_value
from isobatch.core.terminal import rendered
from isobatch.models.encoder import baselines as simple
from isobatch.models.encoder import evaluation, latency, problems
from isobatch.models.encoder.calibration import answering_table
from isobatch.models.encoder.encoders import open_classifier
from isobatch.models.encoder.problems import NOISE, SIGNIFICANT, Problem
from isobatch.models.protocols import Batches, ReportRow, ReportTable, TaskReport

RUNTIMES = {"torch": "torch", "onnx": "onnxruntime"}
SEED = "another seed"
"""In place of a test: of two seeds of one setting one is always ahead."""


class ClassifierReport(TaskReport):
    """Classifiers in every form in which they run."""

    curves = ("accuracy", "sparsity")

    def __init__(self, variants: Callable[[Path, Path], Mapping[str, Path]]) -> None:
        """`variants`: (final, exports) -> the ways in which the task's model runs, and their files."""
        self.variants = variants

    def measure(
        self, final: Path, exports: Path, facts: Facts, batches: Batches, in_child: Callable[..., Any]
    ) -> list[ReportRow]:
        """A row, as JSON, for each form in which the finished model runs.

        `in_child("models.room.module:function", **values)` calls a function in a process of its own and
        returns its JSON: memory is measured alone.
        """
        problem, rows = problems.of_folder(final), []
        parameters = sum(p.numel() for p in open_classifier(str(final)).parameters())
        asked = {"vocabulary": facts.extra["vocabulary"], "lengths": latency.drawn_lengths(batches())}
        others = simple.baselines_of(facts, batches)
        for form, file in self.variants(final, exports).items():
            runtime = "onnx" if file.suffix == ".onnx" else "torch"
            path = file if runtime == "onnx" else final
            opened = {**asked, "model_path": str(path.resolve())}
            found = evaluation.predict(evaluation.open_runner(path), batches())
            evidence = problem.evidence(found)
            row: ReportRow = {"form": form, "runtime": runtime, "problem": problem.name, "opened": opened}
            row |= {"samples": len(evidence), "labels": found.labels.tolist(), "parameters": parameters}
            row |= {"file": str(file.relative_to(final.parent)), "file_bytes": file.stat().st_size}
            row |= {"class_names": problem.labels, "baselines": simple.standings(problem, found, others)}
            row |= {problem.headline: problem.score(evidence), **problem.detail(evidence)}
            row[f"{problem.headline}_ci95"] = problem.interval(evidence)
            row["evidence"] = problem.brief(evidence).tolist()
            row["answering"] = problem.kept.answering(found)
            row["peak_memory_bytes"] = in_child("models.encoder.latency:peak_memory", model=opened)
            rows.append(row)
        return rows


def compare(rows: list[ReportRow], in_child: Callable[..., Any]) -> list[ReportRow]:
    """The speed of all models, which compares only where they take turns; the paired test of the headline
    figure, the interval of its difference, and how much faster each is than the first in the same runtime.
    """
    opened = [row.pop("opened") for row in rows]
    measured = in_child("models.encoder.latency:measure_speed", models=opened)
    rows = [row | speed for row, speed in zip(rows, measured, strict=True)]
    first, baselines = rows[0], {row["runtime"]: row for row in reversed(rows)}
    for row in rows:
        problem = _problem(row)
        name = problem.headline
        is_seed = row["run"] != first["run"] and row["setting"] == first["setting"]
        is_same = name in first and row["labels"] == first["labels"] and not is_seed
        both = [np.array(r["evidence"]) for r in (row, first)]
        found = problem.difference(*both) if is_same else None
        row[problem.test_name] = found and found.p
        row[f"{name}_difference_ci95"] = found and found[:3]
        verdict = found.verdict if found else SEED if is_seed else "another evaluation set: not comparable"
        row[f"{name}_verdict"] = "baseline" if row is first else verdict
        alike = baselines[row["runtime"]]
        row["speedup"], low, high = latency.speedup(row["batch_1"], alike["batch_1"])
        row["speedup_ci95"] = [low, high]  # where it holds 1, a difference says nothing
        verdict = "faster" if low > 1 else "slower" if high < 1 else NOISE
        row["speed_verdict"] = "baseline" if alike is row else verdict
    return [{k: v for k, v in row.items() if k not in ("evidence", "labels")} for row in rows]


def cells(row: ReportRow) -> dict[str, str]:
    """A model as text, by the heads of the table of all models."""
    shown = {"runtimes": RUNTIMES, "size": format_bytes, "p_value": format_p_value}
    lines = rendered(__file__, "cells", row=row, problem=_problem(row), **shown).splitlines()
    return dict(line.split(": ", 1) for line in lines)


def caption(row: ReportRow, machine: str) -> str:
    """What the figures of the table are figures of."""
    known = {"machine": machine, "least": SIGNIFICANT}
    return rendered(__file__, "caption", row=row, problem=_problem(row), **known).replace("\n", " ")


def verdicts(rows: list[ReportRow]) -> list[str]:
    """Who is ahead; and of each run the form that was chosen, else the last one, which is the one to ship."""
    baselines = {row["runtime"]: row for row in reversed(rows)}
    last = {row["run"]: row for row in rows if row["run"] != rows[0]["run"]}
    last |= {row["run"]: row for row in rows[1:] if row["chosen"]}
    found = [_who_is_ahead(rows)] if rows else []
    shown = {"noise": NOISE, "runtimes": RUNTIMES, "size": format_bytes}
    for row in last.values():  # speed is against the first in the same runtime
        both = {"row": row, "first": rows[0], "alike": baselines[row["runtime"]]}
        problem, same_figure = _problem(row), _problem(rows[0]).headline == _problem(row).headline
        if row[f"{problem.headline}_verdict"] != SEED:
            found.append(
                rendered(__file__, "against", problem=problem, same_figure=same_figure, **both, **shown)
            )
    return found


def tables(row: ReportRow) -> list[ReportTable]:
    """A line for each of its labels, and how it stands to simple models."""
    name = row["run"] if row["form"].endswith("fp32") else f"{row['run']}, {row['form']}"
    head = ["simple model", f"{_problem(row).title}, %", "the model above it (95 %, p)", "it is"]
    rows = [[it["name"], f"{100 * it['score']:.2f}", _points(it), it["verdict"]] for it in row["baselines"]]
    note = f"Learnt from the same training rows and measured on the same {row['samples']:,} samples."
    found = [_problem(row).table(name, row), ReportTable(f"{name} beside simple models", note, head, rows)]
    return [*found, *([answering_table(name, row["answering"])] if row["answering"] else [])]


def _problem(row: ReportRow) -> Problem:
    return problems.PROBLEMS[row["problem"]](row["class_names"])


def _who_is_ahead(rows: list[ReportRow]) -> str:
    """The best model of the first one's data beside the simple ones, and whether the better is so clearly."""
    name = _problem(rows[0]).headline
    scores = [[one["score"] for one in row["baselines"]] for row in rows]
    alike = (row for row, found in zip(rows, scores, strict=True) if found == scores[0])
    best = max(alike, key=lambda row: row[name])
    rival = max(best["baselines"], key=lambda one: one["score"])
    shown = {"uncompared": simple.UNCOMPARED, "noise": NOISE, "points": _points}
    return rendered(__file__, "ahead", best=best, rival=rival, problem=_problem(best), **shown)


def _points(one: dict[str, Any]) -> str:
    """How far the model is above a baseline."""
    value, low, high = (100 * one[part] for part in ("value", "low", "high"))
    return f"({value:+.1f} points, {low:+.1f} to {high:+.1f}, p {format_p_value(one['p'])})"
