"""Several labels, scores and tags of words: trained on one and two processes, pruned, quantized, answered."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file

from isobatch.tests.integration.helpers import figure, succeed, summary

if TYPE_CHECKING:
    from pathlib import Path

COLORS, ANIMALS = ("red", "green", "blue"), ("cat", "dog")
TEXT = "the green and red dog sleeps"
PROBLEMS = ("multi-label", "regression", "tokens")
SHORT = ["--max-length", "16", "--lr", "2e-3", "--quiet", "--batch-size", "32", "--micro-batch", "16"]
CHAIN = {
    "pruning": ["--teacher", "runs/base", "--sparsity", "0.25", "--prune-every", "2", "--steps", "8"],
    "qat": ["--pruned", "runs/pruning", "--steps", "8"],
}


def row(problem: str, draw: random.Random) -> dict[str, Any]:
    colors, animal = [c for c in COLORS if draw.random() < 0.5], draw.choice(ANIMALS)
    words = ["the", *" and ".join(colors or ["pale"]).split(), animal, draw.choice(["sleeps", "eats"])]
    if problem == "tokens":
        tags = ["B-color" if w in COLORS else "B-animal" if w in ANIMALS else "O" for w in words]
        return {"words": words, "tags": tags}
    label = {"labels": colors} if problem == "multi-label" else {"score": len(colors) + 0.25}
    return {"text": " ".join(words), **label}


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_labels_of_every_kind_go_from_training_to_answers(problem: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    (tmp_path / "data").mkdir()
    for split, count in {"train": 240, "valid": 40, "test": 40}.items():
        lines = (json.dumps(row(problem, draw)) + "\n" for _ in range(count))
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(lines))
    train = ["auto", "--data", "data", "--eval-every", "20", *SHORT]
    for name, processes in {"base": "2", "alone": "1"}.items():
        where = ["--model", "tiny", "--steps", "80", "--processes", processes, "--name", name]
        succeed(*train, "--task", "classifier", *where, cwd=tmp_path)
    one, two = (tmp_path / "runs" / name for name in ("alone", "base"))
    losses = [figure(run) for run in (one, two)]
    assert losses[0][:20] == pytest.approx(losses[1][:20], abs=2e-5)  # then the noise of sums has grown
    measured = [summary(run)["metrics"] for run in (one, two)]
    assert measured[0].keys() == measured[1].keys()
    assert measured[0]["loss"] == pytest.approx(measured[1]["loss"], abs=2e-3)
    for task, words in CHAIN.items():
        succeed(*train, "--task", task, *words, "--name", task, cwd=tmp_path)
    succeed("export", "runs/pruning", "--to", "hf,dense,onnx", cwd=tmp_path)
    found = summary(tmp_path / "runs" / "qat")["metrics"]
    assert found["max_logit_difference"] < 1e-3
    assert {"bootstrap_p", "bits"} <= found.keys()
    told = list[dict[str, float]]()
    for run, form in ("pruning", "torch"), ("pruning", "onnx"), ("qat", "onnx-int4"):
        asked = ["predict", f"runs/{run}", TEXT, "--form", form, "--json"]
        said = json.loads(succeed(*asked, cwd=tmp_path).stdout)
        answer = said["prediction"]
        if problem == "regression":
            assert answer == pytest.approx(2.25, abs=0.75)
        elif problem == "multi-label":
            kept = load_file(tmp_path / "runs" / run / "final" / "calibration.safetensors")["thresholds"]
            told.append(said["probabilities"])
            assert [*told[-1]] == sorted(COLORS)
            least = zip(told[-1].items(), kept.tolist(), strict=True)
            assert answer == [color for (color, p), threshold in least if p >= threshold]
        else:
            assert [one["text"] for one in answer] == ["green", "red", "dog"]
    if told:  # which colors so small a model likes best is chance; that its forms like the same is not
        assert told[0] == pytest.approx(told[1], abs=1e-3)
