"""Tests of launch/clusters/ray: the file that is printed, its flags, and wrong words in one line."""

from __future__ import annotations

import dataclasses
import socket
import time
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest

from isobatch.core.errors import DONE, STOPPED, UserError, WorkerLostError
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.cli import COMMANDS
from isobatch.launch.clusters.cluster import CLUSTERS, Cluster, cluster
from isobatch.launch.clusters.ray.driver import Ray, RayOptions, judge, submit
from isobatch.launch.local.arguments import parse_request
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

GPUS = ["--task", "causal-lm", "--data", "/shared/texts", "--ray-workers", "4", "--gpus-per-worker", "8"]
CPUS = ["--task", "causal-lm", "--cpu"]
OF_RAY = (
    *("RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "RAY_TRAIN_METRICS_ENABLED"),
    "RAY_CLIENT_MODE",
)
"""Variables that Ray, or we for it, set in this process."""
MINE = f"{ROOT / 'examples' / 'own_task' / 'mine.py'}:Mine"


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in OF_RAY:
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize(
    "words",
    [
        [*GPUS, "--lr", "3e-4", "--processes", "16", "--strategy", "zero2", "--address", "[::1]:6379"],
        ["--task", MINE, "--data", "demo", "--cpu", "--steps", "7", "--name", "a b"],
    ],
    ids=["gpus", "own task"],
)
def test_the_file_that_is_printed_asks_for_the_same(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert submit(words) == 0
    (tmp_path / "week.yaml").write_text(capsys.readouterr().out)
    assert submit(["--config", "week.yaml"]) == 0
    assert capsys.readouterr().out == (tmp_path / "week.yaml").read_text()
    there, typed = (parse_request(w, "ray", RayOptions) for w in (["--config", "week.yaml"], words))
    assert (there.recipe, there.run) == (typed.recipe, typed.run)
    assert there.plan == dataclasses.replace(typed.plan, device="cpu" if "--cpu" in words else "auto")
    assert RayOptions(**there.extra) == RayOptions(**typed.extra)


def test_a_trainer_is_what_ray_takes(tmp_path: Path) -> None:
    """A TorchTrainer of so many workers, whose group is on the hosts, and whom Ray does not restart."""
    train = pytest.importorskip("ray.train")
    ray_cluster = Ray()
    ray_cluster.options = RayOptions(ray_workers=4, gpus_per_worker=8)
    made = ray_cluster.trainer({"storage": str(tmp_path)})
    assert (made.scaling_config.num_workers, made.scaling_config.use_gpu) == (4, True)
    assert made.scaling_config.resources_per_worker == {"CPU": 1, "GPU": 8}
    assert made.run_config.failure_config == train.FailureConfig(max_failures=0)
    assert made.backend_config.backend == "gloo"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*CPUS, "--ray-workers", "0"], "--ray-workers 0"),
        (["--task", "causal-lm"], "--gpus-per-worker, or --cpu"),
        ([*GPUS, "--cpu"], "--cpu: "),
        ([*CPUS, "--gpus-per-worker", "a100:4"], "without a type: --gpus-per-worker 4$"),
        ([*CPUS, "--address", "http://head:8265"], "ray job submit"),
        ([*GPUS, "--processes", "6"], "--processes 6: must be a multiple of --ray-workers 4"),
        ([*GPUS, "--processes", "64"], "--processes 64: .* at most 32"),
        ([*GPUS, "--gpu-per-worker", "8"], "did you mean --gpus-per-worker"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        submit(words)
    assert "\n" not in str(raised.value)


def test_without_ray_its_pip_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--submit needs: pip install 'isobatch\[ray\]'"):
        submit([*CPUS, "--submit"])


def test_an_address_where_nobody_answers_is_said() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(UserError, match=f"--address {address}: nothing answers there"):
        submit([*CPUS, "--address", address, "--submit"])


OF_A_RECIPE = ("auto", "plan", "profile", "tune", "prepare", *(f"submit --to {name}" for name in CLUSTERS))


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_cluster_answers_what_is_asked_of_any(name: str, tmp_path: Path) -> None:
    made = cluster(name)
    assert isinstance(made, Cluster)
    assert made.state([RunFolder(tmp_path)]) == {}
    assert dataclasses.is_dataclass(COMMANDS[f"submit --to {name}"].options)


@pytest.mark.parametrize("command", OF_A_RECIPE)
def test_a_commands_flags_are_no_other_flags(command: str) -> None:
    """One word would otherwise mean two things at once, as --workers does not: loader processes."""
    own = {field.name for field in dataclasses.fields(COMMANDS[command].options)}
    for others in (PlanOptions, RunOptions, Recipe):
        assert not own & {field.name for field in dataclasses.fields(others)}


def test_a_process_has_said_its_last_words_when_it_was_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    from isobatch.launch.clusters.ray import workers

    (tmp_path / "dies.py").write_text("import sys; sys.exit('last words')")
    relay = workers.relay_output
    monkeypatch.setattr("ray.train.get_context", MagicMock)
    monkeypatch.setattr(workers, "TRAIN_SCRIPT", tmp_path / "dies.py")
    monkeypatch.setattr(workers, "relay_output", lambda *words: (time.sleep(0.2), relay(*words)))
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    order = {"run": "", "plan": "", "processes": 2, "cpus": 0, "environment": {}, "folder": str(tmp_path)}
    with (tmp_path / "worker.log").open("ab", buffering=0) as log:
        children = [workers._start(order, index, {}, log) for index in range(2)]  # noqa: SLF001
        assert workers._wait(children, lambda: False) == [1, 1]  # noqa: SLF001
    assert (tmp_path / "worker.log").read_text() == "last words\n" * 2


@pytest.mark.parametrize(("verdict", "error"), [(None, "worker 1 died"), (Verdict(STOPPED, "saved"), "")])
def test_what_an_attempts_end_means(verdict: Verdict | None, error: str) -> None:
    found = judge(verdict, error, is_asked_to_stop=False)
    assert found is not None
    assert found.cause == WorkerLostError.cause
    found = judge(verdict, error, is_asked_to_stop=True)
    assert found is not None
    assert (found.code, found.cause) == (STOPPED, "")
    assert judge(Verdict(DONE, ""), error, is_asked_to_stop=True) == Verdict(DONE, "")
