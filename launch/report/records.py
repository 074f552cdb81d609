"""A run's own records for its report, what they say of its machine, and the figures of them by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.measures import format_bytes, printable
from isobatch.core.package import table_beside
from isobatch.core.terminal import print_lines
from isobatch.engine import consent
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import damaged_rows, thinned_rows
from isobatch.launch.report.tables import format_value, in_words, side_by_side
from isobatch.models.capabilities import monitor_of
from isobatch.models.protocols import Drawing, Reports, TaskReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.base import Task

    Curves = Mapping[str, list[Any]]
    """Name of a field -> its values at the steps of `step`, None where a row lacks it."""
    Panels = dict[str, list[tuple[Sequence[float], Sequence[float | None], dict[str, Any]]]]
    """Title -> lines over the steps: steps, values, and how matplotlib draws them."""

DOTS_PER_INCH = 110
POINTS = 400
"""Most points of a curve; more are not visible."""
SUMMARY_FIELDS = (
    *("train_seconds", "steps", "samples_seen", "parameters", "trainable_parameters", "metrics", "split"),
    *("world_size", "precision", "peak_memory_bytes", "sample", "remark", "before"),
)
GPU_USE, MEMORY, DATA_WAIT = 90.0, 80.0, 10.0
"""Targets in percent: GPU use above, memory and waiting for data below."""
VALID = "valid"
SHOWN_ANSWERS, SHOWN_CHARACTERS = 10, 600
"""Prompts whose answers are shown, and how much of each text."""
MEANS: dict[str, list[str]] = table_beside(__file__, "means")
"""Figures without a target: their field, what they are called, and how they are written."""
CURVES = (*MEANS, "data_seconds", "memory_bytes", "gpu_utilisation")
"""Fields of metrics.jsonl that say how the machine was used."""


def task_of(run: RunFolder) -> Task | None:
    """The run's task; None where that is damaged, or would execute code not agreed to."""
    try:
        consent.require(run.recipe, run.folder)
        return workload_of(run.recipe).make(run.recipe)[0]
    except UserError as error:
        print_lines(f"{run.folder} without its task's own part: {error}")
        return None


def report_of(task: Task | None) -> TaskReport | None:
    """What the task adds to a report; None where it adds nothing."""
    return task.report() if isinstance(task, Reports) else None


def read_records(run: RunFolder, task: Task | None) -> dict[str, Any]:
    """Run, task, the fields of its summary, `training` and `evaluations` (columns), `reported` (rows).

    `evaluations` are on the validation split while it trained, one a step: the exported weights, which may be
    those of an earlier step, are measured again at the end. `use` is a table of how it used its machine,
    `notes` are on files that cannot be read: the run is shown with what there is.
    """
    notes: list[str] = []
    summary = _readable(run.summary, notes) or {}
    plan = _readable(lambda: run.plan.to_dict(), notes) or {}
    about = _readable(lambda: [f"recipe {run.recorded_hash}, data {run.recipe.data}", *run.facts.notes], [])
    report, monitor = report_of(task), summary.get("monitor")
    if task and not isinstance(monitor, str):  # nothing else here misses the facts
        monitor = _readable(lambda: monitor_of(task, run.facts)[0], [])
    curves = report.curves if report else (monitor,) if isinstance(monitor, str) else ()
    reported = report.reported if report else ()
    if damaged := damaged_rows(run.metrics):
        notes.append(f"damaged rows of metrics.jsonl that are left out: {damaged}")
    rows = placed_rows(run, ("seal", "split", *reported))  # phases end with a seal
    steps, shown = [row for row in rows if "lr" in row], ("loss", *curves)
    held_out = {row["at"]: row for row in reversed(rows) if row.get("split") == VALID}
    status = "training" if run.is_training() else str(summary.get("status") or "unfinished")
    reason = summary.get("reason") if status != "training" else None
    return {
        "run": printable(run.folder.name),
        "task": printable(_readable(lambda: run.recipe.task, notes) or ""),
        "state": printable(f"{status}: {reason}" if reason else status),
        **{name: summary.get(name) for name in SUMMARY_FIELDS},
        "monitor": monitor if isinstance(monitor, str) else "",
        "environment": _readable(run.environment, notes) or {},
        "training": _curve(steps, shown),
        "evaluations": _curve([held_out[at] for at in sorted(held_out)], shown),
        "reported": [
            {"step": row["at"], **{name: row[name] for name in reported if name in row}}
            for row in _thinned([row for row in steps if any(name in row for name in reported)])
        ],
        **{"curves": curves, "answers": answers_table(run), "later": later_evaluations(run), "notes": notes},
        "use": list(use_table(_curve(steps, CURVES), summary, plan)),
        "about": [printable(line) for line in about or ()],
    }


def answers_table(run: RunFolder) -> list[list[str]]:
    """A row for each of the first held-out prompts: prompt, reference, the model's answer before training and
    after it. Texts that are long are cut; none where no answers were asked for.
    """
    table: dict[Any, list[str]] = {}
    for row in atomic_files.rows_in(run.answers):
        sample = str(row.get("sample"))
        if row.get("split") == VALID and (len(table) < SHOWN_ANSWERS or sample in table):
            texts = [_shown(row.get(name)) for name in ("prompt", "reference", "answer")]
            cells = table.setdefault(sample, [*texts[:2], "", ""])
            cells[2 if row.get("step") == 0 else 3] = texts[2]
    return list(table.values())


def later_evaluations(run: RunFolder) -> list[list[str]]:
    """A table with a column for each of the six newest evaluations after training, the last one first."""
    columns: list[dict[str, str]] = []
    for row in reversed([*atomic_files.rows_in(run.evaluations)]):
        if not isinstance(found := row.get("metrics"), dict):
            continue
        when = str(row.get("when")).replace("T", " ")[:16] + " UTC"
        of = found if all(isinstance(v, dict) for v in found.values()) else {row.get("data"): found}
        for name, figures in of.items():
            head = ", ".join(str(part) for part in (name, row.get("form"), when) if part)
            shown = {in_words(n): format_value(v) for n, v in figures.items() if type(v) not in (dict, list)}
            columns.append({"": head, **shown})
    return side_by_side(columns[:6])


def _shown(text: Any) -> str:
    """A text, or its end: a received run may have anything there."""
    text = str(text or "").strip() or "(nothing)"
    return text if len(text) <= SHOWN_CHARACTERS else "..." + text[-SHOWN_CHARACTERS:]


def _readable(read: Callable[[], Any], notes: list[str]) -> Any:
    """What `read` returns; None, and a note, where a file is missing or damaged."""
    try:
        return read()
    except UserError as error:
        notes.append(printable(error))
        return None


def placed_rows(run: RunFolder, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, `at` in each its step counted through all phases; a received run's may say
    anything.
    """
    rows, last = [], dict[str, int]()
    for row in thinned_rows(run.metrics, 4 * POINTS, fields):
        if isinstance(row.get("phase"), str) and isinstance(row.get("step"), int):
            rows.append(row)
            last[row["phase"]] = max(last.get(row["phase"], 0), row["step"])
    starts = dict(zip(last, accumulate(last.values(), initial=0), strict=False))
    return [{**row, "at": starts[row["phase"]] + row["step"]} for row in rows]


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about 2 * POINTS of them."""
    return rows[:: max(1, len(rows) // POINTS)]


def _curve(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Columns of the fields that are numbers in any row, and of `step`."""
    thinned = _thinned(rows)
    found = {"step": [row["at"] for row in thinned]}
    for name in names:
        found[name] = [v if isinstance(v := row.get(name), float | int) else None for row in thinned]
    return {k: v for k, v in found.items() if any(x is not None for x in v)}


def use_table(curves: Curves, summary: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows (figure, value, target, whether it is met); a figure that nobody measured has no row."""
    known = {name: [v for v in column if v is not None] for name, column in curves.items()}
    means = {name: sum(values) / len(values) for name, values in known.items()}
    peak = _positive(summary.get("peak_memory_bytes")) or max(known.get("memory_bytes", []), default=None)
    met = {True: "met", False: "missed"}
    if (use := means.get("gpu_utilisation")) is not None:
        yield ["GPU use", f"{use:.0f} %", f"above {GPU_USE:.0f} %", met[use > GPU_USE]]
    if peak and (device := _positive(plan.get("device_memory_bytes"))):
        share = 100 * peak / device
        of_it = f"{share:.0f} % of {format_bytes(device)}"
        yield ["memory", of_it, f"under {MEMORY:.0f} %", met[share < MEMORY]]
    if peak and (foreseen := _positive(plan.get("predicted_peak_memory_bytes"))):
        predicted = f"predicted {format_bytes(foreseen)}"
        yield ["memory per process", format_bytes(peak), predicted, f"{100 * (foreseen / peak - 1):+.0f} %"]
    if "data_seconds" in means and means.get("step_seconds"):
        wait = 100 * means["data_seconds"] / means["step_seconds"]
        yield ["data wait", f"{wait:.1f} %", f"under {DATA_WAIT:.0f} %", met[wait < DATA_WAIT]]
    for name, (label, form) in ((n, of) for n, of in MEANS.items() if n in means):
        yield [label, form.format(means[name]), "", ""]


def _positive(value: Any) -> float | None:
    return value if isinstance(value, float | int) and not isinstance(value, bool) and value > 0 else None


def draw_figure(drawing: Drawing) -> Figure:
    """The figure of a drawing. A `$` in a name is no formula."""
    need("matplotlib", "a report")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(drawing.width, drawing.height), layout="constrained")
        axes = figure.subplots(1, drawing.columns, squeeze=False)[0]
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
            ax.set_axisbelow(True)
        drawing.draw(*axes)
    return figure


def write_plots(run: RunFolder, folder: Path) -> list[Path]:
    """Draw a run's figures as PNG files into a folder; returns them. Raises UserError without any step."""
    task = task_of(run)
    record = read_records(run, task)
    if not record["training"].get("loss"):
        raise UserError(f"report --png: {run.folder} has trained no step yet")
    drawings = drawings_of([record], [report_of(task)])
    return [save(one, folder / f"{one.title.lower().replace(' ', '-')}.png") for one in drawings]


def save(drawing: Drawing, file: Path) -> Path:
    """Draw into a file, which is PNG or SVG by its name; returns it."""
    with atomic_files.explain_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}")
        draw_figure(drawing).savefig(temporary, dpi=DOTS_PER_INCH)
        temporary.replace(file)
    return file


def drawings_of(records: Sequence[dict[str, Any]], reports: Sequence[TaskReport | None]) -> list[Drawing]:
    """The training of the runs of each task over each other, and what their tasks draw of each run."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(record)
    found = [_draw_training(panels) for alike in tasks.values() if (panels := training_panels(alike))]
    for record, report in zip(records, reports, strict=True):
        found += report.run_drawings(record) if report else []
    return found


def training_panels(records: Sequence[dict[str, Any]]) -> Panels:
    """The loss, and each metric that has a curve: of all runs the training, faint and smoothed, and the
    validation split.
    """
    found: Panels = {}
    for name in dict.fromkeys(("loss", *records[0]["curves"])):
        lines = []
        for place, record in enumerate(records):
            training, held_out = record["training"], record["evaluations"]
            colour, run = {"color": f"C{place}"}, f"{record['run']}: " if records[1:] else ""
            if name in training:
                steps, values = training["step"], training[name]
                lines.append((steps, values, {**colour, "lw": 0.6, "alpha": 0.25}))
                lines.append((steps, smoothed(values), {**colour, "label": f"{run}training, smoothed"}))
            if name in held_out:
                look = {**colour, "marker": "o", "ms": 3, "ls": "--" if name in training else "-"}
                lines.append((held_out["step"], held_out[name], {**look, "label": f"{run}valid"}))
        if any(sum(value is not None for value in values) > 1 for _, values, _ in lines):
            found[name.replace("_", " ")] = lines
    return found


def _draw_training(panels: Panels) -> Drawing:
    """The panels side by side."""

    def draw(*axes: Any) -> None:
        for ax, (name, lines) in zip(axes, panels.items(), strict=True):
            for steps, values, look in lines:
                ax.plot(steps, values, **look)
            ax.set(xlabel="step")
            ax.set_title(name, loc="left", fontsize=10)
            ax.legend(fontsize=8, frameon=False)

    return Drawing("Training", draw, 4.2 * len(panels), 3.0, columns=len(panels))


def smoothed(values: Sequence[float | None]) -> list[float]:
    """The mean of each value and its neighbours, a fortieth of the points on either side; None is NaN.

    A mean of what came before, such as an exponential one, lags behind a loss that falls.
    """
    reach = len(values) // 40
    found = []
    for place, value in enumerate(values):
        width = min(reach, place, len(values) - 1 - place)
        near = values[place - width : place + width + 1]
        known = [v for v in near if v is not None and math.isfinite(v)]
        found.append(sum(known) / len(known) if value is not None and known else math.nan)
    return found
