"""The report of classifiers: accuracy with its noise, size, and speed, each model against the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.measures import format_bytes, format_p_value
from isobatch.core.terminal import rendered
from isobatch.models.encoder import baselines as simple
from isobatch.models.encoder import evaluation, latency, problems
from isobatch.models.encoder.encoders import open_classifier
from isobatch.models.encoder.problems import NOISE, SIGNIFICANT, Problem
from isobatch.models.protocols import Batches, ReportRow, ReportTable, TaskReport

if TYPE_CHECKING:
    from isobatch.core.facts import Facts

RUNTIMES = {"torch": "torch", "onnx": "onnxruntime"}
AHEAD, AGAINST = (Path(__file__).with_name(f"{name}.jinja") for name in ("ahead", "against"))
COLUMNS = (
    "model", "accuracy, % (95 %)", "file", "ms, 1 text", "speed (95 %)",
    "points against the first (95 %, p)", "parameters", "texts/s", "memory",
    "training",
)  # fmt: skip


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
            rows.append(
                {
                    "form": form,
                    "runtime": runtime,
                    "samples": len(evidence),
                    "problem": problem.name,
                    "parameters": parameters,
                    "file": str(file.relative_to(final.parent)),
                    "file_bytes": file.stat().st_size,
                    "baselines": simple.standings(problem, found, others),
                    "opened": opened,
                    "peak_memory_bytes": in_child("models.encoder.latency:peak_memory", model=opened),
                    "class_names": problem.labels,
                    **problem.detail(evidence),
                    problem.headline: problem.score(evidence),
                    f"{problem.headline}_ci95": problem.interval(evidence),
                    "evidence": problem.brief(evidence).tolist(),
                    "labels": found.labels.tolist(),
                }
            )
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
        is_same = name in first and row["labels"] == first["labels"]
        both = [np.array(r["evidence"]) for r in (row, first)]
        found = problem.difference(*both) if is_same else None
        row[problem.test_name] = found and found.p
        row[f"{name}_difference_ci95"] = found and found[:3]
        verdict = found.verdict if found else "another evaluation set: not comparable"
        row[f"{name}_verdict"] = "baseline" if row is first else verdict
        alike = baselines[row["runtime"]]
        row["speedup"], low, high = latency.speedup(row["batch_1"], alike["batch_1"])
        row["speedup_ci95"] = [low, high]  # where it holds 1, a difference says nothing
        verdict = "faster" if low > 1 else "slower" if high < 1 else NOISE
        row["speed_verdict"] = "baseline" if alike is row else verdict
    return [{k: v for k, v in row.items() if k not in ("evidence", "labels")} for row in rows]


def columns(rows: list[ReportRow]) -> list[str]:
    """Heads of the table of all models."""
    return [name.replace("accuracy", _problem(rows[0]).title) for name in COLUMNS]


def cells(row: ReportRow) -> list[str]:
    """A model as text under `columns`."""
    problem, name = _problem(row), _problem(row).headline
    low, high = (100 * x for x in row[f"{name}_ci95"])
    one, (least, most) = row["batch_1"], row["speedup_ci95"]
    speed, points = f"{row['speedup']:.2f}x ({least:.2f} to {most:.2f})", row[f"{name}_verdict"]
    if row["speed_verdict"] == "baseline":
        speed = f"baseline of {RUNTIMES[row['runtime']]}"
    if points != "baseline" and (p := row[problem.test_name]) is not None:
        apart = (100 * x for x in row[f"{name}_difference_ci95"])
        points = "{:+.1f} ({:+.1f} to {:+.1f})".format(*apart) + f", p {format_p_value(p)}"
    return [
        f"{row['run']}, {row['form']}",
        f"{100 * row[name]:.2f} ({low:.1f} to {high:.1f})",
        format_bytes(row["file_bytes"]),
        f"{one['p50']:.2f} / {one['p95']:.2f}",
        speed,
        points,
        f"{row['parameters']:,}",
        f"{row['samples_per_second']:,.0f}",
        format_bytes(row["peak_memory_bytes"]),
        f"{row['train_seconds']:,.0f} s",
    ]


def caption(row: ReportRow, machine: str) -> str:
    """What the figures of the table are figures of."""
    template, known = Path(__file__).with_name("caption.jinja"), {"machine": machine, "least": SIGNIFICANT}
    return rendered(template, row=row, problem=_problem(row), **known).replace("\n", " ")


def verdicts(rows: list[ReportRow]) -> list[str]:
    """Who is ahead; and of each run the last form, which is the one to ship."""
    baselines = {row["runtime"]: row for row in reversed(rows)}
    last = {row["run"]: row for row in rows if row["run"] != rows[0]["run"]}
    against = [_worth_against(row, rows[0], baselines[row["runtime"]]) for row in last.values()]
    return [_who_is_ahead(rows), *against] if rows else []


def tables(row: ReportRow) -> list[ReportTable]:
    """A line for each of its labels, and how it stands to simple models."""
    name = row["run"] if row["form"].endswith("fp32") else f"{row['run']}, {row['form']}"
    head = ["simple model", f"{_problem(row).title}, %", "the model above it (95 %, p)", "it is"]
    rows = [
        [one["name"], f"{100 * one['score']:.2f}", _points(one), one["verdict"]] for one in row["baselines"]
    ]
    note = f"Learnt from the same training rows and measured on the same {row['samples']:,} samples."
    return [_problem(row).table(name, row), ReportTable(f"{name} beside simple models", note, head, rows)]


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
    return rendered(AHEAD, best=best, rival=rival, problem=_problem(best), **shown)


def _points(one: dict[str, Any]) -> str:
    """How far the model is above a baseline."""
    value, low, high = (100 * one[part] for part in ("value", "low", "high"))
    return f"({value:+.1f} points, {low:+.1f} to {high:+.1f}, p {format_p_value(one['p'])})"


def _worth_against(row: ReportRow, first: ReportRow, alike: ReportRow) -> str:
    """Accuracy and file against the first model, speed against `alike`, the first in the same runtime."""
    problem, shown = _problem(row), {"noise": NOISE, "runtimes": RUNTIMES, "size": format_bytes}
    same_figure = _problem(first).headline == problem.headline
    rows = {"row": row, "first": first, "alike": alike}
    return rendered(AGAINST, problem=problem, same_figure=same_figure, **rows, **shown)
