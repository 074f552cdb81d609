"""`doctor`: tries what training needs on this machine (machine.py), or looks at one run: what it does or why
it ended, who waits for whom, and whether its records are whole.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobatch.core.atomic_files import is_disk_full
from isobatch.core.errors import DONE, FAILED, TrainingError, UserError, WorkerLostError, first_line
from isobatch.core.measures import printable
from isobatch.core.terminal import print_answer
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.runs.log_reader import damaged_rows, newest_rows
from isobatch.engine.runs.run_folder import RunFolder, no_run, refuse_links, runs_named
from isobatch.launch.control.runs import RunsOptions, look
from isobatch.launch.doctor.machine import REMEDIES, check_machine, check_space
from isobatch.launch.doctor.probes import NOT_KNOWN, Check, broken, ok, warning
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.run_setup import one_run

TRACES = ("recipe.json", "metrics.jsonl", "checkpoints", "launcher.log", "plan.json", "summary.json")
"""Files by which a damaged run is still known as one."""
DAMAGE = (UserError, TrainingError, TypeError, KeyError, ValueError, AttributeError, IndexError, OSError)
"""What reading damaged records may raise."""
TAIL_BYTES = 1 << 16
ERROR = re.compile(
    r"^(?:\S*rank(?P<rank>\d+)\]?:?\s*)?(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b: .+"
    r"|.*(?:oom[-_]kill|Out of memory: Killed|CANCELLED AT|DUE TO ).*|isobatch: .+(?=\n*\Z))$",
    re.MULTILINE,
)
"""The last line of a traceback, behind the mark of a rank where torchrun puts one;
what Slurm and the kernel say when they end a job; or what was refused, where nothing follows."""
SILENT_SECONDS = 30.0
"""Ranks speak every second."""
STILL_SECONDS, STILL_STEPS = 60.0, 10.0
"""All ranks stand still for that long, and for so many steps: the run hangs. Rank 0 writes
every ten seconds."""


def check_run(folder: Path) -> Iterator[Check]:
    """Every check of the run in a folder, with what there is of it. Raises UserError where it is no run."""
    if not any((folder / name).exists() for name in TRACES):
        raise UserError(no_run(folder))
    refuse_links(folder)
    run = RunFolder(folder)
    training = run.is_training()
    yield from check_records(run)
    try:
        yield check_state(run)
    except DAMAGE:
        state = "running" if training else "not running"
        yield warning("state", f"{state}; how far it is, its damaged records do not say", "mend the records")
    if not training and run.status_or_none() not in ("done", "stopped") and (found := last_error(folder)):
        yield broken("last error", found[0], f"less {found[1]}")
    try:
        if (record := run.ranks()) is not None:
            age = max(0.0, time.time() - run.rank_record.stat().st_mtime)
            rows = (row.get("step_seconds") for row in newest_rows(run.metrics)[-50:])
            longest = max((seconds for seconds in rows if isinstance(seconds, float | int)), default=0.0)
            yield check_ranks(record, age, training, str(folder), longest)
    except DAMAGE as error:
        yield warning("ranks", f"ranks.json: {first_line(error)[:200]}", f"rm {run.rank_record}")
    space = check_space("disk", folder, "move the run to another disk")
    is_done = space.remedy and run.status_or_none() == "done"  # it writes nothing more
    yield warning(space.name, space.text, space.remedy) if is_done else space


def check_records(run: RunFolder) -> Iterator[Check]:
    """A line for each record that is missing or damaged; one line where all are whole."""
    readers = {
        "recipe.json": lambda: run.recipe,
        "facts.json": lambda: run.facts,
        "plan.json": lambda: run.plan if run.has_plan else None,
        "run.json": run.options,
        "summary.json": run.summary,
    }
    damaged = {"metrics.jsonl": f"{rows} rows are damaged"} if (rows := damaged_rows(run.metrics)) else {}
    for record, read in readers.items():
        try:
            read()
        except DAMAGE as error:
            damaged[record] = f"cannot be read: {first_line(error)[:200]}"
    if run.status_or_none() == "done" and (changed := ", ".join(run.changed_export())):
        damaged["model"] = f"{changed}: missing, changed or added since the run wrote it"
    for record, text in damaged.items():
        yield broken(record, text, "copy it from where the run came from; plan and summary are written anew")
    if not damaged:
        yield ok("records", f"whole; {run.recipe.task}, recipe {run.recipe.hash()}")


def check_state(run: RunFolder) -> Check:
    """What the run does or came to, and how far it is."""
    seen = look(run.folder)
    done = f"step {seen.step or 0} of {seen.total or '?'}"
    reason = str((run.summary() or {}).get("reason") or "no reason was written")
    if seen.state == "failed":
        verdict = run.read_exit()
        code = verdict.code if verdict and verdict.reason == reason else ""
        kind = REMEDIES["kinds"].get(str(code), "")
        known = next(way for word, way in REMEDIES["failed"].items() if word in f"{kind}{reason}".lower())
        return broken("state", f"failed at {done}: {kind}{reason}", known.format(run.folder))
    if seen.state == "unfinished":
        log = run.folder / "log.txt"
        last = log.read_text(errors="replace").splitlines()[-1:] if log.is_file() else []
        is_full = is_disk_full(run.folder) or "No space left" in f"{last} {last_error(run.folder)}"
        unknown = REMEDIES["disk"] if is_full else REMEDIES["ended"]["any"]
        why, way = REMEDIES["ended"].get(seen.job.state) or unknown
        job = f"job {seen.job.job} {seen.job}; " if seen.job.job else ""
        return warning("state", f"{done}; {job}{why}", way.format(run.folder))
    if seen.state == "unknown":
        return warning("state", f"{done}; Slurm does not answer whether it runs", "scontrol ping")
    saved = f", saved ({reason}); `isobatch resume {run.folder}` goes on" if seen.state == "stopped" else ""
    return ok("state", f"{seen.state}, {done}{saved}")


def check_ranks(
    record: Mapping[str, Any], age: float, training: bool, folder: str, step_seconds: float = 0.0
) -> Check:
    """`age`: seconds since ranks.json was written; `training`: whether a process still holds the run;
    `step_seconds`: of a usual step. Raises TypeError, KeyError or ValueError where the record is damaged.
    """
    ranks = [dict(rank) for rank in record["ranks"]]
    where, mend = describe_ranks(ranks), f"isobatch cancel {folder} --now, then isobatch resume {folder}"
    if not training:
        return warning("ranks", f"in the ten seconds before it ended: {where}", f"isobatch resume {folder}")
    still = min((float(r["still_seconds"]) for r in ranks if "still_seconds" in r), default=0.0) + age
    if still < max(STILL_SECONDS, STILL_STEPS * step_seconds) and not any(map(_is_silent, ranks)):
        return ok("ranks", f"moved {still:.0f} s ago: {where}")
    stuck = [rank["process"].split()[0] for rank in ranks if _is_blamed(rank) and "process" in rank]
    look_at = [f"py-spy dump --pid {process}" for process in stuck[:1]]
    return broken("ranks", f"no step for {still:.0f} s: {where}", "; ".join([*look_at, mend]))


def _is_blamed(rank: Mapping[str, Any]) -> bool:
    """Whether the others wait for it: it is in no collective, silent, or was never heard of."""
    return "place" not in rank or not rank["waiting"] or _is_silent(rank)


def _is_silent(rank: Mapping[str, Any]) -> bool:
    return float(rank.get("silent_seconds", 0.0)) > SILENT_SECONDS


def describe_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """What each group of ranks does; those that others wait for come first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for rank in sorted(ranks, key=_is_blamed, reverse=True):
        groups[_doing(rank)].append(str(rank["rank"]))
    text = "; ".join(
        f"rank{'s' if numbers[1:] else ''} {', '.join(numbers)} {doing}" for doing, numbers in groups.items()
    )
    return text if len(ranks) == 1 or any(map(_is_blamed, ranks)) else f"{text}; each waits for the others"


def _doing(rank: Mapping[str, Any]) -> str:
    if "place" not in rank:
        return "was never heard of"
    silent = f"(silent for {float(rank['silent_seconds']):.0f} s) " if _is_silent(rank) else ""
    waits = f"waiting in {rank['waiting']}" if rank["waiting"] else f"in {rank['code']}"
    return f"{silent}at {rank['place']}, {waits}"


def last_error(folder: Path) -> tuple[str, Path] | None:
    """The last error that the run's processes wrote, and its file; None where there is none.

    Lost connections follow from what ended another rank: they are told only where nothing else is.
    """
    slurm = [path for kind in ("node-*.log", "*.out") for path in (folder / "slurm").glob(kind)]
    slurm.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (p for p in (folder / "launcher.log", *slurm) if p.is_file()):
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            found = list(ERROR.finditer(stream.read().decode(errors="replace")))
        own = [m for m in found if not isinstance(classify(RuntimeError(m["error"])), WorkerLostError)]
        if chosen := (own or found)[-1:]:
            rank = f"rank {chosen[0]['rank']}: " if chosen[0]["rank"] else ""
            return f"{rank}{chosen[0]['error'][:300]}", path
    return None


NAME_WIDTH, STATE_WIDTH = 22, 9


def doctor(words: Sequence[str]) -> int:
    """Usage: doctor [--out FOLDER] [--json]: what is wrong with this machine; each check really tries.
    doctor RUN [--json]: why a run failed or hangs, and whether its files are whole.

    Each line is ok, warning or broken, with what mends it. Exit 3 where something is broken.
    """
    positional, options = read_command(words, RunsOptions, "doctor")
    run = runs_named(one_run(positional, "doctor"))[-1] if positional else None
    found = []
    for check in check_run(run) if run else check_machine(Path(options.out)):
        found.append(check)
        text = f"{check.state:<{STATE_WIDTH}}{check.name:<{NAME_WIDTH}}{' '.join(check.text.split())}"
        if check.remedy:  # under it
            text += f"\n{'':<{STATE_WIDTH + NAME_WIDTH}}-> {check.remedy}"
        if not options.json:  # as soon as it is known
            print(printable(text), flush=True)
    count = Counter(check.state for check in found)
    unknown = sum(check.text.startswith(NOT_KNOWN) for check in found)
    text = f"{count['broken']} broken, {count['warning']} warnings, of {len(found)} checks"
    text += f"; {unknown} of them not known" * bool(unknown)
    print_answer({"checks": [asdict(check) for check in found]}, text, options.json)
    return FAILED if count["broken"] else DONE
