"""Runs on a Ray of this machine: a killed worker, and a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from isobatch.core.package import own_command
from isobatch.tests.integration.helpers import RAGGED, ledger, rows, succeed, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HANGS = 1800
"""Seconds after which a run hangs: a limit for none that goes on, on however busy a machine."""
SAMPLES = 93
"""Of RAGGED."""
NODE: dict[str, Any] = {"object_store_memory": 80 << 20, "num_gpus": 0}
HEAD: dict[str, Any] = {**NODE, "include_dashboard": False}
ALONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_health_check_period_ms": "1000",
}


@pytest.fixture
def make_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a Ray whose nodes have so many cores each, which ends with the test."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")  # a second: not where tests are only collected
    for name, value in {**ALONE, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    made: list[Any] = []

    def make(cores: int, *others: int) -> Any:
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={**HEAD, "num_cpus": cores})
        made.append(cluster)
        for more in others:
            cluster.add_node(**NODE, num_cpus=more)
        return cluster

    yield make
    for cluster in made:
        cluster.shutdown()


class OnRay:
    """`isobatch ray --submit` of a run in two workers of one core each."""

    def __init__(self, folder: Path, cluster: Any, *words: str) -> None:
        self.folder, self.run = folder, folder / "runs" / "on-ray"
        flags = ["--task", RAGGED, "--cpu", "--ray-workers", "2", "--name", "on-ray", "--ledger"]
        flags += ["--save-every", "20", "--keep", "9", "--eval-every", "1000", *words]
        self.process = subprocess.Popen(
            own_command("ray", *flags, "--address", cluster.address, "--submit"),
            cwd=folder,
            env=dict(os.environ),
            stdout=(folder / "out").open("wb"),
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        logs = sorted(self.run.glob("ray/worker-*.log"))
        return "".join(path.read_text(errors="replace")[-3000:] for path in [self.folder / "out", *logs])

    def wait_for(self, what: Callable[[], Any]) -> None:
        """Until something has come about, however slow the machine is; unless the run ends before."""
        end = time.monotonic() + HANGS
        while not what():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.1)

    def has_saved(self) -> bool:
        return bool(list(self.run.glob("checkpoints/[!.]*/state.json")))

    def ray_worker_of(self, rank: int) -> psutil.Process:
        """The process of Ray that started a rank of ours."""
        for process in psutil.process_iter():
            try:
                if str(self.run) in process.cmdline() and process.environ().get("RANK") == str(rank):
                    return process.parent()
            except psutil.Error:
                continue
        raise AssertionError(f"there is no rank {rank}")

    def check(self, steps: int) -> None:
        """It is done, has seen every sample once an epoch, and is what its recipe says."""
        assert self.process.wait(HANGS) == 0, self.said()
        assert f"{self.run}: done, {steps} steps" in (self.folder / "out").read_text()
        seen = ledger(self.run)
        assert [one["step"] for one in seen] == list(range(1, steps + 1))
        order = [sample for one in seen for sample in one["samples"]]
        for start in range(0, len(order) - SAMPLES, SAMPLES):
            assert sorted(order[start : start + SAMPLES]) == list(range(SAMPLES))
        succeed("verify", str(self.run), "--trust", cwd=self.folder)


@pytest.mark.cluster
def test_a_killed_worker_is_replaced(make_cluster: Callable[..., Any], tmp_path: Path) -> None:
    training = OnRay(tmp_path, make_cluster(2), "--steps", "400")
    training.wait_for(training.has_saved)
    training.ray_worker_of(1).send_signal(signal.SIGKILL)
    training.check(steps=400)
    restarts = [one for one in rows(training.run, "decisions.jsonl") if one["decision"] == "restart"]
    assert len(restarts) == 1
    assert "lost" in restarts[0]["reason"]
    assert summary(training.run)["world_size"] == 2
    assert summary(training.run)["resumed_from"]


@pytest.mark.slow
def test_a_signal_saves_and_stops(make_cluster: Callable[..., Any], tmp_path: Path) -> None:
    training = OnRay(tmp_path, make_cluster(2), "--steps", "9000")
    training.wait_for(training.has_saved)
    training.process.send_signal(signal.SIGTERM)
    assert training.process.wait(HANGS) == 75, training.said()
    assert summary(training.run)["status"] == "stopped"
    assert not list((training.run / "ray").glob("st*-*"))
