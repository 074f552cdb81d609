"""Classifier, pruning, qat, exports and report, as a user runs them."""

from __future__ import annotations

import json
import random
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.engine.runs.run_folder import RunFolder
from isobatch.tests.integration.helpers import (
    figure,
    furthest,
    killed_at_random,
    launch,
    rows,
    run_card,
    succeed,
    summary,
)
from isobatch.tests.integration.test_bad_input import complaint

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["--train-fraction", "0.5", "--quiet"]
PRUNE = [
    "--task", "pruning", "--teacher", "runs/teacher", "--sparsity", "0.5", "--epochs", "2", "--lr", "3e-4",
    "--prune-every", "4", "--save-every", "3", "--ledger", *SMALL,
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished classifier, runs/teacher, and a pruned one, runs/pruned."""
    folder = tmp_path_factory.mktemp("compression")
    words = ["auto", "--task", "classifier", "--name", "teacher", "--epochs", "3", *SMALL]
    succeed(*words, cwd=folder)
    succeed("auto", *PRUNE, "--name", "pruned", "--processes", "1", cwd=folder)
    return folder


def decided(run: Path) -> list[dict[str, Any]]:
    return [r for r in rows(run, "decisions.jsonl") if r["decision"] == "change of the model"]


@pytest.mark.slow
def test_sparsity_rises_as_a_cubic_and_the_model_is_cut_on_the_way(home: Path) -> None:
    run = home / "runs" / "pruned"
    events = decided(run)
    steps = max(r["step"] for r in rows(run) if r.get("phase") == "prune")
    for event in events:
        # --ramp and --recover are half of the run each: the ramp is all of the pruning phase.
        target = 0.5 * (1 - (1 - event["step"] / steps) ** 3)
        assert event["target"] == pytest.approx(target, abs=1e-5)
        assert target <= event["sparsity"] + 1e-6 <= target + 0.09  # a head of this model is 0.04 of it
        assert all(n % 32 == 0 for n in event["neurons_left"])
    assert 3 <= sum(e["cut"] for e in events) <= 6
    found, last = summary(run)["metrics"], events[-1]
    assert found["sparsity"] == pytest.approx(last["sparsity"], abs=1e-6)
    assert [found[name] for name in ("heads_left", "neurons_left")] == [
        last["heads_left"],
        last["neurons_left"],
    ]
    assert 0 <= found["mcnemar_p"] <= 1
    whole, cut = summary(home / "runs" / "teacher"), summary(run)
    assert cut["parameters"] < whole["parameters"]
    sparsity = figure(run, "sparsity")
    assert sparsity == sorted(sparsity)


@pytest.mark.parametrize("name", ["teacher", "pruned"])
def test_a_models_card_shows_lines_that_run(name: str, home: Path) -> None:
    final = home / "runs" / name / "final"
    assert run_card(final).strip() in ("email", "http", "json", "logging", "urllib")
    card = (final / "README.md").read_text(encoding="utf-8")
    metrics = summary(home / "runs" / name)["metrics"]
    assert f"| accuracy | {metrics['accuracy']:.4f} |" in card
    assert "latency" not in card
    assert ("trust_remote_code" in card) == (name == "pruned")


def receipt_holds(run: str, before: str, home: Path) -> None:
    """Without the run's folder: its task's decisions and later checkpoints are not there. It says that the
    stage before it needs one too.
    """
    made = succeed("receipt", "make", f"runs/{run}", "--out", f"{run}.json", cwd=home).stdout
    assert f"needs a receipt of its own: isobatch receipt make runs/{before}\n" in made
    found = succeed("receipt", "check", f"{run}.json", "--steps", "12", cwd=home).stdout
    assert re.search(r"(1[2-9]|2\d) steps from the beginning made again", found), found


def test_a_receipt_holds_past_a_decision_of_its_task(home: Path) -> None:
    assert decided(home / "runs" / "pruned")[1]["step"] < 12
    receipt_holds("pruned", "teacher", home)


@pytest.mark.slow
def test_two_processes_prune_the_same(home: Path) -> None:
    words = ["auto", *PRUNE, "--name", "two", "--processes", "2", "--again"]
    succeed(*words, cwd=home)
    one, two = home / "runs" / "pruned", home / "runs" / "two"
    assert decided(one) == decided(two)
    assert furthest(figure(one), figure(two)) < 1e-4
    succeed("verify", str(two), cwd=home)


@pytest.mark.slow
def test_killed_in_the_middle_of_pruning_it_ends_the_same(home: Path, tmp_path: Path) -> None:
    run, generator = home / "runs" / "killed", random.Random(3)
    words = ["auto", *PRUNE, "--name", "killed", "--processes", "1"]
    shutil.move(home / "runs" / "pruned", tmp_path / "pruned")  # or `auto` would find its recipe done
    try:
        for _ in range(4):
            killed_at_random(words, run, generator)
        succeed("resume", str(run), cwd=home)
    finally:
        shutil.move(tmp_path / "pruned", home / "runs" / "pruned")
    whole = home / "runs" / "pruned"
    assert decided(run) == decided(whole)
    assert figure(run) == figure(whole)
    weights = [(r / "final" / "model.safetensors").read_bytes() for r in (run, whole)]
    assert weights[0] == weights[1]
    succeed("verify", str(run), cwd=home)


@pytest.mark.slow
def test_a_pruned_model_becomes_a_small_verified_file(home: Path) -> None:
    words = ["auto", "--task", "qat", "--pruned", "runs/pruned", "--epochs", "1", "--name", "small", *SMALL]
    succeed(*words, cwd=home)
    run = home / "runs" / "small"
    found, pruned = summary(run)["metrics"], summary(home / "runs" / "pruned")["metrics"]
    assert found["max_logit_difference"] < 1e-3
    assert found["rounding_doubt"] < 1e-2
    assert found["baseline_accuracy"] == pytest.approx(pruned["accuracy"])
    assert found["fake_quant_accuracy"] == pytest.approx(found["accuracy"])
    whole = (home / "runs" / "pruned" / "final" / "model.safetensors").stat().st_size
    assert found["file_bytes"] < whole / 4
    planned = json.loads((run / "plan.json").read_text())
    loss, norm = planned["rounding"]
    assert (planned["invariance"], summary(run)["invariance"]) == ("rounding", "rounding")
    assert 0 <= loss < 1e-2
    assert 0 <= norm < 1
    succeed("verify", str(run), cwd=home)
    receipt_holds("small", "pruned", home)
    exported = succeed("export", str(run), "--json", cwd=home)
    figures = json.loads(exported.stdout)
    assert figures.keys() == {"hf", "dense", "onnx", "onnx-int4"}
    assert all(f["max_logit_difference"] < 1e-4 for f in figures.values())
    check_report(home)


def check_report(home: Path) -> None:
    """One page without anything from elsewhere, and the same figures as JSON and Markdown."""
    done = succeed(
        "report", "runs/teacher", "runs/pruned", "runs/small", "--to", "report", "--json", cwd=home
    )
    made = json.loads(done.stdout)
    assert made == json.loads((home / "report" / "report.json").read_text())
    again = launch(
        "report", "runs/teacher", "runs/pruned", "runs/small", "--to", "report", "--json", cwd=home
    )
    assert "the same files were measured here on " in again.stderr
    assert json.loads(again.stdout)["models"] == made["models"], "speeds too"
    forms = [(row["run"], row["form"]) for row in made["models"]]
    assert forms[:2] == [("teacher", "torch fp32"), ("pruned", "torch fp32")]
    assert ("small", "onnxruntime 4-bit") in forms
    # The file alone, without torch, needs a fraction of the memory.
    memory = {form: row["peak_memory_bytes"] for form, row in zip(forms, made["models"], strict=True)}
    assert memory["small", "onnxruntime 4-bit"] < memory["pruned", "torch fp32"] / 2
    html = (home / "report" / "report.html").read_text()
    assert html.count("<svg") >= 3
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", html.replace("xlink:href=", "xlink-href="))
    markdown = (home / "report" / "report.md").read_text()
    assert "within the noise" in markdown or "worse" in markdown
    assert "## Classes of teacher" in markdown
    assert "<h2>Classes of teacher</h2>" in html
    # What the report counts is what the run counted when it ended.
    trained = summary(home / "runs" / "teacher")["metrics"]
    assert made["models"][0]["confusion"] == trained["confusion"]
    assert made["models"][0]["calibration_error"] == pytest.approx(trained["calibration_error"], abs=1e-5)


@pytest.mark.slow
def test_compress_is_the_chain_and_goes_on_where_it_stood(home: Path) -> None:
    steps = ["--steps", "6", "--prune-every", "2", "--sparsity", "0.4", "--name", "chain", "--out", "chained"]
    words = ["auto", "--task", "compress", *steps, *SMALL[:-1]]
    said = succeed(*words, cwd=home).stderr
    assert said.count("show a precision of") == 1, "the data is that of all stages"
    stages = ["chain-classifier", "chain-pruning", "chain-qat"]
    assert sorted(p.name for p in (home / "chained").iterdir()) == stages
    assert (home / "chained" / "chain-qat" / "report" / "report.html").is_file()
    shutil.rmtree(home / "chained" / "chain-qat")
    first = (home / "chained" / "chain-classifier" / "metrics.jsonl").read_bytes()
    succeed(*words, cwd=home)
    assert (home / "chained" / "chain-qat" / "report" / "report.html").is_file()
    assert (home / "chained" / "chain-classifier" / "metrics.jsonl").read_bytes() == first
    for stage in stages:
        run = RunFolder(home / "chained" / stage)
        assert ("chosen" in run.exports()) == (stage == "chain-qat")
        assert run.exports()
        assert None not in run.exports().values(), "each has its record"
        assert run.changed_export() == []
    page, alone = (
        home / "chained" / "chain-qat" / name / "report.json" for name in ("report", "report-alone")
    )
    of_all = json.loads(page.read_text())
    succeed("report", "chained/chain-qat", cwd=home)
    assert json.loads(page.read_text()) == of_all
    assert [run["run"] for run in json.loads(alone.read_text())["runs"]] == ["chain-qat"]
    succeed("report", "chained/chain", cwd=home)
    assert json.loads(page.read_text())["runs"] == of_all["runs"]
    chosen = home / "chained" / "chain-qat" / "chosen"
    said = "chosen/config.json: not as the run wrote it"
    assert said not in launch("predict", str(chosen), "a text", cwd=home).stderr
    (chosen / "config.json").write_bytes((chosen / "config.json").read_bytes() + b" ")
    assert said in launch("predict", str(chosen), "a text", cwd=home).stderr


def test_a_base_that_learnt_nothing_stops_the_chain(tmp_path: Path) -> None:
    """Labels in random order: exit 3 before the second stage, and --anyway is the way out."""
    draw = random.Random(0)
    lines = [f"{' '.join(draw.choices('abcdefgh', k=6))}\t{draw.choice('xy')}" for _ in range(200)]
    (tmp_path / "rows").mkdir()
    for name, part in (("train", lines[:100]), ("dev", lines[100:])):
        (tmp_path / "rows" / f"{name}.tsv").write_text("\n".join(["text\tlabel", *part]) + "\n")
    words = ["auto", "--task", "compress", "--data", "rows", "--model", "tiny", "--steps", "6", "--quiet"]
    done = launch(*words, "--vocab-size", "300", "--max-length", "16", "--name", "noise", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "noise-classifier is not clearly better than the largest class on 100 valid samples" in done.stderr
    assert "--anyway" in done.stderr
    assert "Traceback" not in done.stderr
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["noise-classifier"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sparsity", "0.95", "--granularity", "neurons"], "--sparsity 0.95: at most 0."),
        (["--multiple", "48"], "--multiple 48: does not divide the 512 neurons"),
        (["--ramp", "0.9"], "--ramp 0.9: with --recover 0.5"),
        (["--teacher", "runs/none"], "--teacher runs/none: there is no such file or folder"),
        (["--teacher", "runs/pruned"], "is pruned already"),
    ],
)
def test_what_cannot_be_pruned_is_one_line(flags: list[str], expected: str, home: Path) -> None:
    teacher = [] if "--teacher" in flags else ["--teacher", "runs/teacher"]
    assert expected in complaint(launch("auto", "--task", "pruning", *teacher, *flags, cwd=home))


def changed(home: Path, folder: Path, file: str, *place: str, **values: Any) -> str:
    """The teacher's final/ with these values at a place of one of its JSON files."""
    shutil.copytree(home / "runs" / "teacher" / "final", folder)
    found = json.loads((folder / file).read_text())
    inner = found
    for name in place:
        inner = inner[name]
    inner |= values
    (folder / file).write_text(json.dumps(found))
    return str(folder)


def test_a_model_that_does_not_fit_is_refused(home: Path, tmp_path: Path) -> None:
    """A teacher of other classes, one that reads other tokens, and a family without a map."""
    lines = [f"some words {n}\t{'xyz'[n % 3]}" for n in range(40)]
    (tmp_path / "rows").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "rows" / name).write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    tokens = changed(home, tmp_path / "tokens", "tokenizer.json", "model", "vocab", zzzzzz=99_999)
    deberta = changed(home, tmp_path / "deberta", "config.json", model_type="deberta-v2")
    for words, said in (
        (["pruning", "--teacher", "runs/teacher", "--data", str(tmp_path / "rows")], "the data has x, y, z"),
        (["pruning", "--teacher", tokens, "--model", "runs/teacher/final"], "its tokenizer is not that of"),
        (["pruning", "--model", deberta], "known of bert, roberta, xlm-roberta"),
        (["qat", "--model", deberta], "known of bert, roberta, xlm-roberta"),
    ):
        assert said in complaint(launch("auto", "--task", *words, cwd=home))


def test_four_bits_need_qat(home: Path) -> None:
    done = launch("export", "runs/pruned", "--to", "onnx-int4", cwd=home)
    assert "`auto --task qat --pruned RUN --bits 4`" in complaint(done)
