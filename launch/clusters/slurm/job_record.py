"""RUN/slurm/job.json: which Slurm job a run is in, and what the legs of a job tell each other.

`engine/runs/slurm_queue.py` asks Slurm about that job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder


def read(run: RunFolder) -> dict[str, Any]:
    path = run.folder / "slurm" / "job.json"
    return atomic_files.read_json(path) if path.exists() else {}


def update(run: RunFolder, **facts: Any) -> None:
    """Update job.json; entries of another job are dropped."""
    before = read(run)
    if "job" in facts and before.get("job") != facts["job"]:
        before = {}
    (run.folder / "slurm").mkdir(exist_ok=True)
    atomic_files.write_json(run.folder / "slurm" / "job.json", {**before, **facts})
