"""Tests of `slurm`: what is refused, the run and the script of a job, and those of an array."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.slurm import client, command, options
from isobatch.launch.clusters.slurm.command import slurm
from isobatch.launch.clusters.slurm.job import plan_for_nodes
from isobatch.launch.clusters.slurm.legs import JobRequest
from isobatch.tests.integration.helpers import launch

if TYPE_CHECKING:
    from isobatch.tests.unit.fake_slurm import Say, Slurm

LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


def test_nodes_that_can_be_used() -> None:
    assert all(map(client.is_usable, ("idle", "allocated", "mixed", "draining", "completing")))
    assert not any(map(client.is_usable, ("down", "down*", "idle*", "drained", "failing", "fail")))


@pytest.mark.parametrize(
    "words",
    [
        "--time 5",  # needs GPUs, or --cpu
        "--cpu",  # needs --time
        "--time 5 --gpus-per-node 2 --cpu",
        "--cpu --time 5 --nodes 2 --processes 3",
        "--cpu --time 5 --setup /no/such",
        "--cpu --time 5 --sbatch --ntasks=3",
        "--cpu --time 5 --nodes 2 --strategy single",
        "--cpu --time 5 --array 0-1 --seed 1",
        "--cpu --time 5 --partiton x",
        "--cpu --time 5 --max-legs 0",
        "--cpu --time 5 --container ./no.sif",
        "--cpu --time 5 --parallel 2",
        "--cpu --time 5 --lr 1e-3,x",
        "--cpu --time 5 --mem 64",
        "--cpu --time 5 --mem lots",
        "--cpu --time 5 --mem 64m",
        "--cpu --time 5 --no-requeue",
        "--cpu --time 5 --mem 100M",
        "--cpu --time 5 --sbatch --time=6",
        "--time 5 --gpus-per-node 2 --sbatch --gres=gpu:a100:2",
        "--time 5 --gpus-per-node 2 --sbatch --gpus=2",
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last flag is the wrong one, or the one that misses another."""
    monkeypatch.chdir(tmp_path)
    flag = [word for word in words.split(" ") if re.match(r"--(?!ntasks|nodes=)", word)][-1]
    with pytest.raises(
        UserError, match=flag.replace("--no-", "--") if len(words) > 8 else "--gpus-per-node, or --cpu|--time"
    ):
        slurm(["--task", LINE, *words.split(" ")])
    assert not list(tmp_path.iterdir())


def test_a_printed_script_has_a_plan_and_makes_nothing_and_a_submitted_one_its_run(tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--nodes", "2", "--time", "00:00:05", "--name", "r"]
    done = launch(*words, cwd=tmp_path, PATH="/usr/bin/nowhere")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    assert "of 8 CPU cores used" in done.stderr  # 4 of each node, where sinfo does not say
    assert re.search(r"--time 00:00:05: \d+ jobs after each other .* saves every 10m and 5 s", done.stderr)
    refused = launch(*words, "--submit", cwd=tmp_path, PATH="/usr/bin/nowhere")
    assert refused.returncode == 2
    assert "there is no sbatch here" in refused.stderr
    run = RunFolder.open(tmp_path / "runs" / "r")
    submitted = (run.folder / "slurm" / "job.sh").read_text().splitlines()
    printed = done.stdout.splitlines()
    more = [line for line in printed if line not in submitted]
    assert [line.split("/")[0] for line in submitted if line not in printed] == ["#SBATCH --output="]
    assert more[0] == f"#SBATCH --output={tmp_path}/r-%j.out", "where there is a folder before there is a run"
    assert shlex.join(["isobatch", *words, "--make"]) in more[-1]
    request = JobRequest.read(run.folder)
    assert [plan_for_nodes(run, nodes, request).processes for nodes in (1, 2)] == [1, 2]


def test_a_script_that_was_only_printed_makes_its_runs(tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--time", "00:10:00", "--name", "r", "--array", "0-1"]
    done = launch(*words, cwd=tmp_path, PATH="/usr/bin/nowhere")
    assert all(f"{tmp_path}/runs/r-seed{seed}" in done.stderr.splitlines()[-1] for seed in (0, 1))
    (tmp_path / "job.sh").write_text(done.stdout)
    task = {**os.environ, "SLURM_ARRAY_TASK_ID": "1"}
    started = subprocess.run(["/bin/bash", "job.sh"], cwd=tmp_path, env=task, capture_output=True, text=True)
    assert "job: runs inside a Slurm job" in started.stderr, "all else is there"
    assert all(JobRequest.read(tmp_path / "runs" / f"r-seed{seed}").seconds == 600 for seed in (0, 1))
    made = launch(*words, "--make", cwd=tmp_path, PATH="/usr/bin/nowhere")
    assert made.stdout.strip() == f"{tmp_path}/runs/slurm-r/job.sh"


GPU_NODES = r"gpu|64|gpu:h100:8(S:0-1)|1000000|1-00:00:00\ngpu|96|gpu:h100:8|2000000|1-00:00:00"
NODES = f"case $* in *gpu*) printf '{GPU_NODES}' ;; *) echo 'debug*|16|(null)|64000|infinite' ;; esac"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--cpu", ["--cpus-per-task=16", "--mem=57600M"]),
        ("--cpu --cpus-per-task 4", ["--cpus-per-task=4", "--mem=14400M"]),
        ("--cpu --mem 3G", ["--cpus-per-task=16", "--mem=3G"]),
        ("--cpu --sbatch --mem-per-cpu=2G", ["--cpus-per-task=16"]),
        ("--gpus-per-node 2 --partition gpu", ["--cpus-per-task=16", "--mem=225000M"]),
    ],
)
def test_a_job_asks_for_its_share_of_a_node(
    words: str, asked: list[str], tmp_path: Path, slurm: Slurm, say: Say
) -> None:
    slurm(sinfo=NODES)
    more = ("--time", "5", "--name", "r", "--quiet", "--out", str(tmp_path))
    _, script, _ = say(command.slurm, "--task", LINE, *more, *words.split())
    assert re.findall("^#SBATCH (--(?:cpus|mem=).*)", script, re.MULTILINE) == asked


@pytest.mark.parametrize(
    ("words", "sinfo", "most"),
    [
        ("--partition gpu --time 3-00:00:00", NODES, "gpu grants 24:00:00"),
        ("--partition gpu --sbatch --time=25:00:00", NODES, "gpu grants 24:00:00"),
        ("--partition gpu --time 1-00:00:00", NODES, ""),
        ("--time 3-00:00:00", NODES, ""),
        ("--time 31", "echo 'debug*|16|(null)|64000|30:00'", "the default partition grants 30:00"),
        ("--time 31", "printf 'a*|1|(null)|1|30:00\\nb*|1|(null)|1|60:00'", ""),
        ("--time 31", "exit 1", ""),
    ],
)
def test_a_time_above_what_a_partition_grants_is_said_before_the_job_waits_for_ever(
    words: str, sinfo: str, most: str, tmp_path: Path, slurm: Slurm, say: Say
) -> None:
    slurm(sinfo=sinfo)
    _, script, said = say(command.slurm, "--task", LINE, "--cpu", "--out", str(tmp_path), *words.split())
    assert "#SBATCH --time=" in script
    assert re.findall(r"--time \S+: (.* grants \S+): .*; give --time", said) == ([most] if most else [])


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--gpus-per-node l4:2", "--gpus-per-node=l4:2"),
        ("--gres gpu:L4:2", "--gpus-per-node=L4:2"),
        ("--gres gpu:2", "--gpus-per-node=2"),
        ("--gpus-per-node 2 --sbatch --gres=nvme:1", "--gpus-per-node=2"),
    ],
)
def test_a_job_asks_for_a_type_of_gpus_and_the_plan_is_for_it(
    words: str, asked: str, tmp_path: Path, slurm: Slurm, say: Say
) -> None:
    slurm(sinfo=NODES)
    more = ("--time", "5", "--partition", "gpu", "--out", str(tmp_path))
    _, script, said = say(command.slurm, "--task", LINE, *more, *words.split())
    assert re.findall("^#SBATCH (--gpus.*)", script, re.MULTILINE) == [asked]
    _, _, named = say(command.slurm, "--task", LINE, *more, *words.split(), "--hardware", "l4")
    plan = re.compile("^(?:memory|time) .*", re.MULTILINE)
    assert (plan.findall(said) == plan.findall(named)) == ("l4" in asked.lower()), "else sinfo names h100"


@pytest.mark.parametrize(
    ("memory", "said"), [("2000", "of 2.10 GB"), ("64G", "of 68.72 GB"), ("8gb", "of 8.59 GB")]
)
def test_the_plan_is_of_the_memory_that_is_asked(
    memory: str, said: str, tmp_path: Path, slurm: Slurm, say: Say
) -> None:
    slurm(sinfo=NODES)
    words = ("--task", LINE, "--cpu", "--out", str(tmp_path))
    for asked in (("--time", "5", "--mem", memory), ("--sbatch", f"--mem {memory} --time=5 --exclusive")):
        _, script, told = say(command.slurm, *words, *asked)
        assert said in told
        assert "--time 5 minutes: " in told
        assert [script.count(line) for line in (f"--mem={memory}\n", "--time=5\n")] == [1, 1]
        assert ("--exclusive" in script) == (asked[0] == "--sbatch")


def test_what_slurm_refuses_leaves_no_run_that_is_new(tmp_path: Path, slurm: Slurm, say: Say) -> None:
    slurm(sinfo=NODES, sbatch='echo "sbatch: error: invalid partition specified: gpuu" >&2; exit 1')
    words = ("--task", LINE, "--time", "5", "--cpu", "--out", str(tmp_path), "--name", "r")
    for made in (False, True):
        if made:
            say(command.slurm, *words, "--make")
        with pytest.raises(UserError, match="invalid partition specified: gpuu"):
            command.slurm([*words, "--submit"])
        assert (tmp_path / "r").is_dir() == made


def test_a_job_that_may_start_once_is_asked_for_by_max_legs() -> None:
    with pytest.raises(UserError, match=r"--sbatch --no-requeue: .*--max-legs 1 starts the job once"):
        options.option_words("--sbatch", "--no-requeue")


def test_the_jobs_of_a_plan_are_no_more_than_may_start(tmp_path: Path, slurm: Slurm, say: Say) -> None:
    slurm(sinfo=NODES)
    words = ("--task", LINE, "--cpu", "--out", str(tmp_path), "--time", "1", "--steps", "100000000")
    told = {legs: say(command.slurm, *words, "--max-legs", legs)[2] for legs in ("2", "9999999")}
    assert [" of which --max-legs allows 2: leave it out" in text for text in told.values()] == [True, False]


def test_weights_that_this_user_may_not_read_are_said_where_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "model." not in str(path) and may(path, mode))
    with pytest.raises(UserError, match=r"model.safetensors must be readable by this user \(chmod a\+r\)"):
        slurm(["--task", "causal-lm", "--cpu", "--time", "5", "--model", str(tmp_path)])


def test_gpus_that_are_worth_little_are_said_and_a_card_may_be_named_as_in_a_plan(tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--nodes", "2", "--gpus-per-node", "4", "--time", "1:00:00"]
    named = launch(*words, "--hardware", "8xh100", cwd=tmp_path, PATH="/usr/bin/nowhere")
    assert "8 of 8 GPUs used, none idle" in named.stderr
    assert "1 of the 8 GPUs would take" in named.stderr
    unknown = launch(*words, cwd=tmp_path, PATH="/usr/bin/nowhere")
    assert unknown.returncode == named.returncode == 0
    assert "--hardware h100 names them" in unknown.stderr


@pytest.mark.parametrize("more", [(), ("--make",), ("--json",)])
@pytest.mark.parametrize(
    "words", [("--hardware", "h1000"), ("--hardware", "h100", "--memory-limit", "1MB")], ids=["card", "plan"]
)
def test_a_plan_that_is_refused_makes_no_script(
    words: tuple[str, ...], more: tuple[str, ...], tmp_path: Path, slurm: Slurm, say: Say
) -> None:
    slurm(sinfo=NODES)
    asked = ("--gpus-per-node", "1", "--time", "5", "--name", "r", "--out", str(tmp_path))
    with pytest.raises(UserError, match=words[-2]):
        say(command.slurm, "--task", LINE, *asked, *words, *more)
    assert not (tmp_path / "r").exists()


def test_one_submission_of_a_run_at_a_time(tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--time", "00:03:00", "--name", "r"]
    words += ["--submit"]
    assert launch(*words, cwd=tmp_path, PATH="/usr/bin/nowhere").returncode == 2  # there is no sbatch
    with RunFolder(tmp_path / "runs" / "r").lock("submit"):
        refused = launch(*words, cwd=tmp_path, PATH="/usr/bin/nowhere")
    assert refused.returncode == 2
    assert "is being submitted by another process" in refused.stderr


def test_the_numbers_are_written_short() -> None:
    assert command.array_text([9, 0, 1, 2, 3, 5, 6], None) == "0-3,5,6,9"
    assert command.array_text(range(1000), 8) == "0-999%8"


def test_an_array_is_seeds_and_a_limit(tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--time", "5", "--name", "r", "--json", "--parallel", "2"]
    words += ["--array", "4,0-1"]
    made = json.loads(launch(*words, cwd=tmp_path, PATH="/usr/bin/nowhere").stdout)
    assert [Path(run).name for run in made["runs"]] == ["r-seed4", "r-seed0", "r-seed1"]
    assert "#SBATCH --array=0-2%2\n" in made["script"]


def test_a_larger_sweep_remembers_a_smaller_one(tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--time", "5", "--name", "r", "--json"]

    def sweep(*more: str) -> tuple[dict[str, Any], str]:
        done = launch(*words, *more, cwd=tmp_path, PATH=f"{tmp_path}/bin:/usr/bin:/bin")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    launch(*words, "--lr", "1e-2,3e-2", "--submit", cwd=tmp_path, PATH="/usr/bin/nowhere")  # makes them
    small, _ = sweep("--lr", "1e-2,3e-2")
    assert [Path(run).name for run in small["runs"]] == ["r-lr0.01", "r-lr0.03"]
    assert "#SBATCH --array=0,1\n" in small["script"]
    done, held = (Path(run) for run in small["runs"])
    atomic_files.write_json(done / "summary.json", {"status": "done"})
    atomic_files.write_json(held / "slurm" / "job.json", {"job": "7_1"})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 7_1 RUNNING 0 None\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    large, said = sweep("--lr", "1e-2,3e-2", "--seed", "0-1", "--parallel", "1")
    assert [Path(run).name for run in large["runs"]] == ["r-lr0.01-seed1", "r-lr0.03-seed1"]
    assert "#SBATCH --array=1,3%1\n" in large["script"]
    assert f"{done} has this recipe and is done" in said
    assert f"{held} is in job 7_1 already (RUNNING): it stays there" in said
    assert sweep("--lr", "1e-2,3e-2")[0] == {"job": None, "script": None, "path": None, "runs": []}
    assert json.loads((held / "slurm" / "job.json").read_text()) == {"job": "7_1"}
