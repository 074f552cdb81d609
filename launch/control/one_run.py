"""One run: `runs logs`, `runs cancel` and `runs rm`, what it says, its end, and its removal; and `inspect`,
what it is, for one that somebody sent: its files are read, nothing of it is executed.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, STOPPED, UserError
from isobatch.core.measures import format_bytes, printable, wait_for
from isobatch.core.number_ranges import Positive
from isobatch.core.terminal import doing, format_metrics, print_answer, print_lines, rendered
from isobatch.engine import consent
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_folder import RunFolder, runs_named
from isobatch.engine.runs.summary import changed_fields
from isobatch.engine.task_files import is_task_file, task_file
from isobatch.launch.clusters.cluster import cluster
from isobatch.launch.control.runs import RunView, look
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.options import ListingOptions
from isobatch.launch.local.run_setup import open_single_run
from isobatch.launch.report.tables import metrics_of

WAIT_SECONDS, LOOK_SECONDS = 600.0, 1.0
"""How long a run may take to save and end, and how often to look whether it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOptions(ListingOptions):
    """Flags of `runs cancel`."""

    now: bool = False
    """Do not wait for a save: what was saved before is kept."""


def cancel(words: Sequence[str]) -> int:
    """Usage: runs cancel RUN [--now] [--json]

    A run that trains saves and ends; --now ends it at once. One that waits in a queue leaves it.
    """
    run, options = open_single_run(words, "runs cancel", CancelOptions, runs_code=False)
    seen = end = look(run.folder)
    if seen.state == "unknown":
        raise UserError(f"{run.folder}: {seen.job.reason}: cancel job {seen.job.job} again when it does")
    text = f"it is {seen.state}: there is nothing to cancel"
    if not seen.is_over:
        cluster(seen.job.cluster).cancel(run, seen.job, options.now)
        end = look(run.folder) if seen.state == "queued" else _wait_for_end(run)
        newest = _newest_checkpoint(run)
        way = f"`resume {run.folder}` goes on from {newest}" if newest else "nothing was saved"
        left = f"job {seen.job.job} was {seen.job}, and is cancelled" if seen.state == "queued" else end.state
        text = left if end.state == "done" else f"{left}; {way}"
    states = {"job": seen.job.job, "before": seen.state, "state": end.state, "step": end.step}
    found = {"run": str(run.folder), **states, "checkpoint": _newest_checkpoint(run), "text": text}
    return print_answer(found, f"{run.folder}: {text}", options.json)


def _newest_checkpoint(run: RunFolder) -> str:
    """Name of the newest checkpoint; empty where there is none."""
    found = max(run.checkpoints.glob("[!.]*-*"), key=lambda path: path.stat().st_mtime, default=None)
    return found.name if found else ""


def _wait_for_end(run: RunFolder) -> RunView:
    """Wait until nobody trains the run. Raises UserError where it does not end."""
    print_lines(f"isobatch: waiting until {run.folder} has ended")
    doing(f"waiting for {run.folder}")
    if not wait_for(lambda: look(run.folder).is_over, WAIT_SECONDS, LOOK_SECONDS):
        raise UserError(f"{run.folder} has not ended within {WAIT_SECONDS:g} s: --now ends it at once")
    return look(run.folder)


READ_SECONDS, FOLLOW_SECONDS = 0.5, 3.0
"""How often -f reads the log, and how often it asks how the run stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsOptions:
    """Flags of `runs logs`."""

    follow: bool = False
    """Go on with what is written, over requeues, until the run ends (-f)."""
    lines: Positive | None = None
    """Only so many of the last lines."""


def logs(words: Sequence[str]) -> int:
    """Usage: runs logs RUN [-f] [--lines N]

    With -f the exit code is the run's: 0 done, 3 failed, 75 stopped.
    """
    words = ["--follow" if word == "-f" else word for word in words]
    run, options = open_single_run(words, "runs logs", LogsOptions, runs_code=False)
    log = LogReader(run.folder / "log.txt", sys.stdout)
    if not log.path.exists():
        seen = look(run.folder)
        state = f"{seen.state}; {seen.job}".removesuffix("; ")
        print_lines(f"{run.folder} has no log yet (it is {state})")
    log.print_new(options.lines)
    return _follow(run, log) if options.follow else DONE


class LogReader:
    """Prints what a log holds beyond what was printed already, in whole lines."""

    def __init__(self, path: Path, to: TextIO | None) -> None:
        self.path, self._to = path, to
        self._offset, self.last = 0, ""

    def print_new(self, lines: int | None = None) -> None:
        """Print the lines that are new, the last `lines` of them at most; with 0 they count as printed."""
        if not self.path.exists():
            return
        with self.path.open("rb") as stream:
            if stream.seek(0, 2) < self._offset:  # written anew
                self._offset = 0
            stream.seek(self._offset)
            whole = stream.read().rpartition(b"\n")
        self._offset += len(whole[0]) + len(whole[1])
        found = whole[0].decode(errors="replace").split("\n") if whole[1] else []
        for line in deque(found, lines):
            if self._to is not None:
                print(printable(line), file=self._to, flush=True)
            self.last = line


def _follow(run: RunFolder, log: LogReader) -> int:
    """Print the log as it grows, and a line whenever the run's job waits; returns the exit code."""
    said, ended = "", False
    doing()
    while True:
        seen = look(run.folder)
        log.print_new()
        if seen.state == "queued" and str(seen.job) != said:
            said = str(seen.job)
            print_lines(f"{run.folder}: job {seen.job.job} is {said}")
        # Two looks: between two legs, or two attempts, nobody may hold the run for a moment.
        if seen.state == "done" or (ended and seen.is_over):
            return {"done": DONE, "failed": FAILED}.get(seen.state, STOPPED)
        ended = seen.is_over
        until = time.monotonic() + FOLLOW_SECONDS
        while time.monotonic() < until:
            time.sleep(READ_SECONDS)
            log.print_new()


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveOptions:
    """Flags of `runs rm`."""

    yes: bool = False
    """Remove them; without it, they are named."""


def remove(words: Sequence[str]) -> int:
    """Usage: runs rm RUN... --yes: removes runs with their checkpoints; without --yes it says which."""
    positional, options = read_command(words, RemoveOptions, "runs rm")
    if not positional:
        raise UserError("runs rm: give the folders of runs, as in: runs rm runs/old (`runs` lists them)")
    runs = [RunFolder.open(folder) for place in positional for folder in runs_named(place)]
    for run in runs:
        if run.folder.is_symlink():
            raise UserError(f"rm: {run.folder} is a link; remove what it points to, or the link itself")
        if not (seen := look(run.folder)).is_over:
            raise UserError(f"rm: {run.folder} is {seen.state}: `runs cancel {run.folder}` ends it first")
    sizes = (sum(p.stat().st_size for p in run.folder.rglob("*") if p.is_file()) for run in runs)
    named = [f"{run.folder} ({format_bytes(size)})" for run, size in zip(runs, sizes, strict=True)]
    if not options.yes:
        raise UserError(f"runs rm: would remove {', '.join(named)} and all in it: say --yes")
    for run, name in zip(runs, named, strict=True):
        with run.lock("launch"), atomic_files.explain_write_errors(run.folder):
            run.refuse_if_training()
            shutil.rmtree(run.folder)
        print(f"removed {name}")
    return DONE


def inspect(words: Sequence[str]) -> int:
    """Usage: inspect RUN [--json]: recipe, status and metrics of a run, what code it brings, what it
    reads and where it sends. Nothing that came with it is executed, read or sent to.
    """
    run, options = open_single_run(words, "inspect", ListingOptions, runs_code=False)
    found = describe_run(run)
    values = {**found["recipe"], **found["recipe"]["options"], "options": None}
    true = {n: v for n, v in found["metrics"].items() if f"metrics.{n}" not in found["changed"]}
    shown = format_metrics(true, ".4g")
    text = rendered(__file__, "inspect", **found, values=values, shown=shown, short=_short)
    return print_answer(found, text, options.json)


def describe_run(run: RunFolder) -> dict[str, Any]:
    """What the run's files say, as JSON. Raises UserError where they are damaged."""
    recipe, summary = run.recipe, run.summary() or {}
    options, base = run.options(), consent.adapter_base(run.folder)
    code = consent.code_of(recipe, run.folder) | consent.hook_code(options)
    asked = consent.asks(recipe, run.folder, options)
    unknown = asked.pop(consent.CODE, ())
    end: dict[str, Any] = next((row for row in reversed(newest_rows(run.metrics)) if "final" in row), {})
    logged = found if isinstance(found := end.get("summary"), dict) else {}
    return {
        **{"folder": str(run.folder), "task": recipe.task, "status": run.status()},
        **{"hash": recipe.hash(), "recorded_hash": run.recorded_hash, "recipe": recipe.to_dict()},
        **{"steps": summary.get("steps"), "reason": str(summary.get("reason") or "")},
        "split": str(summary.get("split") or "no split"),
        "metrics": metrics_of(summary),
        "changed": changed_fields(summary, logged) if logged else [],
        "added": run.changed_export(),
        "code": [{"file": f, "sha256": code[f], "agreed": f not in unknown} for f in code],
        "reads": {**dict(consent.places(recipe)), "prepared data": run.facts.folder}
        | ({"base of final/": base} if base else {}),
        "sends": options.sends(),
        "missing": recipe.task if is_task_file(recipe.task) and not task_file(recipe.task).is_file() else "",
        "asks": [one for named in asked.values() for one in named],
    }


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else atomic_files.json_text(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
