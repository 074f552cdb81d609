"""verify under another Python: what differs there is said with its versions."""

from __future__ import annotations

import json
import stat
import sys
from typing import TYPE_CHECKING, Any

import pytest

import isobatch
from isobatch.core.errors import UserError
from isobatch.launch.commands.verify import verify
from isobatch.launch.forensics.other_environment import find_python, judged, verify_there, versions_of
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.tests.paths import ROOT
from isobatch.tests.tasks import planted

if TYPE_CHECKING:
    from pathlib import Path

FINE = {"verified": True, "problems": [], "unproven": [], "largest_loss_difference": 2e-8}
WRONG = {**FINE, "verified": False, "problems": ["step 3: loss 1.2, logged 1.3"]}
GONE = {**FINE, "verified": False, "unproven": ["the checkpoint train-4 is missing"]}
OLD, NEW = {"torch": "2.11.0", "numpy": "2.1"}, {"torch": "2.13.0", "numpy": "2.1"}


@pytest.mark.parametrize(
    ("here", "there", "changes", "sentence"),
    [
        (FINE, FINE, False, "changes nothing beyond rounding (torch 2.11.0 -> 2.13.0): losses differ"),
        (FINE, WRONG, True, "changes what is learnt (torch 2.11.0 -> 2.13.0): step 3: loss 1.2, logged 1.3"),
        (WRONG, FINE, False, "here the run is not what its recipe says, and there it is"),
        (WRONG, WRONG, False, "here the run is not what its recipe says, and there neither"),
        (
            FINE,
            GONE,
            False,
            "something could not be checked (torch 2.11.0 -> 2.13.0): the checkpoint train-4",
        ),
    ],
)
def test_the_verdict(here: dict[str, Any], there: dict[str, Any], changes: bool, sentence: str) -> None:
    found = judged(here, there, [OLD, NEW])
    assert sentence in found["verdict"]
    assert found["changes_what_is_learnt"] == changes
    assert found["verified"] == (here is FINE and there is FINE)
    assert found["versions"] == {"torch": ["2.11.0", "2.13.0"]}


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_environment_is_found_by_its_folder_and_another_is_refused(tmp_path: Path) -> None:
    python = script(tmp_path / "env" / "bin" / "python", f'exec {sys.executable} "$@"')
    assert find_python(str(tmp_path / "env")) == find_python(str(python)) == python
    assert versions_of(python)["torch"] == versions_of(find_python(sys.executable))["torch"]
    with pytest.raises(UserError, match="is no Python, and no environment with bin/python in it"):
        find_python(str(tmp_path))
    broken = script(tmp_path / "broken", "echo no such library >&2; exit 3")
    with pytest.raises(UserError, match="ended with 3: no such library"):
        versions_of(broken)


MISSING = "Traceback\\nImportError: tokenizers>=0.22 is required, but found 0.21\\nTry: pip install -U"


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (
            MISSING,
            r"ended with 1: ImportError: tokenizers>=0.22 is required, but found 0.21; that env.* needs",
        ),
        ("ValueError: no such thing", r"ended with 1: ValueError: no such thing$"),
        ("killed", r"ended with 1: killed$"),
        ("", r"ended with 1: it said nothing$"),
    ],
)
def test_what_failed_there_is_one_line(said: str, answer: str, tmp_path: Path) -> None:
    python = script(tmp_path / "python", f"printf '{said}' >&2; exit 1")
    with pytest.raises(UserError, match=answer):
        verify_there(python, ["run"])


def test_a_library_that_computes_otherwise_is_found_and_the_same_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = isobatch.Recipe(task=f"{ROOT}/tests/tasks/planted.py:Planted", steps=[6])
    options = {"precision": "fp32", "device": "cpu", "processes": 1, "quiet": True, "log_every": 1}
    run = str(isobatch.train(recipe, out=str(tmp_path), name="run", **options).folder)
    same = script(tmp_path / "same", f'exec {sys.executable} "$@"')
    with preserve_process_state():
        assert verify([run, "--against", str(same)]) == 0
    assert "changes nothing beyond rounding (the same versions)" in capsys.readouterr().out
    other = script(tmp_path / "other", f'{planted.LABEL}=0 exec {sys.executable} "$@"')
    with preserve_process_state():
        assert verify([run, "--against", str(other), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["changes_what_is_learnt"]
    assert found["here"]["verified"]
    assert "step 1" in found["verdict"]
