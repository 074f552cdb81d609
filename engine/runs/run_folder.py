"""The run folder: every file that a run writes. A copy of the folder is a complete copy of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import BUG, FAILED, WRONG_INPUT, UserError
from isobatch.core.facts import Facts
from isobatch.core.flags import build_options, flags_of, nearest, options_to_dict, spelling, value_text
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe, differing
from isobatch.engine.checkpointing.digests import bytes_digest, file_digest, folder_digests
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_options import RunOptions

NO_FLAGS = ("starts_from", "fingerprint of the data")
"""What runs differ in that no flag says."""

NONCE = "ISOBATCH_NONCE"
"""Environment variable that ties exit.json to the launch that waits for it."""

SWEEP = "sweep.json"
"""What a sweep came to, in its folder beside its runs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended: the content of exit.json."""

    code: int
    """Exit code."""
    reason: str
    cause: str = ""
    """An error's `cause` where another attempt may succeed; else empty."""


class FolderTakenError(UserError):
    """The folder of a new run is another run's, or no run's."""

    def __init__(self, folder: Path, recipe: Recipe, facts: Facts) -> None:
        what, way = "is not a run", "choose another --name or --out"
        if (folder / "recipe.json").is_file():
            there, way = RunFolder(folder), f"{way}, or remove it: `runs rm {folder} --yes`"
            both = (there.recipe, there.facts), (recipe, facts)
            of_both = [{**r.to_compare(), "fingerprint of the data": f.fingerprint} for r, f in both]
            rows = {n if n in NO_FLAGS else spelling(n): pair for n, pair in differing(of_both).items()}
            told = {name: ["not given" if v is None else value_text(v) for v in rows[name]] for name in rows}
            said = (f"{name} {a} there, {b} here" for name, (a, b) in told.items())
            what = f"is another run: {'; '.join(said) or 'of the same recipe and data'}"
        super().__init__(f"{folder} exists and {what}; {way}")


def run_around(path: Path) -> Path | None:
    """The run that a path lies in, itself not one."""
    found = (one for one in path.absolute().parents if (one / "recipe.json").is_file())
    return next((Path(os.path.relpath(one)) for one in found), None)


def runs_named(place: str | Path) -> list[Path]:
    """The folder of the run that a path says, with or without runs/ before it; of a chain, as --task compress
    trains one, those of its stages by its --name, oldest first. What is there otherwise, or not, stays.
    """
    path = Path(place).expanduser()
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("runs",) else Path("runs", path)
    for at in (path, inside):
        if (at / "recipe.json").is_file():
            return [at]
        stages = [run for run in list_runs(at.parent) if run.folder.name.startswith(f"{at.name}-")]
        if found := [r.folder for r in stages if r.folder.name.startswith(f"{at.name}-{r.recipe.task}")]:
            return found
    return [next((at for at in (path, inside) if at.exists()), path)]


def finished_runs(place: str | Path) -> list[Path]:
    """Of `runs_named` the stages of a chain that are done, where one is; else the last."""
    named = runs_named(place)
    stages = named if named[1:] else ()  # a single run is checked before it is read
    return [one for one in stages if RunFolder.open(one).status_or_none() == "done"] or named[-1:]


def finished_run(place: str | Path) -> Path:
    """The last of these."""
    return finished_runs(place)[-1]


def no_run(path: Path) -> str:
    """Why a path is no run, with the run that may be meant: around it, in it, or called like it."""
    if run := run_around(path):
        return f"{path} is not a run but inside one: give {run}"
    if within := [str(run.folder) for run in list_runs(path)]:
        return f"{path} is not a run but a folder of runs: give one, as {' or '.join(within[-3:])}"
    if (path / SWEEP).is_file():
        found = atomic_files.read_json(path / SWEEP)
        run = path.parent / Path((found["best"] or found["rows"][0])["runs"][0]).name
        return f"{path} is a sweep: give one of its runs, as {run} (`report {path}` shows them all)"
    beside = {run.folder.name: run.folder for at in (path.parent, Path("runs")) for run in list_runs(at)}
    sweeps = [one.parent for one in Path("runs").glob(f"*/{SWEEP}")]
    beside |= {name: at for at in sweeps for name in (at.name, at.name.removeprefix("sweep-"))}
    meant = beside.get(nearest(path.name, beside))
    hint = f"did you mean {meant}?" if meant else "`runs` lists the runs here"
    return f"{path} is not a run: it has no recipe.json ({hint})"


class RunFolder:
    """A run folder and its files. Records are read once, at first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.final, self.unfinished = folder / "final", folder / ".final.tmp"
        """The exported model, once it is whole; until then."""
        self.metrics, self.decisions = folder / "metrics.jsonl", folder / "decisions.jsonl"
        self.answers, self.evaluations = folder / "answers.jsonl", folder / "evaluations.jsonl"
        self.samples = folder / "samples.bin"
        self.rank_record = folder / "ranks.json"
        """Where every rank is; there while the run trains, and after an error."""

    def ranks(self) -> dict[str, Any] | None:
        """The content of ranks.json; None where there is none."""
        return self._record("ranks.json")

    def _record(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return atomic_files.read_json(path) if path.exists() else None

    @classmethod
    def open(cls, folder: str | Path) -> RunFolder:
        """An existing run. Raises UserError where the folder is none, or links to files elsewhere."""
        path = runs_named(folder)[-1]
        if not (path / "recipe.json").is_file():
            raise UserError(no_run(path))
        refuse_links(path)
        return cls(path)

    @classmethod
    def create(cls, folder: Path, recipe: Recipe, facts: Facts, options: RunOptions) -> RunFolder:
        """Create a run folder atomically. Raises FolderTakenError where `folder` exists and is not empty."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FolderTakenError(folder, recipe, facts)
        fresh = cls(folder.with_name(f".{folder.name}.{os.getpid()}.new"))
        with atomic_files.explain_write_errors(folder):
            fresh.folder.mkdir(parents=True)
            atomic_files.write_json(fresh.folder / "facts.json", facts.to_dict())
            fresh.write_options(options)
            names = {"hash": recipe.hash(), "run": secrets.token_hex(6)}
            atomic_files.write_json(fresh.folder / "recipe.json", {**recipe.to_dict(), **names})
            try:
                fresh.folder.replace(folder)
            except OSError as error:  # taken since
                shutil.rmtree(fresh.folder, ignore_errors=True)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise FolderTakenError(folder, recipe, facts) from None
                raise
        return cls(folder)

    @contextlib.contextmanager
    def lock(self, role: str) -> Iterator[None]:
        """Hold the run's lock for a role (launch, train, export, submit); it ends with the process.

        Raises UserError where another process holds it.
        """
        from filelock import FileLock, Timeout

        try:
            lock = FileLock(self.folder / f".{role}.lock", timeout=0)
            with atomic_files.explain_write_errors(Path(lock.lock_file)):
                held = lock.acquire()
            with held:
                yield
        except Timeout:
            doing = {"export": "exported", "submit": "submitted"}.get(role, "trained")
            raise UserError(
                f"{self.folder} is being {doing} by another process: wait for it (what was left by a killed"
                " command saves and ends within a minute)"
            ) from None

    def refuse_if_training(self) -> None:
        """Raise UserError while workers train this run: they may outlive the command that started them."""
        with self.lock("train"):
            pass

    def is_training(self, roles: Sequence[str] = ("launch", "train")) -> bool:
        """Whether a launcher or a worker is at work on this run: it writes nothing and holds no lock."""
        return any(_is_locked(self.folder / f".{role}.lock") for role in roles)

    @functools.cached_property
    def _recipe_record(self) -> dict[str, Any]:
        return atomic_files.read_json(self.folder / "recipe.json")

    @functools.cached_property
    def recipe(self) -> Recipe:
        return Recipe.from_dict(self._recipe_record)

    @functools.cached_property
    def here(self) -> Recipe:
        """The recipe with places as they are read. Assigned, what it begins with has moved."""
        return self.recipe

    @property
    def recorded_hash(self) -> str:
        """The recipe's hash when the run was created."""
        return str(self._recipe_record.get("hash", ""))

    @property
    def identity(self) -> str:
        """The run's own name among those of its recipe, as a receipt has it."""
        return str(self._recipe_record.get("run", self.recorded_hash))

    @functools.cached_property
    def facts(self) -> Facts:
        """Assigned, they count in this process alone: who judges a run changes no file of it."""
        return Facts.from_dict(atomic_files.read_json(self.folder / "facts.json"))

    def write_facts(self, facts: Facts) -> None:
        """Replace facts.json: the same data, prepared in another folder."""
        if facts != self.facts:
            atomic_files.write_json(self.folder / "facts.json", facts.to_dict())
        self.facts = facts

    @property
    def has_plan(self) -> bool:
        return "plan" in self.__dict__ or (self.folder / "plan.json").exists()

    @functools.cached_property
    def plan(self) -> Plan:
        return Plan.from_dict(atomic_files.read_json(self.folder / "plan.json"))

    def write_plan(self, plan: Plan) -> None:
        atomic_files.write_json(self.folder / "plan.json", plan.to_dict())
        self.plan = plan

    def forget_plan(self) -> None:
        """Read plan.json again at the next use: another process may have replaced it."""
        self.__dict__.pop("plan", None)

    def options(self) -> RunOptions:
        """The options of the newest launch; fields that this version does not know are ignored."""
        recorded = atomic_files.read_json(self.folder / "run.json")
        known = {name: recorded[name] for name in flags_of(RunOptions) if name in recorded}
        return dataclasses.replace(build_options(RunOptions, known), stop_at=recorded.get("stop_at"))

    def write_options(self, options: RunOptions) -> None:
        atomic_files.write_json(self.folder / "run.json", options_to_dict(options))

    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json; None where there is none yet."""
        return self._record("summary.json")

    def environment(self) -> dict[str, Any]:
        """The content of environment.json: what trained its last leg; empty where nothing says so."""
        return self._record("environment.json") or {}

    @property
    def exported(self) -> str:
        """The checkpoint that final/ was made of; "" where there is none yet."""
        rows = newest_rows(self.metrics)
        return next((row["exported"] for row in reversed(rows) if "exported" in row), "")

    def exported_weights(self) -> dict[str, str]:
        """The same as a recipe's `starts_from`. Raises UserError."""
        if not (name := self.exported):
            raise UserError(f"{self.folder} is not done: {self.why_unfinished()}")
        checksums = self.checkpoints / name / "checksums.json"
        if not checksums.is_file():
            raise UserError(f"{self.folder} has no checkpoint {name} any more: its weights cannot be taken")
        run = str(self.folder.resolve())
        return {"run": run, "checkpoint": name, "digest": bytes_digest(checksums)}

    def exports(self) -> dict[str, dict[str, Any] | None]:
        """Each folder of exports/, and chosen/ -> digests of its files as they were written, which stand in
        FOLDER.json beside it; None where nothing says what was written.
        """
        places = [*sorted(self.folder.glob("exports/[!.]*")), self.folder / "chosen"]
        names = [path.relative_to(self.folder).as_posix() for path in places if path.is_dir()]
        return {name: self._record(f"{name}.json") for name in names}

    def record_export(self, folder: Path) -> None:
        """Keep the digests of what was written into a folder of the run."""
        atomic_files.write_json(folder.with_name(f"{folder.name}.json"), folder_digests(folder))

    def changed_export(self, only_later: bool = False, final: Mapping[str, str] | None = None) -> list[str]:
        """Files of final/, exports/ and chosen/ that are not there as the run wrote them: changed, added or
        gone. `final`: the digests of final/, by default those in the log.

        `only_later`: those alone are read that changed after their record; where nobody touched a run, none.
        """
        logged = [row["final"] for row in newest_rows(self.metrics) if isinstance(row.get("final"), dict)]
        records: dict[str, tuple[Path, Mapping[str, Any] | None]]
        records = {n: (self.folder / f"{n}.json", written) for n, written in self.exports().items()}
        records["final"] = self.metrics, final or (logged[-1] if logged else None)
        changed: set[str] = set()
        for name, (record, written) in records.items():
            if written is not None:
                since, folder = record.stat().st_mtime if only_later else 0.0, self.folder / name
                there = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
                later = {n for n, p in there.items() if p.stat().st_ctime >= since}
                other = {n for n in later if file_digest(there[n]) != written.get(n)}
                changed.update(f"{name}/{n}" for n in other | ({*written} ^ {*there}))
        return sorted(changed)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        atomic_files.write_json(self.folder / "summary.json", summary)

    def mark_failed(self, reason: str) -> None:
        """Write to summary.json that the run failed, and why."""
        summary = self.summary() or {"task": self.recipe.task, "metrics": {}}
        self.write_summary({**summary, "status": "failed", "reason": reason})

    def status(self) -> str:
        """done, stopped, failed, or unfinished (killed, or still running)."""
        summary = self.summary()
        return str(summary.get("status")) if summary else "unfinished"

    def why_unfinished(self) -> str:
        """How a run without an export stands, and the way to one."""
        if self.is_training():
            return "it is still in training; wait for its end"
        return f"it is {self.status()}; `resume {self.folder}` goes on with it"

    def status_or_none(self) -> str | None:
        """`status`; None where summary.json is damaged."""
        try:
            return self.status()
        except UserError:
            return None

    def write_exit(self, verdict: Verdict) -> None:
        """Record how this attempt ended, for the parent process that started it.

        The first verdict of a launch is kept: later ranks fail only because the first one exited.
        """
        if not self.has_verdict():
            record = {"nonce": os.environ.get(NONCE, ""), **dataclasses.asdict(verdict)}
            atomic_files.write_json(self.folder / "exit.json", record)
            # Of others it is said where another attempt is made: by a launcher, if there is one.
            if verdict.code in (BUG, WRONG_INPUT) or (verdict.code == FAILED and not record["nonce"]):
                with contextlib.suppress(UserError):  # of a damaged run exit.json alone says it
                    self.mark_failed(verdict.reason)

    def has_verdict(self) -> bool:
        """Whether a process of the current launch has written exit.json."""
        nonce = os.environ.get(NONCE, "")
        return bool(nonce) and self.read_exit(nonce) is not None

    def read_exit(self, nonce: str | None = None) -> Verdict | None:
        """The verdict in exit.json, of the launch with this nonce or of any; None where it is damaged."""
        try:
            said = atomic_files.read_json(self.folder / "exit.json")
            verdict = Verdict(int(said["code"]), str(said["reason"]), str(said.get("cause", "")))
        except (UserError, KeyError, TypeError, ValueError):
            return None
        return verdict if nonce in (None, str(said.get("nonce"))) else None

    def keep_until(self, log: Path, phase_order: list[str], phase: str, step: int) -> None:
        """Remove the rows after `step` of `phase` from a log: a resumed run writes them again.

        Decisions of launches stay: they have no step.
        """
        if log.exists():
            kept = (row for row in atomic_files.rows_in(log) if is_before(row, phase_order, phase, step))
            text = "".join(atomic_files.json_text(row, ensure_ascii=False) + "\n" for row in kept)
            atomic_files.write_text(log, text)

    def keep_evaluation(self, row: Mapping[str, Any]) -> None:
        """Append what was measured of the trained model later to evaluations.jsonl, and when (UTC)."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        atomic_files.append_row(self.evaluations, {"when": when, **row})

    def log_decision(self, decision: str, **facts: Any) -> None:
        """Append a decision of a launch to decisions.jsonl; resuming does not remove it."""
        atomic_files.append_row(self.decisions, {"decision": decision, **facts})


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock; asked with a shared one, which stands in the way of a new lock for a
    moment only.
    """
    import fcntl

    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or its file system has no locks
        return False
    return False


def is_before(row: Mapping[str, Any], phases: list[str], phase: str, step: int) -> bool:
    """Whether a row was logged up to `step` of `phase`; rows count steps from 1."""
    if "final" in row:  # the last row of a finished run, which a resumed run writes again
        return False
    if "phase" not in row or row["phase"] not in phases:
        return True
    return (phases.index(row["phase"]), int(row.get("step", 0))) <= (phases.index(phase), step)


def list_runs(folder: Path) -> Iterator[RunFolder]:
    """Every run in a folder, oldest first."""
    found = [p for p in folder.glob("[!.]*/recipe.json") if p.with_name("facts.json").is_file()]
    for path in sorted(found, key=lambda p: p.stat().st_mtime):
        yield RunFolder(path.parent)


def run_name(recipe: Recipe) -> str:
    """Task and recipe hash; the same recipe has the same name everywhere."""
    task = re.sub(r"[^A-Za-z0-9-]+", "-", recipe.task.rpartition("/")[2]).strip("-")
    return f"{task}-{recipe.hash()}"


def free_folder(out: Path, name: str) -> Path:
    """`out/name`, or the first `out/name-2`, `-3`... that is not taken."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(out / one for one in names if not (out / one).exists())


def refuse_links(folder: Path) -> None:
    """Raise UserError where a link leads out of a run's folder: what is written and removed must be its own.

    So it does for pipes, sockets and devices, which no run has: to read one may never end.
    """
    inside, waiting = folder.resolve(), [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:  # a listing says what is a link: no file is asked
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif entry.is_symlink() and inside not in path.resolve().parents:  # trackers make some inside
                    where = "a run's files lie in its own folder; copy them there"
                    raise UserError(f"{path} is a link to {path.readlink()}: {where}")
                elif not entry.is_symlink() and not entry.is_file(follow_symlinks=False):
                    raise UserError(f"{path} is neither a file nor a folder: a run has none such")
