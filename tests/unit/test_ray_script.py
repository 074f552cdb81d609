"""Tests of launch/clusters/ray: the script that is printed, its flags, and wrong words in one line."""

from __future__ import annotations

import ast
import dataclasses
import json
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobatch.core.errors import DONE, RESIZED, STOPPED, UserError, WorkerLostError
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.cli import COMMANDS
from isobatch.launch.clusters.ray import attempts
from isobatch.launch.clusters.ray.attempts import judge
from isobatch.launch.clusters.ray.command import ray
from isobatch.launch.clusters.ray.driver import train_until_done
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.local.launch_run import train_with_restarts
from isobatch.tests.paths import ROOT

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
    """What the script says to the driver, and RESOURCES."""
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
    return {**names, **{n: ast.literal_eval(v) for n, v in found.items() if n != "resources"}}


def test_a_script_holds_the_recipe_and_the_workers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*GPUS, "--name", "week", "--lr", "3e-4", "--min-ray-workers", "2", "--cpus-per-worker", "64"]
    found = settings(script(capsys, *words, "--save-every", "5m"))
    assert found["RESOURCES"] == {"CPU": 64, "GPU": 8}
    assert (found["workers"], found["processes"], found["limit_cpus"]) == ((2, 4), 8, True)
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
    made = runpy.run_path(str(path))["trainer"](3, {"storage": str(tmp_path)})
    assert (made.scaling_config.num_workers, made.scaling_config.use_gpu) == (3, True)
    assert made.scaling_config.resources_per_worker == {"CPU": 1, "GPU": 8}
    assert made.run_config.failure_config == train.FailureConfig(max_failures=0)
    assert "max_failures=0, controller_failure_limit=0)" in script(capsys, *GPUS, "--min-ray-workers", "2")
    assert made.backend_config.backend == "gloo"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*CPUS, "--ray-workers", "0"], "--ray-workers 0"),
        (["--task", "causal-lm"], "--gpus-per-worker, or --cpu"),
        ([*GPUS, "--cpu"], "--cpu: "),
        ([*CPUS, "--min-ray-workers", "2"], "--min-ray-workers 2"),
        ([*CPUS, "--address", "somewhere"], "--address somewhere"),
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
        workers=(1, 1),
        processes=1,
        resources={"CPU": 1},
    )
    assert code == 2
    assert f"--address 127.0.0.1:{port}: nothing answers there" in capfd.readouterr().err


def test_a_job_is_handed_in(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    submission = pytest.importorskip("ray.job_submission")
    sent: list[str] = []

    class Client:
        def __init__(self, address: str) -> None:
            assert address == "http://head:8265"

        def submit_job(self, entrypoint: str, runtime_env: dict[str, str]) -> str:
            print("a library's words")
            sent.append((Path(runtime_env["working_dir"]) / entrypoint.removeprefix("python ")).read_text())
            return "raysubmit_1"

    monkeypatch.setattr(submission, "JobSubmissionClient", Client)
    assert ray([*CPUS, "--address", "http://head:8265", "--submit"]) == 0
    assert capsys.readouterr().out == "raysubmit_1\n"
    assert settings(sent[0])["address"] == "auto"


def test_where_no_cluster_takes_jobs_it_is_said() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"--address http://127\.0\.0\.1:9: ") as raised:
        ray([*CPUS, "--address", "http://127.0.0.1:9", "--submit"])
    assert "\n" not in str(raised.value)


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


@pytest.mark.parametrize(
    ("verdict", "error", "more", "cause"),
    [
        (None, "worker 1 died", 0, WorkerLostError.cause),
        (Verdict(STOPPED, "saved"), "", 0, WorkerLostError.cause),
        (Verdict(STOPPED, "saved"), "", 1, RESIZED),
        (None, "", 1, RESIZED),
    ],
)
def test_what_an_attempts_end_means(verdict: Verdict | None, error: str, more: int, cause: str) -> None:
    found = judge(verdict, error, more, is_asked_to_stop=False)
    assert found is not None
    assert found.cause == cause
    found = judge(verdict, error, more, is_asked_to_stop=True)
    assert found is not None
    assert (found.code, found.cause) == (STOPPED, "")
    assert judge(Verdict(DONE, ""), error, more, is_asked_to_stop=True) == Verdict(DONE, "")


def test_a_larger_world_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However often it comes: --max-restarts counts losses."""
    run = RunFolder(tmp_path)
    run.write_options(RunOptions(max_restarts=0))
    ends = iter(
        [Verdict(STOPPED, "there is room", RESIZED), Verdict(STOPPED, "again", RESIZED), Verdict(DONE, "")]
    )
    assert train_with_restarts(run, lambda _: next(ends)) == Verdict(DONE, "")
    decided = [json.loads(line) for line in run.decisions.read_text().splitlines()]
    assert [(one["decision"], one["reason"]) for one in decided] == [
        ("resize", "there is room"),
        ("resize", "again"),
    ]
    assert "in a larger world" in capsys.readouterr().err


def test_places_are_counted_when_they_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, or the fewest after a while without more; not before Ray knows of a loss."""
    clock = [0.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(attempts.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    class Known(attempts.Places):
        """Places that come at these moments."""

        came: tuple[float, ...] = ()

        def want(self, count: int) -> None:
            self._hold(["place"] * count)

        def _count_held(self) -> int:
            return sum(moment <= clock[0] for moment in self.came)

        def release(self) -> None:
            self._hold([])

    def count(came: tuple[float, ...], lost: bool = False) -> tuple[int, float]:
        clock[0] = 0.0
        known = Known({"CPU": 1}, least=1, most=2)
        known.came = came
        if lost:
            known.distrust()
        return known.count(lambda: clock[0] > 100), clock[0]

    assert count((0, 0)) == (2, 0)
    assert count((0, 4)) == (2, 4)
    assert count((3,)) == (1, pytest.approx(3 + attempts.SETTLE_SECONDS, abs=1))
    assert count((0, 0), lost=True) == (2, attempts.LOSS_SECONDS)
    assert count(()) == (0, pytest.approx(100, abs=1)), "asked to stop meanwhile"


def test_a_log_is_followed_in_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.txt"
    path.write_text("before\n")
    log = attempts.RunLog(path, quiet=False)
    with path.open("a") as stream:
        stream.write("one\ntw")
        stream.flush()
        log.print_new()
        stream.write("o\n")
    log.print_new()
    log.print_unless_said("two")
    log.print_unless_said("three")
    assert capsys.readouterr().err == "one\ntwo\nisobatch: three\n"
