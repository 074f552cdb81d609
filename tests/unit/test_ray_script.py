"""Tests of launch/clusters/ray: the script that is printed, its flags, and wrong words in one line."""

from __future__ import annotations

import ast
import dataclasses
import runpy
import socket
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from isobatch.core.errors import DONE, STOPPED, UserError, WorkerLostError
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.runs.run_folder import Verdict
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.cli import COMMANDS
from isobatch.launch.clusters.ray.command import ray
from isobatch.launch.clusters.ray.driver import judge, train_until_done
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


def script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert ray(words) == 0
    return capsys.readouterr().out


def settings(text: str) -> dict[str, Any]:
    """What the script says to the driver, and FLAGS."""
    names = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    (call,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "train_until_done"
    ]
    found = {k.arg or "": k.value for k in call.keywords}
    return {**names, **{n: ast.literal_eval(v) for n, v in found.items()}}


def test_a_script_holds_the_recipe_and_the_workers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*GPUS, "--name", "week", "--lr", "3e-4", "--cpus-per-worker", "64"]
    found = settings(script(capsys, *words, "--save-every", "5m"))
    assert (found["processes"], found["cpus"]) == (8, 64)
    assert (found["folder"], found["address"]) == (str(tmp_path), "auto")
    flags = yaml.safe_load(found["FLAGS"])
    assert (flags["task"], flags["data"], float(flags["lr"])) == ("causal-lm", "/shared/texts", 3e-4)
    assert (flags["name"], flags["save_every"]) == ("week", "5m")


@pytest.mark.parametrize(
    "words",
    [
        [*GPUS, "--lr", "3e-4", "--processes", "16", "--strategy", "zero2"],
        ["--task", MINE, "--cpu", "--steps", "7", "--name", "a b"],
    ],
    ids=["gpus", "own task"],
)
def test_a_scripts_flags_make_the_same_recipe(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The plan's too, but for the number of processes, which is the world's."""
    found = settings(script(capsys, *words))
    (tmp_path / "flags.yaml").write_text(found["FLAGS"])
    there = parse_request(["--config", str(tmp_path / "flags.yaml"), "--data", "demo"], "auto")
    own = [w for w in words if w not in ("--cpu", "--ray-workers", "4", "--gpus-per-worker", "8")]
    typed = parse_request([*own, *(() if "--data" in own else ("--data", "demo"))], "k8s", _Elsewhere)
    assert dataclasses.replace(typed.recipe, data="demo") == there.recipe
    device = "cpu" if "--cpu" in words else "auto"
    assert dataclasses.replace(typed.plan, processes=None, device=device) == there.plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Elsewhere:
    data_is_elsewhere = True


def test_a_script_is_what_ray_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its `trainer` makes a TorchTrainer of so many workers, whose group is on the hosts."""
    train = pytest.importorskip("ray.train")
    path = tmp_path / "week.py"
    path.write_text(script(capsys, *GPUS, "--name", "week"))
    made = runpy.run_path(str(path))["trainer"]({"storage": str(tmp_path)})
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
        ([*CPUS, "--address", "http://head:8265"], "ray job submit"),
        ([*GPUS, "--processes", "6"], "--processes 6: must be a multiple of --ray-workers 4"),
        ([*GPUS, "--processes", "64"], "--processes 64: .* at most 32"),
        ([*GPUS, "--gpu-per-worker", "8"], "did you mean --gpus-per-worker"),
        ([*CPUS, "--name", 'a"""b'], "which a script cannot hold"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        ray(words)
    assert "\n" not in str(raised.value)


def test_without_ray_its_pip_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--submit needs: pip install 'isobatch\[ray\]'"):
        ray([*CPUS, "--submit"])


def test_an_address_where_nobody_answers_is_said(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = train_until_done(
        lambda *_: pytest.fail("no attempt is made"),
        "task: causal-lm\n",
        folder=str(tmp_path),
        address=f"127.0.0.1:{port}",
        processes=1,
    )
    assert code == 2
    assert f"--address 127.0.0.1:{port}: nothing answers there" in capfd.readouterr().err


OF_A_RECIPE = (
    "auto",
    "plan",
    "profile",
    "tune",
    "prepare",
    *(f"submit --to {c}" for c in ("slurm", "k8s", "ray")),
)


@pytest.mark.parametrize("command", OF_A_RECIPE)
def test_a_commands_flags_are_no_other_flags(command: str) -> None:
    """One word would otherwise mean two things at once, as --workers does not: loader processes."""
    own = {field.name for field in dataclasses.fields(COMMANDS[command].options)}
    for others in (PlanOptions, RunOptions, Recipe):
        assert not own & {field.name for field in dataclasses.fields(others)}


@pytest.mark.parametrize(("verdict", "error"), [(None, "worker 1 died"), (Verdict(STOPPED, "saved"), "")])
def test_what_an_attempts_end_means(verdict: Verdict | None, error: str) -> None:
    found = judge(verdict, error, is_asked_to_stop=False)
    assert found is not None
    assert found.cause == WorkerLostError.cause
    found = judge(verdict, error, is_asked_to_stop=True)
    assert found is not None
    assert (found.code, found.cause) == (STOPPED, "")
    assert judge(Verdict(DONE, ""), error, is_asked_to_stop=True) == Verdict(DONE, "")
