"""Redo steps of a run in a world of the caller's: in this process, or in children under accelerate."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.core.package import TRAIN_SCRIPT
from isobatch.core.plan import Plan
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.accelerate_launcher import launch_workers


def redo_steps(run: RunFolder, plan: Plan, steps: int, owns_process: bool = True) -> list[dict[str, Any]]:
    """The steps done again under a plan, in this process or in as many as it says; a JSON object each."""
    if plan.processes == 1:
        return _redone(run, plan, steps)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        task = {"run": str(run.folder.resolve()), "plan": plan.to_dict(), "steps": steps}
        atomic_files.write_json(place / "task.json", task)
        code = launch_workers(
            plan, TRAIN_SCRIPT, ["--redo", str(place)], place, forward_signals=owns_process
        ).code
        if code != DONE or not (place / "report.json").exists():
            sys.stderr.write((place / "launcher.log").read_text(errors="replace")[-4000:])
            raise RuntimeError(f"the {plan.processes} processes that redid the steps ended with {code}")
        steps_redone: list[dict[str, Any]] = atomic_files.read_json(place / "report.json")["steps"]
        return steps_redone


def _redone(run: RunFolder, plan: Plan, steps: int, place: Path | None = None) -> list[dict[str, Any]]:
    """The steps done again in this world, as JSON, in `place` where the processes end with it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from isobatch.engine.verification.replay import Replay

    redo = Replay(run, plan)
    found = [
        {**dataclasses.asdict(r), "loss_difference": r.loss_difference, "norm_difference": r.norm_difference}
        for r in redo.steps(steps)
    ]
    if place is not None and redo.world.is_main:
        atomic_files.write_json(place / "report.json", {"steps": found})
    redo.world.close()
    redo.world.exit_process(DONE)
    return found


def redo_as_told(folder: Path) -> int:
    """In a child: the steps that task.json in `folder` names; the answer is report.json beside it."""
    task = atomic_files.read_json(folder / "task.json")
    _redone(RunFolder.open(task["run"]), Plan.from_dict(task["plan"]), task["steps"], folder)
    return DONE
