"""What is checked of this machine: most lines by a look, those of `probes_for` by processes that compute."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.atomic_files import nearest_place
from isobatch.core.measures import format_bytes
from isobatch.core.package import cache_folder, table_beside
from isobatch.engine.consent import STATE, state_folder
from isobatch.engine.machine.detect import detect
from isobatch.engine.machine.hardware import Hardware, gpu_remarks
from isobatch.launch.doctor.probes import Check, Probe, broken, ok, ok_if, try_out, warning
from isobatch.launch.local.interfaces import loopback_interfaces

GB = 10**9
FULL_BYTES, SCARCE_BYTES, SMALLEST_SHM = GB // 2, 5 * GB, GB
PIP = f"{sys.executable} -m pip install" if find_spec("pip") else f"uv pip install --python {sys.executable}"
NEW_TORCH = f"{PIP} --upgrade torch, with the --index-url that pytorch.org names for this machine"
REMEDIES = table_beside(__file__, "remedies")
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_machine(out: Path) -> Iterator[Check]:
    """Every check, as soon as it is known. `out`: the folder of runs."""
    os.environ.update({**loopback_interfaces(), **os.environ})  # as `auto` starts its processes
    hardware, load = detect(), os.getloadavg()[0] / (os.cpu_count() or 1)
    probes = probes_for(hardware)
    with ThreadPoolExecutor(len(probes) or 1) as pool:
        tried = pool.map(partial(try_out, load=load), probes)
        required = importlib.metadata.requires("isobatch") if installed_version("isobatch") else None
        yield from (
            check_versions(required or ()) if installed_version("torch") else [warning(*REMEDIES["no_torch"])]
        )
        yield check_variables(os.environ)
        yield check_cores(hardware.cpus, os.cpu_count() or 1)
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None)
        text = compiler or "none, and --compile on needs one"
        yield ok_if(compiler is not None, "C++ compiler", text, "apt install g++, or --compile off")
        if sys.platform == "linux":
            yield check_shm(Path("/dev/shm"))
        yield from check_folder("runs", out, "--out")
        yield from check_folder("prepared data", cache_folder(), "ISOBATCH_CACHE")
        yield check_access("agreed code", state_folder(), os.W_OK, STATE)
        cache = hub_cache.hub_folder()  # may be read-only
        flag = next(filter(os.environ.get, ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")), "HF_HOME")
        yield check_access("hub cache", cache, os.R_OK, flag)
        reached = hub_cache.is_reachable()
        yield ok("Hub", "answers" if reached else "not reachable (HTTPS_PROXY?): local files serve")
        yield from check_gpus(hardware)
        yield from tried


def probes_for(hardware: Hardware) -> list[Probe]:
    """What is tried: torch, sums over processes, and libraries that are here and often broken."""
    if not installed_version("torch"):
        return []
    libraries = [name for name, row in REMEDIES["probes"].items() if row["function"] == "imported"]
    found = [probe(name) for name in ("torch", "gloo", *filter(installed_version, libraries))]
    usable = [n for n, gpu in enumerate(hardware.gpus) if gpu.supported] if hardware.kind == "cuda" else []
    if usable:
        found.append(probe("nccl", processes=len(usable)))
    return found + [probe(f"GPU {number}", device=f"cuda:{number}") for number in usable]


def probe(name: str, **arguments: Any) -> Probe:
    """That of remedies.toml, with further arguments; `GPU 1` is one of GPU."""
    row = REMEDIES["probes"][name.split()[0]]
    remedy = row["remedy"].format(reinstall=f"{PIP} --force-reinstall", new_torch=NEW_TORCH)
    return Probe(name, **{**row, "remedy": remedy, "arguments": row.get("arguments", {}) | arguments})


def check_gpus(hardware: Hardware) -> list[Check]:
    """A line for each GPU that torch cannot use, where there is none, and on what slows the others, which are
    tried.
    """
    if not hardware.gpus or hardware.kind == "mps":
        return [ok("GPU", "none: the processor trains" if not hardware.gpus else "that of Apple's chip")]
    remedy = f"{NEW_TORCH}; or install a newer driver (nvidia.com/drivers) and restart"
    unusable = [
        broken(f"GPU {n}", f"{gpu.name}: {gpu.why_unusable or 'this torch has no kernels for it'}", remedy)
        for n, gpu in enumerate(hardware.gpus)
        if not gpu.supported
    ]
    return unusable + [warning(*remark) for remark in gpu_remarks(hardware)]


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(required: Iterable[str]) -> list[Check]:
    """A line for each requirement that is not met; one line where all are. None are known of a clone that is
    not installed.
    """
    from packaging.requirements import Requirement

    wrong, met = [], 0
    for need in map(Requirement, required):
        version, extra = installed_version(need.name), "extra" in str(need.marker)
        if not extra and need.marker and not need.marker.evaluate():
            continue
        met += version is not None
        if (extra and version is None) or (version and need.specifier.contains(version, prereleases=True)):
            continue
        say, here = warning if extra else broken, f"{version} is here" if version else "is not installed"
        wanted = f"{need.name}{need.specifier}"
        wrong.append(say(need.name, f"{here}; isobatch needs {wanted}", f'{PIP} "{wanted}"'))
    if not (wrong or met):
        return [warning("versions", "not compared: isobatch is not installed here", f"{PIP} -e .")]
    return wrong or [ok("versions", f"all {met} packages, those of extras too, are in versions that fit")]


def check_variables(env: Mapping[str, str]) -> Check:
    """Whether this shell still has variables of a launcher, by which a run would wait for other ranks, or
    one that hides every GPU.
    """
    if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and any(Path("/dev").glob("nvidia[0-9]*")):
        name = "CUDA_VISIBLE_DEVICES"
        return warning(name, f"{name} hides the GPUs of this machine", f"unset {name}")
    left = [name for name in WORLD if name in env]
    if not left or "TORCHELASTIC_RUN_ID" in env or "SLURM_PROCID" in env:
        return ok("environment", "no variable stands in the way")
    say = broken if "RANK" in env and env.get("WORLD_SIZE", "1") != "1" else warning
    text = f"{', '.join(left)} left in this shell: a run would wait for other ranks"
    return say(left[0], text, f"unset {' '.join(left)}")


def check_cores(usable: int, total: int) -> Check:
    """`usable`: within affinity, quota and Slurm's allocation; `total`: that the machine has."""
    remedy = "srun --cpus-per-task=8, docker run --cpus=8, or leave taskset away"
    return ok_if(usable > 1 or total == 1, "cores", f"this shell may use {usable} of {total}", remedy)


def check_shm(folder: Path) -> Check:
    """/dev/shm, through which loader processes and NCCL exchange data."""
    free = shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
    text = f"{format_bytes(free)} are free for loader processes and NCCL"
    remedy = "docker run --shm-size=8g (or --ipc=host), or: sudo mount -o remount,size=8g /dev/shm"
    return ok_if(free >= SMALLEST_SHM, "/dev/shm", text, remedy)


def check_folder(name: str, folder: Path, flag: str) -> list[Check]:
    """Lines on a folder that may not be there yet. `flag`: what names another one."""
    if (access := check_access(name, folder, os.W_OK, flag)).remedy:
        return [access]
    place = nearest_place(folder.expanduser().absolute())
    elsewhere = f"choose a folder on another disk ({flag})"
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".isobatch-doctor-") as made:
            return [check_space(name, place, elsewhere), check_locks(name, made, elsewhere)]
    except OSError as error:
        return [broken(name, f"{place}: {error.strerror}", f"df -h {place}; {elsewhere}")]


def check_access(name: str, folder: Path, mode: int, flag: str) -> Check:
    """A line on whether this user has `mode` in a folder, or could make it.
    One that is not there yet needs it in the folder above. `flag`: what names another one.
    """
    path = folder.expanduser().absolute()
    place = nearest_place(path)
    if place.is_dir() and os.access(place, (mode if mode == os.W_OK or place == path else 0) | os.X_OK):
        return ok(name, str(folder))
    why = "is closed to this user" if place.is_dir() else "is a file, not a folder"
    own = f"chmod u+rwx {place}, or " if place.is_dir() and place.stat().st_uid == os.getuid() else ""
    missing = "is not there, and" if os.access(place, os.X_OK) else "cannot be reached:"
    text = f"{path} {why}" if place == path else f"{path} {missing} {place} {why}"
    return broken(name, text, f"{own}set {flag} to a folder of yours")


def check_space(name: str, folder: Path, elsewhere: str) -> Check:
    """A line on what is free on the folder's disk."""
    free = shutil.disk_usage(folder).free
    say = broken if free < FULL_BYTES else warning
    name, text = f"{name} space", f"{folder}: {format_bytes(free)} are free"
    if free >= SCARCE_BYTES:
        return ok(name, text)
    return say(name, text, f"du -sh {folder}/* shows what is large; {elsewhere}")


def check_locks(name: str, folder: str, elsewhere: str) -> Check:
    """Whether a lock that is held is refused to another: it keeps two processes from training one run."""
    from filelock import FileLock, Timeout

    problem = "a lock that is held is given to another"
    try:
        with FileLock(f"{folder}/lock", timeout=0), FileLock(f"{folder}/lock", timeout=0):
            pass
    except Timeout:
        return ok(f"{name} locks", "a lock that is held is refused to others")
    except (OSError, NotImplementedError) as error:
        problem = str(error)
    return broken(f"{name} locks", f"{problem}; two processes could train one run", elsewhere)
