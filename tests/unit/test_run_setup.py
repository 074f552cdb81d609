"""Tests of launch/local/run_setup.py: new and continued runs, and what is refused before training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.data.labelled.dataset import Labelled
from isobatch.data.preferences.answers import JudgedAnswers
from isobatch.data.preferences.dataset import Preferences
from isobatch.data.sequences import Sequences
from isobatch.data.text.dataset import Text
from isobatch.data.tokenized import TokenizedData
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.runs.run_folder import FolderTakenError, RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.cli import guarded
from isobatch.launch.commands.evaluate import evaluate
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.run_setup import (
    compare_source,
    create_run,
    locate_data,
    plan_for_training,
    prepare_facts,
    trained_before,
)

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


KINDS: dict[str, tuple[type[TokenizedData], Callable[[int], dict[str, Any]]]] = {
    "conversations": (Text, lambda n: {"prompt": f"what is {n}?", "completion": f"it is {n}"}),
    "documents in blocks": (Text, lambda n: {"text": f"a text on {n} and on {n + 1}"}),
    "pairs of answers": (
        Preferences,
        lambda n: {"prompt": f"and {n}?", "chosen": f"yes {n}", "rejected": "no"},
    ),
    "judged answers": (JudgedAnswers, lambda n: {"prompt": f"is {n}?", "completion": f"{n}", "label": n % 2}),
    "labelled texts": (Labelled, lambda n: {"text": f"all of {n}", "label": n % 2}),
    "sequences": (Sequences, lambda n: {"text": f"and {n} and {n}"}),
}
"""Of each kind of rows its data, and the row of a number."""


def ask(folder: Path, *words: str):  # type: ignore[no-untyped-def]
    (folder / "own.py").write_text(OWN)
    own = ["--task", f"{folder / 'own.py'}:Line", "--out", str(folder / "runs")]
    return parse_request([*own, *words], "auto")


def made(folder: Path) -> RunFolder:
    asked = ask(folder)
    return create_run(asked, prepare_facts(asked))


def test_patience_needs_a_split_to_watch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--patience 2: the data has no valid split"):
        prepare_facts(ask(tmp_path, "--patience", "2"))
    assert prepare_facts(ask(tmp_path)).samples == {"train": 8}


def test_patience_of_a_preset_is_no_wish(tmp_path: Path) -> None:
    """Presets of networks keep the best step where the data has a valid split; elsewhere the last is kept."""
    rows = (f"{user},{item},{item}\n" for user in range(9) for item in range(user, user + 5))
    (tmp_path / "orders.csv").write_text("user,item,time\n" + "".join(rows))
    words = ["--task", "recommender", "--data", str(tmp_path / "orders.csv"), "--split", "none"]
    for preset in ("sequence", "ids"):
        asked = parse_request([*words, "--preset", preset], "auto")
        assert asked.recipe.patience > 0
        assert "valid" not in prepare_facts(asked).samples
    with pytest.raises(UserError, match="--patience 3: the data has no valid split"):
        prepare_facts(parse_request([*words, "--preset", "ids", "--patience", "3"], "auto"))


def test_facts_are_not_what_the_run_says_where_they_were_changed(tmp_path: Path) -> None:
    run = made(tmp_path)
    facts = atomic_files.read_json(run.folder / "facts.json")
    atomic_files.write_json(
        run.folder / "facts.json", {**facts, "samples": {"train": 7}, "folder": "elsewhere"}
    )
    run = RunFolder(run.folder)
    with pytest.raises(UserError, match=r"facts\.json was changed: samples differs from the data's"):
        locate_data(run, None)
    atomic_files.write_json(run.folder / "facts.json", {**facts, "folder": "elsewhere"})
    run = RunFolder(run.folder)
    locate_data(run, None)
    assert run.facts.folder == facts["folder"]


@pytest.mark.parametrize(("here", "before"), [(1, 2), (2, 1), (2, 2)])
def test_a_run_that_goes_on_with_other_processes_says_so(
    here: int, before: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path)
    recipe, facts = run.recipe, run.facts
    for processes in (before, here):
        run.write_plan(plan_for_training(recipe, facts, PlanOptions(processes=processes), False, run, None))
        run.metrics.touch()  # it has begun
    said = capsys.readouterr().err
    assert (f"processes: {here} here, {before} before; the same batches" in said) == (here != before)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_a_proof_allows_is_said_where_a_cpu_computes_in_bf16(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path)
    asked = PlanOptions(device="cpu", precision=precision)
    plan_for_training(run.recipe, run.facts, asked, False, None, None)
    said = "a loss may be 0.02 off, with --precision fp32, which is slower, 0.0001"
    assert (said in capsys.readouterr().err) == (precision == "bf16")


def test_another_task_file_than_the_trained_one_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path)
    (tmp_path / "own.py").write_text(OWN + "\n")
    with pytest.raises(UserError, match=r"own\.py:Line is not the code that was trained"):
        evaluate([str(run.folder)])
    (tmp_path / "own.py").unlink()
    with pytest.raises(UserError, match="there is no file"):
        evaluate([str(run.folder)])


def test_what_another_process_made_in_the_same_instant_is_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two `auto` of one recipe: one folder, whose lock one of them gets."""
    asked = ask(tmp_path)
    facts = prepare_facts(asked)
    create, others = RunFolder.create, []

    def create_second(*arguments: Any) -> RunFolder:
        monkeypatch.setattr(RunFolder, "create", create)
        others.append(create(*arguments))  # the other process is a moment earlier
        return create(*arguments)

    monkeypatch.setattr(RunFolder, "create", create_second)
    mine = create_run(asked, facts)
    assert mine.folder == others[0].folder
    assert [p.name for p in mine.folder.parent.iterdir()] == [mine.folder.name]
    assert create_run(asked, facts).folder == mine.folder
    again = create_run(ask(tmp_path, "--again"), facts)
    assert again.folder.name == f"{mine.folder.name}-2"
    changed = f"--seed 0 there, 3 here; --lr {asked.recipe.lr} there, 0.5 here;"
    for words, said in ((["--again"], "of the same recipe"), (["--lr", "0.5", "--seed", "3"], changed)):
        with pytest.raises(FolderTakenError, match=said):
            create_run(ask(tmp_path, *words, "--name", mine.folder.name), facts)
    (mine.folder / "recipe.json").unlink()
    with pytest.raises(FolderTakenError, match="not a run; choose"):
        create_run(ask(tmp_path, "--seed", "3", "--name", mine.folder.name), facts)


def test_a_folder_that_is_taken_while_a_run_is_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask(tmp_path)
    facts, folder = prepare_facts(asked), tmp_path / "runs" / "r"
    write = RunFolder.write_options

    def meanwhile(run: RunFolder, options: Any) -> None:
        write(run, options)
        folder.mkdir()
        (folder / "theirs").touch()

    monkeypatch.setattr(RunFolder, "write_options", meanwhile)
    with pytest.raises(FolderTakenError):
        RunFolder.create(folder, asked.recipe, facts, asked.run)
    assert [p.name for p in folder.iterdir()] == ["theirs"]
    assert [p.name for p in folder.parent.iterdir()] == ["r"]


def test_names_that_no_file_system_takes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"--name x{20}\.\.\.: has 300 bytes, and may have 200"):
        ask(tmp_path, "--name", "x" * 300)
    assert ask(tmp_path, "--name", "ä" * 100).run.name
    assert guarded(lambda: evaluate([str(tmp_path / ("x" * 300))])) == 2
    assert "is too long for a file's name: take a shorter one" in capsys.readouterr().err


def test_a_tokenizer_whose_folder_is_gone_is_that_of_final_if_it_is_the_same(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"line {number} of a text"}) + "\n" for number in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    for name, words in (("first", ["a", "line", "of"]), ("other", ["text", "line", "of"])):
        vocabulary = {"[UNK]": 0} | {word: number for number, word in enumerate(words, 1)}
        made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
        made.pre_tokenizer = Whitespace()
        (tmp_path / name).mkdir()
        made.save(str(tmp_path / name / "tokenizer.json"))
    words = ["--task", "causal-lm", "--data", str(tmp_path / "rows.jsonl"), "--max-length", "8"]
    words += ["--tokenizer", str(tmp_path / "first"), "--out", str(tmp_path / "runs")]
    asked = parse_request(words, "auto")
    run = create_run(asked, prepare_facts(asked))
    digests, folder = run.facts.fingerprint, Path(run.facts.folder)
    shutil.rmtree(folder)
    (tmp_path / "first").rename(run.final)
    run.final.rename(tmp_path / "first.away")
    (tmp_path / "other").rename(run.final)
    with pytest.raises(UserError, match="the data is not what"):
        locate_data(RunFolder(run.folder), None)
    run.final.rename(tmp_path / "other")
    with pytest.raises(UserError, match="no such folder or file; put it back, say where it lies now"):
        locate_data(RunFolder(run.folder), None)
    (tmp_path / "first.away").rename(run.final)
    found = RunFolder(run.folder)
    locate_data(found, None)
    assert found.facts.fingerprint == digests
    assert compare_source(found, None) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_held_out_now_that_the_run_of_from_was_trained_on_are_counted(kind: str, tmp_path: Path) -> None:
    """Wherever they stand in the new data, and whatever stands beside them."""
    data, row = KINDS[kind]

    def prepared(name: str, train: Iterable[int], valid: Iterable[int], tokenizer: str | None) -> Facts:
        (tmp_path / name).mkdir()
        for split, numbers in (("train", train), ("valid", valid)):
            lines = (f"{json.dumps(row(n))}\n" for n in numbers)
            (tmp_path / name / f"{split}.jsonl").write_text("".join(lines))
        given = Recipe(task="own", data=str(tmp_path / name), max_length=32, tokenizer=tokenizer)
        return prepare(data(given, data.Options(vocab_size=300)))

    facts = prepared("old", range(20), range(20, 24), None)
    recipe = Recipe(task="own", data="old", options={"valid": 0.2})
    run = RunFolder.create(tmp_path / "run", recipe, facts, RunOptions())
    grown = prepared("grown", [*range(24, 40), *range(16)], [41, 17, 40, 19], facts.folder)
    said = trained_before(run, grown, ("mix", "valid"))
    assert said.startswith(f"--from {run.folder}: it was trained on 2 of the 4 valid rows, ")
    assert said.endswith(" --data old,NEW --valid 0.2 holds the same out")
    assert trained_before(run, grown, ("valid",)).endswith(
        ": hold out rows that it never saw by --valid FILE"
    )
    kept = prepared("kept", range(30, 40), range(23, 19, -1), facts.folder)
    assert [trained_before(run, same, ()) for same in (kept, facts)] == ["", ""]


def test_data_that_grew_under_its_name_trains_no_other_tokenizer_for_the_run_of_from(tmp_path: Path) -> None:
    def ask_again(text: str) -> Request:
        (tmp_path / "rows.csv").write_text("text\n" + "".join(f"{text} {n}\n" for n in range(40)))
        words = ["--data", str(tmp_path / "rows.csv"), "--vocab-size", "300", "--out", str(tmp_path / "runs")]
        return parse_request(["--task", "causal-lm", *words], "auto")

    asked = ask_again("a first text on")
    run = create_run(asked, prepare_facts(asked))
    with pytest.raises(UserError, match=r"another tokenizer: add --tokenizer .*/final"):
        trained_before(run, prepare_facts(ask_again("quite other words about")), ())
