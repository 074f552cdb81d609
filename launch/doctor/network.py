"""Checks of what talks: ports of this machine, sums over processes, the Hub; Slurm and its nodes."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.hub_cache import OFFLINE, TRUE
from isobatch.core.measures import format_bytes
from isobatch.engine.machine.detect_nvidia import positive
from isobatch.engine.runs.slurm_queue import run_slurm
from isobatch.launch.clusters.slurm.client import is_usable
from isobatch.launch.doctor.check import Check, broken, ok, warning
from isobatch.launch.doctor.storage import PREFIX, existing_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from isobatch.launch.doctor.children import Answer

LOOPBACK = "127.0.0.1"
SLOW_NCCL = 1e9
"""Bytes/s between GPUs of a machine; PCIe without peer-to-peer copies has about 5e9."""
PROXIES = ("HTTPS_PROXY", "https_proxy", "HF_ENDPOINT")
ASK_SECONDS = 8.0
NODES_SECONDS = 12.0
APART_SECONDS = 5.0
"""srun starts its tasks within a second or two of each other."""
COMMANDS = ("sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")


def check_ports(listen: Callable[[], socket.socket] | None = None) -> Check:
    """Whether a process can listen on the loopback address and be reached there."""
    try:
        server = (listen or (lambda: socket.create_server((LOOPBACK, 0))))()
        with server, socket.create_connection(server.getsockname()[:2], 2.0):
            return ok("ports", f"processes of this machine reach each other at {LOOPBACK}")
    except OSError as error:
        text = f"processes of this machine cannot talk at {LOOPBACK}: {error}"
        return broken("ports", text, "ip link set lo up; in a sandbox, allow its own network")


def check_all_reduce(backend: str, answer: Answer) -> Check:
    """Of `probes.all_reduce`."""
    if answer.error:
        remedy = {
            "gloo": "unset GLOO_SOCKET_IFNAME; a firewall must let this machine reach itself",
            "nccl": "NCCL_DEBUG=INFO isobatch doctor says why; try NCCL_P2P_DISABLE=1, and a larger /dev/shm",
        }[backend]
        return broken(backend, f"a sum over processes fails: {answer.error}", remedy)
    processes, rate = answer.found["processes"], answer.found["bytes_per_second"]
    text = f"{processes} processes sum {format_bytes(rate)} a second"
    if backend == "nccl" and processes > 1 and rate < SLOW_NCCL:
        remedy = "nvidia-smi topo -m shows the links; unset NCCL_P2P_DISABLE; disable ACS in the BIOS"
        return warning(backend, f"{text}: too slow for the links of one machine", remedy)
    return ok(backend, text)


def check_hub(reachable: bool, env: Mapping[str, str] = os.environ) -> Check:
    """`reachable`: whether the Hub, or the proxy before it, accepts a connection. Without it is no fault."""
    if offline := [name for name in OFFLINE if env.get(name, "").upper() in TRUE]:
        return ok("Hub", f"not asked: {offline[0]} is set")
    if reachable:
        return ok("Hub", "accepts connections")
    if given := next((name for name in PROXIES if env.get(name)), None):
        text = f"{given}={env[given]} accepts no connection"
        return warning("Hub", text, f"unset {given}; HF_HUB_OFFLINE=1 uses the cache alone")
    return ok("Hub", "not reachable: local files and what was downloaded are used")


def check_slurm() -> Check:
    """Its commands, its controller and its nodes. No Slurm is no fault."""
    if shutil.which("sinfo") is None and shutil.which("sbatch") is None:
        return ok("Slurm", "none here")
    asked = run_slurm("sinfo", "-h", "-N", "-o", "%N %T", seconds=ASK_SECONDS)
    if asked.no_cluster:
        return ok("Slurm", "its commands are installed, and no cluster is configured")
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        remedy = "install the package of Slurm's client commands (slurm-client)"
        return broken("Slurm", f"{', '.join(missing)} are missing", remedy)
    if "munge" in asked.error.lower():
        return broken("Slurm", asked.error, "sudo systemctl restart munge; its key must be the cluster's")
    if asked.code:
        return broken("Slurm", f"does not answer: {asked.error}", "scontrol ping; ask who runs the cluster")
    states = dict(line.split()[:2] for line in asked.out.splitlines() if len(line.split()) > 1)
    usable = [name for name, state in states.items() if is_usable(state)]
    if not usable:
        text = f"none of its {len(states)} nodes can start a job now"
        return warning("Slurm", text, "sinfo -R says why; jobs wait until then")
    return ok("Slurm", f"answers; {len(usable)} of {len(states)} nodes can run jobs")


def check_nodes(env: Mapping[str, str], runs: Path) -> list[Check]:
    """In an allocation of several nodes: whether all see the folder of runs, and have the same time."""
    count = int(positive(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES")) or 1)
    if count < 2 or shutil.which("srun") is None:
        return []
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=existing_parent(runs)) as folder:
        (Path(folder) / "seen").write_text("yes")
        script = 'echo "$(hostname) $(date +%s.%N) $(cat "$1/seen" 2>/dev/null)"'
        words = ["--overlap", "--ntasks-per-node=1", f"--nodes={count}", "sh", "-c", script, "sh", folder]
        asked = run_slurm("srun", *words, seconds=NODES_SECONDS)
    rows = [line.split() for line in asked.out.splitlines()]
    times = {row[0]: float(row[1]) for row in rows if len(row) > 1}
    if asked.code or len(times) < count:
        text = f"{len(times)} of {count} nodes answer: {asked.error}"
        return [broken("nodes", text, "squeue -j $SLURM_JOB_ID; leave out the node with --exclude")]
    return [_clocks(times), _shared(runs, [row[0] for row in rows if row[2:] != ["yes"]])]


def _clocks(times: Mapping[str, float]) -> Check:
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    apart = times[last] - times[first]
    if apart > APART_SECONDS:
        text = f"{last} is {apart:.0f} s ahead of {first}"
        return warning("clocks of nodes", text, "sudo timedatectl set-ntp true, on both nodes")
    return ok("clocks of nodes", f"within {apart:.1f} s on {len(times)} nodes")


def _shared(runs: Path, blind: list[str]) -> Check:
    if blind:
        text = f"{runs} is not seen by {', '.join(blind)}"
        return broken("shared folder", text, "choose --out on the file system that all nodes mount")
    return ok("shared folder", f"all nodes see {runs}")
