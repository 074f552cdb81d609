"""`evaluate` of other data: a file is measured as the run's own splits are, for every workload."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.extras import has
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.report.page import collect, write_report
from isobatch.launch.report.records import later_evaluations
from isobatch.tests.integration.helpers import launch, run_code, succeed
from isobatch.tests.tiny_models import WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DRAW = random.Random(0)
SPLITS = {"train": 48, "valid": 16}
SHORT = ["--steps", "4", "--batch-size", "8", "--quiet"]


def texts(count: int) -> Iterator[str]:
    return (" ".join(DRAW.choices(WORDS.split(), k=5)) for _ in range(count))


def labelled(count: int) -> str:
    rows = [f"{text},{'ab'[n % 2]}\n" for n, text in enumerate(texts(count))]
    return "text,label\n" + "".join(rows)


def lines(rows: Iterator[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def interactions(count: int) -> str:
    pairs = [(n % 12, 7 * n % 30 if count > 16 else (7 * n + 5) % 30) for n in range(4 * count)]
    return "user,item\n" + "".join(f"u{user},i{item}\n" for user, item in dict.fromkeys(pairs))


KINDS = {
    "classifier": (["--model", "tiny", "--vocab-size", "300", "--max-length", "16"], "csv", labelled),
    "causal-lm": (
        ["--model", "tiny", "--vocab-size", "300", "--max-length", "192"],
        "jsonl",
        lambda n: lines({"instruction": t, "output": t[:6]} for t in texts(n)),
    ),
    "dpo": (
        ["--model", "tiny", "--vocab-size", "300", "--max-length", "96"],
        "jsonl",
        lambda n: lines({"prompt": t, "chosen": t[:4], "rejected": t[5:]} for t in texts(n)),
    ),
    "sequence-vae": (["--vocab-size", "300", "--max-length", "24"], "txt", lambda n: "\n".join(texts(n))),
    "recommender": (["--preset", "ids"], "csv", interactions),
}
DEPENDS_ON_ORDER = ("hr@10", "ndcg@10", "mrr@10")
"""Parts of the names of figures that depend on the order of rows: on drawn negatives, for one."""


@pytest.mark.parametrize("task", KINDS)
def test_a_file_is_measured_as_the_split_that_it_was(tmp_path: Path, task: str) -> None:
    flags, ending, write = KINDS[task]
    for split, count in SPLITS.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.{ending}").write_text(write(count))
    succeed("auto", "--task", task, "--data", "data", *flags, *SHORT, "--name", "run", cwd=tmp_path)
    other = tmp_path / f"elsewhere.{ending}"
    (tmp_path / "data" / f"valid.{ending}").rename(other)
    (tmp_path / "data").rename(tmp_path / "gone")  # the run's own data is not needed
    own = json.loads(succeed("evaluate", "runs/run", "--json", cwd=tmp_path).stdout)["valid"]
    done = succeed("evaluate", "runs/run", "--test", other.name, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)[other.name]
    floats = [n for n, value in own.items() if isinstance(value, float) and "latency" not in n]
    same = {n for n in floats if n.startswith("full_") or not any(part in n for part in DEPENDS_ON_ORDER)}
    assert {n: found[n] for n in same} == pytest.approx(
        {n: own[n] for n in same}, rel=1e-5, abs=1e-6, nan_ok=True
    )
    assert len(same) > 1
    (row,) = [json.loads(line) for line in (tmp_path / "runs/run/evaluations.jsonl").open()]
    assert (row["data"], row["metrics"]) == (other.name, found)
    refused = launch("evaluate", "runs/run", "--test", f"none.{ending}", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


WRONG = {
    "labels": ("text,label\nthe cat,y\nthe dog,z\n", "2 of 2 rows have a label that the model does not know"),
    "columns": ("body,mark\nthe cat,a\n", "it has: body, mark"),
    "pairs": ("sentence1,sentence2,label\nthe cat,a dog,a\n", "types of its samples are not as the run's"),
    "empty": ("text,label\n", "it has: no rows"),
}


@pytest.mark.skipif(not has("sklearn"), reason="the extra [baselines]")
def test_a_classifiers_figures_on_new_rows_are_said_with_their_noise(tmp_path: Path) -> None:
    """How many rows, an interval, what simple models score there, and why a temperature is 1."""
    for name, count in (("texts.csv", 60), ("new.csv", 24)):
        lines_of = [f"{text} {'xy'[n % 2]},{'ab'[n % 2]}\n" for n, text in enumerate(texts(count))]
        (tmp_path / name).write_text("text,label\n" + "".join(lines_of))
    flags = ["--model", "tiny", "--vocab-size", "300", "--max-length", "16", "--name", "run", "--quiet"]
    succeed("auto", "--task", "classifier", "--data", "texts.csv", "--steps", "80", *flags, cwd=tmp_path)
    done = succeed("evaluate", "runs/run", "--test", "new.csv", cwd=tmp_path)
    said = done.stdout
    assert "in train" not in done.stderr
    for part in ("samples 24", "accuracy within (95 %) 0.", "accuracy of the largest class 0.5"):
        assert part in said
    assert "accuracy of TF-IDF with logistic regression " in said
    assert "beside the largest class the model is better" in said
    found = json.loads(succeed("evaluate", "runs/run", "--test", "new.csv", "--json", cwd=tmp_path).stdout)
    assert ("temperature is 1 as of" in found["new.csv"]) == (found["new.csv"]["temperature"] == 1.0)
    low, high = found["new.csv"]["accuracy_ci95"]
    assert found["new.csv"]["accuracy within (95 %)"] == f"{low:.4f} to {high:.4f}"
    rows = (tmp_path / "new.csv").read_text().partition("\n")[2]
    (tmp_path / "later.csv").write_text(f"Anliegen,Abteilung\n{rows}" + "a loan,Kredit\n" * 6)
    named = ["--text-column", "Anliegen", "--label-column", "Abteilung"]
    done = succeed("evaluate", "runs/run", "--test", "later.csv", *named, "--json", cwd=tmp_path)
    assert "(the first: later.csv line 26): Kredit (6); it knows a, b" in done.stderr
    (later,) = json.loads(done.stdout).values()
    known, every = (f"{later['accuracy'] * share:.4g}" for share in (1, 24 / 30))
    told = f"6 of 30 rows: accuracy {known} of the others, {every} of all, these as wrong"
    assert (later["samples"], later["with an unknown label"]) == (24, told)
    assert ("labels to doubt" in later) == (later["accuracy"] < 1)


def test_files_of_another_kind_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text(labelled(48))
    flags = ["--model", "tiny", "--vocab-size", "300", "--max-length", "16", "--name", "run"]
    succeed("auto", "--task", "classifier", "--data", "texts.csv", *flags, *SHORT, cwd=tmp_path)
    for name, (text, said) in WRONG.items():
        (tmp_path / f"{name}.csv").write_text(text)
        refused = launch("evaluate", "runs/run", "--test", f"{name}.csv", cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert said in refused.stderr
    (tmp_path / "other.csv").write_text(labelled(40))
    other = launch("evaluate", "runs/run", "--data", "other.csv", cwd=tmp_path)
    assert "evaluate --test FILE" in other.stderr
    both = launch("evaluate", "runs/run", "--split", "valid", "--test", "other.jsonl", cwd=tmp_path)
    assert "--split and --test exclude each other" in both.stderr
    for flag, more in (("--text-column", []), ("--user-column", ["--test", "labels.csv"])):
        wrong = launch("evaluate", "runs/run", flag, "x", *more, cwd=tmp_path)
        assert wrong.stderr == f"isobatch: {flag}: is for --test FILE, a column that classifier reads\n"
    lone = launch("evaluate", "runs/run", "--limit", "3", cwd=tmp_path)
    assert "--limit 3: is for --lm-eval" in lone.stderr
    asked = launch("evaluate", "runs/run", "--lm-eval", ".", cwd=tmp_path)
    assert "which writes no text" in asked.stderr
    assert not (tmp_path / "runs/run/evaluations.jsonl").exists()
    done = succeed("evaluate", "runs/run", "--test", "texts.csv", cwd=tmp_path)
    trained = RunFolder.open(tmp_path / "runs/run").facts.samples["train"]
    assert f"{trained} of 48 rows are in the run's train data too" in done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith(f"texts.csv without these {trained}: loss ")
    assert said[-1].startswith("texts.csv with these, which were trained on: loss ")
    assert done.stdout.count("samples ") == 1 + sum(line.startswith("  class ") for line in said)
    kept = [json.loads(line) for line in (tmp_path / "runs/run/evaluations.jsonl").open()]
    whole, new = (row["metrics"] for row in kept)
    assert (whole["samples"], new["samples"]) == (48, 48 - trained)
    heads = later_evaluations(RunFolder.open(tmp_path / "runs/run"))[0]
    assert [head.partition(", ")[0] for head in heads[1:]] == [
        f"texts.csv without these {trained}",
        "texts.csv",
    ]


TASK = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
BY_HAND = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
final, file = sys.argv[1:]
net, tokenizer = AutoModelForCausalLM.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
right = []
for row in map(json.loads, open(file)):
    asked, scores = tokenizer(row["question"]).input_ids, []
    for choice in row["choices"]:
        ids = tokenizer(row["question"] + " " + choice).input_ids
        logs = net(torch.tensor([ids])).logits[0].log_softmax(-1)
        scores.append(sum(float(logs[n - 1, ids[n]]) for n in range(len(asked), len(ids))))
    right.append(scores.index(max(scores)) == row["label"])
print(sum(right) / len(right))
"""


@pytest.mark.skipif(not has("lm_eval"), reason="lm-evaluation-harness is not installed")
def test_the_harness_measures_the_final_model_on_tasks_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(texts(300)))
    flags = ["--data", "text.txt", "--model", "tiny", "--vocab-size", "300", "--max-length", "32"]
    succeed("auto", "--task", "causal-lm", *flags, *SHORT, "--name", "run", cwd=tmp_path)
    rows = ({"question": t, "choices": ["red", "the tree"], "label": n % 2} for n, t in enumerate(texts(12)))
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "colours.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    done = succeed("evaluate", "runs/run", "--lm-eval", "tasks", "--limit", "12", "--json", cwd=tmp_path)
    by_hand = run_code(BY_HAND, "runs/run/final", "rows.jsonl", cwd=tmp_path)
    assert json.loads(done.stdout)["colours"]["acc"] == float(by_hand.stdout), by_hand.stderr
    write_report(collect([RunFolder.open(str(tmp_path / "runs/run"))]), tmp_path / "report")
    assert "colours" in (tmp_path / "report" / "report.html").read_text()
    succeed("verify", "runs/run", "--level", "records", cwd=tmp_path)
    unknown = launch("evaluate", "runs/run", "--lm-eval", "nosuch", cwd=tmp_path)
    assert "lm-eval has no task nosuch" in unknown.stderr
