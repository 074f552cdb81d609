"""`predict` and `serve` of trained classifiers, as a user types them."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyarrow import parquet

import isobatch
from isobatch.core.errors import UserError
from isobatch.launch.commands.evaluate import evaluate
from isobatch.launch.commands.export import export
from isobatch.launch.predicting.predict import predict
from isobatch.launch.report.page import report
from isobatch.launch.serving.command import ServeOptions, make_app
from isobatch.models.encoder.calibration import Calibration, Confidences
from isobatch.models.encoder.export import copy_beside
from isobatch.tests.integration.helpers import launch, port_of, post, predicted, predictions, succeed
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.paths import REGISTER, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTHS = (1, 3, 9, 30, 2, 9, 60)
TEXTS = ["def get(self): return " + "self.headers " * n for n in LENGTHS]
BRIEF = ["--quiet", "--processes", "1"]
SOUNDS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier, a quantized one, and a classifier of pairs."""
    folder = tmp_path_factory.mktemp("predict")
    pairs = [
        {"premise": f"the {a} sleeps", "hypothesis": f"a {b} sleeps", "label": "yes" if a == b else "no"}
        for a in SOUNDS
        for b in (a, *SOUNDS)
    ]
    texts = [{"text": f"def {a}{n}(self): self.{a}", "label": a} for n in range(20) for a in SOUNDS]
    for name, rows in (("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = ["--model", "tiny", "--vocab-size", "300", "--batch-size", "8"]
    short = ["--max-length", "64", "--lr", "1e-3"]
    train(folder, "one", "--task", "classifier", "--data", "texts.jsonl", "--steps", "12", *tiny, *short)
    small = ["--task", "qat", "--data", "texts.jsonl", "--pruned", "runs/one", "--max-length", "64"]
    train(folder, "small", *small, "--steps", "4")
    train(folder, "pair", "--task", "classifier", "--data", "pairs.jsonl", "--steps", "4", *tiny)
    sets = [{"text": row["text"], "label": [row["label"], "any"][: n % 3]} for n, row in enumerate(texts)]
    (folder / "sets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sets))
    train(folder, "sets", "--task", "classifier", "--data", "sets.jsonl", "--steps", "12", *tiny, *short)
    return folder


def train(folder: Path, name: str, *words: str) -> None:
    succeed("auto", *words, "--name", name, *BRIEF, cwd=folder)


def probabilities(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([list(row["probabilities"].values()) for row in rows])


def test_python_answers_as_the_command(home: Path) -> None:
    answer = isobatch.load(home / "runs" / "one").predictor()
    found = predictions(home, "runs/one", *TEXTS)
    assert answer(TEXTS) == [{k: v for k, v in row.items() if k != "text"} for row in found]
    with pytest.raises(UserError, match="did you mean form"):
        isobatch.load(home / "runs" / "one").predictor(fomr="onnx")


def test_probabilities_are_those_of_transformers(home: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    final = home / "runs" / "one" / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    model = AutoModelForSequenceClassification.from_pretrained(final).eval()
    found = predictions(home, "runs/one", *TEXTS)
    temperature = json.loads((home / "runs" / "one" / "summary.json").read_text())["metrics"]["temperature"]
    assert temperature != 1
    for text, row in zip(TEXTS, found, strict=True):
        tokens = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            expected = (model(**tokens).logits[0].double() / temperature).softmax(0)
        named = {model.config.id2label[n]: float(p) for n, p in enumerate(expected)}
        assert row["probabilities"] == pytest.approx(named, abs=1e-6)
        assert row["prediction"] == max(named, key=lambda n: named[n])
        assert row["probability"] == max(row["probabilities"].values())


@pytest.mark.parametrize("form", ["runs/one", "runs/small", "runs/small --form onnx-int4"])
def test_an_answer_does_not_depend_on_its_batch(form: str, home: Path) -> None:
    words = form.split()
    together = predictions(home, *words, *TEXTS)
    alone = [predictions(home, *words, text)[0] for text in TEXTS[:4]]
    assert probabilities(together)[:4] == pytest.approx(probabilities(alone), abs=2e-6)
    assert len({json.dumps(row["probabilities"]) for row in together}) > 3


def test_the_int4_file_answers_as_the_trained_model_wherever_it_is_opened(home: Path) -> None:
    trained = probabilities(predictions(home, "runs/small", *TEXTS))
    shutil.copytree(home / "runs" / "small" / "final", home / "shipped")
    read = json.loads((home / "shipped" / "config.json").read_text())["isobatch"]
    recipe = json.loads((home / "runs" / "small" / "recipe.json").read_text())
    assert read["max_length"] == recipe["max_length"]
    forms = ("runs/small --form onnx-int4", "runs/small/final/model-int4.onnx", "runs/small/final", "shipped")
    for form in forms:
        found = probabilities(predictions(home, *form.split(), *TEXTS))
        assert found == pytest.approx(trained, abs=1e-3)


def test_a_file_of_pairs_has_the_columns_of_the_run(home: Path) -> None:
    rows = [{"premise": "the cow sleeps", "hypothesis": "a dog sleeps", "label": "?"}]
    with (home / "new.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    said = predicted(home, "runs/pair", "--file", "new.csv", "--out", "new.parquet")
    assert said == "1 row -> new.parquet\n"
    (found,) = parquet.read_table(home / "new.parquet").to_pylist()
    (typed,) = predictions(home, "runs/pair", "the cow sleeps", "a dog sleeps")
    assert found["label"] == "?"
    assert found["probabilities.no"] == pytest.approx(typed["probabilities"]["no"], abs=1e-6)
    (swapped,) = predictions(home, "runs/pair", "a dog sleeps", "the cow sleeps")
    assert swapped["probabilities"] != typed["probabilities"]
    with pytest.raises(UserError, match="give them in twos"):
        predictions(home, "runs/pair", "a")


OF_SPLITS = {
    "runs/one": "texts.jsonl",
    "runs/small --form onnx-int4": "texts.jsonl",
    "runs/pair": "pairs.jsonl",
    "runs/sets": "sets.jsonl",
}


@pytest.mark.parametrize("form", OF_SPLITS)
def test_the_rows_that_were_held_out_are_answered_as_they_stand_in_the_data(form: str, home: Path) -> None:
    data = [json.loads(line) for line in (home / OF_SPLITS[form]).read_text().splitlines()]
    run = home / form.split()[0]
    held, trained = (predictions(home, *form.split(), "--split", split) for split in ("valid", "train"))
    rows = [[{k: row[k] for k in data[0]} for row in found] for found in (held, trained)]
    facts = json.loads((run / "facts.json").read_text())
    assert [len(found) for found in rows] == [facts["samples"][split] for split in ("valid", "train")]
    assert sorted(map(json.dumps, rows[0] + rows[1])) == sorted(map(json.dumps, data))
    if form == "runs/one":
        right = np.mean([row["label"] == row["prediction"] for row in held])
        assert right == json.loads((run / "summary.json").read_text())["metrics"]["accuracy"]


WRONG: dict[str, tuple[list[str], str]] = {
    "no run": (["runs/none", "a"], "runs/none is not a run"),
    "no ONNX file": (["runs/one/final/model.onnx", "a"], "there is no such file"),
    "an ONNX file alone": (["alone.onnx", "a"], "alone.onnx: needs tokenizer.json beside it"),
    "no ONNX": (["junk", "a"], "cannot be opened by onnxruntime"),
    "nothing asked": (["runs/one"], "give one of texts in quotes"),
    "no file": (["runs/one", "--file", "no.csv"], "there is no such file"),
    "both": (["runs/one", "a", "--file", "pairs.jsonl"], "give one of"),
    "no such split": (["runs/one", "--split", "vald"], "--split vald: the data has train, valid"),
    "over its data": (
        ["runs/one", "--split", "valid", "--out", "texts.jsonl"],
        "--out texts.jsonl: is the file",
    ),
    "a split of a file": (
        ["runs/small/final", "--split", "valid"],
        "--split: is for the run of a classifier",
    ),
    "missing column": (["runs/one", "--file", "other.jsonl"], "other.jsonl line 1: has no column"),
    "misspelt flag": (["runs/one", "a", "--fil", "b"], "did you mean --file?"),
    "unread flag": (["runs/one", "a", "--tokens", "5"], "--tokens: changes nothing of a classifier run"),
    "no such form": (["runs/one", "a", "--form", "onnx"], "`export runs/one --to onnx` writes it"),
    "no int4": (["runs/one", "a", "--form", "onnx-int4"], "`auto --task qat --pruned runs/one`"),
    "no ONNX neighbours": (["runs/small", "a", "--form", "onnx-int4", "--neighbours", "2"], "--form torch"),
    "neighbours of a file": (
        ["runs/small/final", "a", "--neighbours", "2"],
        "changes nothing of an ONNX file",
    ),
    "too few to show it": (["runs/one", "a", "--precision", "0.99"], "show it of no answers with"),
    "unfinished": (["runs/begun", "a"], "`resume runs/begun` goes on with it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "other.jsonl").write_text('{"words": "a"}')
    shutil.copy(home / "runs" / "small" / "final" / "model-int4.onnx", home / "alone.onnx")
    shutil.copytree(home / "runs" / "one" / "final", home / "junk", dirs_exist_ok=True)
    (home / "junk" / "model.onnx").write_bytes(b"junk")
    begun = home / "runs" / "begun"
    begun.mkdir(exist_ok=True)
    for name in ("recipe.json", "facts.json"):
        (begun / name).write_bytes((home / "runs" / "one" / name).read_bytes())
    words, expected = WRONG[case]
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        predict(words)
    assert "\n" not in str(caught.value)


def test_the_nearest_training_texts_are_told_as_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [json.loads(line) for line in (home / "texts.jsonl").read_text().splitlines()]
    for run in ("runs/one", "runs/small"):
        (row,) = predictions(home, run, written[7]["text"], "--neighbours", "80")
        near = row["neighbours"]
        assert len(near) == 72  # a tenth is validation
        assert all({k: one[k] for k in ("text", "label")} in written for one in near)
        assert near == sorted(near, key=lambda one: -one["similarity"])
        if written[7] in [{k: one[k] for k in ("text", "label")} for one in near]:
            assert near[0]["similarity"] == pytest.approx(1, abs=2e-3)
            assert near[0]["text"] == written[7]["text"]
    (pair,) = predictions(home, "runs/pair", "the cow sleeps", "a dog sleeps", "--neighbours", "1")
    assert pair["neighbours"][0].keys() == {"text", "pair", "label", "similarity"}
    assert len(list((home / "runs" / "one").glob("neighbours-*.npy"))) == 1
    monkeypatch.setattr("isobatch.launch.local.run_setup.folder_of", lambda _: home)
    with pytest.raises(UserError, match=r"--neighbours: .* not what runs/one learnt"):
        predictions(home, "runs/one", TEXTS[0], "--neighbours", "3")


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    **{"predict": lambda words: predict([*words, "a"]), "evaluate": evaluate, "export": export},
    **{"report": report, "serve": lambda words: make_app(*words, ServeOptions())},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_folder_in_a_run_is_taken_or_answered_with_its_run(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ONNX files answer, are served and measured; of all else the run is named."""
    monkeypatch.chdir(home)
    (home / "runs" / "one" / "exports" / "dense").mkdir(parents=True, exist_ok=True)
    shutil.copy(home / "runs" / "one" / "final" / "config.json", home / "runs" / "one" / "exports" / "dense")
    chosen = shutil.copytree(
        home / "runs" / "small" / "final", home / "runs" / "small" / "chosen", dirs_exist_ok=True
    )
    for place in (
        "small/chosen",
        "small/chosen/model-int4.onnx",
        "one/final",
        "one/exports/dense",
        "one/checkpoints",
    ):
        if place.startswith("small") and command in ("predict", "serve"):
            COMMANDS[command]([f"runs/{place}"])
        if place.startswith("small") and command in ("predict", "evaluate", "serve"):
            continue
        with pytest.raises(UserError, match=f"inside one: give runs/{place.partition('/')[0]}") as caught:
            COMMANDS[command]([f"runs/{place}"])
        assert "\n" not in str(caught.value)
    if command == "evaluate":
        right = Confidences.of(np.linspace(0.3, 1, 300), np.ones(300, bool))
        Calibration(1.0, right, None).save(chosen)
        capsys.readouterr()
        evaluate(["runs/small/chosen", "--test", "texts.jsonl", "--json"])
        measured = json.loads(capsys.readouterr().out)["texts.jsonl"]
        rows = [json.loads(line) for line in (home / "texts.jsonl").read_text().splitlines()]
        answers = predictions(home, "runs/small/chosen", *(row["text"] for row in rows))
        given = [one["probability"] >= 0.3 for one in answers]
        said = f"from probability 0.3, answered {sum(given)} ({sum(given) / len(given):.1%}), not answered "
        assert measured["with --precision 0.9"].startswith(said)
        flags = [f"--{one['flag']} {one['wanted']:g}" for one in measured["answering"]]
        assert [name for name in measured if name.startswith("with --")] == [f"with {one}" for one in flags]
        right = sum(one["prediction"] == row["label"] for one, row in zip(answers, rows, strict=True))
        assert (measured["samples"], measured["accuracy"]) == (len(rows), pytest.approx(right / len(rows)))
        assert sum(name.startswith("class ") for name in measured) == len(SOUNDS) + 1  # and their mean
        kept, *_ = [json.loads(line) for line in (home / "runs" / "small" / "evaluations.jsonl").open()]
        assert kept["form"] == "chosen/model-int4.onnx"
        shutil.copytree(chosen, home / "alone")
        with pytest.raises(UserError, match="is in no run, by which rows are read"):
            evaluate(["alone", "--test", "texts.jsonl"])


def test_an_answer_that_is_not_sure_enough_is_withheld(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    final = tmp_path / "final"
    shutil.copytree(home / "runs" / "small" / "final", final)
    every = predictions(tmp_path, "final", *TEXTS)
    sure = sorted(row["probability"] for row in every)
    between = (sure[2] + sure[3]) / 2  # kept in fp32
    right = Confidences.of(np.linspace(between, 1, 300), np.ones(300, bool))
    Calibration(Calibration.open(final).temperature, right, None).save(final)
    found = predictions(tmp_path, "final", *TEXTS, "--precision", "0.9")
    assert [row["abstained"] for row in found] == [row["probability"] < between for row in every]
    assert {row["abstained"] for row in found} == {True, False}
    for row, before in zip(found, every, strict=True):
        assert row["prediction"] == (None if row["abstained"] else before["prediction"])
        assert row["probabilities"] == before["probabilities"]
    (shipped := tmp_path / "shipped").mkdir()
    copy_beside(final, shipped)  # what a service of others reads
    kept = json.loads((shipped / "config.json").read_text())["isobatch"]["abstaining"]
    assert kept == dict.fromkeys(("0.9", "0.95", "0.98"), pytest.approx(between))  # .99 takes 459 right ones
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for flags, withheld in ((["--precision", "0.9"], sum(row["abstained"] for row in found)), ([], None)):
        capsys.readouterr()
        assert predict(["final", "--file", "new.jsonl", *flags]) == 0
        said = capsys.readouterr().err
        assert ("abstained" in said) == (withheld is not None)
        assert withheld is None or f"abstained: {withheld} of {len(TEXTS)} answers" in said


def test_a_threshold_withholds_answers_and_labels(home: Path) -> None:
    every = predictions(home, "runs/small", *TEXTS)
    cut = sorted(row["probability"] for row in every)[3]
    for row, before in zip(
        predictions(home, "runs/small", *TEXTS, "--threshold", str(cut)), every, strict=True
    ):
        assert row["abstained"] == (before["probability"] < cut)
        assert row["prediction"] == (None if row["abstained"] else before["prediction"])
    sets = predictions(home, "runs/sets", *TEXTS, "--threshold", "0.3")
    assert any(row["prediction"] for row in sets)
    for row in sets:
        assert row["prediction"] == [label for label, share in row["probabilities"].items() if share >= 0.3]
    with pytest.raises(UserError, match="exclude each other"):
        predictions(home, "runs/one", "a", "--threshold", "0.5", "--precision", "0.9")
    with pytest.raises(UserError, match="at most 1"):
        predictions(home, "runs/one", "a", "--threshold", "7")


SERVICE = (ROOT / "docs/predict-and-serve.md").read_text()
PROGRAM = re.search(r"```python\n(import json\n.*?)```", SERVICE, re.S)
BLOCKED = ("torch", "transformers", "safetensors", "isobatch")


@pytest.mark.parametrize("run", ["pair", "sets", "small", pytest.param("one", marks=pytest.mark.slow)])
def test_the_program_of_the_docs_answers_as_predict(
    run: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With onnxruntime, tokenizers and numpy alone, from the folder of an export."""
    assert PROGRAM is not None
    form = "onnx-int4" if run == "small" else "onnx-dynamic"
    succeed("export", f"runs/{run}", "--to", form, cwd=home)
    folder = tmp_path / "shipped"
    shutil.copytree(home / "runs" / run / "exports" / form, folder)
    asked = (
        [["the cow sleeps", "a dog sleeps"], ["a", "b c"]] if run == "pair" else [[text] for text in TEXTS]
    )
    config, least = json.loads((folder / "config.json").read_text()), 0.0
    if run == "small":  # with a threshold, as if validation had shown one
        least = sorted(row["probability"] for row in predictions(tmp_path, "shipped", *TEXTS))[3]
        config["isobatch"]["abstaining"] = {"0.9": least}
        (folder / "config.json").write_text(json.dumps(config))
    blocked = f"import sys\nfor one in {BLOCKED}: sys.modules[one] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", blocked + PROGRAM[1], str(folder), *(["0.9"] if least else [])],
        input="".join("\t".join(texts) + "\n" for texts in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    capsys.readouterr()
    names = ("premise", "hypothesis") if run == "pair" else ("text",)
    rows = (json.dumps(dict(zip(names, texts, strict=True))) for texts in asked)
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    expected = predictions(tmp_path, "shipped", "--file", "asked.jsonl")
    score = json.loads((folder / "parity.json").read_text())
    figure = score[f"exported_{'f1_micro' if run == 'sets' else 'accuracy'}"]
    said = capsys.readouterr().err
    assert f"{form.replace('onnx', 'model')}.onnx: " in said
    assert f" {100 * figure:.1f} % on {score['samples']} valid samples" in said
    monkeypatch.setattr(sys, "argv", ["answer.py", str(folder), "0.97"])
    with pytest.raises(SystemExit, match=r"precision 0\.97: validation shows (none|0\.9)"):
        exec(PROGRAM[1], {})
    for found, wanted in zip(answers, expected, strict=True):
        assert found["prediction"] == (wanted["prediction"] if found.get("probability", 1) >= least else None)
        assert found.get("probability") == pytest.approx(wanted.get("probability"), abs=1e-6)
        assert found["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-6)


def test_a_file_of_other_texts_is_told_from_those_of_validation(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = [f"def {a}{n}(self): self.{a}" for n in range(20, 40) for a in SOUNDS]
    for name, texts, differ in (("same", alike, False), ("other", ["zebra \u00fc " * 9] * 80, True)):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
        predictions(home, "runs/small/final", "--file", str(tmp_path / f"{name}.txt"))
        assert ("differ from those of validation" in capsys.readouterr().err) == differ


def test_the_int4_file_is_served_where_torch_cannot_be_imported(home: Path) -> None:
    script = "import sys; sys.modules['torch'] = None\n" + REGISTER
    script += "from isobatch.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["serve", "runs/small/final/model-int4.onnx", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], cwd=home, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            found = json.loads(post(port_of(server), "/predict", {"texts": TEXTS}).read())
        finally:
            server.kill()
    expected = probabilities(predictions(home, "runs/small", "--form", "onnx-int4", *TEXTS))
    assert probabilities(found["predictions"]) == pytest.approx(expected, abs=1e-9)


def test_what_cannot_be_served_is_one_line(home: Path) -> None:
    for words, expected in (
        (["runs/none"], "runs/none is not a run"),
        (["runs/one", "--form", "onnx"], "--form onnx: runs/one has no model.onnx"),
        (["runs/one", "--port", "70000"], "--port 70000: must be at"),
        (["runs/one", "--prot", "1"], "did you mean --port?"),
    ):
        assert expected in complaint(launch("serve", *words, cwd=home))
