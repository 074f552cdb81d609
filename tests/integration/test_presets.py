"""A preset's values for the plan reach every process that trains, whatever starts the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from isobatch.tests.integration.helpers import ROOT, launch, plan_of, succeed

if TYPE_CHECKING:
    from pathlib import Path

TASK = f"{ROOT}/tests/tasks/preset.py:Line"
QUICK = ["--task", TASK, "--preset", "quick", "--steps", "2", "--device", "cpu"]


def test_auto_and_resume_follow_the_preset(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quick"
    # It makes the run and trains nothing, as there is no sbatch.
    launch("slurm", *QUICK, "--name", "quick", "--time", "1:00", "--submit", cwd=tmp_path, PATH="/nowhere")
    assert json.loads((run / "slurm/request.json").read_text())["plan"]["workers"] == 1
    done = succeed("resume", str(run), "--prefetch", "3", "--device", "cpu", cwd=tmp_path)
    assert "the preset quick, --precision 16-mixed: fp16 needs a GPU, so this is fp32" in done.stderr
    plan = plan_of(run)
    assert (plan["workers"], plan["prefetch"]) == (1, 3)
    assert plan["reasons"]["workers"] == "the preset quick asks for it"
    assert plan["reasons"]["prefetch"] == "you asked for it"
    succeed("auto", *QUICK, "--name", "own", "--again", "--workers", "0", cwd=tmp_path)
    assert (plan_of(run.with_name("own"))["workers"], plan_of(run.with_name("own"))["prefetch"]) == (0, 4)
