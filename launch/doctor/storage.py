"""Checks of what lies elsewhere: folders that runs are written to, really tried; the Hub; Slurm."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from isobatch.core.measures import format_bytes
from isobatch.engine.runs.slurm_queue import run_slurm
from isobatch.launch.clusters.slurm.client import is_usable
from isobatch.launch.doctor.check import Check, broken, ok, warning

GB = 10**9
FULL_BYTES, SCARCE_BYTES = GB // 2, 5 * GB
PREFIX = ".isobatch-doctor-"
ELSEWHERE = "choose a folder on another disk ({})"
ASK_SECONDS = 8.0


def check_folder(name: str, folder: Path, flag: str) -> list[Check]:
    """Lines on a folder that may not be there yet. `flag`: what names another one."""
    place, elsewhere = existing_parent(folder), ELSEWHERE.format(flag)
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=PREFIX, ignore_cleanup_errors=True) as made:
            return [
                check_space(name, folder, shutil.disk_usage(place), elsewhere),
                check_locks(name, Path(made), elsewhere),
            ]
    except OSError as error:
        if "No space" in str(error):
            return [broken(name, f"{place}: the disk is full", f"df -h {place}; make some; {elsewhere}")]
        return [broken(name, f"{place}: {error.strerror or error}", f"chmod u+w {place}, or {elsewhere}")]


def existing_parent(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = folder.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def check_space(name: str, folder: Path, usage: Any, elsewhere: str) -> Check:
    """`usage`: of shutil.disk_usage."""
    text = f"{folder}: {format_bytes(usage.free)} are free"
    if usage.free >= SCARCE_BYTES:
        return ok(f"{name} space", text)
    say = broken if usage.free < FULL_BYTES else warning
    return say(f"{name} space", text, f"du -sh {folder}/* shows what is large; {elsewhere}")


def check_locks(name: str, folder: Path, elsewhere: str) -> Check:
    """Whether a lock that is held is refused to another: it keeps two processes from training one run."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / "lock", timeout=0), FileLock(folder / "lock", timeout=0):
            problem = "a lock that is held is given to another"
    except Timeout:
        return ok(f"{name} locks", "a lock that is held is refused to others")
    except (OSError, NotImplementedError) as error:
        problem = str(error)
    return broken(f"{name} locks", f"{problem}; two processes could train one run", elsewhere)


def check_hub(reachable: bool) -> Check:
    """`reachable`: whether the Hub, or the proxy before it, accepts a connection. Without it is no fault."""
    if reachable:
        return ok("Hub", "accepts connections")
    return ok("Hub", "not reachable (HTTPS_PROXY?): local files and what was downloaded are used")


def check_slurm() -> Check:
    """Its commands, its controller and its nodes. No Slurm is no fault."""
    if shutil.which("sinfo") is None and shutil.which("sbatch") is None:
        return ok("Slurm", "none here")
    asked = run_slurm("sinfo", "-h", "-N", "-o", "%N %T", seconds=ASK_SECONDS)
    if asked.no_cluster:
        return ok("Slurm", "its commands are installed, and no cluster is configured")
    if asked.code:
        remedy = "scontrol ping; sudo systemctl restart munge; ask who runs the cluster"
        return broken("Slurm", f"does not answer: {asked.error}", remedy)
    states = dict(line.split()[:2] for line in asked.out.splitlines() if len(line.split()) > 1)
    usable = [name for name, state in states.items() if is_usable(state)]
    if not usable:
        text = f"none of its {len(states)} nodes can start a job now"
        return warning("Slurm", text, "sinfo -R says why; jobs wait until then")
    return ok("Slurm", f"answers; {len(usable)} of {len(states)} nodes can run jobs")
