"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import isobatch
from isobatch.tests.integration.helpers import ROOT, launch, losses, summary

if TYPE_CHECKING:
    from pathlib import Path

README = (ROOT / "README.md").read_text(encoding="utf-8")


CODE, FROM_PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the file that the README tells to save."""
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def test_a_users_own_task(folder: Path) -> None:
    assert len(CODE.strip().splitlines()) < 45
    done = launch("auto", "--task", "./mine.py:Sine", "--name", "sine", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "sine"
    assert losses(run)[-1] < 0.1 * losses(run)[0]
    metrics = summary(run)["metrics"]
    assert metrics["loss"] < 0.05
    assert metrics["absolute_error"] < 0.25
    assert launch("verify", str(run), cwd=folder).returncode == 0
    described = launch("describe", "./mine.py:Sine", cwd=folder).stdout
    assert "--batch-size" in described
    assert "Units of the hidden layer." in described


def test_a_users_own_task_on_their_data(folder: Path) -> None:
    (folder / "waves.csv").write_text("".join(f"{n / 100},{n % 3}\n" for n in range(160)))
    words = ["auto", "--task", "./mine.py:Sine", "--data", "waves.csv", "--width", "32", "--name", "r"]
    done = launch(*words, "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = isobatch.load(folder / "runs" / "r")
    assert found.facts.samples == {"train": 80, "valid": 20}
    assert found.recipe.options["width"] == 32


def test_isobatch_from_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(FROM_PYTHON, names)
    assert names["run"].status == "done"
    assert names["model"](torch.zeros(1, 1)).shape == (1, 1)


def test_every_command_shown_exists() -> None:
    from isobatch.launch.cli import ALIASES, COMMANDS

    fences = re.findall(r"```\n(.*?)```", README, re.S)
    shown = set(re.findall(r"^(?:\$ )?isobatch (\w+)", "\n".join(fences), re.M))
    assert shown <= {*COMMANDS, *ALIASES}
    assert {"auto", "plan", "resume", "verify"} <= shown
