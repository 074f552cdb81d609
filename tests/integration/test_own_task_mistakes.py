"""Mistakes in a user's own task file: a few lines say where and what, without the program's own frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import launch

if TYPE_CHECKING:
    from pathlib import Path

RIGHT = """
import csv

import numpy as np
from isobatch import Data, Loss, Sum, Task


class Houses(Data):
    def read(self):
        with open(self.recipe.data) as file:
            rows = [[float(value) for value in row.values()] for row in csv.DictReader(file)]
        table = np.float32(rows)
        x, y = table[:, :2], table[:, 2:]
        return {"valid": {"x": x[::8], "y": y[::8]}, "train": {"x": x[1::2], "y": y[1::2]}}


class Price(Task):
    data = Houses
    defaults = {"epochs": 1, "lr": 1e-2, "batch_size": 16}

    def build_model(self, facts):
        from torch import nn

        width = 8
        return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

    def loss(self, model, batch, step):
        error = (model(batch["x"]) - batch["y"]).square().sum()
        return {"loss": Loss(error, "sample")}

    def evaluate(self, model, batch, step):
        error = (model(batch["x"]) - batch["y"]).abs().sum()
        return {**super().evaluate(model, batch, step), "mae": Sum(error, len(batch["x"]))}
"""
RETURNED = 'return {"loss": Loss(error, "sample")}'
MISTAKES = [
    ("nn.Linear(width, 1)", "nn.Linear(9, 1)", "in loss: RuntimeError: mat1 and mat2 shapes cannot be mult"),
    ("import csv\n", "", "in read: NameError: name 'csv' is not defined"),
    (RETURNED, "return error / 16", "loss() returned a Tensor: return {name: Loss(sum, unit)}"),
    ('batch["x"]', 'batch["inputs"]', "KeyError: 'inputs'; the batch has x, y, index"),
    ('"sample")', '"samples")', "loss() counts in 'samples', and this data weighs sample"),
    (
        "loss(self, model, batch, step)",
        "loss(self, model, batch)",
        "Price.loss takes (self, model, batch, step)",
    ),
    ('"y": y[::8]', '"y": y[::4]', "the columns of a split must have one length"),
    ("facts):", "facts)", "cannot be imported: SyntaxError: expected ':'"),
    ("class Price(", "class Prices(", "no Task called Price there (did you mean Prices?)"),
    ("return nn.Seq", "nn.Seq", "build_model() returned a NoneType: return a torch.nn.Module"),
    ("width = 8", "width = self.options.width", "in build_model: AttributeError: 'NoOptions' object has no"),
    (
        "data = Houses",
        'data, monitor = Houses, ("ma", "min")',
        "monitor ma: is no metric of the task, which has loss, mae",
    ),
    ('Sum(error, len(batch["x"]))', "error", "evaluate() returned a Tensor as mae: return {name: Sum(total"),
]


@pytest.mark.parametrize(("right", "wrong", "answer"), MISTAKES, ids=[wrong for _, wrong, _ in MISTAKES])
def test_a_mistake_is_answered_in_a_few_lines(tmp_path: Path, right: str, wrong: str, answer: str) -> None:
    assert RIGHT.count(right), "the mistake is made somewhere"
    (tmp_path / "mine.py").write_text(RIGHT.replace(right, wrong, 1))
    rows = "\n".join(f"{n % 7},{n % 5},{n % 11}" for n in range(64))
    (tmp_path / "houses.csv").write_text(f"rooms,age,price\n{rows}\n")
    done = launch("auto", "--task", "./mine.py:Price", "--data", "houses.csv", cwd=tmp_path)
    said = done.stderr.splitlines()
    begin = next((n for n, line in enumerate(said) if line.startswith(("  ", "isobatch: "))), 0)
    assert answer in done.stderr
    assert done.returncode in (2, 3)
    assert "train 1/" not in done.stderr, "it is refused before the first step"
    assert not any(place in done.stderr for place in ("/engine/", "/launch/", "site-packages"))
    assert 1 <= len(said[begin:]) <= 6
    if "monitor" in wrong:  # what is refused, and no code of the user's that fails, leaves its name free
        assert not any((tmp_path / "runs").iterdir())


def test_debug_shows_all_frames(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RIGHT.replace("import csv\n", ""))
    (tmp_path / "houses.csv").write_text("rooms,age,price\n1,2,3\n")
    done = launch("auto", "--task", "./mine.py:Price", "--data", "houses.csv", "--debug", cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith("NameError: name 'csv' is not defined")
