"""The figures of a report as text: what its Markdown and its page both show."""

from __future__ import annotations

from typing import Any

from isobatch.engine.runs.console import format_bytes

SIGNIFICANT = 0.05
"""McNemar's p from which a difference is within the noise."""
COLUMNS = (
    "model", "accuracy (95 % interval)", "against the first (McNemar p)", "parameters", "MACs", "file",
    "ms, 1 text: p50 / p95", "ms, 16 texts: p50 / p95", "texts/s", "speed", "memory", "training",
)  # fmt: skip


def table(made: dict[str, Any]) -> list[list[str]]:
    """The models as text, a row each under COLUMNS."""
    return [_cells(row) for row in made["models"]]


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = (100 * x for x in row["accuracy_ci95"])
    p = "" if row["mcnemar_p"] is None else f" ({row['mcnemar_p']:.3f})"
    one, many = row["batch_1"], row["batch_16"]
    return [
        f"{row['run']}, {row['form']}",
        f"{100 * row['accuracy']:.2f} ({low:.1f} to {high:.1f})",
        row["accuracy_verdict"] + ("" if row["accuracy_verdict"] == "baseline" else p),
        f"{row['parameters']:,}",
        f"{row['macs'] / 1e6:,.0f} M",
        format_bytes(row["file_bytes"]),
        f"{one['p50']:.2f} / {one['p95']:.2f}",
        f"{many['p50']:.1f} / {many['p95']:.1f}",
        f"{row['samples_per_second']:,.0f}",
        f"{row['speedup']:.2f}x"
        + ("" if row["speed_verdict"] != "within the noise" else ", within the noise"),
        format_bytes(row["peak_memory_bytes"]),
        f"{row['train_seconds']:,.0f} s",
    ]


def runs_table(made: dict[str, Any]) -> list[list[str]]:
    """The runs whose models were not measured here: a head of names, then a row for each."""
    runs = [r for r in made["runs"] if r["run"] not in {row["run"] for row in made["models"]}]
    names = list(dict.fromkeys(n for r in runs for n, v in (r["metrics"] or {}).items() if _is_plain(v)))
    head = ["run", "split", "parameters", "trained", *names, "memory", "training"]
    return [head, *(_figures(run, names) for run in runs)] if runs else []


def _is_plain(value: Any) -> bool:
    return isinstance(value, float | int | str) and not isinstance(value, bool)


def _figures(run: dict[str, Any], names: list[str]) -> list[str]:
    metrics = run["metrics"] or {}
    return [
        run["run"],
        run["split"] or "",
        f"{run['parameters']:,}",
        f"{run['trainable_parameters']:,}",
        *(plain(metrics[name]) if _is_plain(metrics.get(name)) else "" for name in names),
        format_bytes(run["peak_memory_bytes"]),
        f"{run['train_seconds']:,.0f} s",
    ]


def caption(made: dict[str, Any]) -> str:
    """What the table's figures are figures of."""
    if not made["models"]:
        return f"Trained on {made['machine']}."
    row = made["models"][0]
    where = f"{made['machine']}, {row['threads']} thread, texts of {row['tokens']} tokens"
    return (
        f"Measured on {where}; accuracy on all {row['samples']} samples of the {row['split']} split, MACs of"
        " one text; memory is a process's peak. Accuracies whose difference McNemar's exact test does not"
        f" tell from chance (p at least {SIGNIFICANT}) are within the noise, and so are speeds whose middle"
        " halves overlap."
    )


def plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
