"""Computes logged steps of a run again: in this process, or in worker processes under accelerate."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.core.package import TRAIN_SCRIPT
from isobatch.core.plan import Plan
from isobatch.launch.local.accelerate_launcher import launch_workers
from isobatch.launch.local.run_setup import open_run

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder


def redo_steps(run: RunFolder, plan: Plan, steps: int, owns_process: bool = True) -> list[dict[str, Any]]:
    """Redo `steps` steps from each starting point under another plan; a JSON object for each step.

    Raises RuntimeError where worker processes end without a result.
    """
    if plan.processes == 1:
        return _redo_here(run, plan, steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = {"run": str(run.folder.resolve()), "plan": plan.to_dict(), "steps": steps}
        atomic_files.write_json(folder / "task.json", task)
        code = launch_workers(
            plan, TRAIN_SCRIPT, ["--redo", str(folder)], folder, forward_signals=owns_process
        ).code
        if code != DONE or not (folder / "report.json").exists():
            sys.stderr.write((folder / "launcher.log").read_text(errors="replace")[-4000:])
            raise RuntimeError(f"the {plan.processes} processes that redid the steps ended with {code}")
        steps_redone: list[dict[str, Any]] = atomic_files.read_json(folder / "report.json")["steps"]
        return steps_redone


def _redo_here(run: RunFolder, plan: Plan, steps: int, folder: Path | None = None) -> list[dict[str, Any]]:
    """Redo the steps in this process group; with `folder` rank 0 writes them to report.json there."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from isobatch.engine.verification.replay import Replay

    replay = Replay(run, plan)
    rows = [
        {**dataclasses.asdict(r), "loss_difference": r.loss_difference, "norm_difference": r.norm_difference}
        for r in replay.steps(steps)
    ]
    if folder is not None and replay.world.is_main:
        atomic_files.write_json(folder / "report.json", {"steps": rows})
    replay.world.close()
    replay.world.exit_process(DONE)
    return rows


def redo_task_file(folder: Path) -> int:
    """In a worker process: redo the steps that task.json in `folder` asks for; writes report.json there."""
    task = atomic_files.read_json(folder / "task.json")
    _redo_here(open_run(task["run"]), Plan.from_dict(task["plan"]), task["steps"], folder)
    return DONE
