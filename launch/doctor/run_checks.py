"""Checks of one run: what it does or why it ended, who waits for whom, and whether its records are whole."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import TrainingError, UserError, WorkerLostError
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_folder import RunFolder, refuse_links
from isobatch.launch.control.run_state import look
from isobatch.launch.doctor.check import Check, broken, ok, warning
from isobatch.launch.doctor.storage import check_space

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

TRACES = ("recipe.json", "metrics.jsonl", "checkpoints", "launcher.log", "plan.json", "summary.json")
"""Files by which a damaged run is still known as one."""
DAMAGE = (UserError, TrainingError, TypeError, KeyError, ValueError, AttributeError, IndexError, OSError)
"""What reading damaged records may raise."""
TAIL_BYTES = 1 << 16
ERROR = re.compile(
    r"^(?:\S*rank(?P<rank>\d+)\]?:?\s*)?(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b: .+)$",
    re.MULTILINE,
)
"""The last line of a traceback, behind the mark of a rank where torchrun puts one."""
KILLED = re.compile(
    r"^.*(?:oom[-_ ]kill|Out of memory: Killed|CANCELLED AT|DUE TO \w+).*$", re.MULTILINE | re.I
)
"""What Slurm and the kernel say when they end a job."""
REMEDIES = {
    "out of memory": "isobatch resume {} --memory-limit 80% --activation-checkpointing on",
    "signal 9": "dmesg | grep -i oom says whether memory ran out; then: isobatch resume {}",
    "": "isobatch logs {} --lines 100",
}
"""Part of a reason -> what helps."""
SILENT_SECONDS = 30.0
"""Ranks speak every second."""
STILL_SECONDS, STILL_STEPS = 60.0, 10.0
"""All ranks stand still for that long, and for so many steps: the run hangs."""
OLD_SECONDS = 60.0
"""Rank 0 writes every ten seconds."""


def check_run(folder: Path) -> Iterator[Check]:
    """Every check of the run in a folder, with what there is of it. Raises UserError where it is no run."""
    if not folder.is_dir() or not any((folder / name).exists() for name in TRACES):
        what = "is not a run: it has none of a run's files" if folder.is_dir() else "there is no such folder"
        raise UserError(f"doctor {folder}: {what} (`runs` lists the runs here)")
    refuse_links(folder)
    run = RunFolder(folder)
    yield from check_records(run)
    training = run.is_training()
    try:
        yield check_state(run)
    except DAMAGE:
        state = "running" if training else "not running"
        yield warning("state", f"{state}; how far it is, its damaged records do not say", "mend the records")
    if not training and run.status_or_none() not in ("done", "stopped") and (found := last_error(run.folder)):
        yield broken("last error", found[0], f"less {found[1]}")
    yield from check_progress(run, training)
    yield check_space("disk", run.folder, shutil.disk_usage(run.folder), "move the run to another disk")


def check_records(run: RunFolder) -> Iterator[Check]:
    """A line for each record that is missing or damaged; one line where all are whole."""
    readers = {
        "recipe.json": lambda: run.recipe,
        "facts.json": lambda: run.facts,
        "plan.json": lambda: run.plan if run.has_plan else None,
        "run.json": run.options,
        "metrics.jsonl": lambda: _read_newest_rows(run.metrics),
        "summary.json": run.summary,
    }
    whole = True
    for record, read in readers.items():
        try:
            read()
        except DAMAGE as error:
            whole = False
            remedy = "copy it from where the run came from; plan.json and summary.json are written anew"
            yield broken(record, f"cannot be read: {_short(error)}", remedy)
    if whole:
        yield ok("records", f"whole; {run.recipe.task}, recipe {run.recipe.hash()}")


def _read_newest_rows(file: Path) -> None:
    """Raises ValueError where one of the newest rows is no JSON; the last may be in the middle of a write."""
    if file.exists():
        *lines, _ = _tail(file).split("\n")
        for line in lines[1:] if file.stat().st_size > TAIL_BYTES else lines:
            json.loads(line)


def _short(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def check_state(run: RunFolder) -> Check:
    """What the run does or came to, and how far it is."""
    seen = look(run.folder)
    done = f"step {seen.progress.step or 0} of {seen.progress.total or '?'}"
    resume = f"isobatch resume {run.folder}"
    if seen.state == "failed":
        reason = str((run.summary() or {}).get("reason") or "no reason was written")
        known = next(way for word, way in REMEDIES.items() if word in reason.lower())
        return broken("state", f"failed at {done}: {reason}", known.format(run.folder))
    if seen.state == "unfinished":
        text = f"{done}; nobody trains it, and how it ended nobody wrote: killed, or the machine went down"
        return warning("state", text, resume)
    if seen.state == "unknown":
        text = f"{done}; Slurm does not answer, so whether it runs is not known"
        return warning("state", text, "scontrol ping")
    saved = f", saved; `{resume}` goes on" if seen.state == "stopped" else ""
    return ok("state", f"{seen.state}, {done}{saved}")


def check_progress(run: RunFolder, training: bool) -> Iterator[Check]:
    """Who waits for whom; where ranks.json does not say, the age of the newest logged step."""
    try:
        record = run.ranks()
        if record is not None:
            age = max(0.0, time.time() - run.rank_record.stat().st_mtime)
            yield check_ranks(record, age, training, str(run.folder), _step_seconds(run))
            return
    except DAMAGE as error:
        yield warning("ranks", f"ranks.json: {_short(error)}", f"rm {run.rank_record}")
    if training and run.metrics.exists():
        age = time.time() - run.metrics.stat().st_mtime
        if age > max(120.0, 30 * _step_seconds(run)):
            yield broken("ranks", f"no step was logged for {age:.0f} s", _begin_anew(str(run.folder)))


def _begin_anew(folder: str) -> str:
    return f"isobatch cancel {folder} --now, then isobatch resume {folder}"


def _step_seconds(run: RunFolder) -> float:
    """Of the newest logged steps, the longest; 0 where there is none."""
    found = (row.get("step_seconds") for row in newest_rows(run.metrics)[-50:])
    return max((seconds for seconds in found if isinstance(seconds, float | int)), default=0.0)


def check_ranks(
    record: Mapping[str, Any], age: float, training: bool, folder: str, step_seconds: float = 0.0
) -> Check:
    """`age`: seconds since ranks.json was written; `training`: whether a process still holds the run;
    `step_seconds`: of a usual step. Raises TypeError, KeyError or ValueError where the record is damaged.
    """
    ranks = [dict(rank) for rank in record["ranks"]]
    where, mend = describe_ranks(ranks), _begin_anew(folder)
    if not training:
        return warning("ranks", f"in the ten seconds before it ended: {where}", f"isobatch resume {folder}")
    if age > OLD_SECONDS:
        process = str(ranks[0].get("process", "PID"))
        text = f"rank 0 ({process}) wrote nothing for {age:.0f} s: stopped, or the disk hangs; then {where}"
        return broken("ranks", text, f"kill -CONT {process.split()[0]} lets it go on; else {mend}")
    still = min((float(r["still_seconds"]) for r in ranks if "still_seconds" in r), default=0.0) + age
    if still < max(STILL_SECONDS, STILL_STEPS * step_seconds) and not any(map(_is_silent, ranks)):
        return ok("ranks", f"moved {still:.0f} s ago: {where}")
    stuck = [r["process"].replace(" ", " (", 1) for r in ranks if _is_blamed(r) and "process" in r]
    look = [f"py-spy dump --pid {process})" for process in stuck[:1]]
    return broken("ranks", f"no step for {still:.0f} s: {where}", "; ".join([*look, mend]))


def _is_blamed(rank: Mapping[str, Any]) -> bool:
    """Whether the others wait for it: it is in no collective, silent, or was never heard of."""
    return "place" not in rank or not rank["waiting"] or _is_silent(rank)


def _is_silent(rank: Mapping[str, Any]) -> bool:
    return float(rank.get("silent_seconds", 0.0)) > SILENT_SECONDS


def describe_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A sentence for each group of ranks that do the same; those that others wait for come first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(ranks, key=_is_blamed, reverse=True):
        groups[_doing(rank)].append(int(rank["rank"]))
    text = "; ".join(f"{_names(numbers)} {doing}" for doing, numbers in groups.items())
    return text if len(ranks) == 1 or any(map(_is_blamed, ranks)) else f"{text}; each waits for the others"


def _doing(rank: Mapping[str, Any]) -> str:
    if "place" not in rank:
        return "was never heard of"
    place = rank["place"]
    if _is_silent(rank):
        return f"says nothing for {float(rank['silent_seconds']):.0f} s; it was at {place}, in {rank['code']}"
    return f"at {place}, {'waiting ' if rank['waiting'] else ''}in {rank['waiting'] or rank['code']}"


def _names(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def last_error(folder: Path) -> tuple[str, Path] | None:
    """The last error that the run's processes wrote, and its file; None where there is none.

    Lost connections follow from what ended another rank: they are told only where nothing else is.
    """
    logs = [path for path in (folder / "launcher.log",) if path.is_file()]
    for pattern in ("node-*.log", "*.out"):
        logs += sorted((folder / "slurm").glob(pattern), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in logs:
        text = _tail(path)
        found = list(ERROR.finditer(text))
        own = [m for m in found if not isinstance(classify(RuntimeError(m["error"])), WorkerLostError)]
        if chosen := (own or found)[-1:]:
            rank = f"rank {chosen[0]['rank']}: " if chosen[0]["rank"] else ""
            return f"{rank}{chosen[0]['error'][:300]}", path
        if killed := KILLED.findall(text):
            return killed[-1].strip()[:300], path
    return None


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
        return stream.read().decode(errors="replace")
