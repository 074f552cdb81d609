"""`auto --lr 1e-3,3e-3 --seed 0-2`: a run for each combination, then a table, sweep.json and pictures of it.

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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, STOPPED, UserError
from isobatch.core.extras import has
from isobatch.core.flags import Flag, convert, flags_of, spelling, to_json_value
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import print_answer, print_lines, table
from isobatch.engine.runs.run_folder import SWEEP, RunFolder, run_name
from isobatch.launch.local.arguments import Point, Request, labelled
from isobatch.launch.local.launch_run import find_or_train
from isobatch.launch.local.options import AutoOptions
from isobatch.launch.local.run_setup import known_run
from isobatch.launch.report import sweeps
from isobatch.models.capabilities import monitor_of

SEED = "seed"


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

    def stop_of(self, share: float) -> int:
        """The step of the first evaluation past a share of all steps, or 0."""
        steps = self.summary().get("planned_steps", 0)
        return next((step for step, _ in sweeps.curve(self.run) if 0 < share * steps <= step < steps), 0)


def train_sweep(points: Sequence[Point], options: AutoOptions) -> int:
    """Train a run for each point, with --halving some of them in part; returns the exit code.

    A run that fails is shown as failed, and the others go on; a stop ends the sweep. Raises UserError.
    """
    runs, rungs, keeps = list[Trained](), list[dict[str, Any]](), options.halving or 0
    for number, point in enumerate(points, 1):
        request = labelled(point)
        values = {name: to_json_value(request.recipe.values()[name]) for name in point[1]}
        runs.append(Trained(title=f"run {number} of {len(points)}", request=request, values=values))
    first, asked = points[0][0], by_setting(runs)
    if keeps and (len(asked) < 2 or len(first.workload.make(first.recipe)[0].phases()) > 1):
        raise UserError(f"--halving {keeps}: needs several settings (--lr 1e-3,3e-3) of a task of one phase")
    count = next(n for n in itertools.count() if not keeps or keeps**n >= len(asked))
    going, folder = runs, _folder(points)
    before = atomic_files.read_json(folder / SWEEP)["rows"] if (folder / SWEEP).is_file() else []
    if lost := [row["values"] for row in before if atomic_files.json_text(row["values"]) not in asked]:
        shown = "; ".join(" ".join(f"{name} {value}" for name, value in one.items()) for one in lost[:3])
        why = f"has the table of settings that are not asked for here ({shown})"
        raise UserError(f"{folder} {why}: choose another --name, ask for them too, or remove it")
    for share in (*(keeps**-rung for rung in range(count, 0, -1)), None):
        if STOPPED in (one.train(options.trust, share) for one in going):
            print_lines("the same command again goes on with the whole sweep", quiet=first.run.quiet)
            return STOPPED
        if share:
            scores, going = judge(going, share, keeps)
            rungs.append({"share": share, "scores": scores})
        found = _store(runs, rungs, folder)
    said = [table(sweeps.cells_of(found)), "", *sweeps.legend(found)]
    where = f"all figures: {folder / SWEEP}; tables: sweep.csv, sweep.md and sweep.tex there"
    print_answer(found, "\n".join([*said, where]), options.json)
    return max(one.code for one in runs)


def judge(going: Sequence[Trained], share: float, keeps: int) -> tuple[dict[str, float], list[Trained]]:
    """(score of each setting, runs that go on) of runs that have reached a share of their steps.

    A score is the mean of the seeds; a setting of which a run failed, or is not finite, does not go on.
    """
    groups, (metric, direction) = by_setting(going), _monitor(going)
    for one in going:
        stop = one.stop_of(share) or math.inf
        curve = sweeps.curve(one.run, metric) if one.code == DONE else []
        one.score = [math.nan, *(value for step, value in curve if step <= stop)][-1]
    scores = {name: statistics.fmean(one.score for one in group) for name, group in groups.items()}
    known = sorted((s, name) for name, s in scores.items() if math.isfinite(s))
    kept = known[:: -1 if direction == "max" else 1][: -(-len(groups) // keeps)]
    chosen = [one for _, name in kept for one in groups[name]]
    for one in going:
        if one not in chosen and not one.metrics and (stop := one.stop_of(share)):
            one.stopped, one.metrics = stop, {sweeps.VALID: {metric: one.score}}
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
    found["edges"] = list(edges(found, flags_of(Recipe) | runs[0].request.workload.option_flags()))
    found["seeds"] = sorted({one.values[SEED] for one in runs if SEED in one.values})
    atomic_files.write_json(folder / SWEEP, found)
    sweeps.write_tables(found, folder / "sweep")
    if has("matplotlib"):
        sweeps.draw(found, folder, folder / "sweep")
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
    rows = sorted(map(_row, groups.values()), key=_order)
    ended = [row for row in rows if "stopped" not in row]
    known = [row for row in ended if math.isfinite(row["metrics"].get(metric, math.nan))]
    best = (max if direction == "max" else min)(known, key=lambda row: row["metrics"][metric], default=None)
    if best and (test := _figures(groups[atomic_files.json_text(best["values"])], sweeps.TEST))["metrics"]:
        best = {**best, sweeps.TEST: test}
    return {"metric": metric, "direction": direction, "split": sweeps.VALID, "rows": rows, "best": best}


def _order(row: Mapping[str, Any]) -> list[tuple[float, str]]:
    """By which rows are sorted: numbers by size, words by their letters."""
    return [(v, "") if type(v) in (int, float) else (0.0, str(v)) for v in row["values"].values()]


def _row(group: Sequence[Trained]) -> dict[str, Any]:
    stops = [one.stopped for one in group if one.stopped]
    return {
        "values": {name: value for name, value in group[0].values.items() if name != SEED},
        "runs": [str(one.run.folder) for one in group if one.run],
        "failed": sum(one.code != DONE for one in group),
        **_figures(group, sweeps.VALID),
        **({"stopped": stops[0]} if stops else {}),
    }


def _figures(group: Sequence[Trained], split: str) -> dict[str, dict[str, float]]:
    """Means and standard deviations of the runs' numbers on a split."""
    return sweeps.means([one.metrics.get(split, {}) for one in group])


def edges(found: Mapping[str, Any], flags: Mapping[str, Flag]) -> Iterator[str]:
    """Of the best setting each number that is the least or the largest tried, with a range to go on with."""
    for name, value in found["best"]["values"].items() if found["best"] else ():
        tried = [row["values"][name] for row in found["rows"]]
        if all(type(one) in (int, float) for one in tried) and min(tried) < max(tried) and value > 0:
            factor = 10 if 0 < 10 * min(tried) <= max(tried) else 2
            beyond = {min(tried): ("smallest", type(value)(value / factor), value)}
            beyond[max(tried)] = ("largest", value, value * factor)
            word, *ends = beyond.get(value, ("",))
            with suppress(UserError):  # where the flag takes no such value
                between = "..".join(f"{convert(flags[name], end):g}" for end in ends)
                way = f"go on with {spelling(name)} {between} --trials 4"
                yield from [f"{name} {value:g} is the {word} tried: {way}"] if word else []
