"""Checks of folders that runs are written to: space, speed; locks, renames and memory maps, really tried."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes
from isobatch.launch.doctor.check import Check, broken, ok, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GB = 10**9
FULL_BYTES, SCARCE_BYTES = GB // 2, 5 * GB
FEWEST_INODES = 1000
WRITTEN_BYTES = 32 << 20
SLOW_RATE = 30e6
"""Bytes/s of synced writes under which checkpoints hold up training."""
CLOCK_SECONDS = 5.0
ASK_FOR_LOCK = """
import sys
from filelock import FileLock, Timeout
try:
    FileLock(sys.argv[1], timeout=0).acquire()
    print("got")
except Timeout:
    print("refused")
"""
PREFIX = ".isobatch-doctor-"
ELSEWHERE = "choose a folder on another disk ({})"


def check_folder(name: str, folder: Path, flag: str) -> list[Check]:
    """Lines on a folder that may not be there yet. `flag`: what names another one."""
    place = existing_parent(folder)
    elsewhere = ELSEWHERE.format(flag)
    try:
        with _scratch(place) as scratch:
            return [
                check_space(name, folder, shutil.disk_usage(place), _free_inodes(place), elsewhere),
                *([check_speed(name, write_rate(scratch), elsewhere)]),
                check_semantics(name, scratch, elsewhere),
                *check_clock(name, scratch),
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


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=place, prefix=PREFIX, ignore_cleanup_errors=True) as made:
        yield Path(made)


def check_space(name: str, folder: Path, usage: Any, inodes: int | None, elsewhere: str) -> Check:
    """`usage`: of shutil.disk_usage; `inodes`: how many files may still be made, None where unlimited."""
    text = f"{folder}: {format_bytes(usage.free)} are free"
    if usage.free < FULL_BYTES:
        return broken(f"{name} space", text, f"du -sh {folder}/* shows what is large; {elsewhere}")
    if inodes is not None and inodes < FEWEST_INODES:
        few = f"{folder}: {inodes} more files fit (inodes)"
        return broken(f"{name} space", few, f"remove small files; {elsewhere}")
    if usage.free < SCARCE_BYTES:
        return warning(f"{name} space", text, f"du -sh {folder}/* shows what is large; {elsewhere}")
    return ok(f"{name} space", text)


def _free_inodes(place: Path) -> int | None:
    status = os.statvfs(place)
    return status.f_favail if status.f_files else None


def write_rate(folder: Path, size: int = WRITTEN_BYTES) -> float:
    """Bytes/s of writing `size` bytes and syncing them, as a checkpoint is."""
    block = os.urandom(1 << 20)
    began = time.perf_counter()
    with (folder / "speed").open("wb") as stream:
        for _ in range(size >> 20):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    return size / (time.perf_counter() - began)


def check_speed(name: str, rate: float, elsewhere: str) -> Check:
    """`rate` in bytes/s."""
    text = f"writes {format_bytes(rate)} a second"
    if rate < SLOW_RATE:
        return warning(f"{name} speed", f"{text}: checkpoints take long", elsewhere)
    return ok(f"{name} speed", text)


def check_semantics(
    name: str, folder: Path, elsewhere: str, ask_for_lock: Callable[[Path], str] | None = None
) -> Check:
    """Whether locks hold between processes, a rename replaces, and a file can be mapped into memory."""
    name = f"{name} files"
    tries = (
        ("locks", _try_lock(folder, ask_for_lock or _ask_in_child), "two processes could train one run"),
        ("rename", _try_rename(folder), "a killed run may leave half a file"),
        ("mmap", _try_mmap(folder), "prepared data and weights are read by memory maps"),
    )
    for what, problem, harm in tries:
        if problem:
            return broken(name, f"{what}: {problem}; {harm}", elsewhere)
    return ok(name, "locks, renames and memory maps work")


def _try_lock(folder: Path, ask: Callable[[Path], str]) -> str:
    """What is wrong with locks; empty where another process is refused a lock that this one holds."""
    from filelock import FileLock

    path = folder / "lock"
    try:
        with FileLock(path, timeout=0):
            answer = ask(path)
    except (OSError, NotImplementedError) as error:
        return f"this file system has none ({error})"
    return "" if answer == "refused" else f"another process {answer or 'fails'} a lock that is held"


def _ask_in_child(path: Path) -> str:
    words = [sys.executable, "-c", ASK_FOR_LOCK, str(path)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=30).stdout.strip()


def _try_rename(folder: Path) -> str:
    old, new = folder / "old", folder / "new"
    try:
        old.write_text("old")
        new.write_text("new")
        new.replace(old)
        return "" if old.read_text() == "new" and not new.exists() else "does not replace a file"
    except OSError as error:
        return str(error)


def _try_mmap(folder: Path) -> str:
    path = folder / "map"
    try:
        path.write_bytes(b"isobatch" * 1024)
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return "" if content[-8:] == b"isobatch" else "shows other bytes than were written"
    except (OSError, ValueError) as error:
        return str(error)


def check_clock(name: str, folder: Path, now: Callable[[], float] = time.time) -> list[Check]:
    """A line where the file server's clock is not this machine's."""
    path = folder / "clock"
    path.write_text("now")
    ahead = path.stat().st_mtime - now()
    if abs(ahead) < CLOCK_SECONDS:
        return []
    text = f"the file server's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this one's"
    return [warning(f"{name} clock", text, "timedatectl set-ntp true, on both (or ask who runs the machine)")]


def check_downloads(hub: Path) -> Check:
    """The Hub's cache folder: downloads that were cut short. `hub` is the folder of repositories."""
    cut = list(hub.glob("*/blobs/*.incomplete")) if hub.is_dir() else []
    if cut:
        size = sum(path.stat().st_size for path in cut)
        text = f"{len(cut)} downloads were cut short, {format_bytes(size)} in {hub}"
        return warning("Hub cache", text, f"rm {hub}/*/blobs/*.incomplete (none while one is under way)")
    return ok("Hub cache", f"{hub}" if hub.is_dir() else f"{hub}: nothing was downloaded yet")
