"""Tests of core/atomic_files.py: JSON never holds NaN or Infinity, whoever writes it; a device stays one."""

from __future__ import annotations

import ast
import errno
import json
import math
import os
from typing import TYPE_CHECKING, Any

import pytest

import isobatch
from isobatch.core import atomic_files
from isobatch.core.errors import FAILED, DiskFullError, TrainingError, UserError
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LINE = f"{ROOT}/tests/tasks/failing.py:Line"


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def test_a_number_that_json_lacks_is_null_and_named(tmp_path: Path) -> None:
    value = {"loss": math.inf, "lists": [1.0, [math.nan]], "part": {"kl": -math.inf, "n": 3}, "word": "NaN"}
    atomic_files.write_json(tmp_path / "x.json", value)
    assert strict((tmp_path / "x.json").read_text()) == {
        "loss": None,
        "lists": [1.0, [None]],
        "part": {"kl": None, "n": 3, "not_finite": {"kl": "-inf"}},
        "word": "NaN",
        "not_finite": {"loss": "inf"},
    }
    assert atomic_files.json_text({"a": 1.5, "b": [2]}, indent=1) == json.dumps(
        {"a": 1.5, "b": [2]}, indent=1
    )


def test_a_row_of_metrics_is_json(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    MetricsLog(run, writes=True).log_metrics({"step": 1, "mine": math.nan})
    (text,) = run.metrics.read_text().splitlines()
    assert strict(text) == {"step": 1, "mine": None, "not_finite": {"mine": "nan"}}


@pytest.mark.parametrize("folder", ["engine/runs", "launch/commands", "launch/clusters/slurm"])
def test_json_for_others_is_written_in_one_place(folder: str) -> None:
    """`json.dumps` writes NaN, which no other reader takes."""
    found = set()
    for file in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dumps", "json.dump"):
                found.add(file.name)
    assert not found - {"metrics_log.py"}, "whose rows of steps enter no other file where numbers are finite"


@pytest.mark.parametrize(
    ("lr", "problem"),
    [
        (1e25, "loss of the valid split is inf: training has diverged; lower --lr or lengthen --warmup"),
        (1e39, "weights are not finite after step 1 of train: training has diverged; lower --lr"),
    ],
)
def test_a_run_whose_last_update_diverged_fails(lr: float, problem: str, tmp_path: Path) -> None:
    """No loss has seen it: the run ended as done, with Infinity in its files."""
    recipe = isobatch.Recipe(LINE, steps=1, lr=lr)
    with pytest.raises(TrainingError, match=problem):
        isobatch.train(recipe, out=str(tmp_path), name="run", quiet=True, device="cpu", processes=1)
    run = RunFolder(tmp_path / "run")
    assert run.status() == "failed"
    for file in run.folder.glob("*.json*"):
        for line in [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines():
            strict(line)


FULL = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded")]


@pytest.mark.parametrize("error", [*FULL, RuntimeError("unable to write: No space left on device")], ids=str)
def test_a_full_disk_is_a_failure_that_space_mends(error: Exception, tmp_path: Path) -> None:
    """Wherever it is met, it says what is full, how much is free and needed, and does not count as wrong."""
    with pytest.raises(DiskFullError) as raised, atomic_files.explain_write_errors(tmp_path / "a/b", 12_000):
        raise error
    said = str(raised.value)
    assert said.startswith(
        f"cannot write {tmp_path}/a/b: {getattr(error, 'strerror', None) or FULL[0].strerror} ("
    )
    assert "are free there, it takes 12 KB); make space, then go on with `resume`" in said
    for found in (raised.value, classify(error)):
        assert found is not None
        assert (found.exit_code, found.cause) == (FAILED, DiskFullError.cause)
    assert classify(ValueError("No space left on device")) is None


def test_a_pipe_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        atomic_files.write_json(pipe, {"a": 1})
        assert strict(reader.read()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()


def test_a_pipe_is_no_file_of_json(tmp_path: Path) -> None:
    """To read one may never end."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config.json cannot be read as JSON: it is no regular file"):
        atomic_files.read_json(tmp_path / "config.json")
