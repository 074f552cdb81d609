"""`runs logs`, `runs cancel` and `runs rm`: what a run says, its end, and its removal."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.atomic_files import explain_write_errors
from isobatch.core.errors import DONE, FAILED, STOPPED, UserError
from isobatch.core.measures import format_bytes, printable
from isobatch.core.number_ranges import Positive
from isobatch.core.terminal.status import doing
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.slurm_queue import run_slurm, update_job_record
from isobatch.launch.control.run_state import RunView, look, one_run
from isobatch.launch.local.arguments import read_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import psutil


WAIT_SECONDS, LOOK_SECONDS = 600.0, 1.0
"""How long a run may take to save and end, and how often to look whether it has."""
SECOND_SIGNAL_SECONDS = 1.0
"""Between the two SIGINT of --now: a launcher takes the second for an end at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOptions:
    """Flags of `runs cancel`."""

    now: bool = False
    """Do not wait for a save: what was saved before is kept."""
    json: bool = False
    """One JSON object on standard output."""


def cancel(words: Sequence[str]) -> int:
    """Usage: runs cancel RUN [--now] [--json]

    A run that trains saves and ends; --now ends it at once. One that waits in Slurm's queue leaves it.
    """
    run, options = one_run(words, CancelOptions, "runs cancel")
    seen = look(run.folder)
    end, text = _cancel(seen, options.now)
    if options.json:
        facts = {"run": str(run.folder), "job": seen.job, "before": seen.state, "state": end.state}
        step = {"step": end.progress.step, "checkpoint": _newest_checkpoint(run)}
        print(atomic_files.json_text({**facts, **step, "text": text}))
    else:
        print(text)
    return DONE


def _cancel(seen: RunView, now: bool) -> tuple[RunView, str]:
    """End the run; how it stands then, and a line about it. Raises UserError where it cannot be ended."""
    folder, job, status = seen.run.folder, seen.job, seen.status
    if seen.state == "unknown":
        raise UserError(f"{folder}: Slurm does not answer for job {job}: cancel again when squeue does")
    if seen.is_over:
        return seen, f"{folder} is {seen.state}: there is nothing to cancel"
    if status is not None and status.waits:
        _scancel(job)
        saved = f"; {_kept(seen.run)}" if _newest_checkpoint(seen.run) else ""
        return look(folder), f"{folder}: job {job} was {status}, and is cancelled{saved}"
    if not seen.in_job:
        _interrupt_launcher(seen.run, now)
    elif now:
        _scancel(job)
    elif status is not None and status.state == "SUSPENDED":
        raise UserError(
            f"job {job} is suspended and cannot save: scontrol resume {job} first, or cancel --now"
        )
    else:
        update_job_record(seen.run, cancel="save")  # first: the job reads it when the signal comes
        _scancel(job, "--batch", "--signal=INT")
    end = _wait_for_end(seen)
    return end, f"{folder}: {_outcome(end, now)}"


def _scancel(job: str, *flags: str) -> None:
    done = run_slurm("scancel", *flags, job)
    if done.code or done.err.strip():
        raise UserError(f"scancel {job}: {done.error or done.err.strip()}")


def _interrupt_launcher(run: RunFolder, now: bool) -> None:
    """SIGINT to the process that trains the run here: once to save, twice to end at once."""
    import psutil

    launcher = _launcher(run)
    if launcher is None:
        raise UserError(
            f"{run.folder} is being trained, but not by a process of yours on this machine: cancel it on the"
            " machine that trains it"
        )
    try:
        launcher.send_signal(signal.SIGINT)
        if now:
            launcher.wait(SECOND_SIGNAL_SECONDS)
    except psutil.TimeoutExpired:
        launcher.send_signal(signal.SIGINT)
    except psutil.Error as error:
        raise UserError(f"process {launcher.pid} trains {run.folder}: {error}") from None


def _launcher(run: RunFolder) -> psutil.Process | None:
    """The process on this machine that holds the run's lock: its launcher, else the worker of rank 0."""
    import psutil

    for role in ("launch", "train"):
        path = str((run.folder / f".{role}.lock").resolve())
        holders = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # another user's, or it has just ended
                if any(file.path == path for file in process.open_files()):
                    holders[process.pid] = process
        # Loader processes are forked with the lock open.
        if first := [p for p in holders.values() if p.ppid() not in holders]:
            return first[0]
    return None


def _wait_for_end(seen: RunView) -> RunView:
    """Wait until nobody trains the run. Raises UserError where it does not end."""
    print(f"isobatch: waiting until {seen.run.folder} has ended", file=sys.stderr)
    doing(f"waiting for {seen.run.folder}")
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        if (now := look(seen.run.folder)).is_over:
            return now
    raise UserError(
        f"{seen.run.folder} has not ended within {WAIT_SECONDS:g} s: `runs logs {seen.run.folder}` shows what"
        " it does, cancel --now ends it at once"
    )


def _outcome(end: RunView, now: bool) -> str:
    if end.state == "done":
        return "it was done before it could be stopped"
    if end.state == "stopped" and not now:
        return f"saved at step {end.progress.step}; `resume {end.run.folder}` goes on"
    why = f" ({end.status})" if end.status is not None and not now else ""
    return ("ended" if now else f"ended{why} and did not save") + f"; {_kept(end.run)}"


def _kept(run: RunFolder) -> str:
    newest = _newest_checkpoint(run)
    return f"{newest} is kept, and `resume {run.folder}` goes on from it" if newest else "nothing was saved"


def _newest_checkpoint(run: RunFolder) -> str:
    """Name of the newest checkpoint; empty where there is none."""
    found = sorted(run.checkpoints.glob("[!.]*-*"), key=lambda path: path.stat().st_mtime)
    return found[-1].name if found else ""


READ_SECONDS, FOLLOW_SECONDS = 0.5, 3.0
"""How often -f reads the log, and how often it asks how the run stands."""
EXIT_CODES = {"done": DONE, "failed": FAILED}
"""Of -f, by the state in which the run ended; STOPPED in any other."""


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
    run, options = one_run(["--follow" if word == "-f" else word for word in words], LogsOptions, "runs logs")
    path = run.folder / "log.txt"
    if options.follow:
        return _follow(run, _LogReader(path), options.lines)
    if not path.exists():
        seen = look(run.folder)
        output = run.folder / "slurm" / f"{seen.job}.out"
        job = f" (job {seen.job}: {seen.status})" if seen.in_job else ""
        why = f"yet{job}; -f waits for it"
        if seen.is_over:
            told = f"what its job said is in {output}" if output.exists() else f"`resume {run.folder}` does"
            why = f"and nobody trains it: {told}"
        print(f"{run.folder} has no log {why}", file=sys.stderr)
    _LogReader(path).print_new(options.lines)
    return DONE


class _LogReader:
    """Prints what a log holds beyond what was printed already."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def print_new(self, lines: int | None = None) -> None:
        """Print the lines that are new, the last `lines` of them at most."""
        if not self.path.exists():
            return
        with self.path.open("rb") as stream:
            if stream.seek(0, 2) < self.offset:  # written anew
                self.offset = 0
            stream.seek(self.offset)
            for line in deque(stream, lines) if lines else stream:
                sys.stdout.write(printable(line.decode(errors="replace")))
            self.offset = stream.tell()
        sys.stdout.flush()


def _follow(run: RunFolder, log: _LogReader, lines: int | None) -> int:
    """Print the log as it grows, and a line whenever the run's job waits; returns the exit code."""
    said, ended = "", False
    doing()
    log.print_new(lines)
    while True:
        seen = look(run.folder)
        log.print_new()
        if seen.state == "queued" and str(seen.status) != said:
            said = str(seen.status)
            print(f"{run.folder}: job {seen.job} is {seen.status}", file=sys.stderr)
        # Two looks: between two legs, or two attempts, nobody may hold the run for a moment.
        if seen.state == "done" or (ended and seen.is_over):
            return EXIT_CODES.get(seen.state, STOPPED)
        ended = seen.is_over
        until = time.monotonic() + FOLLOW_SECONDS
        while time.monotonic() < until:
            time.sleep(READ_SECONDS)
            log.print_new()


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveOptions:
    """Flags of `runs rm`."""

    yes: bool = False
    """Do not ask."""


def remove(words: Sequence[str]) -> int:
    """Usage: runs rm RUN... [--yes]: removes runs with their checkpoints; asks first on a terminal."""
    positional, options = read_command(words, RemoveOptions, "runs rm")
    if not positional:
        raise UserError("runs rm: give the folders of runs, as in: runs rm runs/old (`runs` lists them)")
    runs = [RunFolder.open(place) for place in positional]
    for run in runs:
        if run.folder.is_symlink():
            raise UserError(f"rm: {run.folder} is a link; remove what it points to, or the link itself")
        if not (seen := look(run.folder)).is_over:
            raise UserError(f"rm: {run.folder} is {seen.state}: `runs cancel {run.folder}` ends it first")
    for run in runs:
        size = format_bytes(sum(p.stat().st_size for p in run.folder.rglob("*") if p.is_file()))
        if not options.yes and not _agreed(f"remove {run.folder} ({size})?"):
            print(f"{run.folder} stays", file=sys.stderr)
            continue
        with run.lock("launch"), explain_write_errors(run.folder):
            run.refuse_if_training()
            shutil.rmtree(run.folder)
        print(f"removed {run.folder} ({size})")
    return DONE


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"{question} Nobody can be asked here: say --yes")
    doing()
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
