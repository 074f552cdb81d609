"""`auto --lr 1e-3,3e-3 --seed 0-2`: a run for each combination, then a table, sweep.json and sweep.png.

Called again, it goes on where it was stopped. Seeds of one setting are one row: mean and deviation. The best
is chosen by the validation split; of the test split its figures alone are shown, by which nothing was chosen.

`--halving 3` is successive halving (arxiv.org/abs/1502.07943): all settings train the first part of their
run, and the best third goes on, each run from its own checkpoint and with the schedule of its whole length.
It ends as if it had been trained at once. What was stopped where follows from the logs of the runs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, STOPPED, UserError
from isobatch.core.extras import has
from isobatch.core.flags import to_json_value
from isobatch.core.terminal import print_answer, print_lines, table
from isobatch.engine.runs.log_reader import thinned_rows
from isobatch.engine.runs.run_folder import RunFolder, run_name
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.launch.local.arguments import Point, Request, labelled
from isobatch.launch.local.launch_run import AutoOptions, find_or_train
from isobatch.launch.local.run_setup import known_run
from isobatch.launch.report.records import DOTS_PER_INCH, draw_figure
from isobatch.models.capabilities import monitor_of
from isobatch.models.protocols import Drawing

FILE_NAME = "sweep.json"
SEED = "seed"
TEST, VALID = HELD_OUT_SPLITS
LOOKS = (("0.7", "x", "stopped or failed"), ("C0", "o", "whole run"), ("C3", "o", "best"))
"""Colour, marker and name of runs in a picture."""


@dataclass(kw_only=True, slots=True, eq=False)
class Trained:
    """A run of a sweep, as far as it is trained."""

    title: str
    request: Request
    values: dict[str, Any]
    """Swept flag -> its value."""
    run: RunFolder | None = None
    code: int = DONE
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Split -> its metrics at the end."""
    stopped: int = 0
    """The step after which --halving stopped it, or 0; its score where it was compared last."""
    score: float = math.nan

    def train(self, trust: bool, share: float | None) -> int:
        """Train to the end, or to the first evaluation past a share; STOPPED where the user stopped it."""
        options = self.request.run
        if share and self.run is None:
            self.run = known_run(replace(self.request, run=replace(options, quiet=True)))[1]
        if not (share and self.run and (self.stop_of(share) or self.run.status() == "done")):
            shown = " ".join(f"{name} {value}" for name, value in self.values.items())
            part = f", up to {share:.1%}" if share else ""
            print_lines(f"{self.title}{part}: {shown}", quiet=options.quiet)
            if self.run:  # --again was for its beginning
                options = replace(options, again=False, resume=str(self.run.folder))
            request = replace(self.request, run=replace(options, stop_at=share))
            self.run, verdict = find_or_train(request, trust=trust)
            self.code = DONE if verdict.cause == "planned" else verdict.code
        self.metrics = self.summary().get("metrics_by_split", {}) if self.code == DONE else {}
        return self.code

    def summary(self) -> dict[str, Any]:
        """The content of its summary.json, if there is one yet."""
        return (self.run and self.run.summary()) or {}

    def curve(self, name: str = "step") -> list[tuple[int, float]]:
        """Steps with a field of the validation split's rows."""
        rows = thinned_rows(self.run.metrics, 1, ("split",)) if self.run else []
        found = [(row["step"], row.get(name)) for row in rows if row.get("split") == VALID]
        return [(step, math.nan if value is None else value) for step, value in found]

    def stop_of(self, share: float) -> int:
        """The step of the first evaluation past a share of all steps, or 0."""
        steps = self.summary().get("planned_steps", 0)
        return next((step for step, _ in self.curve() if 0 < share * steps <= step < steps), 0)


def train_sweep(points: Sequence[Point], options: AutoOptions) -> int:
    """Train a run for each point, with --halving some of them in part; returns the exit code.

    A run that fails is shown as failed, and the others go on; a stop ends the sweep. Raises UserError.
    """
    runs, rungs, keeps = list[Trained](), list[dict[str, Any]](), options.halving or 0
    for number, point in enumerate(points, 1):
        request = labelled(point)
        fields = {**request.recipe.options, **request.recipe.to_dict()}
        values = {name: to_json_value(fields[name]) for name in point[1]}
        runs.append(Trained(title=f"run {number} of {len(points)}", request=request, values=values))
    first, settings = points[0][0], len(by_setting(runs))
    if keeps and (settings < 2 or len(first.workload.make(first.recipe)[0].phases()) > 1):
        raise UserError(f"--halving {keeps}: needs several settings (--lr 1e-3,3e-3) of a task of one phase")
    count = next(n for n in itertools.count() if not keeps or keeps**n >= settings)
    going, folder = runs, _folder(points)
    for share in (*(keeps**-rung for rung in range(count, 0, -1)), None):
        if STOPPED in (one.train(options.trust, share) for one in going):
            return STOPPED
        if share:
            scores, going = judge(going, share, keeps, _monitor(going))
            rungs.append({"share": share, "scores": scores})
        found = _store(runs, rungs, folder)
    print_answer(found, f"{format_sweep(found)}\nall figures: {folder / FILE_NAME}", options.json)
    return max(one.code for one in runs)


def judge(
    going: Sequence[Trained], share: float, keeps: int, monitor: tuple[str, str]
) -> tuple[dict[str, float], list[Trained]]:
    """(score of each setting, runs that go on) of runs that have reached a share of their steps.

    A score is the mean of the seeds; a setting of which a run failed, or is not finite, does not go on.
    """
    groups = by_setting(going)
    for one in going:
        stop = one.stop_of(share) or math.inf
        values = [value for step, value in one.curve(monitor[0]) if step <= stop and one.code == DONE]
        one.score = [math.nan, *values][-1]
    scores = {name: statistics.fmean(one.score for one in group) for name, group in groups.items()}
    known = sorted((s, name) for name, s in scores.items() if math.isfinite(s))
    kept = known[:: -1 if monitor[1] == "max" else 1][: -(-len(groups) // keeps)]
    chosen = [one for _, name in kept for one in groups[name]]
    for one in going:
        one.stopped = 0 if one in chosen or one.metrics else one.stop_of(share)
    return scores, chosen


def by_setting(runs: Iterable[Trained]) -> dict[str, list[Trained]]:
    """Swept flags but for the seed, as text -> their runs."""
    groups: dict[str, list[Trained]] = {}
    for one in runs:
        setting = {name: value for name, value in one.values.items() if name != SEED}
        groups.setdefault(atomic_files.json_text(setting), []).append(one)
    return groups


def _monitor(runs: Sequence[Trained]) -> tuple[str, str]:
    task, _ = runs[0].request.workload.make(runs[0].request.recipe)
    done = next((one.run for one in runs if one.run and one.code == DONE), None)
    return monitor_of(task, done.facts) if done else task.monitor


def _store(runs: Sequence[Trained], rungs: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Write sweep.json, and draw it; its content."""
    found = summary(runs, *_monitor(runs))
    if rungs:
        whole = [(one.summary().get("planned_steps", 0), one.stopped) for one in runs]
        saved = sum(steps - stopped for steps, stopped in whole if stopped)
        found |= {"rungs": rungs, "steps": sum(steps for steps, _ in whole), "steps_saved": saved}
    atomic_files.write_json(folder / FILE_NAME, found)
    if has("matplotlib"):
        draw_figure(drawing(found, runs)).savefig(folder / "sweep.png", dpi=DOTS_PER_INCH)
    else:
        print_lines("no sweep.png, which needs matplotlib: pip install 'isobatch[plots]'")
    return found


def _folder(points: Sequence[Point]) -> Path:
    """The folder of the sweep, beside its runs; made if it is not there."""
    hashes = " ".join(request.recipe.hash() for request, _ in points)
    run = points[0][0].run
    task = run_name(points[0][0].recipe).rpartition("-")[0]
    name = run.name or f"{task}-{hashlib.sha256(hashes.encode()).hexdigest()[:12]}"
    folder = Path(run.out).expanduser() / f"sweep-{name}"
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def summary(runs: Sequence[Trained], metric: str, direction: str) -> dict[str, Any]:
    """The answer of --json: a row for each setting with its figures on the validation split, and the best of
    them by the task's own metric, with those on the test split.
    """
    groups = by_setting(runs)
    rows = [_row(group) for group in groups.values()]
    known = [row for row in rows if math.isfinite(row["metrics"].get(metric, math.nan))]
    best = (max if direction == "max" else min)(known, key=lambda row: row["metrics"][metric], default=None)
    if best and (test := _figures(groups[atomic_files.json_text(best["values"])], TEST))["metrics"]:
        best = {**best, TEST: test}
    return {"metric": metric, "direction": direction, "split": VALID, "rows": rows, "best": best}


def _row(group: Sequence[Trained]) -> dict[str, Any]:
    row = {
        "values": {name: value for name, value in group[0].values.items() if name != SEED},
        "runs": [str(one.run.folder) for one in group if one.run],
        "failed": sum(one.code != DONE for one in group),
        **_figures(group, VALID),
    }
    if stops := [one for one in group if one.stopped]:
        row |= {"stopped": stops[0].stopped, "score": statistics.fmean(one.score for one in stops)}
    return row


def _figures(group: Sequence[Trained], split: str) -> dict[str, dict[str, float]]:
    """Means and standard deviations of the runs' numbers on a split."""
    columns: dict[str, list[float]] = {}
    for one in group:
        for name, value in one.metrics.get(split, {}).items():
            if isinstance(value, float | int):
                columns.setdefault(name, []).append(value)
    return {
        "metrics": {name: statistics.fmean(found) for name, found in columns.items()},
        "deviations": {name: statistics.stdev(found) for name, found in columns.items() if len(found) > 1},
    }


def format_sweep(found: Mapping[str, Any]) -> str:
    """The table: what was swept, and the task's own metric; sweep.json has the others."""
    rows, metric, best = found["rows"], found["metric"], found["best"] or {}
    cells = [["", *rows[0]["values"], f"{VALID} {metric}", "run"]]
    for row in rows:
        mark = "best" if row["values"] == best.get("values") and len(rows) > 1 else ""
        others = f" and {len(row['runs']) - 1} more" if len(row["runs"]) > 1 else ""
        failed = f" ({row['failed']} failed)" if row["failed"] else ""
        name = Path(row["runs"][0]).name + others + failed
        cells.append([mark, *map(str, row["values"].values()), _figure(row, metric), name])
    return "\n".join([table(cells), "", *_legend(found)])


def _legend(found: Mapping[str, Any]) -> Iterator[str]:
    """What the table's figures are, and that of the best on the test split."""
    best, metric, alone = found["best"], found["metric"], len(found["rows"]) == 1
    if best is None:
        yield f"best: none, as no run has a {metric} of the {VALID} split to choose by"
    elif not alone:
        yield f"best: by {VALID} {metric} ({'lower' if found['direction'] == 'min' else 'higher'} is better)"
    if best and TEST in best and metric in best[TEST]["metrics"]:
        yield f"{TEST}{'' if alone else ', of the best alone'}: {_figure(best[TEST], metric)}"
    if "rungs" in found:
        saved = f"{found['steps_saved']:,} of {found['steps']:,} steps were saved"
        yield f"at step N: stopped there, with this {metric}; {saved}"
    if any(row["deviations"] for row in found["rows"]):
        seeds = max(len(row["runs"]) - row["failed"] for row in found["rows"])
        yield f"+-: standard deviation of {seeds} seeds around their mean"


def _figure(row: Mapping[str, Any], name: str) -> str:
    if name not in row["metrics"]:
        return f"{row['score']:.4g} at step {row['stopped']}" if "stopped" in row else ""
    text = f"{row['metrics'][name]:.4g}"
    return f"{text} +- {row['deviations'][name]:.2g}" if name in row["deviations"] else text


def drawing(found: Mapping[str, Any], runs: Sequence[Trained]) -> Drawing:
    """The metric over the steps of each run, and over each flag that is a number, seeds as error bars."""
    rows, metric, best = found["rows"], found["metric"], (found["best"] or {}).get("values")
    flags = [n for n in rows[0]["values"] if all(type(row["values"][n]) in (int, float) for row in rows)]

    def draw(over_steps: Any, *over_flags: Any) -> None:
        from matplotlib.ticker import LogLocator

        for row, group in zip(rows, by_setting(runs).values(), strict=True):
            kind = (metric in row["metrics"]) + (row["values"] == best)
            look = dict(zip(("color", "marker", "label"), LOOKS[kind], strict=True), lw=1, zorder=2 + kind)
            for one in (one for one in group if one.curve()):
                over_steps.plot(*zip(*one.curve(metric), strict=True), markevery=[-1], **look)
            ends = [one.metrics.get(VALID, {}).get(metric, one.score) for one in group]
            spread = statistics.stdev(ends) if len(ends) > 1 else None
            for name, ax in zip(flags, over_flags, strict=True):
                ax.errorbar(row["values"][name], statistics.fmean(ends), spread, capsize=3, **look)
        for name, ax in zip(["step", *flags], [over_steps, *over_flags], strict=True):
            ax.set(xlabel=name, ylabel=f"{VALID} {metric}")
            for axis in (ax.yaxis, ax.xaxis)[: 1 + (name != "step")]:
                low, high = axis.get_data_interval()
                if 0 < low <= high / 10:
                    ax.set(**{f"{axis.axis_name}scale": "log"})
                    axis.set_major_locator(LogLocator(subs=(1, 3)))
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter("")
        lines = dict(zip(*over_steps.get_legend_handles_labels()[::-1], strict=True))
        over_steps.legend(lines.values(), lines.keys(), frameon=False)

    return Drawing("", draw, 5.0 * (1 + len(flags)), 4.0, 1 + len(flags))
