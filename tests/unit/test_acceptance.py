"""Tests of launch/clusters/slurm/acceptance.py: what Slurm would not start is said before it is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.engine.runs import slurm_queue
from isobatch.launch.clusters.slurm import acceptance, command
from isobatch.launch.clusters.slurm.sbatch_script import JobScript
from isobatch.tests.unit.fake_slurm import AWAY, NO_CLUSTER, Say, Slurm, queued

LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"
NODES = (
    "printf 'n1|debug|debug*|2|4000|(null)|idle|1:00:00|up\\n"
    "n2|debug|debug*|2|4000|gpu:h100:4|%s|1:00:00|up\\n'"
)
REFUSED = 'echo "allocation failure: %s" >&2; exit 1'
UNAVAILABLE = "Requested node configuration is not available"


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
        ({"extra_options": (("mem", "1T"),)}, UNAVAILABLE, "--mem 1T: partition debug has 1 node(s) with"),
        (
            {"seconds": 7200},
            "Requested time limit is invalid",
            "--time 02:00:00: Requested time limit is inv",
        ),
        ({"seconds": 7200}, "", "--time 02:00:00: partition debug allows 01:00:00; a job requeues itself"),
        (
            {"extra_options": (("partition", "nowhere"),)},
            "Invalid partition name specified",
            "--partition nowhere: Invalid partition name specified; there are debug",
        ),
        ({"extra_options": (("qos", "no"),)}, "Invalid qos specification", "--qos no: Invalid qos spec"),
        ({}, "Invalid account or account/partition combination specified", "--account: Invalid account or"),
        ({"raw_options": ("--account=me",)}, "Invalid account or account/partition", "--account me: Invalid"),
        ({"raw_options": ("-Anobody",)}, "Invalid account or account/partition", "--account nobody: Invalid"),
        ({"raw_options": ("-q", "no", "-H")}, "Invalid qos specification", "--qos no: Invalid qos"),
        ({}, UNAVAILABLE, f"Slurm refuses the job: {UNAVAILABLE}"),
    ],
)
def test_what_slurm_refuses_names_the_flag(asks: dict[str, Any], error: str, says: str, slurm: Slurm) -> None:
    names = '[ "$3" = %R ] && echo debug && exit'
    slurm(sbatch=REFUSED % error if error else "exit 0", sinfo=f"{names}; {NODES % 'idle'}")
    objection = acceptance.objection_to(job_script(**asks))
    assert objection is not None
    assert objection.text.startswith(says)
    assert not objection.passes


def test_nodes_that_are_down_are_waited_for(slurm: Slurm) -> None:
    slurm(sbatch=REFUSED % UNAVAILABLE, sinfo=NODES % "down*")
    objection = acceptance.objection_to(job_script(nodes=2))
    assert objection == acceptance.Objection(
        f"the job will wait: n2 cannot be used now ({UNAVAILABLE})", passes=True
    )


def test_what_slurm_takes_has_no_objection(slurm: Slurm) -> None:
    slurm(sbatch="exit 0", sinfo=NODES % "idle")
    assert acceptance.objection_to(job_script()) is None
    assert acceptance.objection_to(job_script(seconds=7200, extra_options=(("qos", "long"),))) is None
    slurm(sbatch=NO_CLUSTER)
    assert acceptance.objection_to(job_script()) is None
    slurm(sbatch=AWAY)
    with pytest.raises(slurm_queue.SlurmSilentError, match="Slurm does not answer"):
        acceptance.objection_to(job_script())


@pytest.mark.parametrize(
    ("squeue", "remark"),
    [
        (queued("7", "RUNNING"), ""),
        (queued("7", "PENDING", "Priority"), "job 7 waits: Priority"),
        (queued("7", "PENDING", "AssocMaxJobsLimit"), "job 7 waits: AssocMaxJobsLimit"),
        (
            queued("7", "PENDING", "PartitionTimeLimit"),
            "job 7 will not start by itself (PartitionTimeLimit): --time is above the partition's limit;",
        ),
        (queued("7", "PENDING", "QOSMaxWallDurationPerJobLimit"), "job 7 will not start by itself (QOSMaxW"),
        (queued("7", "PENDING", "AssocMaxNodePerJobLimit"), "job 7 will not start by itself (AssocMaxNode"),
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
    slurm(sbatch=REFUSED % UNAVAILABLE, sinfo=NODES % "idle")
    with pytest.raises(UserError, match="--nodes 5: partition debug has 2"):
        command.slurm([*words, "--submit"])
    slurm(sbatch=AWAY)
    with pytest.raises(UserError, match=r"--submit: Slurm does not answer .*: nothing was submitted"):
        command.slurm([*words, "--submit"])
    assert not (tmp_path / "runs").exists()
    slurm(sbatch=REFUSED % UNAVAILABLE)
    code, out, err = say(command.slurm, *words)
    assert (code, out) == (0, (tmp_path / "runs" / "r" / "slurm" / "job.sh").read_text())
    assert "--nodes 5: partition debug has 2" in err


def test_processes_on_cpus_are_not_counted_by_gpu() -> None:
    for flags, says in (
        (["--cpu", "--processes", "3"], r"a multiple of --nodes 2$"),
        (
            ["--gpus-per-node", "2", "--processes", "6"],
            r"a multiple of --nodes 2, and at most 4, one per GPU$",
        ),
    ):
        with pytest.raises(UserError, match=says):
            command.slurm(["--task", LINE, "--time", "5", "--nodes", "2", *flags])
