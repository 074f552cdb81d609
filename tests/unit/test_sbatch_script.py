"""Tests of launch/slurm/submission: the sbatch script, its quoting, and Slurm's own words."""

from __future__ import annotations

import shlex
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core.errors import UserError
from isobatch.core.package import own_command
from isobatch.launch.local.arguments import split_words
from isobatch.launch.slurm.submission import sbatch_script, slurm_words
from isobatch.launch.slurm.submission.options import join_sbatch_value

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1)


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
        slurm_words.parse_sbatch_options(text)


def test_other_options_are_passed_on() -> None:
    assert slurm_words.parse_sbatch_options("--exclusive --comment='a b'") == (
        "--exclusive",
        "--comment=a b",
    )
    assert slurm_words.parse_sbatch_options("-H --nodelist=n1 -Qvx n2") == (
        "-H",
        "--nodelist=n1",
        "-Qvx",
        "n2",
    )
    assert '#SBATCH --exclusive "--comment=a b"' in sbatch_script.render(
        script(raw_options=("--exclusive", "--comment=a b"))
    )
    assert (
        split_words(join_sbatch_value(["--sbatch", "--exclusive --x", "--nodes", "2"]))[1]["sbatch"]
        == "--exclusive --x"
    )
    for bad in ("date", "'", ""):
        with pytest.raises(UserError, match="--sbatch"):
            slurm_words.parse_sbatch_options(bad)


@pytest.mark.parametrize(
    "word", ["--arra=0-1", "--nod=2", "-HN2", "-n2", "--no-req", "--sig=B:TERM@9", "-D/"]
)
def test_beginnings_and_bundles_of_what_the_script_sets_are_refused(word: str) -> None:
    with pytest.raises(UserError, match=f"--sbatch {word}: the script sets this itself; use --"):
        slurm_words.parse_sbatch_options(f"-v {word}")


def test_the_job_starts_where_it_was_asked_for() -> None:
    assert "cd -- '/home/some one' || exit 2" in sbatch_script.render(script()).splitlines()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("00:03:00", 180), ("1-0", 86400), ("1-2:03", 93780), ("1-00:00:01", 86401)],
)
def test_times_are_slurms(text: str, seconds: int) -> None:
    assert slurm_words.parse_time_limit(text) == seconds
    assert slurm_words.parse_time_limit(slurm_words.format_time_limit(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "1:2:3:4", "-5", "1-"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--time"):
        slurm_words.parse_time_limit(text)


def test_arrays_are_seeds() -> None:
    assert slurm_words.parse_array("0-4") == [0, 1, 2, 3, 4]
    assert slurm_words.parse_array("7,1-5:2%2") == [1, 3, 5, 7]
    for bad in ("", "a", "4-1", "0-5%", "0-5%0", "0-999999", "0-4;date", "1 2"):
        with pytest.raises(UserError, match="--array"):
            slurm_words.parse_array(bad)
