"""Tests of engine/forensics and of `seen`: its answers are what the loader consumes, for every task."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.engine.loading.loader import BatchLoader
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.registry import TASKS, workload
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.verification.run_order import RunOrder
from isobatch.launch.forensics.seen import SeenOptions, answer_question, seen
from isobatch.tests.paths import RAGGED, REGISTER
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from pathlib import Path

PROSE = "".join(f"line {i} of plain text\n" for i in range(400))
CHATS = [{"instruction": f"Say {i}.", "output": f"{i}"} for i in range(300)]
SAMPLES = 1000


def make_run(folder: Path, task: str, passes: float = 1.7, done: float = 1.0, **values: Any) -> RunFolder:
    """A run of about so many passes over its data, of which the log counts the share `done`."""
    chosen = workload(task)
    common = {"batch_size": 64, "max_length": 32} if task in TASKS else {}
    recipe, _ = chosen.complete({**common, **values})
    facts = prepare(chosen.make(recipe)[1])
    order = RunOrder.of(recipe, facts)
    each = max(2, round(passes * order.sampler.steps_per_epoch))
    steps = tuple(each for _ in order.schedules)
    if recipe.phase is None:
        recipe = dataclasses.replace(recipe, epochs=None, steps=steps)
    run = RunFolder.create(folder, recipe, facts, RunOptions())
    run.write_plan(plan(processes=2, micro_batch_samples=24, micro_batch_tokens=700))
    write_log(run, done)
    return run


def order_of(run: RunFolder) -> RunOrder:
    return RunOrder.of(run.recipe, run.facts)


def write_log(run: RunFolder, done: float) -> None:
    """The rows of the share `done` of all steps, every tenth, as a run that was stopped leaves them."""
    schedules = order_of(run).schedules
    left = round(done * sum(schedule.steps for schedule in schedules))
    log = MetricsLog(run, writes=True, every=10)
    log.begin([schedule.name for schedule in schedules])
    for schedule in schedules:
        steps = min(left, schedule.steps)
        for step in range(1, steps + 1):
            log.log_step({"phase": schedule.name, "step": step, "chain": "0"}, np.empty(0, np.int64))
        log.flush_skipped()
        if steps:
            log.seal(schedule.name, steps)
        left -= steps


def consumed(run: RunFolder) -> dict[int, list[dict[str, Any]]]:
    """Sample -> where it went, from the batches that every rank's loader makes of every step."""
    order, plan = order_of(run), run.plan
    ranks = range(plan.processes)
    loaders = [
        BatchLoader(order.source, order.sampler.batch, plan, rank, order.task.cohort) for rank in ranks
    ]
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for schedule in order.schedules:
        for step in range(schedule.steps):
            here = []
            for loader in loaders:
                work = loader.plan_step(step)
                here += [position for micro in work.micro_batches for position in micro.positions.tolist()]
            assert sorted(here) == list(range(len(work.samples)))
            where = {"phase": schedule.name, "step": step + 1, "epoch": step // schedule.steps_per_epoch + 1}
            for position in here:
                found[int(work.samples[position])].append(where)
    return found


def assert_agrees(run: RunFolder) -> None:
    """What `seen` says of 1,000 rows is what the loaders took, and so is what it says of some steps."""
    order, expected = order_of(run), consumed(run)
    counted = order.counted_steps(run)
    rows = np.random.default_rng(0).permutation(order.sampler.count)[:SAMPLES].tolist()
    assert any(expected[row] for row in rows)
    for row, places in order.sightings(run, rows).items():
        assert places == [one for one in expected[row] if one["step"] <= counted[one["phase"]]]
    last = order.schedules[-1]
    for step in (1, last.steps):
        answer = answer_question(run, SeenOptions(step=step, phase=last.name))["rows_of_step"]
        assert [one["row"] for one in answer["rows"]] == order.sampler.batch(step - 1).tolist()


KINDS: dict[str, dict[str, Any]] = {
    "causal-lm": {},
    "orpo": {"train_fraction": 0.4},
    "recommender": {"passes": 0.4, "batch_size": 128},
    "sequence-vae": {"passes": 0.2, "group_by_length": True, "batch_size": 256},
    RAGGED: {"passes": 5.5, "batch_size": 24, "group_by_length": True},
}


@pytest.mark.parametrize("task", KINDS)
def test_what_is_said_is_what_the_loader_takes(task: str, tmp_path: Path) -> None:
    assert_agrees(make_run(tmp_path / "run", task, **KINDS[task]))


def test_of_a_run_that_was_stopped_in_its_second_phase(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "recommender", passes=0.2, done=0.7, batch_size=128)
    order = order_of(run)
    (first, second), counted = order.schedules[:2], order.counted_steps(run)
    assert counted[first.name] == first.steps
    assert 0 < counted[second.name] < second.steps
    assert_agrees(run)


@pytest.mark.parametrize(("like", "fraction"), [(False, 1.0), (True, 0.6)])
def test_of_a_mixture_with_shares(tmp_path: Path, like: bool, fraction: float) -> None:
    (tmp_path / "prose.txt").write_text(PROSE)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    data = ",".join(str(tmp_path / name) for name in ("prose.txt", "chats.jsonl"))
    small = {"model": "tiny", "vocab_size": 300, "batch_size": 16, "data": data, "mix": (0.6, 0.4)}
    values = {"train_fraction": fraction, "group_by_length": like}
    run = make_run(tmp_path / "run", "causal-lm", passes=4.5, **small, **values)
    assert_agrees(run)
    chats = order_of(run).sampler.parts[0][0] + 7
    (answer,) = answer_question(run, SeenOptions(sample=chats))["rows"]
    assert "Say 7." in answer["text"]
    assert answer in answer_question(run, SeenOptions(text="s\u00e1y 7"))["rows"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({}, "--sample ROW, --text PART or --step N"),
        ({"sample": 1, "step": 2}, "--sample ROW, --text PART or --step N"),
        ({"sample": 1, "phase": "train"}, "--phase train: belongs to --step"),
        ({"sample": 93}, "--sample 93: the last row for training is 92"),
        ({"step": 9}, "--phase train --step 9: this run has train with 8 steps"),
        ({"step": 1, "phase": "qat"}, "--phase qat"),
    ],
)
def test_a_wrong_question_is_one_line(words: dict[str, Any], named: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RAGGED, passes=2, batch_size=24)
    with pytest.raises(UserError) as error:
        answer_question(run, SeenOptions(**words))
    assert named in str(error.value)


@pytest.mark.parametrize("split", ["train", "valid", "none"])
def test_a_text_is_found_in_whichever_split_has_it(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, numbers in (("train", range(40)), ("valid", range(40, 50))):
        rows = "".join(f"M\u00fcller pays {n} EUR,{'ab'[n % 2]}\n" for n in numbers)
        (tmp_path / f"{name}.csv").write_text("text,label\n" + rows)
    small = {"model": "tiny", "vocab_size": 300, "batch_size": 8, "data": str(tmp_path)}
    run = make_run(tmp_path / "run", "classifier", **small)
    number = {"train": 17, "valid": 43, "none": 77}[split]
    assert seen([str(run.folder), "--text", f"Muller PAYS {number}"]) == 0
    said = capsys.readouterr().out
    row = {"train": "row 17 was seen ", "valid": "row 3 of valid, held out, was seen 0 times"}
    assert said.startswith(row.get(split, "no row holds this text"))
    (found,) = answer_question(run, SeenOptions(text=f"pays {number}"))["rows"] or [{"seen": []}]
    assert found["seen"] == (order_of(run).sightings(run, [17])[17] if split == "train" else [])


def test_a_changed_recipe_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RAGGED, batch_size=24)
    file = run.folder / "recipe.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(UserError, match=r"recipe.json was changed"):
        answer_question(RunFolder.open(run.folder), SeenOptions(sample=1))


def test_what_a_user_reads_of_a_run_that_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", RAGGED, passes=6, done=0.5, batch_size=24)
    order = order_of(run)
    assert (order.counted_steps(run)["train"], order.schedules[0].steps) == (12, 24)
    row = int(order.sampler.batch(20)[0])
    assert seen([str(run.folder), "--sample", str(row), "--trust"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"row {row} was seen 3 times: step ")
    assert second.startswith("  of 93 rows of training data as prepared, the first is 0: tokens [")
    assert seen([str(run.folder), "--step", "21"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "step 21 (epoch 6) would see 24 rows:"
    assert [line.split()[0] for line in rows] == [str(n) for n in order.sampler.batch(20)]


def test_an_answer_needs_no_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "classifier")
    script = REGISTER + (
        "import sys; from isobatch.launch.cli import main; code = main(sys.argv[1:]);"
        " print('torch' in sys.modules, 'transformers' in sys.modules); sys.exit(code)"
    )
    for question in (("--sample", "7"), ("--step", "2")):
        words = [sys.executable, "-c", script, "seen", str(run.folder), *question]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "False False"
