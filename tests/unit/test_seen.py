"""Tests of engine/forensics and of `seen`: its answers are what the loader consumes, for every task."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.data.base import Ragged, TextQuery
from isobatch.engine.forensics.run_order import open_order
from isobatch.engine.forensics.seen_rows import find_rows, row_answers, step_answer, text_answer
from isobatch.engine.loading.loader import BatchLoader
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.registry import TASKS, workload
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.forensics.seen import SeenOptions, answer_question, seen
from isobatch.tests.paths import REGISTER, ROOT
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Mapping

RAGGED = f"{ROOT / 'tests' / 'tasks' / 'ragged.py'}:RaggedLM"
PROSE = "".join(f"line {i} of plain text\n" for i in range(400))
CHATS = [{"instruction": f"Say {i}.", "output": f"{i}"} for i in range(300)]
REVIEWS = [{"sentence": f"film {i}", "label": "good" if i % 2 else "bad"} for i in range(200)]
SAMPLES = 1000


def make_run(folder: Path, task: str, passes: float = 1.7, done: float = 1.0, **values: Any) -> RunFolder:
    """A run of about so many passes over its data, of which the log counts the share `done`."""
    chosen = workload(task)
    common = {"batch_size": 64, "max_length": 32} if task in TASKS else {}
    recipe, _ = chosen.complete({**common, **values})
    facts = prepare(chosen.make(recipe)[1])
    made, data = chosen.make(recipe)
    sampler = make_sampler(recipe, data.open(Path(facts.folder), "train"), made.cohort)
    each = max(2, round(passes * sampler.steps_per_epoch))
    steps = tuple(each for _ in made.phases())
    if recipe.phase is None:
        recipe = dataclasses.replace(recipe, epochs=None, steps=steps)
    run = RunFolder.create(folder, recipe, facts, RunOptions())
    run.write_plan(plan(processes=2, micro_batch_samples=24, micro_batch_tokens=700))
    write_log(run, done)
    return run


def schedules_of(run: RunFolder) -> Any:
    task, data = workload(run.recipe.task).make(run.recipe)
    sampler = make_sampler(run.recipe, data.open(Path(run.facts.folder), "train"), task.cohort)
    return phase_schedules(run.recipe, task.phases(), sampler.steps_per_epoch)


def write_log(run: RunFolder, done: float) -> None:
    """The rows of the share `done` of all steps, every tenth, as a run that was stopped leaves them."""
    schedules = schedules_of(run)
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
    task, data = workload(run.recipe.task).make(run.recipe)
    source = data.open(Path(run.facts.folder), "train")
    order = make_sampler(run.recipe, source, task.cohort).batch
    loaders = [BatchLoader(source, order, run.plan, rank, task.cohort) for rank in range(run.plan.processes)]
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for schedule in schedules_of(run):
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
    order, expected = open_order(run, at_hand=True), consumed(run)
    rows = np.random.default_rng(0).permutation(order.sampler.count)[:SAMPLES].tolist()
    assert any(expected[row] for row in rows)
    order = dataclasses.replace(order, data=_Silent())  # the texts are tried below
    for row, answer in zip(rows, row_answers(order, rows), strict=True):
        assert answer["seen"] == [one for one in expected[row] if one["step"] <= order.counted[one["phase"]]]
    last = order.schedules[-1]
    for step in (1, last.steps):
        answer = step_answer(order, step, last.name)
        batch = [one["row"] for one in answer["rows"]]
        assert batch == order.sampler.batch(step - 1).tolist()


class _Silent:
    """Data that describes no rows."""

    def describe_rows(self, _: Any, batch: Mapping[str, np.ndarray]) -> list[str]:
        return [""] * len(batch["index"])


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


def test_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "classifier", passes=3, done=0.4)
    order = open_order(run, at_hand=True)
    assert 0 < order.counted["train"] < order.schedules[0].steps
    assert_agrees(run)


def test_of_a_run_in_its_second_phase(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "recommender", passes=0.2, done=0.7, batch_size=128)
    order = open_order(run, at_hand=True)
    first, second = order.schedules[:2]
    assert order.counted[first.name] == first.steps
    assert 0 < order.counted[second.name] < second.steps
    assert_agrees(run)


def jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    (tmp_path / "prose.txt").write_text(PROSE)
    jsonl(tmp_path / "chats.jsonl", CHATS)
    jsonl(tmp_path / "reviews.jsonl", REVIEWS)
    return ",".join(str(tmp_path / name) for name in ("prose.txt", "chats.jsonl", "reviews.jsonl"))


SMALL_LM = {"model": "tiny", "vocab_size": 300, "batch_size": 16}


@pytest.mark.parametrize(("like", "fraction"), [(False, 1.0), (True, 1.0), (False, 0.6)])
def test_of_a_mixture_with_shares(tmp_path: Path, mixture: str, like: bool, fraction: float) -> None:
    values = {"data": mixture, "mix": (0.5, 0.2, 0.3), "train_fraction": fraction, "group_by_length": like}
    run = make_run(tmp_path / "run", "causal-lm", passes=4.5, **SMALL_LM, **values)
    assert_agrees(run)
    order = open_order(run, at_hand=True)
    chats = order.sampler.parts[0][0] + 7
    (answer,) = row_answers(order, [chats])
    assert (answer["set"], answer["row_of_set"]) == ("chats", 7)
    assert "Say 7." in answer["text"]


def test_without_the_data_the_steps_are_known_and_the_texts_are_not(tmp_path: Path, mixture: str) -> None:
    values = {"data": mixture, "mix": (0.5, 0.2, 0.3)}
    run = make_run(tmp_path / "run", "causal-lm", passes=2.5, **SMALL_LM, **values)
    there, gone = open_order(run, at_hand=True), open_order(run, at_hand=False)
    rows = list(range(0, there.sampler.count, 17))
    for known, found in zip(row_answers(there, rows), row_answers(gone, rows), strict=True):
        assert found["seen"] == known["seen"]
        assert found["text"] is None


def found(run: RunFolder, text: str) -> dict[str, Any]:
    return text_answer(open_order(run, at_hand=True), text)


def rows_of(answer: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["split"], row["row"]) for row in answer["rows"]]


def table(folder: Path, **splits: list[dict[str, Any]]) -> str:
    folder.mkdir()
    for name, rows in splits.items():
        jsonl(folder / f"{name}.jsonl", rows)
    return str(folder)


WORDS = ("bad", "good")
REVIEW_ROWS = [{"text": f"film number {i} was {WORDS[i % 2]}", "label": str(i % 2)} for i in range(60)]
SMALL_CLASSIFIER = {"model": "tiny", "vocab_size": 320, "batch_size": 8}


def test_a_classifiers_text_is_a_whole_row(tmp_path: Path) -> None:
    data = table(tmp_path / "data", train=[*REVIEW_ROWS[:50], REVIEW_ROWS[7]], valid=REVIEW_ROWS[50:])
    run = make_run(tmp_path / "run", "classifier", data=data, **SMALL_CLASSIFIER)
    answer = found(run, "film number 7 was good")
    assert rows_of(answer) == [("train", 7), ("train", 50)]  # a row that is there twice
    order = open_order(run, at_hand=True)
    assert answer["rows"][:1] == row_answers(order, [7])
    assert answer["rows"][0]["seen"]
    assert rows_of(found(run, "film number 55 was good")) == [("valid", 5)]
    assert rows_of(found(run, "film number 7")) == []  # a part of a row is no row


def test_of_pairs_either_text_is_found(tmp_path: Path) -> None:
    rows = [
        {"sentence1": f"question {i} here", "sentence2": f"answer {i % 9} there", "label": str(i % 2)}
        for i in range(60)
    ]
    data = table(tmp_path / "data", train=rows[:50], valid=rows[50:])
    run = make_run(tmp_path / "run", "classifier", data=data, **SMALL_CLASSIFIER)
    assert rows_of(found(run, "question 33 here")) == [("train", 33)]
    there = [("train", i) if i < 50 else ("valid", i - 50) for i in range(60) if i % 9 == 4]
    assert rows_of(found(run, "answer 4 there")) == there


def test_a_text_in_windows_of_a_stream(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text(PROSE)
    run = make_run(tmp_path / "run", "causal-lm", data=str(tmp_path / "prose.txt"), **SMALL_LM)
    order = open_order(run, at_hand=True)
    tokens = order.source.columns["tokens"]  # type: ignore[union-attr]
    tokenizer = order.data.prepared_tokenizer(order.facts)  # type: ignore[attr-defined]
    held = [tokenizer.decode(tokens.rows(np.array([row]))[0].tolist()) for row in range(len(tokens))]
    crossing = 0
    for number in range(0, 380, 3):
        wanted = f"line {number} of plain text"
        places = [place["rows"] for place in found(run, wanted)["places"] if place["split"] == "train"]
        whole = [[row] for row, text in enumerate(held) if wanted in text]
        if whole:
            assert places == whole
        else:
            crossing += 1
            (place,) = places
            assert len(place) == 2
            assert wanted in held[place[0]] + held[place[1]]
    assert crossing > 5
    assert rows_of(found(run, "line 399 of plain text"))[0][0] == "valid"
    assert rows_of(found(run, "line 999 of plain text")) == []


def test_a_text_in_conversations_and_mixtures(tmp_path: Path, mixture: str) -> None:
    run = make_run(tmp_path / "run", "causal-lm", **SMALL_LM, data=mixture, clean=("html",))
    order = open_order(run, at_hand=True)
    chats = order.sampler.parts[0][0]
    assert rows_of(found(run, "Say 133.")) == [("train", chats + 133)]
    assert rows_of(found(run, "<b>Say 133.</b>")) == [("train", chats + 133)]  # cleaned as the data was


def test_a_text_in_a_preference_pair(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {i}?", "chosen": f" yes {i}.", "rejected": f" no {i}."} for i in range(60)]
    data = table(tmp_path / "data", train=rows[:50], valid=rows[50:])
    run = make_run(tmp_path / "run", "dpo", data=data, batch_size=8, model="tiny", vocab_size=300)
    for text in ("Question 33?", "yes 33.", "no 33."):
        assert rows_of(found(run, text)) == [("train", 33)], text
    assert rows_of(found(run, "yes 53.")) == [("valid", 3)]


def test_interactions_by_the_ids_of_the_data(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "recommender", passes=0.2, batch_size=128)
    order = open_order(run, at_hand=True)
    batch = order.source.fetch(np.array([1204]))  # type: ignore[union-attr]
    names = json.loads((Path(run.facts.folder) / "catalogue" / "names.json").read_text())
    user, item = names["users"][batch["user"][0]], names["items"][batch["item"][0]]
    assert rows_of(found(run, f"{user},{item}")) == [("train", 1204)]
    assert ("train", 1204) in rows_of(found(run, user))
    assert len(rows_of(found(run, user))) > 3
    with pytest.raises(UserError, match="there is no user nobody"):
        found(run, "nobody")


def test_sequences_of_text_and_of_integers(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text(PROSE)
    small = {"batch_size": 16, "max_length": 24, "hidden": 8, "latent": 2}
    run = make_run(
        tmp_path / "run", "sequence-vae", data=str(tmp_path / "lines.txt"), vocab_size=300, **small
    )
    assert rows_of(found(run, " line 77 of plain text ")) == [("train", 77)]
    data = table(
        tmp_path / "ids", train=[{"tokens": [i, i + 1, 5]} for i in range(60)], valid=[{"tokens": [3]}]
    )
    run = make_run(tmp_path / "ids-run", "sequence-vae", data=data, **small)
    assert rows_of(found(run, "33, 34 5")) == [("train", 33)]
    assert rows_of(found(run, "3")) == [("valid", 0)]
    with pytest.raises(UserError, match="lists of integers"):
        found(run, "three")


def test_an_own_task_says_what_is_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RAGGED, batch_size=24)
    with pytest.raises(UserError, match="Sequences has no method text_query to find texts: give --sample"):
        found(run, "walk")
    assert row_answers(open_order(run, at_hand=True), [3])[0]["text"].startswith("tokens [")


def test_tokens_are_found_over_the_borders_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.engine.forensics.seen_rows.CHUNK", 7)
    values = np.random.default_rng(0).integers(0, 3, 500).astype(np.uint16)
    rows = Ragged.from_blocks(values, 5)
    wanted = np.array([1, 2, 0])
    plain = [k for k in range(498) if values[k : k + 3].tolist() == [1, 2, 0]]
    expected = sorted({tuple(range(k // 5, (k + 2) // 5 + 1)) for k in plain})
    assert find_rows(TextQuery({"tokens": [wanted]}, spans_rows=True), {"tokens": rows}) == expected
    within = [place for place in expected if len(place) == 1]
    assert 0 < len(within) < len(expected)
    assert find_rows(TextQuery({"tokens": [wanted]}), {"tokens": rows}) == within


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ({}, "what shall be looked for? Give one of --sample, --text or --step"),
        ({"sample": 1, "step": 2}, "--sample and --step are 2 questions: give one of them"),
        ({"sample": 1, "phase": "train"}, "--phase train: belongs to --step"),
        ({"sample": 93}, "--sample 93: the training data has 93 rows, numbered 0 to 92"),
        ({"step": 9}, "--step 9: phase train has the steps 1 to 8"),
        ({"step": 1, "phase": "qat"}, "--phase qat: this run's phases are train"),
    ],
)
def test_a_wrong_question_is_one_line(words: dict[str, Any], answer: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RAGGED, passes=2, batch_size=24)
    with pytest.raises(UserError) as error:
        answer_question(run, SeenOptions(**words))
    assert answer in str(error.value)


def test_a_changed_recipe_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RAGGED, batch_size=24)
    file = run.folder / "recipe.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(UserError, match=r"recipe.json was changed"):
        open_order(RunFolder.open(run.folder), at_hand=True)


def test_facts_that_do_not_fit_the_data_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RAGGED, batch_size=24)
    run.write_facts(dataclasses.replace(run.facts, samples={"train": 94}))
    with pytest.raises(UserError, match="says 94 training samples, and the prepared data has 93"):
        open_order(run, at_hand=True)


def test_of_a_run_that_ended_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", RAGGED, passes=6, done=0.5, batch_size=24)
    order = open_order(run, at_hand=True)
    done, steps = order.counted["train"], order.schedules[0].steps
    assert (done, steps) == (12, 24)
    run.write_summary({"status": "done"})
    row = int(order.sampler.batch(20)[0])
    assert seen([str(run.folder), "--sample", str(row), "--trust"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"row {row} was seen 3 times: step ")
    assert seen([str(run.folder), "--step", "21"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "step 21 (epoch 6) was not reached (done after step 12 of 24) and holds 24 rows:"
    assert [line.split()[0] for line in rows[:24]] == [str(n) for n in order.sampler.batch(20)]


def test_what_a_user_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "classifier", passes=3, done=0.5)
    order = open_order(run, at_hand=True)
    row = int(order.sampler.batch(0)[0])
    assert seen([str(run.folder), "--sample", str(row)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    times = len(row_answers(order, [row])[0]["seen"])
    assert first.startswith(f"row {row:,} was seen {times} time{'s' * (times > 1)}: step 1 (epoch 1)")
    assert f"row {row:,} of the training data as prepared" in rest[0]
    assert seen([str(run.folder), "--step", "1", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["rows_of_step"]
    assert [one["row"] for one in step["rows"]] == order.sampler.batch(0).tolist()
    assert step["counted"]
    assert seen([str(run.folder), "--text", "nothing of the kind"]) == 0
    assert capsys.readouterr().out.startswith("no row of the prepared data is exactly this text")


def test_an_answer_needs_no_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "classifier")
    script = REGISTER + (
        "import sys; from isobatch.launch.cli import main; code = main(sys.argv[1:]);"
        " print('torch' in sys.modules, 'transformers' in sys.modules); sys.exit(code)"
    )
    for question in (("--sample", "7"), ("--step", "2"), ("--text", "nothing of the kind")):
        words = [sys.executable, "-c", script, "seen", str(run.folder), *question]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "False False"
