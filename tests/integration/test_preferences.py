"""Preference training: what is preferred is learnt, by any number of processes, and the run is a run."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from isobatch.tests.integration.helpers import losses, resumed_from, rows, succeed, summary
from isobatch.tests.integration.test_batch_invariance import assert_same, run

if TYPE_CHECKING:
    from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALL = "--data pairs.jsonl --batch-size 16 --max-length 64 --quiet"


def write_pairs(file: Path, count: int) -> None:
    """Pairs whose chosen answer begins with `please` and the rejected one with `now`; the rest is chance."""
    draw, lines = random.Random(0), []
    for _ in range(count):
        prompt, one, other = (" ".join(draw.choices(LETTERS, k=draw.randint(3, 9))) for _ in range(3))
        lines.append({"prompt": prompt, "chosen": f" please {one}", "rejected": f" now {other}"})
    file.write_text("\n".join(map(json.dumps, lines)))


def succeeds(home: Path, words: str) -> str:
    done = succeed(*words.split(), cwd=home)
    return done.stdout


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder) if "lr" in row]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs, and with a run of DPO."""
    folder = tmp_path_factory.mktemp("preferences")
    write_pairs(folder / "pairs.jsonl", 400)
    more = "--model tiny --vocab-size 320 --lr 1e-3 --steps 24 --save-every 12 --keep 9 --name run"
    succeeds(folder, f"auto --task dpo {SMALL} {more}")
    return folder


def test_held_out_preferences_are_learnt(home: Path) -> None:
    first, *_ = steps(home / "runs/run")
    found = summary(home / "runs/run")["metrics"]
    # Before the first update model and reference are one: every pair is a tie.
    assert (first["reward_accuracy"], first["reward_margin"]) == (0.5, pytest.approx(0, abs=1e-5))
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert found["reward_accuracy"] > 0.9
    assert found["reward_margin"] > 0.1
    assert found["loss"] < 0.6


def test_a_run_is_verified_resumed_and_opened(home: Path) -> None:
    folder = home / "runs/run"
    assert "verified (exact)" in succeeds(home, "verify runs/run")
    assert losses(resumed_from(folder, 12)) == losses(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    ids = AutoTokenizer.from_pretrained(folder / "final")("a b c", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()


def test_an_adapter_is_held_to_the_model_without_it(home: Path) -> None:
    """On the model of the run, which then is the reference: its pairs are ties again."""
    shutil.copytree(home / "runs/run/final", home / "base", dirs_exist_ok=True)
    succeeds(home, f"auto --task dpo {SMALL} --model base --adapter lora --lr 1e-2 --steps 30 --name lora")
    first, *_, last = steps(home / "runs/lora")
    assert (first["reward_accuracy"], first["reward_margin"]) == (0.5, pytest.approx(0, abs=1e-5))
    assert last["reward_margin"] > 0.02
    assert summary(home / "runs/lora")["metrics"]["reward_accuracy"] > 0.8


@pytest.mark.parametrize("task", ["dpo", pytest.param("orpo", marks=pytest.mark.slow)])
def test_any_world_learns_the_same(task: str, home: Path, tmp_path: Path) -> None:
    data = {"data": str(home / "pairs.jsonl"), "model": "tiny", "vocab_size": 320, "max_length": 64}
    flags = {**data, "batch_size": 24, "lr": 1e-3, "dropout": 0.1}
    whole = {"micro_batch_samples": 24, "micro_batch_tokens": 10**6, "micro_batch_cost": 1e9}
    alone = run(tmp_path / "alone", 1, 12, flags, task, **whole)
    assert all(len(step) == 1 for step in alone.micros[0])
    two = run(tmp_path / "two", 2, 12, flags, task, micro_batch_samples=5)
    assert_same(two, alone)
