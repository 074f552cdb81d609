"""The pods of a manifest, as processes of this machine: they train, and a killed one is replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from isobatch.launch.kubernetes.command import k8s
from isobatch.tests.integration.helpers import RAGGED, launch, rows, summary

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def pods(folder: Path, documents: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    """What the Job's controller starts: the container's command for each index, with its volumes here."""
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = container["command"][2].replace("pods-0.pods", "127.0.0.1").replace("29500", str(port))
    python = f"{sys.executable} -P"
    command = here(folder, command).replace("exec python3", f"exec {python}")
    variables = {one["name"]: here(folder, one["value"]) for one in container["env"]}
    return [
        subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)},
            stdout=(folder / f"pod-{index}.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        for index in range(documents["Job"]["spec"]["completions"])
    ]


def here(folder: Path, text: str) -> str:
    return text.replace("/isobatch-job", f"{folder}/job").replace("/isobatch/", f"{folder}/volume/")


def logs(folder: Path) -> str:
    return "".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("pod-*.log")))


def test_a_killed_pod_is_replaced_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--task",
        RAGGED,
        "--image",
        "any",
        "--claim",
        "any",
        "--cpu",
        "--nodes",
        "2",
        "--name",
        "pods",
    ]
    assert k8s([*words, "--steps", "400", "--save-every", "10", "--keep", "99"]) == 0
    documents = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
    (tmp_path / "job").mkdir()
    for place, text in documents["ConfigMap"]["data"].items():
        (tmp_path / "job" / place).write_text(here(tmp_path, text))
    run = tmp_path / "volume" / "runs" / "pods"
    first = pods(tmp_path, documents)
    end = time.monotonic() + 120
    while not list(run.glob("checkpoints/[!.]*/state.json")) and time.monotonic() < end:
        assert first[0].poll() is None, logs(tmp_path)
        time.sleep(0.1)
    killed = psutil.Process(first[1].pid)
    for process in [*killed.children(recursive=True), killed]:
        process.send_signal(signal.SIGKILL)
    assert [pod.wait(120) != 0 for pod in first] == [True, True], "the world ends with its pod"
    again = pods(tmp_path, documents)
    assert [pod.wait(240) for pod in again] == [0, 0], logs(tmp_path)
    found = summary(run)
    assert (found["status"], found["world_size"]) == ("done", 2)
    assert found["resumed_from"]
    assert [row["step"] for row in rows(run) if "chain" in row] == list(range(1, 401))
    checked = launch("verify", str(run), "--trust", cwd=tmp_path, ISOBATCH_CACHE=f"{tmp_path}/volume/cache")
    assert checked.returncode == 0, checked.stdout + checked.stderr
