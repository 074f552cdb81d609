"""`runs logs`: what a run says, or a node of its Slurm job; with -f until the run ends, over all legs."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.errors import DONE, FAILED, STOPPED, UserError
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Positive
from isobatch.core.terminal.status import doing
from isobatch.launch.control.run_state import RunView, look, one_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from isobatch.engine.runs.run_folder import RunFolder

READ_SECONDS, LOOK_SECONDS = 0.5, 3.0
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
    node: str | None = None
    """The log of this node of the run's Slurm job."""


def logs(words: Sequence[str]) -> int:
    """Usage: runs logs RUN [-f] [--lines N] [--node NAME]

    With -f the exit code is the run's: 0 done, 3 failed, 75 stopped.
    """
    run, options = one_run(["--follow" if word == "-f" else word for word in words], LogsOptions, "runs logs")
    path = _node_log(run, options.node) if options.node else run.folder / "log.txt"
    if not options.follow:
        if not path.exists():
            print(_why_silent(run), file=sys.stderr)
        _LogReader(path).print_new(options.lines)
        return DONE
    return _follow(run, _LogReader(path), options.lines)


def _node_log(run: RunFolder, name: str) -> Path:
    folder = run.folder / "slurm"
    nodes = sorted(p.stem.removeprefix("node-") for p in folder.glob("node-*.log"))
    if name not in nodes:
        have = f"those of {', '.join(nodes)} do" if nodes else "no node has written one yet"
        raise UserError(f"--node {name}: {run.folder} has no log of that node; {have}")
    return folder / f"node-{name}.log"


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
            print(_job_line(seen), file=sys.stderr)
        # Two looks: between two legs, or two attempts, nobody may hold the run for a moment.
        if seen.state == "done" or (ended and seen.is_over):
            return EXIT_CODES.get(seen.state, STOPPED)
        ended = seen.is_over
        until = time.monotonic() + LOOK_SECONDS
        while time.monotonic() < until:
            time.sleep(READ_SECONDS)
            log.print_new()


def _job_line(seen: RunView) -> str:
    return f"{seen.run.folder}: job {seen.job} is {seen.status}"


def _why_silent(run: RunFolder) -> str:
    """Why a run has no log."""
    seen = look(run.folder)
    if seen.in_job:
        return _job_line(seen)
    if not seen.is_over:
        return f"{run.folder} has no log yet; -f waits for it"
    if output := _job_output(seen):
        return f"{run.folder} has no log; job {seen.job} said: {output}"
    return f"{run.folder} has no log: nobody trains it; `resume {run.folder}` does"


def _job_output(seen: RunView) -> str:
    """The last line that the run's job itself wrote; an array's tasks write beside the runs."""
    folder = seen.run.folder.resolve()
    paths = [folder / "slurm" / f"{seen.job}.out", *folder.parent.glob(f"slurm-*/{seen.job}.out")]
    lines = [
        line for path in paths if path.is_file() for line in path.read_text(errors="replace").split("\n")
    ]
    return printable(next((line for line in reversed(lines) if line.strip()), ""))
