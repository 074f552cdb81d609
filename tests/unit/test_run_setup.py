"""Tests of launch/local/run_setup.py: new and continued runs, and what is refused before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.data.base import Ragged, save
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.auto import print_outcome
from isobatch.launch.commands.evaluate import evaluate
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.local.run_setup import create_run, locate_data, prepare_facts

if TYPE_CHECKING:
    from pathlib import Path

OWN = """
import numpy as np
from isobatch.data.base import Data
from isobatch.tests.tasks import failing


class Alone(Data):
    def read(self):
        return {"train": {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}}


class Line(failing.Line):
    data = Alone
"""


def ask(folder: Path, *words: str):  # type: ignore[no-untyped-def]
    (folder / "own.py").write_text(OWN)
    return parse_request(
        ["--task", f"{folder / 'own.py'}:Line", "--out", str(folder / "runs"), *words], "auto"
    )


def made(folder: Path) -> RunFolder:
    asked = ask(folder)
    return create_run(
        asked,
        prepare_facts(asked),
    )


def test_patience_needs_a_split_to_watch(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--patience 2: this data has no valid split to watch \(it has train\)"
    ):
        prepare_facts(ask(tmp_path, "--patience", "2"))
    assert prepare_facts(ask(tmp_path)).samples == {"train": 8}


@pytest.mark.parametrize(
    ("split", "line"), [("valid", "x: done, 3 steps, valid: loss 0.5\n"), (None, "x: done, 3 steps\n")]
)
def test_the_last_line(
    split: str | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"loss": 0.5} if split else {}
    summary = {"status": "done", "steps": 3, "split": split, "metrics": metrics}
    atomic_files.write_json(tmp_path / "summary.json", summary)
    print_outcome(RunFolder(tmp_path))
    assert capsys.readouterr().out.endswith(line.removeprefix("x"))


def test_facts_are_not_what_the_run_says_where_they_were_changed(tmp_path: Path) -> None:
    run = made(tmp_path)
    facts = atomic_files.read_json(run.folder / "facts.json")
    atomic_files.write_json(
        run.folder / "facts.json", {**facts, "samples": {"train": 7}, "folder": "elsewhere"}
    )
    run = RunFolder(run.folder)
    with pytest.raises(UserError, match=r"facts\.json was changed: samples differs from the data's"):
        locate_data(run, run.recipe, None)
    atomic_files.write_json(run.folder / "facts.json", {**facts, "folder": "elsewhere"})
    run = RunFolder(run.folder)
    locate_data(run, run.recipe, None)
    assert run.facts.folder == facts["folder"]


def test_another_task_file_than_the_trained_one_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path)
    (tmp_path / "own.py").write_text(OWN + "\n")
    with pytest.raises(UserError, match=r"own\.py:Line is not the code that was trained"):
        evaluate([str(run.folder)])
    (tmp_path / "own.py").unlink()
    with pytest.raises(UserError, match="there is no file"):
        evaluate([str(run.folder)])


def test_ragged_rows_are_lists(tmp_path: Path) -> None:
    rows = Ragged.from_rows([np.zeros((2, 3)), np.zeros((1, 3))])
    with pytest.raises(UserError, match=r"column x: the rows of a Ragged are lists .* shape \(3, 3\)"):
        save(tmp_path, {"x": rows})
