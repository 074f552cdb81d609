"""The report of classifiers: accuracy with its noise, size, and speed, each model against the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.measures import format_bytes, format_p_value
from isobatch.models.encoder import class_metrics, evaluation
from isobatch.models.encoder.encoders import open_classifier
from isobatch.models.protocols import Batches, ModelComparison, ReportRow, ReportTable

if TYPE_CHECKING:
    from isobatch.core.facts import Facts

MOST_ANSWERS = 12
"""Classes up to which the table of classes says how often each was answered with which."""
RUNTIMES = {"torch": "torch", "onnx": "onnxruntime"}
NOISE = "within the noise"
SIGNIFICANT = 0.05
"""McNemar's p from which a difference is within the noise."""


class ClassifierReport(ModelComparison):
    """Classifiers in every form in which they run."""

    columns = (
        "model", "accuracy, % (95 %)", "file", "ms, 1 text", "speed (95 %)",
        "points against the first (95 %, p)", "parameters", "texts/s", "memory",
        "training",
    )  # fmt: skip
    curves = ("accuracy", "sparsity")

    def __init__(self, variants: Callable[[Path, Path], Sequence[evaluation.ModelVariant]]) -> None:
        """`variants`: (final, exports) -> the ways in which the task's model runs."""
        self.variants = variants

    def measure(
        self, final: Path, exports: Path, facts: Facts, batches: Batches, in_child: Callable[..., Any]
    ) -> list[ReportRow]:
        classes, rows = facts.extra["labels"], []
        for variant in self.variants(final, exports):
            found = evaluation.predict(evaluation.open_runner(variant.runtime, variant.model_path), batches())
            right, path = found.is_correct, str(variant.model_path.resolve())
            opened = {"runtime": variant.runtime, "model_path": path, "vocabulary": facts.extra["vocabulary"]}
            confusion = class_metrics.confusion_matrix(found.labels, found.predicted_labels, len(classes))
            confidence = evaluation.softmax(found.logits).max(1)
            row = {
                "form": variant.name,
                "runtime": variant.runtime,
                "samples": len(right),
                "accuracy": int(right.sum()) / len(right),
                "accuracy_ci95": class_metrics.wilson_interval(int(right.sum()), len(right)),
                "parameters": sum(p.numel() for p in open_classifier(str(variant.final)).parameters()),
                "file_bytes": variant.file.stat().st_size,
                "opened": opened,
                "peak_memory_bytes": in_child("models.encoder.evaluation:peak_memory", model=opened),
                "class_names": classes,
                "confusion": confusion.tolist(),
                "calibration_error": class_metrics.calibration_error(confidence, right),
                "right": right.tolist(),
                "labels": found.labels.tolist(),
            }
            rows.append(row)
        return rows

    def measure_in_turn(self, rows: list[ReportRow], in_child: Callable[..., Any]) -> list[ReportRow]:
        opened = [row.pop("opened") for row in rows]
        measured = in_child("models.encoder.evaluation:measure_speed", models=opened)
        return [row | speed for row, speed in zip(rows, measured, strict=True)]

    def compare(self, rows: list[ReportRow]) -> list[ReportRow]:
        """McNemar's test, the interval of the difference in accuracy, and how much faster each is than the
        first model in the same runtime.
        """
        first, baselines = rows[0], {row["runtime"]: row for row in reversed(rows)}
        for row in rows:
            is_same, both = row["labels"] == first["labels"], [np.array(r["right"]) for r in (row, first)]
            row["mcnemar_p"] = p = class_metrics.mcnemar(*both) if is_same else None
            row["accuracy_difference_ci95"] = class_metrics.paired_difference(*both) if is_same else None
            row["accuracy_verdict"] = "better" if row["accuracy"] > first["accuracy"] else "worse"
            if row is first:
                row["accuracy_verdict"] = "baseline"
            elif p is None:
                row["accuracy_verdict"] = "another evaluation set: not comparable"
            elif p >= SIGNIFICANT:
                row["accuracy_verdict"] = NOISE
            alike = baselines[row["runtime"]]
            row["speedup"], low, high = _speedup(row, alike)
            row["speedup_ci95"] = [low, high]  # where it holds 1, a difference says nothing
            verdict = "faster" if low > 1 else "slower" if high < 1 else NOISE
            row["speed_verdict"] = "baseline" if alike is row else verdict
        return [{k: v for k, v in row.items() if k not in ("right", "labels")} for row in rows]

    def cells(self, row: ReportRow) -> list[str]:
        low, high = (100 * x for x in row["accuracy_ci95"])
        one, (least, most) = row["batch_1"], row["speedup_ci95"]
        speed, points = f"{row['speedup']:.2f}x ({least:.2f} to {most:.2f})", row["accuracy_verdict"]
        if row["speed_verdict"] == "baseline":
            speed = f"baseline of {RUNTIMES[row['runtime']]}"
        if points != "baseline" and row["mcnemar_p"] is not None:
            apart = (100 * x for x in row["accuracy_difference_ci95"])
            points = "{:+.1f} ({:+.1f} to {:+.1f})".format(*apart) + f", p {format_p_value(row['mcnemar_p'])}"
        return [
            f"{row['run']}, {row['form']}",
            f"{100 * row['accuracy']:.2f} ({low:.1f} to {high:.1f})",
            format_bytes(row["file_bytes"]),
            f"{one['p50']:.2f} / {one['p95']:.2f}",
            speed,
            points,
            f"{row['parameters']:,}",
            f"{row['samples_per_second']:,.0f}",
            format_bytes(row["peak_memory_bytes"]),
            f"{row['train_seconds']:,.0f} s",
        ]

    def caption(self, row: ReportRow, machine: str) -> str:
        where = f"{machine}, {row['threads']} thread, texts of {row['tokens']} tokens"
        return (
            f"Measured on {where}; accuracy on all {row['samples']} samples of the {row['split']} split with"
            " its 95 % interval; ms are the median and the 95th percentile of the thread's"
            " own time; memory is a process's peak. Speed is that of one text against the first model in the"
            " same runtime, measured in turn."
            " Accuracies whose difference McNemar's exact test does not tell from chance (p at least"
            f" {SIGNIFICANT}) are within the noise, and so are speeds whose interval holds 1."
        )

    def verdicts(self, rows: list[ReportRow]) -> list[str]:
        """Of each run the last form, which is the one to ship."""
        first = rows[0]
        baselines = {row["runtime"]: row for row in reversed(rows)}
        last = {row["run"]: row for row in rows if row["run"] != first["run"]}
        alone = [said for row in (first, *last.values()) if (said := _worth_alone(row, of_chance=bool(last)))]
        return alone + [_worth_against(row, first, baselines[row["runtime"]]) for row in last.values()]

    def tables(self, row: ReportRow) -> list[ReportTable]:
        """Its classes with their confusion."""
        name = row["run"] if row["form"].endswith("fp32") else f"{row['run']}, {row['form']}"
        return [_table_of_classes(name, row)]


def _worth_alone(row: ReportRow, of_chance: bool) -> str:
    """`of_chance`: nothing is said of a model that is right more often than the answer with the largest
    class.
    """
    low, high = (100 * x for x in row["accuracy_ci95"])
    samples = np.array(row["confusion"]).sum(1)
    is_chance = row["accuracy"] <= samples.max() / samples.sum()
    if of_chance and not is_chance:
        return ""
    return (
        f"{row['run']}: {'no better than chance: ' if is_chance else ''}accuracy"
        f" {100 * row['accuracy']:.1f} % ({low:.1f} to {high:.1f}) on {row['samples']:,} {row['split']}"
        f" texts; always answering `{row['class_names'][samples.argmax()]}` would be right in"
        f" {100 * samples.max() / samples.sum():.1f} %."
    )


def _worth_against(row: ReportRow, first: ReportRow, alike: ReportRow) -> str:
    """Accuracy and file against the first model, speed against `alike`, the first in the same runtime."""
    smaller, runtime = first["file_bytes"] / row["file_bytes"], RUNTIMES[row["runtime"]]
    size = f"{smaller:.1f} times smaller" if smaller >= 1 else f"{1 / smaller:.1f} times larger"
    accuracy = f"{100 * row['accuracy']:.1f} % against {100 * first['accuracy']:.1f} %"
    verdict = row["accuracy_verdict"]
    if verdict == NOISE:  # no difference found is not equality
        points = max(0.0, -100 * row["accuracy_difference_ci95"][1])
        verdict += f": at most {points:.1f} points worse, with 97.5 % confidence"
    if alike is row:  # nothing else was measured in its runtime, which may be what makes it fast
        other = f"{first['batch_1']['p50']:.2f} in {RUNTIMES[first['runtime']]}"
        speed = f"{row['batch_1']['p50']:.2f} ms a text in {runtime}, {other}"
    else:
        low, high = row["speedup_ci95"]
        noise = f", which is {NOISE}" if row["speed_verdict"] == NOISE else ""
        speed = f"{row['speedup']:.1f} times the speed in {runtime} ({low:.1f} to {high:.1f}){noise}"
    return (
        f"{row['run']}, {row['form']}, against {first['run']}: {row['split']} accuracy {accuracy}"
        f" ({verdict}); a file of {format_bytes(row['file_bytes'])}, {size}; {speed}."
    )


def _table_of_classes(name: str, row: ReportRow) -> ReportTable:
    """A line for each class and one for their mean; how often it was answered with which, of few classes."""
    names, confusion = row["class_names"], np.array(row["confusion"])
    shares, means = class_metrics.class_figures(confusion)
    answers = names if len(names) <= MOST_ANSWERS else []
    rows = [
        [label, f"{line.sum():,}", *(f"{share:.3f}" for share in parts), *(f"{n:,}" for n in line if answers)]
        for label, parts, line in zip(names, shares.T, confusion, strict=True)
    ]
    rows.append(["mean", f"{confusion.sum():,}", *(f"{mean:.3f}" for mean in means), *("" for _ in answers)])
    correlation, bins = class_metrics.matthews_correlation(confusion), class_metrics.CALIBRATION_BINS
    note = (
        f"Matthews correlation {correlation:.3f}; expected calibration error"
        f" {row['calibration_error']:.3f} ({bins} bins); the mean is over classes (macro)."
    )
    head = ["class", "samples", "precision", "recall", "F1", *(f"answered {answer}" for answer in answers)]
    return ReportTable(f"Classes of {name}", note, head, rows)


def _speedup(row: ReportRow, first: ReportRow) -> list[float]:
    """[median, low, high] of the ratio within each round; the second and the last but one of the rounds.

    Of 9 rounds these hold the median with 96 %, whatever the distribution (order statistics).
    """
    rounds = np.array(first["batch_1"]["rounds"]) / np.array(row["batch_1"]["rounds"])
    _, low, *_, high, _ = np.sort(rounds).tolist()
    return [round(float(one), 3) for one in (np.median(rounds), low, high)]
