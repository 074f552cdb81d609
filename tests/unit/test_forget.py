"""Tests of `forget`: what it trains is, bit for bit, a run that never had the rows."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import isobatch
from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import list_checkpoints
from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.engine.forensics.run_order import open_order
from isobatch.engine.forensics.seen_rows import row_answer
from isobatch.engine.loading.inverse_order import steps_with
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.runs.ledger import read_ledger
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.control.compare import compared
from isobatch.launch.forensics.diff import diff_runs
from isobatch.launch.forensics.forget import forget
from isobatch.launch.local.launch_run import launch_run
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TASK = f"{ROOT}/tests/tasks/ragged.py:RaggedLM"
STEPS = 12
COMPARED = ("phase", "step", "loss", "grad_norm", "chain", "lr")


def trained(out: Path, name: str, **values: Any) -> RunFolder:
    recipe = isobatch.Recipe(task=TASK, **{"steps": STEPS, "batch_size": 24, **values})
    run = isobatch.train(recipe, out=out, name=name, save_every=2, keep=99, ledger=True, quiet=True)
    return RunFolder(run.folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("run"), "whole")


def trained_from_the_start(run: RunFolder, name: str, rows: list[int]) -> RunFolder:
    """A run whose recipe forgets rows, without a checkpoint of another."""
    recipe = dataclasses.replace(run.recipe, forgets=rows)
    fresh = RunFolder.create(run.folder.with_name(name), recipe, run.facts, run.options())
    fresh.write_plan(run.plan)
    with preserve_process_state():
        assert launch_run(fresh, fresh.options()).code == 0
    return fresh


def rows_seen_first_in(run: RunFolder, step: int) -> list[int]:
    order = open_order(run, at_hand=True)
    return [row for row in range(order.sampler.count) if order.sightings(row)[0].step == step]


def logged(run: RunFolder) -> list[dict[str, Any]]:
    return [{k: row.get(k) for k in COMPARED} for row in rows_in(run.metrics) if "chain" in row]


def forgot(run: RunFolder, name: str, *words: str) -> RunFolder:
    with preserve_process_state():
        assert forget([str(run.folder), "--name", name, "--quiet", *words]) == 0
    return RunFolder(run.folder.with_name(name))


def test_it_is_a_run_that_never_had_the_rows(run: RunFolder) -> None:
    rows = [*rows_seen_first_in(run, 3)[:4], *rows_seen_first_in(run, 4)[:2]]
    found = forgot(run, "forgot", "--sample", ",".join(map(str, rows)))
    direct = trained_from_the_start(run, "direct", sorted(rows))
    assert found.recipe == direct.recipe
    assert logged(found) == logged(direct)
    assert [row["step"] for row in logged(found)] == list(range(1, STEPS + 1))
    assert (
        folder_digests(found.final)["model.safetensors"] == folder_digests(direct.final)["model.safetensors"]
    )
    names = [path.name for path in list_checkpoints(found.checkpoints, ["train"])]
    assert names == [path.name for path in list_checkpoints(direct.checkpoints, ["train"])]
    for one, other in zip(read_ledger(found), read_ledger(direct), strict=True):
        assert one.samples.tolist() == other.samples.tolist()
        assert not set(one.samples.tolist()) & set(rows)
    parted = diff_runs(run, found)
    assert parted["recipe"]["forgets"][0] is None
    assert parted["verdict"].startswith(
        "they part at step 3: they saw other samples, because forgets differs;"
    )
    assert logged(found)[:2] == logged(run)[:2]
    assert logged(found)[2] != logged(run)[2]
    assert isobatch.verify(found.folder, processes=1, level="full").verified


def test_forgetting_twice_is_forgetting_once(run: RunFolder) -> None:
    first, second = rows_seen_first_in(run, 4)[:2]
    once = forgot(run, "once", "--sample", f"{first},{second}")
    half = forgot(run, "half", "--sample", str(first))
    twice = forgot(half, "twice", "--sample", str(second))
    assert twice.recipe == once.recipe
    answer = row_answer(open_order(twice, at_hand=True), first)
    assert not answer["seen"]
    assert answer["forgotten"]
    assert logged(twice) == logged(once)
    assert isobatch.verify(twice.folder, processes=1).verified


def test_without_an_older_checkpoint_training_begins_anew(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    row = rows_seen_first_in(run, 1)[0]
    with preserve_process_state():
        assert forget([str(run.folder), "--name", "anew", "--sample", str(row)]) == 0
    said = capsys.readouterr().out
    assert compared([run, RunFolder(run.folder.with_name("anew"))])["recipe"] == {"forgets": [None, str(row)]}
    assert f"whole that holds row {row}: 12 of 12 steps (100 %) are made again, from the beginning" in said
    assert f"anew held row {row}, and the weights that it began with had not seen it" in said
    found = RunFolder(run.folder.with_name("anew"))
    assert len(logged(found)) == STEPS
    assert isobatch.verify(found.folder, processes=1).verified


def test_a_dry_run_trains_nothing(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    row = rows_seen_first_in(run, 3)[0]
    before = sorted(run.folder.parent.iterdir())
    assert forget([str(run.folder), "--sample", str(row), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_step"] == {"phase": "train", "step": 3}
    assert (found["goes_on_from"], found["steps_made_again"], found["steps"]) == ("train-2", 10, 12)
    assert sorted(run.folder.parent.iterdir()) == before


WRONG: dict[str, tuple[list[str], str]] = {
    "no rows": ([], "forget: which rows: give one of --sample, --samples or --text"),
    "two ways": (["--sample", "1", "--text", "a"], "--sample and --text: give one of"),
    "no number": (["--sample", "1,b"], "--sample 1,b: 'b' is no row"),
    "beyond": (["--sample", "93"], "forgets row 93, and the training data has 93 rows"),
    "no file": (["--samples", "none.txt"], "--samples none.txt: cannot be read"),
    "taken": (["--sample", "1", "--name", "whole"], "whole is there already: choose another --name"),
    "no name": (["--sample", "1", "--name", "../esc"], r"--name \.\./esc: is a folder's name"),
    "taken, before all": (["--sample", "1", "--name", "whole", "--dry-run"], "whole is there already"),
    "all of a batch": (["--sample", "0-92", "--name", "empty"], "would lose all its samples"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_forgotten_is_one_line(case: str, run: RunFolder) -> None:
    words, expected = WRONG[case]
    before = sorted(run.folder.parent.iterdir())
    with pytest.raises(UserError, match=expected) as raised:
        forget([str(run.folder), *words])
    assert "\n" not in str(raised.value)
    assert sorted(run.folder.parent.iterdir()) == before


def test_rows_that_no_step_saw_need_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, "part", steps=2)
    seen = {row for one in read_ledger(run) for row in one.samples.tolist()}
    row = next(row for row in range(93) if row not in seen)
    assert forget([str(run.folder), "--sample", str(row)]) == 0
    assert f"part holds row {row}: nothing is trained anew" in capsys.readouterr().out


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("parts", [(), ((300, 2.0), (101, 1.0))])
def test_every_batch_loses_the_rows_and_nothing_else(like: bool, parts: Any) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 401)
    plain = Sampler(401, 16, 3, 0.9, 1, (lambda n: lengths[n]) if like else None, parts)
    rows = np.array([3, 77, 78, 350])
    lossy = dataclasses.replace(plain, forgets=rows)
    steps = 3 * plain.steps_per_epoch
    batches = lossy.batches()
    for step in range(steps):
        expected = [n for n in plain.batch(step).tolist() if n not in rows]
        assert lossy.batch(step).tolist() == expected
        assert next(batches).tolist() == expected
    assert all(steps_with(lossy, int(row), steps) == [] for row in rows)
    assert steps_with(lossy, 5, steps) == steps_with(plain, 5, steps)
