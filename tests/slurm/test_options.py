"""Options of `slurm` that only a real Slurm answers: no environment, words for srun, one e-mail a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import rows, summary
from isobatch.tests.slurm.nodes import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.tests.slurm.nodes import Cluster

pytestmark = pytest.mark.slurm


def test_a_job_without_its_submitters_environment_trains_in_two_legs_and_sends_one_mail(
    cluster: Cluster, tmp_path: Path
) -> None:
    flags = ["--nodes", "2", "--steps", "60", "--eval-every", "1000"]
    mail = "--mail-user=me@example.org --mail-type=END,FAIL"
    words = ["--sbatch", f"--export=NONE {mail}", "--srun", "--cpu-bind=none --slurmd-debug=error"]
    words += ["--max-legs", "2"]
    job = cluster.submit("Slow", *flags, *words, cwd=tmp_path)
    job.reach(20)
    cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.finish(90)
    assert int(job.shown("Restarts")) == 1
    assert summary(job.run)["world_size"] == 2
    assert len([r for r in rows(job.run) if "lr" in r]) == 60
    mails = cluster.folder / "mails"
    wait_for(lambda: mails.exists() and f"Job_id={job.number} " in mails.read_text(), 20)
    sent = [line for line in mails.read_text().splitlines() if f"Job_id={job.number} " in line]
    assert len(sent) == 1, sent
    assert "COMPLETED" in sent[0]
    assert sent[0].endswith("me@example.org")
