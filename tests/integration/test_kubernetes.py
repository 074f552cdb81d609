"""The pods of a manifest, as processes of this machine: they train, and lost ones are replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from isobatch.launch.clusters.kubernetes.job import submit
from isobatch.tests.integration.helpers import RAGGED, rows, succeed, summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = ["--task", RAGGED, "--image", "any", "--claim", "any", "--cpu", "--nodes", "2", "--name", "pods"]


class Cluster:
    """What a manifest asks for, in a folder of this machine."""

    def __init__(self, folder: Path, documents: dict[str, Any]) -> None:
        self.folder, self.run = folder, folder / "volume" / "runs" / "pods"
        (self.container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
        (folder / "job").mkdir()
        for place, text in documents["ConfigMap"]["data"].items():
            (folder / "job" / place).write_text(self.here(text))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def here(self, text: str) -> str:
        return text.replace("/isobatch-job", f"{self.folder}/job").replace(
            "/isobatch/", f"{self.folder}/volume/"
        )

    def pod(self, index: int) -> subprocess.Popen[bytes]:
        """What the Job's controller starts: the container's command, with its volumes here."""
        words = [self.here(word) for word in self.container["command"][1:]]
        words = [w.replace("pods-0.pods", "127.0.0.1").replace("29500", str(self.port)) for w in words]
        variables = {one["name"]: self.here(one["value"]) for one in self.container["env"]}
        return subprocess.Popen(
            [sys.executable, "-P", *words],
            env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)},
            stdout=(self.folder / f"pod-{index}.log").open("ab"),
            stderr=subprocess.STDOUT,
        )

    def logs(self) -> str:
        paths = sorted(self.folder.glob("pod-*.log"))
        return "".join(path.read_text(errors="replace")[-4000:] for path in paths)

    def wait_for(self, what: Callable[[], Any], *pods: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 240
        while not what():
            assert all(pod.poll() is None for pod in pods), self.logs()
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)

    def has_saved(self) -> bool:
        return bool(list(self.run.glob("checkpoints/[!.]*/state.json")))

    def refuse_loss_or_repeat(self, steps: int) -> None:
        assert summary(self.run)["status"] == "done"
        assert [row["step"] for row in rows(self.run) if "chain" in row] == list(range(1, steps + 1))
        cache = f"{self.folder}/volume/cache"
        succeed("verify", str(self.run), "--trust", cwd=self.folder, ISOBATCH_CACHE=cache)


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Cluster]:
    def make(*words: str) -> Cluster:
        assert submit([*WORDS, "--save-every", "10", "--keep", "99", *words]) == 0
        documents = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
        return Cluster(tmp_path, documents)

    return make


def kill(pod: subprocess.Popen[bytes]) -> None:
    """As where its node is lost."""
    killed = psutil.Process(pod.pid)
    for process in [*killed.children(recursive=True), killed]:
        process.send_signal(signal.SIGKILL)
    pod.wait()


@pytest.mark.cluster
def test_lost_pods_are_replaced_and_the_run_goes_on(cluster: Callable[..., Cluster]) -> None:
    """One is killed, then one is evicted: no pod may end as if the run were done."""
    job = cluster("--steps", "400")
    first = [job.pod(0), job.pod(1)]
    job.wait_for(job.has_saved, *first)
    kill(first[1])
    assert first[0].wait(120) == 1, "the world ends with its pod"
    second = [job.pod(0), job.pod(1)]
    saved = len(list(job.run.glob("checkpoints/[!.]*")))
    job.wait_for(lambda: len(list(job.run.glob("checkpoints/[!.]*"))) > saved, *second)
    second[1].send_signal(signal.SIGTERM)
    assert [pod.wait(120) for pod in second] == [75, 75], job.logs()
    third = [job.pod(0), job.pod(1)]
    assert [pod.wait(240) for pod in third] == [0, 0], job.logs()
    assert summary(job.run)["world_size"] == 2
    assert summary(job.run)["resumed_from"]
    job.refuse_loss_or_repeat(400)
