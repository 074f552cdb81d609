"""Tests of launch/clusters/slurm: the sbatch script, its quoting, and Slurm's own words."""

from __future__ import annotations

import shlex
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.package import ROOT, own_command
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.slurm import client, command, options
from isobatch.launch.clusters.slurm.legs import JobRequest
from isobatch.launch.clusters.slurm.options import SlurmOptions, join_sbatch_value, step_words
from isobatch.launch.clusters.slurm.step import srun_command
from isobatch.launch.local.arguments import split_words
from isobatch.launch.local.run_setup import environment_elsewhere

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1)


def script(**changes: object) -> command.JobScript:
    values: dict[str, object] = {
        "name": "r",
        "runs": {0: Path("/shared/runs/r")},
        "folder": Path("/shared/runs/r/slurm"),
        "options": asked(),
        "lead": 45,
        "start_folder": Path("/home/some one"),
    }
    return command.JobScript(**{**values, **changes})  # type: ignore[arg-type]


def asked(**changes: object) -> SlurmOptions:
    values = {"nodes": 2, "cpus_per_task": 16, "time": "00:03:00", **changes}
    return SlurmOptions(**values)  # type: ignore[arg-type]


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
    lines = command.render(script(options=asked(gpus_per_node=8, partition="gpu"))).splitlines()
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
    assert "run=/shared/runs/r" in lines
    assert lines[-1] == f'exec {shlex.join(own_command("job"))} "$run"'


@given(PRINTABLE)
def test_every_word_reaches_sbatch_as_it_is(word: str) -> None:
    line = f"#SBATCH {command.sbatch_word(f'--x={word}')} -n"
    assert as_sbatch_reads(line) == [f"--x={word}", "-n"]


@given(PRINTABLE, st.text(string.printable, min_size=1))
def test_no_name_adds_a_line_or_an_option(name: str, rest: str) -> None:
    try:
        text = command.render(script(name=name + rest))
    except UserError:
        assert not all(c.isprintable() for c in name + rest) or len(name + rest) > 400
        return
    ours = command.render(script()).splitlines()
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
    options = asked(setup=folder / "s.sh")
    try:
        text = command.render(
            script(runs={0: folder}, folder=folder / "slurm", options=options, start_folder=folder)
        )
    except UserError:
        return
    body = text.partition("\n\n")[2].splitlines()
    words = [shlex.split(line) for line in body if line.startswith(("cd ", "source "))]
    assert [words[0][2], words[1][1]] == [str(folder), str(folder / "s.sh")]
    assert [shlex.split(line) for line in body if line.startswith("run=")] == [[f"run={folder}"]]
    pattern = next(
        w for line in text.splitlines() for w in as_sbatch_reads(line)[:1] if w.startswith("--output=")
    )
    assert pattern == f"--output={str(folder).replace('%', '%%')}/slurm/%j.out"


def test_bash_runs_the_script_of_hostile_paths(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $(touch pwned) "`touch pwned`" ; touch pwned'
    folder.mkdir()
    runs = {3: folder, 4: Path("/x")}
    text = command.render(script(runs=runs, options=asked(array="3-4"), folder=folder, start_folder=folder))
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
        {"options": asked(account=bad)},
        {"options": asked(sbatch=f"--comment={bad}")},
    ):
        with pytest.raises(UserError, match="control character"):
            command.render(script(**change))


def test_no_secret_of_the_environment_is_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    assert "secret" not in command.render(script())


@pytest.mark.parametrize(("answers", "said"), [(False, "1"), (True, None)])
def test_a_job_asks_no_hub_that_does_not_answer(
    answers: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub_cache, "is_reachable", lambda: answers)
    assert environment_elsewhere().get("HF_HUB_OFFLINE") == said


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--sbatch", "--gpus-per-task=1"),
        ("--sbatch", "--arra=0-1"),
        ("--sbatch", "-HN2"),  # letters in one word may hide one that is set already
        ("--srun", "--cpu-bind=cores --ntask=5"),
        ("--srun", "--container-image=x"),
    ],
)
def test_options_that_are_set_already_are_refused(flag: str, text: str) -> None:
    """Beginnings of their names and letters, too."""
    with pytest.raises(UserError, match=flag):
        options.option_words(flag, text)


def test_other_options_are_passed_on() -> None:
    more = asked(sbatch="--exclusive --comment='a b'")
    assert '#SBATCH --exclusive "--comment=a b"' in command.render(script(options=more))
    joined = join_sbatch_value(["--sbatch", "--exclusive --x", "--nodes", "2"])
    assert split_words(joined)[1]["sbatch"] == "--exclusive --x"
    for bad in ("date", "'", ""):
        with pytest.raises(UserError, match="--sbatch"):
            options.option_words("--sbatch", bad)


def bash(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with nothing in its environment but `variables`."""
    return subprocess.run(
        ["/bin/bash"], input=text, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_what_a_node_does_not_see_is_the_first_line_of_its_output(tmp_path: Path) -> None:
    run, python = tmp_path / "it's a run", own_command()[0]
    text = command.render(script(runs={0: run}, start_folder=tmp_path))
    done = bash(text, tmp_path, SLURMD_NODENAME="n7")
    assert done.returncode == 2
    assert done.stdout.startswith(f"isobatch: n7 does not see {run}: choose an --out on a file system that")
    run.mkdir()
    for missing, says in ((python, "Python environment"), (str(ROOT), "isobatch's code")):
        done = bash(text.replace(f" {missing} ]", " /no/such ]"), tmp_path, SLURMD_NODENAME="n7")
        assert (done.returncode, done.stderr) == (2, "")
        assert done.stdout.startswith("isobatch: n7 does not see ")
        assert says in done.stdout
    gone = command.render(script(runs={0: run}, start_folder=tmp_path / "gone"))
    assert "gone: submit from a folder that all nodes share" in bash(gone, tmp_path).stdout
    setup = tmp_path / "set up.sh"
    text = command.render(script(runs={0: run}, start_folder=tmp_path, options=asked(setup=setup)))
    assert "keep --setup on a file system that all nodes share" in bash(text, tmp_path).stdout
    setup.write_text("false\n")
    assert bash(text, tmp_path).stdout.endswith(f": --setup {setup} failed\n")


def test_words_for_srun_reach_every_step(tmp_path: Path) -> None:
    words = step_words(SlurmOptions(gpus_per_node=2, srun="--cpu-bind=cores --mpi=pmix"))
    assert words == ("--mpi=none", "--gpu-bind=none", "--cpu-bind=cores", "--mpi=pmix")
    assert step_words(SlurmOptions()) == ("--mpi=none",)
    run, job = RunFolder(tmp_path), client.Allocation(job="7", nodes=("n1",), cpus=2, gpus=2)
    JobRequest(local=2, lead=5, seconds=9, plan={}, srun=words).write(tmp_path)
    run.facts = Facts(fingerprint="0", folder="/data", samples={}, lengths=())
    command = srun_command(run, ("n1",), job, JobRequest.read(tmp_path), ("nonce", "n1"))
    assert "--export=ALL" in command
    assert command[command.index("/bin/bash") - 4 : command.index("/bin/bash")] == list(words)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("00:03:00", 180), ("1-0", 86400), ("1-2:03", 93780), ("1-00:00:01", 86401)],
)
def test_times_are_slurms(text: str, seconds: int) -> None:
    assert options.parse_time_limit(text) == seconds


def test_what_is_no_time_is_said() -> None:
    for bad in ("", "0", "soon", "1:2:3:4", "-5", "1-"):
        with pytest.raises(UserError, match="--time"):
            options.parse_time_limit(bad)
