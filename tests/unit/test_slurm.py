"""Tests of launch/slurm: the sbatch script and its quoting; when a job stops and when it requeues itself."""

from __future__ import annotations

import shlex
import string
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.package import own_command
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.arguments import split_words
from isobatch.launch.slurm import client, sbatch_script, time_limit
from isobatch.launch.slurm.command import SlurmOptions, join_sbatch_value
from isobatch.launch.slurm.job import should_save_now
from isobatch.launch.slurm.job_record import refuse_if_in_a_job
from isobatch.launch.slurm.job_request import JobRequest, plan_for_nodes
from isobatch.launch.slurm.rendezvous import StepNode, join, local_address, wait_for_answers
from isobatch.launch.slurm.requeue import why_not_requeue

if TYPE_CHECKING:
    from isobatch.tests.conftest import Cli

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1)
LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


def script(**changes: object) -> sbatch_script.JobScript:
    values: dict[str, object] = {
        "name": "r",
        "runs": {0: Path("/shared/runs/r")},
        "folder": Path("/shared/runs/r/slurm"),
        "nodes": 2,
        "seconds": 180,
        "lead": 45,
        "cpus": 16,
        "start_folder": Path("/home/some one"),
    }
    return sbatch_script.JobScript(**{**values, **changes})  # type: ignore[arg-type]


def as_sbatch_reads(line: str) -> list[str]:
    """The words of an #SBATCH line, by the rules of sbatch's own reader (opt.c, _get_argument)."""
    words, word, quote, escaped, open_word = [], "", "", False, False
    for c in line.removeprefix("#SBATCH"):
        if escaped:
            word, escaped = word + c, False
        elif c == "\\":
            escaped = open_word = True
        elif quote:
            quote, word = ("", word) if c == quote else (quote, word + c)
        elif c in "\"'":
            quote, open_word = c, True
        elif c.isspace() or c == "#":
            words += [word] if open_word else []
            word, open_word = "", False
            if c == "#":
                break
        else:
            word, open_word = word + c, True
    assert not quote
    return [*words, word] if open_word else words


def test_what_a_cluster_person_looks_for() -> None:
    lines = sbatch_script.render(script(gpus=8, extra_options=(("partition", "gpu"),))).splitlines()
    assert lines[0] == "#!/bin/bash"
    for wanted in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=16",
        "--time=00:03:00",
        "--partition=gpu",
        "--signal=B:USR1@45",
        "--requeue",
        "--open-mode=append",
        "--output=/shared/runs/r/slurm/%j.out",
    ):
        assert f"#SBATCH {wanted}" in lines
    assert not any("gpus-per-task" in line for line in lines)
    # Installed or from a clone, as it runs here.
    assert lines[-1] == "exec " + shlex.join(own_command("job", "/shared/runs/r"))


@given(PRINTABLE)
def test_every_word_reaches_sbatch_as_it_is(word: str) -> None:
    assert as_sbatch_reads(f"#SBATCH --x={sbatch_script.sbatch_word(word)} -n") == [f"--x={word}", "-n"]


@given(PRINTABLE, st.text(string.printable, min_size=1))
def test_no_name_adds_a_line_or_an_option(name: str, rest: str) -> None:
    try:
        text = sbatch_script.render(script(name=name + rest))
    except UserError:
        assert not all(c.isprintable() for c in name + rest) or len(name + rest) > 400
        return
    ours = sbatch_script.render(script()).splitlines()
    lines = text.splitlines()
    assert as_sbatch_reads(lines[1]) == [f"--job-name={name}{rest}"]
    assert lines[2:] == ours[2:]


@given(
    st.text(
        st.characters(exclude_categories=["C"], exclude_characters="/\\\u2028\u2029"), min_size=1, max_size=40
    )
)
def test_paths_reach_bash_as_they_are(name: str) -> None:
    folder = Path("/shared") / name
    try:
        text = sbatch_script.render(
            script(runs={0: folder}, folder=folder / "slurm", setup=folder / "s.sh", start_folder=folder)
        )
    except UserError:
        return
    body = text.partition("\n\n")[2].splitlines()
    assert shlex.split(body[0])[2] == str(folder)
    assert shlex.split(body[1])[1] == str(folder / "s.sh")
    assert shlex.split(body[-1])[-1] == str(folder)
    pattern = next(
        w for line in text.splitlines() for w in as_sbatch_reads(line)[:1] if w.startswith("--output=")
    )
    assert pattern == f"--output={str(folder).replace('%', '%%')}/slurm/%j.out"


def test_bash_runs_the_script_of_hostile_paths(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $(touch pwned) "`touch pwned`" ; touch pwned'
    folder.mkdir()
    text = sbatch_script.render(
        script(runs={3: folder, 4: Path("/x")}, array="3,4", folder=folder, start_folder=folder)
    )
    text = text.replace("exec ", "printf %s ").replace(" -P -m isobatch job ", " ")
    environment = {"SLURM_ARRAY_TASK_ID": "3", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash"], input=text, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith(str(folder))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("bad", ["a\nb", "a\r#SBATCH --x", "a\x00b", "a\u2028b", "a\x1b[0m", "a\x85b"])
def test_control_characters_are_refused(bad: str) -> None:
    for change in (
        {"name": bad},
        {"folder": Path(bad)},
        {"extra_options": (("account", bad),)},
        {"raw_options": (bad,)},
    ):
        with pytest.raises(UserError, match="control character"):
            sbatch_script.render(script(**change))


def test_no_secret_of_the_environment_is_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    assert "secret" not in sbatch_script.render(script())


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("--gpus-per-task=1", "--gpus-per-node"),
        ("--exclusive --ntasks=5", "--nodes"),
        ("-N 3", "--nodes"),
        ("-t5", "--time"),
        ("--wrap=date", "--task"),
        ("--signal=B:TERM@5", "--lead"),
    ],
)
def test_options_that_the_script_sets_are_refused_with_our_flag(text: str, flag: str) -> None:
    with pytest.raises(UserError, match=f"use {flag}"):
        sbatch_script.parse_sbatch_options(text)


def test_other_options_are_passed_on() -> None:
    assert sbatch_script.parse_sbatch_options("--exclusive --comment='a b'") == (
        "--exclusive",
        "--comment=a b",
    )
    assert sbatch_script.parse_sbatch_options("-H --nodelist=n1 -Qvx n2") == (
        "-H",
        "--nodelist=n1",
        "-Qvx",
        "n2",
    )


@pytest.mark.parametrize(
    "word", ["--arra=0-1", "--nod=2", "-HN2", "-n2", "--no-req", "--sig=B:TERM@9", "-D/"]
)
def test_beginnings_and_bundles_of_what_the_script_sets_are_refused(word: str) -> None:
    with pytest.raises(UserError, match=f"--sbatch {word}: the script sets this itself; use --"):
        sbatch_script.parse_sbatch_options(f"-v {word}")


def test_the_job_starts_where_it_was_asked_for() -> None:
    assert "cd -- '/home/some one' || exit 2" in sbatch_script.render(script()).splitlines()


def test_a_run_that_is_in_a_job_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "slurm").mkdir()
    atomic_files.write_json(tmp_path / "slurm" / "job.json", {"job": "7"})
    monkeypatch.setattr(client, "job_states", lambda jobs: {"7": "RUNNING"})
    refuse_if_in_a_job(run, "7")
    with pytest.raises(UserError, match=r"is in job 7 already \(RUNNING\): scancel 7 first"):
        refuse_if_in_a_job(run, "8")
    monkeypatch.setattr(client, "job_states", lambda jobs: {"7": "NODE_FAIL"})
    refuse_if_in_a_job(run, "8")
    assert '#SBATCH --exclusive "--comment=a b"' in sbatch_script.render(
        script(raw_options=("--exclusive", "--comment=a b"))
    )
    assert (
        split_words(join_sbatch_value(["--sbatch", "--exclusive --x", "--nodes", "2"]))[1]["sbatch"]
        == "--exclusive --x"
    )
    for bad in ("date", "'", ""):
        with pytest.raises(UserError, match="--sbatch"):
            sbatch_script.parse_sbatch_options(bad)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("00:03:00", 180), ("1-0", 86400), ("1-2:03", 93780), ("1-00:00:01", 86401)],
)
def test_times_are_slurms(text: str, seconds: int) -> None:
    assert sbatch_script.parse_time_limit(text) == seconds
    assert sbatch_script.parse_time_limit(sbatch_script.format_time_limit(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "1:2:3:4", "-5", "1-"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--time"):
        sbatch_script.parse_time_limit(text)


def test_arrays_are_seeds() -> None:
    assert sbatch_script.parse_array("0-4") == [0, 1, 2, 3, 4]
    assert sbatch_script.parse_array("7,1-5:2%2") == [1, 3, 5, 7]
    for bad in ("", "a", "4-1", "0-5%", "0-5%0", "0-999999", "0-4;date", "1 2"):
        with pytest.raises(UserError, match="--array"):
            sbatch_script.parse_array(bad)


def test_the_lead_is_measured_where_it_can_be(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert time_limit.seconds_to_stop(run) is None
    run.metrics.write_text('{"step_seconds": 2}\n{"step_seconds": 4}\n{"split": "valid"}\n{"step_sec')
    assert time_limit.seconds_to_stop(run) == time_limit.SHUTDOWN_SECONDS + 12
    (run.checkpoints / "train-5").mkdir(parents=True)
    (run.checkpoints / "train-5" / "x").write_bytes(b"0" * 10**6)
    assert time_limit.seconds_to_stop(run) == pytest.approx(
        time_limit.SHUTDOWN_SECONDS + 12 + 2e6 / time_limit.SLOW_STORE_BYTES_PER_SECOND
    )
    assert [sbatch_script.default_lead(s) for s in (60, 180, 3600)] == [15, 45, 120]


@pytest.mark.parametrize(
    ("left", "warned", "measured", "stops"),
    [
        (None, False, 0, False),  # no time limit
        (None, True, 0, True),
        (500, False, 0, False),
        (44, False, 0, True),
        (44 + 60, True, 0, False),  # Slurm's signal comes up to a minute early: there is time left
        (3000, True, 0, True),  # preempted, or asked by hand
        (200, False, 201, True),  # steps are longer than was thought
    ],
)
def test_when_a_job_stops(left: float | None, warned: bool, measured: float, stops: bool) -> None:
    assert should_save_now(left, warned, 45, measured) is stops


@pytest.mark.parametrize(
    ("why", "state", "before", "now", "reason"),
    [
        ("limit", "RUNNING", None, [0, 5], ""),
        ("limit", "RUNNING", [0, 5], [0, 6], ""),
        ("limit", "RUNNING", [0, 5], [1, 1], ""),
        ("term", "PREEMPTED", [0, 5], [0, 6], ""),
        ("limit", "", [0, 5], [0, 6], ""),
        ("limit", "RUNNING", [0, 5], [0, 5], "no checkpoint"),
        ("limit", "RUNNING", [1, 5], [0, 9], "no checkpoint"),
        ("limit", "RUNNING", None, None, "no checkpoint"),
        ("term", "CANCELLED", [0, 5], [0, 6], "CANCELLED"),
        ("term", "PENDING", [0, 5], [0, 6], "PENDING"),  # requeued by somebody else
        ("interrupt", "RUNNING", [0, 5], [0, 6], "signal"),
        ("", "RUNNING", [0, 5], [0, 6], "signal"),  # only the step's processes were signalled
    ],
)
def test_when_a_job_requeues_itself(
    why: str, state: str, before: list[int] | None, now: list[int] | None, reason: str
) -> None:
    answer = why_not_requeue(why, state, before, now)
    assert (reason in answer) if reason else not answer


def test_the_world_is_read_from_the_steps_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "hostnames", lambda text: tuple(text.split(",")))
    job = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "a,b,c,d", "SLURM_JOB_ID": "7"}
    step = {"SLURM_STEP_NODELIST": "b,d", "SLURM_NODEID": "1"}
    assert StepNode.from_environment({**job, **step}).name == "d"
    with pytest.raises(UserError, match="step"):
        StepNode.from_environment(job)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_GPUS_PER_NODE": "h100:8"}
    allocation = client.Allocation.from_environment({**job, **array})
    assert (allocation.job, allocation.gpus, len(allocation.nodes)) == ("7_3", 8, 4)


def test_a_node_that_does_not_see_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.launch.slurm.rendezvous.ANSWER_SECONDS", 0.2)
    meeting = tmp_path / "r" / "slurm" / "meeting-1"
    meeting.mkdir(parents=True)
    first, second = (StepNode(rank=rank, nodes=("n1", "n2")) for rank in (0, 1))
    atomic_files.write_json(meeting / "0.json", {"node": "n1", "sees_data": True})
    with pytest.raises(UserError, match=r"n2 did not see .* --out on a file system that all nodes share"):
        wait_for_answers(first, meeting, tmp_path)
    atomic_files.write_json(meeting / "1.json", {"node": "n2", "sees_data": False})
    with pytest.raises(UserError, match=r"n2 cannot see the prepared data .* ISOBATCH_CACHE"):
        wait_for_answers(first, meeting, tmp_path)
    monkeypatch.setattr("isobatch.launch.slurm.rendezvous.JOIN_EXTRA_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"n2 does not see .* what n1 wrote"):
        join(second, tmp_path / "elsewhere" / "slurm" / "meeting-1", tmp_path)


def test_a_rendezvous_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.launch.slurm.rendezvous.REACH_SECONDS", 0.2)
    atomic_files.write_json(tmp_path / "call.json", {"addresses": ["127.0.0.1"], "port": 1})
    assert not local_address("127.0.0.1", 1)
    with pytest.raises(UserError, match=r"n2 cannot reach n1 at 127\.0\.0\.1:1"):
        join(StepNode(rank=1, nodes=("n1", "n2")), tmp_path, tmp_path)


@pytest.mark.parametrize("state", ["idle", "allocated", "mixed", "draining", "completing"])
def test_nodes_that_can_be_used(state: str) -> None:
    assert client.is_usable(state)


@pytest.mark.parametrize("state", ["down", "down*", "idle*", "drained", "failing", "fail"])
def test_nodes_that_cannot(state: str) -> None:
    assert not client.is_usable(state)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--time", "5"], "--gpus-per-node, or --cpu"),
        (["--cpu"], "--time"),
        (["--cpu", "--time", "soon"], "--time soon"),
        (["--cpu", "--gpus-per-node", "2", "--time", "5"], "--cpu"),
        (["--cpu", "--time", "5", "--lead", "301"], "--lead 301"),
        (["--cpu", "--time", "5", "--nodes", "2", "--processes", "3"], "--processes 3"),
        (["--cpu", "--time", "5", "--after", "now"], "--after now"),
        (["--cpu", "--time", "5", "--setup", "/no/such"], "--setup /no/such"),
        (["--cpu", "--time", "5", "--sbatch", "--ntasks=3"], "--sbatch --ntasks=3"),
        (
            ["--cpu", "--time", "5", "--nodes", "2", "--strategy", "single"],
            "--strategy single: is one process",
        ),
        (["--cpu", "--time", "5", "--strategy", "zero2"], "--strategy zero2: one process has nobody"),
        (["--cpu", "--time", "5", "--job-name", "a\nb"], "--job-name"),
        (["--cpu", "--time", "5", "--array", "9-1"], "--array 9-1"),
        (["--cpu", "--time", "5", "--seed", "1", "--array", "0-1"], "--seed"),
        (["--cpu", "--time", "5", "--partiton", "x"], "(did you mean --partition?)"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from isobatch.launch.cli import BEFORE_TORCH, main

    monkeypatch.chdir(tmp_path)
    settings = {"ISOBATCH_STARTED": "0", "TRANSFORMERS_VERBOSITY": "error", **BEFORE_TORCH}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert main(["slurm", "--task", LINE, *words]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_script_is_printed_and_its_run_is_ready(cli: Cli, tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--nodes", "2", "--time", "00:03:00", "--name", "r"]
    done = cli(*words, env={"PATH": "/usr/bin/nowhere"})
    assert done.code == 0, done.err
    run = RunFolder.open(tmp_path / "runs" / "r")
    assert done.out == (run.folder / "slurm" / "job.sh").read_text()
    assert plan_for_nodes(run, 2, JobRequest.read(run)).processes == 2
    assert plan_for_nodes(run, 1, JobRequest.read(run)).processes == 1
    refused = cli(*words, "--submit", env={"PATH": "/usr/bin/nowhere"})
    assert refused.code == 2
    assert "there is no sbatch here" in refused.err


def test_every_flag_says_what_it_is_for() -> None:
    from isobatch.core.flags import flags_of

    assert all(flag.help for flag in flags_of(SlurmOptions, "slurm").values())
