"""Stand-ins for Slurm's commands: a few lines of bash each, first in PATH."""

from __future__ import annotations

from collections.abc import Callable

Slurm = Callable[..., None]
Say = Callable[..., tuple[int, str, str]]

AWAY = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1'
FORGOTTEN = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
NO_CLUSTER = 'echo "squeue: fatal: Could not establish a configuration source" >&2; exit 1'


def queued(job: str, state: str, reason: str = "None", restarts: int = 0) -> str:
    """A squeue that lists one job."""
    return f"printf '%-40s%-24s%-12s%-120s\\n' {job} {state} {restarts} '{reason}'"
