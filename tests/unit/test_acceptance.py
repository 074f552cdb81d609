"""Tests of what Slurm would not start: it is said before it is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.launch.clusters.slurm import acceptance, command
from isobatch.launch.clusters.slurm.sbatch_script import JobScript
from isobatch.tests.unit.fake_slurm import AWAY, NO_CLUSTER, Say, Slurm, queued

LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"
NODES = "printf 'n1|debug|debug*|2|(null)|idle|1:00:00|up\\nn2|debug|debug*|2|gpu:h100:4|%s|1:00:00|up\\n'"
REFUSED = 'echo "allocation failure: %s" >&2; exit 1'
UNAVAILABLE = "Requested node configuration is not available"
NOWHERE = "Invalid partition name specified"
NOBODY = "Invalid account or account/partition combination specified"


def job_script(**changes: object) -> JobScript:
    folder = Path("/shared/r")
    values: dict[str, object] = {"name": "r", "runs": {0: folder}, "folder": folder, "start_folder": folder}
    values |= {"nodes": 1, "seconds": 300, "lead": 45, "cpus": 2}
    return JobScript(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asks", "error", "says"),
    [
        ({"nodes": 5}, UNAVAILABLE, "--nodes 5: partition debug has 2"),
        ({"cpus": 64}, UNAVAILABLE, "--cpus-per-task 64: partition debug has 1 node(s) with at most 2"),
        ({"gpus": 4, "nodes": 2}, UNAVAILABLE, "--gpus-per-node 4: partition debug has 2 node(s) with at"),
        ({"seconds": 7200}, "Requested time limit is invalid", "--time 02:00:00: Requested time limit"),
        ({"seconds": 7200}, "", "--time 02:00:00: partition debug allows 01:00:00"),
        ({"extra_options": (("partition", "x"),)}, NOWHERE, f"--partition x: {NOWHERE}; there are debug"),
        ({"extra_options": (("qos", "no"),)}, "Invalid qos specification", "--qos no: Invalid qos"),
        ({}, NOBODY, f"--account: {NOBODY}"),
        ({"raw_options": ("-Anobody",)}, NOBODY, f"--account: {NOBODY}"),
        ({}, UNAVAILABLE, f"Slurm refuses the job: {UNAVAILABLE}"),
    ],
)
def test_what_slurm_refuses_names_the_flag(asks: dict[str, Any], error: str, says: str, slurm: Slurm) -> None:
    slurm(sbatch=REFUSED % error if error else "exit 0", sinfo=NODES % "idle")
    with pytest.raises(UserError) as refused:
        acceptance.check(job_script(**asks), submit=True)
    assert str(refused.value).startswith(says)


def test_what_slurm_takes_has_no_objection(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(sbatch="exit 0", sinfo=NODES % "idle")
    acceptance.check(job_script(), submit=True)
    acceptance.check(job_script(seconds=7200, extra_options=(("qos", "long"),)), submit=True)
    slurm(sbatch=NO_CLUSTER)
    acceptance.check(job_script(), submit=True)
    assert not capsys.readouterr().err
    slurm(sbatch=REFUSED % UNAVAILABLE, sinfo=NODES % "down*")
    acceptance.check(job_script(nodes=2), submit=True)  # it waits until the node is back
    assert "the job will wait: n2 cannot be used now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("squeue", "remark"),
    [
        (queued("7", "RUNNING"), ""),
        (queued("7", "PENDING", "AssocMaxJobsLimit"), "job 7 waits: AssocMaxJobsLimit"),
        (queued("7", "PENDING", "PartitionTimeLimit"), "job 7 will not start by itself (PartitionTimeLimit)"),
        (queued("7", "PENDING", "QOSMaxWallDurationPerJobLimit"), "job 7 will not start by itself (QOSMaxW"),
        (AWAY, ""),
    ],
)
def test_why_a_new_job_waits(squeue: str, remark: str, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(acceptance, "WATCH_EVERY_SECONDS", 0.01)
    slurm(squeue=squeue)
    found = acceptance.waiting_remark(["7"])
    assert found.startswith(remark)
    assert bool(found) == bool(remark)


def test_nothing_is_made_where_slurm_would_not_take_it(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--task", LINE, "--cpu", "--time", "5", "--nodes", "5", "--name", "r"]
    for sbatch, says in ((REFUSED % UNAVAILABLE, "--nodes 5"), (AWAY, "does not answer .* nothing was sub")):
        slurm(sbatch=sbatch, sinfo=NODES % "idle")
        with pytest.raises(UserError, match=says):
            command.slurm([*words, "--submit"])
    assert not (tmp_path / "runs").exists()
    slurm(sbatch=REFUSED % UNAVAILABLE)
    code, out, err = say(command.slurm, *words)
    assert (code, out) == (0, (tmp_path / "runs" / "r" / "slurm" / "job.sh").read_text())
    assert "--nodes 5: partition debug has 2" in err
