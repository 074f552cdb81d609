"""Checks of one run: what it does or why it ended, who waits for whom, and whether its files are whole."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import DONE, STOPPED, TrainingError, UserError, WorkerLostError
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_folder import RunFolder, refuse_links
from isobatch.engine.runs.slurm_queue import SlurmSilentError, job_statuses, last_job_of
from isobatch.launch.control.run_state import look
from isobatch.launch.doctor.check import Check, broken, ok, warning
from isobatch.launch.doctor.ranks import check_ranks
from isobatch.launch.doctor.storage import ELSEWHERE, check_space
from isobatch.launch.local.restarts import dead_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRACES = ("recipe.json", "metrics.jsonl", "checkpoints", "launcher.log", "plan.json", "summary.json")
"""Files by which a damaged run is still known as one."""
DAMAGE = (UserError, TrainingError, TypeError, KeyError, ValueError, AttributeError, IndexError, OSError)
"""What reading damaged records may raise."""
CHECKED_BYTES = 2 << 30
"""Checkpoints up to this size are compared with their checksums, larger ones with their sizes."""
RESTARTS = ("restart", "smaller micro-batches")
"""Decisions of `launch/local/restarts.py`."""
NEVER_STARTS = (
    *("DependencyNeverSatisfied", "PartitionDown", "PartitionInactive", "JobHeldUser", "JobHeldAdmin"),
    *("BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit", "AssocMaxJobsLimit"),
)
"""Reasons of squeue for which a job waits until somebody changes something."""
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
REMEDIES = (
    ("out of memory", "isobatch resume {} --memory-limit 80% --activation-checkpointing on"),
    ("became", "isobatch auto with a lower --lr or a longer --warmup; --anomaly names the operation"),
    ("no space left", "make space, then: isobatch resume {}"),
    ("signal 9", "dmesg | grep -i oom says whether memory ran out; then: isobatch resume {}"),
    ("stood still", "less {}/launcher.log shows the lines of all threads; then: isobatch resume {}"),
    ("lost", "look at the node that was lost (sinfo -R); then: isobatch resume {}"),
)
"""Part of a reason -> what helps."""


def check_run(folder: Path) -> Iterator[Check]:
    """Every check of the run in a folder, with what there is of it. Raises UserError where it is no run."""
    run = open_damaged(folder)
    yield from check_records(run)
    training = run.is_training()
    yield check_state(run, training)
    yield from check_end(run, training)
    yield from check_job(run)
    yield from check_progress(run, training)
    yield from check_checkpoints(run, training)
    yield from check_data(run)
    elsewhere = ELSEWHERE.format("move the run there, or --out")
    yield check_space("disk", run.folder, shutil.disk_usage(run.folder), None, elsewhere)


def open_damaged(folder: Path) -> RunFolder:
    """A run of which files may be missing. Raises UserError where the folder holds nothing of a run."""
    if not folder.is_dir():
        raise UserError(f"doctor {folder}: there is no such folder (`runs` lists the runs here)")
    if not any((folder / name).exists() for name in TRACES):
        raise UserError(
            f"doctor {folder}: is not a run: it has none of a run's files (`runs` lists the runs)"
        )
    refuse_links(folder)
    return RunFolder(folder)


def _read_newest_rows(file: Path) -> None:
    """Raises ValueError where one of the newest rows is no JSON; the last may be in the middle of a write."""
    if not file.exists():
        return
    with file.open("rb") as stream:
        start = max(0, file.stat().st_size - TAIL_BYTES)
        stream.seek(start)
        *lines, _ = stream.read().split(b"\n")
    for line in lines[1 if start else 0 :]:
        json.loads(line)


def check_records(run: RunFolder) -> Iterator[Check]:
    """A line for each record that is missing or damaged; one line where all are whole."""
    name = run.folder
    readers: dict[str, tuple[Callable[[], Any], str]] = {
        "recipe.json": (
            lambda: run.recipe,
            "copy it from where the run came from: no command works without it",
        ),
        "facts.json": (lambda: run.facts, "copy it from another run of this recipe and data"),
        "plan.json": (lambda: run.plan if run.has_plan else None, f"isobatch resume {name} plans anew"),
        "run.json": (run.options, "copy it from another run, and set its flags at `resume`"),
        "metrics.jsonl": (
            lambda: _read_newest_rows(run.metrics),
            f"isobatch verify {name} says what is missing; a resumed run cuts it at a checkpoint",
        ),
        "summary.json": (run.summary, f"rm {name}/summary.json; isobatch resume {name} writes it anew"),
    }
    damaged = []
    for record, (read, remedy) in readers.items():
        try:
            read()
        except DAMAGE as error:
            damaged.append(broken(record, f"cannot be read: {_short(error)}", remedy))
    yield from damaged
    if not damaged and run.recorded_hash not in ("", run.recipe.hash()):
        text = f"was changed after the run was made (recipe {run.recipe.hash()}, then {run.recorded_hash})"
        yield broken("recipe.json", text, f"put it back as it was; isobatch verify {name} --level records")
    elif not damaged:
        yield ok("records", f"whole; {run.recipe.task}, recipe {run.recipe.hash()}")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def check_state(run: RunFolder, training: bool) -> Check:
    """What the run does or came to, and how far it is."""
    try:
        seen = look(run.folder)
    except DAMAGE:
        state = "running" if training else "not running"
        return warning("state", f"{state}; how far it is, its damaged records do not say", "mend the records")
    done = f"step {seen.progress.step or 0} of {seen.progress.total or '?'}"
    resume = f"isobatch resume {run.folder}"
    if seen.state == "failed":
        reason = _reason(run) or "no reason was written"
        return broken("state", f"failed at {done}: {reason}", remedy_of(reason, run.folder))
    if seen.state == "unfinished":
        text = f"{done}; nobody trains it, and how it ended nobody wrote: killed, or the machine went down"
        return warning("state", text, resume)
    if seen.state == "unknown":
        return warning(
            "state", f"{done}; Slurm does not answer, so whether it runs is not known", "scontrol ping"
        )
    if seen.state == "stopped":
        return ok("state", f"stopped at {done}, saved; `{resume}` goes on")
    return ok("state", f"{seen.state}, {done}")


def _reason(run: RunFolder) -> str:
    """Why the run failed, by summary.json; empty where it does not say."""
    try:
        return str((run.summary() or {}).get("reason") or "")
    except UserError:
        return ""


def remedy_of(reason: str, folder: Path) -> str:
    """What helps against a failure, by its reason."""
    known = next((way for word, way in REMEDIES if word in reason.lower()), "isobatch logs {} --lines 100")
    return known.replace("{}", str(folder))


def check_end(run: RunFolder, training: bool) -> Iterator[Check]:
    """What the last attempt wrote when it ended, and how often it began anew."""
    if not training and run.status_or_none() not in ("done", "stopped"):
        verdict = run.last_verdict() or dead_process(run.folder / "launcher.log")
        if verdict is not None and verdict.code not in (DONE, STOPPED) and verdict.reason not in _reason(run):
            text = f"exit code {verdict.code}: {verdict.reason}"
            yield broken("last attempt", text, remedy_of(verdict.reason, run.folder))
        if found := last_error(run.folder, explained=verdict is not None):
            yield broken("last error", found[0], f"less {found[1]}")
    restarts = [row for row in rows_in(run.decisions) if row.get("decision") in RESTARTS]
    if restarts:
        text = f"{len(restarts)} times, the last: {restarts[-1].get('reason', '')}"
        yield warning("restarts", text, f"isobatch logs {run.folder} says what was before each")


def check_job(run: RunFolder) -> Iterator[Check]:
    """What Slurm says of the run's last job."""
    try:
        job = last_job_of(run)
        status = job_statuses([job]).get(job) if job else None
    except SlurmSilentError as error:
        yield warning("Slurm job", str(error), "scontrol ping; ask who runs the cluster")
        return
    except DAMAGE as error:
        yield warning("Slurm job", f"slurm/job.json: {_short(error)}", f"rm {run.folder}/slurm/job.json")
        return
    if not job:
        return
    if status is None:
        yield ok("Slurm job", f"{job}: Slurm does not know it any more (sacct -j {job} may)")
    elif status.is_over and status.state != "COMPLETED" and run.status_or_none() != "done":
        yield broken("Slurm job", f"{job} {status}", f"sacct -j {job}; isobatch logs {run.folder}")
    elif status.waits and status.reason in NEVER_STARTS:
        yield broken("Slurm job", f"{job} {status}: it never starts so", f"scontrol show job {job}")
    else:
        yield ok("Slurm job", f"{job} {status}")


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
            mend = f"isobatch cancel {run.folder} --now, then isobatch resume {run.folder}"
            yield broken("ranks", f"no step was logged for {age:.0f} s", mend)


def _step_seconds(run: RunFolder) -> float:
    """Of the newest logged steps, the longest; 0 where there is none."""
    rows = newest_rows(run.metrics)[-50:]
    return max(
        (r["step_seconds"] for r in rows if isinstance(r.get("step_seconds"), float | int)), default=0.0
    )


def check_checkpoints(run: RunFolder, training: bool) -> Iterator[Check]:
    """Whether each is whole; what `resume` would go on from."""
    folders = sorted(run.checkpoints.glob("[!.]*-*"), key=lambda p: p.stat().st_mtime)
    problems = {path.name: problem for path in folders if (problem := damage_of(path))}
    whole = [path.name for path in folders if path.name not in problems]
    last = f"`resume` goes on from {whole[-1]}" if whole else "`resume` begins anew"
    for name, problem in problems.items():
        say = warning if whole else broken
        yield say("checkpoint", f"{name}: {problem}; {last}", f"isobatch resume {run.folder} removes it")
    if whole and not problems:
        yield ok("checkpoints", f"{', '.join(whole)}: whole")
    elif not folders and not training and newest_rows(run.metrics) and run.status_or_none() != "done":
        text = "none was saved: `resume` begins anew"
        yield warning("checkpoints", text, f"isobatch resume {run.folder} --save-every 5m")


def damage_of(folder: Path) -> str:
    """What is wrong with a checkpoint; empty where it is whole."""
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint

    try:
        saved = SavedCheckpoint(folder)
        if sum(path.stat().st_size for path in folder.iterdir()) <= CHECKED_BYTES:
            saved.verify_checksums()
    except DAMAGE as error:
        return _short(error).rpartition(" is damaged: ")[2]
    return ""


def check_data(run: RunFolder) -> Iterator[Check]:
    """Whether the run's data is still there, as prepared or as it was given."""
    try:
        prepared, given = Path(run.facts.folder), run.recipe.data
    except DAMAGE:
        return
    if prepared.is_dir():
        return
    source = Path(str(given)).expanduser()
    if "://" in str(given):  # a store, which `resume` asks
        yield ok("data", f"indexed again at the next `resume`: {prepared} is gone")
    elif given and ("/" in str(given) or source.suffix) and not source.exists():
        text = f"{given} is gone, and what was prepared of it ({prepared}), too"
        yield broken("data", text, f"isobatch resume {run.folder} --data WHERE-IT-LIES-NOW")
    elif run.status_or_none() != "done":
        yield ok("data", f"prepared again at the next `resume`: {prepared} is gone")


def logs_of(folder: Path) -> Iterator[Path]:
    """The logs of a run, those of its processes first."""
    yield from (path for path in (folder / "launcher.log",) if path.is_file())
    for pattern in ("node-*.log", "*.out"):
        yield from sorted((folder / "slurm").glob(pattern), key=lambda p: p.stat().st_mtime, reverse=True)


def last_error(folder: Path, explained: bool = False) -> tuple[str, Path] | None:
    """The last error that the run's processes wrote, and its file; None where there is none.

    Lost connections follow from what ended another rank: they are told only where nothing else is, and not
    where the end is `explained`.
    """
    for path in logs_of(folder):
        text = _tail(path)
        found = list(ERROR.finditer(text))
        own = [match for match in found if not _is_lost_connection(match["error"])]
        if chosen := (own or ([] if explained else found))[-1:]:
            rank = f"rank {chosen[0]['rank']}: " if chosen[0]["rank"] else ""
            return f"{rank}{chosen[0]['error'][:300]}", path
        if killed := KILLED.findall(text):
            return killed[-1].strip()[:300], path
    return None


def _is_lost_connection(error: str) -> bool:
    return isinstance(classify(RuntimeError(error)), WorkerLostError)


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
        return stream.read().decode(errors="replace")
