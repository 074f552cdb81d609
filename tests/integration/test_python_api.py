"""isobatch from Python: the same runs as from the command line, in a process that stays what it was."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import isobatch
from isobatch.core.errors import TrainingError, UserError
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.tests.paths import RAGGED, REGISTER


def recipe(**values: Any) -> isobatch.Recipe:
    return isobatch.Recipe(task=RAGGED, **{"steps": 4, **values})


def process_state() -> dict[str, Any]:
    from accelerate.state import AcceleratorState, PartialState
    from transformers import AttentionInterface

    return {
        "threads of torch": torch.get_num_threads(),
        "generator": torch.get_rng_state().tolist(),
        "handlers": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "threads": {t.name for t in threading.enumerate()},
        # Neither library has a public way to read these.
        "accelerate": [kind._shared_state == {} for kind in (AcceleratorState, PartialState)],  # noqa: SLF001
        "attention": set(AttentionInterface._global_mapping),  # noqa: SLF001
        "folder": Path.cwd(),
    }


@pytest.mark.parametrize("task", ["causal-lm", "classifier", "recommender", "qat"])
def test_a_recipe_has_one_hash_however_it_was_made(task: str) -> None:
    words = ["--task", task, "--lr", "0.01", "--epochs", "2", "--batch-size", "16", "--schedule", "cosine"]
    there = parse_request(words, "auto").recipe
    here = isobatch.Recipe(task=task, lr=0.01, epochs=2, batch_size=16, schedule="cosine")
    assert here.hash() == there.hash()
    assert here.to_dict() == there.to_dict()
    assert dataclasses.replace(here, seed=3).hash() == dataclasses.replace(there, seed=3).hash()


def test_training_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    isobatch.train(recipe(steps=1), out=tmp_path, quiet=True)  # what is loaded once stays
    before = process_state()
    run = isobatch.train(recipe(), out=tmp_path, quiet=True)
    assert process_state() == before
    assert (run.status, run.summary["steps"]) == ("done", 4)
    assert run.metrics["loss"] == run.summary["metrics"]["loss"]
    assert [r["step"] for r in run.history if "lr" in r] == [1, 2, 3, 4]
    again = isobatch.load(run.folder)
    assert (again.recipe.hash(), again.plan, again.facts) == (recipe().hash(), run.plan, run.facts)
    assert isobatch.train(recipe(), out=tmp_path, quiet=True).folder == run.folder  # it is done


def test_a_trained_model_is_plain_torch(tmp_path: Path) -> None:
    run = isobatch.train(recipe(), out=tmp_path, quiet=True)
    model: Any = run.model()
    from safetensors.torch import load_file

    final = load_file(run.final / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name in final:
            assert torch.equal(weight, final[name]), name
    logits = model(torch.zeros(2, 5, dtype=torch.int64)).logits
    model.train()(torch.zeros(2, 5, dtype=torch.int64)).logits.sum().backward()
    assert logits.shape == (2, 5, 61)


def test_a_run_is_verified_and_a_changed_one_is_not(tmp_path: Path) -> None:
    run = isobatch.train(recipe(), out=tmp_path, quiet=True)
    before = process_state()
    found = isobatch.verify(run, steps=2)
    assert process_state() == before
    assert found
    assert sorted({s["step"] for s in found.steps}) == [1, 2, 3, 4]
    assert found.coverage.startswith("4 of 4 steps redone equal ")
    assert ", samples of all 4 checked, final weights reproduced " in found.coverage
    made = json.loads((run.folder / "environment.json").read_text())
    assert made["torch"] == made["packages"]["torch"] == importlib.metadata.version("torch")
    assert made["python"] == platform.python_version()
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    next(row for row in rows if row.get("step") == 2)["loss"] -= 0.5
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    changed = isobatch.verify(run.folder)
    assert not changed
    assert "metrics.jsonl was changed" in changed.problems[0]


def test_errors_are_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"batchsize: .* has no such recipe field \(did you mean batch_size"):
        recipe(batchsize=3)
    with pytest.raises(UserError, match="--lr -1: must be at least 0"):
        recipe(lr=-1)
    with pytest.raises(UserError, match=r"micro_batches: there is no such option \(did you mean micro_batch"):
        isobatch.train(recipe(), micro_batches=3)
    with pytest.raises(UserError, match="there is no such task"):
        isobatch.Recipe(task="clasifier")
    with pytest.raises(UserError, match="is not a run"):
        isobatch.load(tmp_path)
    nan = recipe(lr=1e38, clip=0)
    with pytest.raises(TrainingError, match="became nan at step"):
        isobatch.train(nan, out=tmp_path, quiet=True)
    assert "Traceback" not in capfd.readouterr().err


def test_a_recipe_is_one_whoever_read_it(tmp_path: Path) -> None:
    run = isobatch.train(recipe(), out=tmp_path, quiet=True)
    assert run.recipe == recipe()
    assert isinstance(run.recipe, isobatch.Recipe)
    assert isobatch.Recipe.from_dict({"task": "classifier"}).options == {}
    with pytest.raises(UserError, match="'classifier' is no recipe: make one"):
        isobatch.train("classifier")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--steps a: is not an integer"):
        isobatch.verify(run, steps="a")
    with pytest.raises(UserError, match=r"task=Task: write the class in a file"):
        isobatch.Recipe(task=isobatch.Task)  # type: ignore[arg-type]


def test_two_runs_at_once_in_one_process_are_refused(tmp_path: Path) -> None:
    with preserve_process_state(), pytest.raises(UserError, match="another run is at work in this process"):
        isobatch.train(recipe(), out=tmp_path, quiet=True)


def test_the_names_are_there_without_torch() -> None:
    code = REGISTER + (
        "import sys, isobatch\n"
        "for name in isobatch.__all__: getattr(isobatch, name)\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(dir(isobatch)) == set(isobatch.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
