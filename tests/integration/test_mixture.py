"""Text, instructions and questions in one run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import furthest, ledger, losses, succeed, summary

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ("sun", "rain", "wind", "snow", "fog", "hail", "storm", "cloud")
FEELINGS = {"good": ("fine", "lovely", "bright"), "bad": ("awful", "dull", "grim")}
SHARES = "0.5,0.25,0.25"
TASK = ["auto", "--task", "causal-lm", "--data", "story.jsonl,asked.jsonl,feelings.csv", "--mix", SHARES]
FLAGS = ["--model", "tiny", "--batch-size", "8", "--lr", "3e-3", "--vocab-size", "300", "--steps", "40"]
MORE = ["--max-length", "48", "--quiet", "--ledger", "--save-every", "30", "--keep", "9", "--template=plain"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three sets and a run over them, runs/one."""
    folder = tmp_path_factory.mktemp("mixture")
    story = [{"text": f"The {a} came before the {b}."} for a in WORDS for b in WORDS]
    asked = [{"instruction": f"Spell {w} {n}", "output": " ".join(w)} for w in WORDS for n in range(5)]
    (folder / "story.jsonl").write_text("\n".join(map(json.dumps, story)))
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    felt = [
        f"a {word} {weather} {n},{label}"
        for n in range(3)
        for weather in WORDS
        for label, words in FEELINGS.items()
        for word in words
    ]
    (folder / "feelings.csv").write_text("\n".join(["prompt,completion", *felt]))
    succeed(*TASK, *FLAGS, *MORE, "--processes", "1", "--name", "one", cwd=folder)
    return folder


def test_every_set_is_reported(home: Path) -> None:
    found = summary(home / "runs" / "one")["metrics"]
    for name in ("story", "asked", "feelings"):
        assert found[f"{name}_perplexity"] > 1, name
    losses_of = [found[f"{name}_loss"] for name in ("story", "asked", "feelings")]
    assert min(losses_of) < found["loss"] < max(losses_of)


@pytest.mark.slow
def test_processes_mix_the_same(home: Path) -> None:
    succeed(*TASK, *FLAGS, *MORE, "--processes", "2", "--name", "two", "--again", cwd=home)
    one, two = home / "runs" / "one", home / "runs" / "two"
    assert ledger(one) == ledger(two)
    assert furthest(losses(one)[:20], losses(two)[:20]) < 1e-5
    succeed("verify", str(two), cwd=home)
