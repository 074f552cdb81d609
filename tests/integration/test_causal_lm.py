"""A language model on real text: trained, checked against plain transformers, reopened, continued."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.launch.commands.chat import open_language_model
from isobatch.tests.integration.helpers import ROOT, launch, losses, run_card, succeed, summary

if TYPE_CHECKING:
    from pathlib import Path

WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext2"
BPE = ROOT.parent / "shared" / "data" / "gpt2-bpe"


def plain_perplexity(final: Path, text: str, width: int) -> float:
    """A few lines of plain transformers: independent blocks, as in run_clm."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(final).eval(),
        AutoTokenizer.from_pretrained(final),
    )
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    total = count = 0.0
    with torch.no_grad():
        for block in ids.split(width):
            if len(block) > 1:
                total += model(block[None], labels=block[None]).loss.item() * (len(block) - 1)
                count += len(block) - 1
    return math.exp(total / count)


def train(folder: Path, data: Path, *words: str) -> Path:
    common = ["--task", "causal-lm", "--data", str(data), "--name", "lm", "--quiet"]
    succeed("auto", *common, *words, cwd=folder, timeout=500)
    return folder / "runs" / "lm"


def excerpt(folder: Path) -> Path:
    """The first lines of each file of WikiText-2: enough for a test, small enough for two cores."""
    folder.mkdir()
    for name, lines in (("train.txt", 40), ("valid.txt", 6), ("test.txt", 8)):
        text = (WIKITEXT / name).read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
        (folder / name).write_text("".join(text), encoding="utf-8")
    return folder


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="WikiText-2 does not lie beside the project")
def test_perplexity_agrees_with_plain_transformers(tmp_path: Path) -> None:
    data = excerpt(tmp_path / "wiki text")
    words = ["--tokenizer", str(BPE), "--model", "tiny", "--steps", "12", "--max-length", "64"]
    run = train(tmp_path, data, *words, "--batch-size", "4")
    found = losses(run)
    assert found[-1] < found[0] - 0.2
    report = summary(run)
    assert report["split"] == "test"
    for split in ("test", "valid"):
        expected = plain_perplexity(run / "final", (data / f"{split}.txt").read_text(encoding="utf-8"), 64)
        assert report["metrics_by_split"][split]["perplexity"] == pytest.approx(expected, rel=1e-3)
    again = launch("evaluate", str(run), "--split", "test", "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["test"]["loss"] == pytest.approx(report["metrics"]["loss"], rel=1e-6)


def test_the_demo_learns_and_writes(tmp_path: Path) -> None:
    done = succeed("auto", "--task", "causal-lm", "--steps", "15", "--name", "demo", cwd=tmp_path)
    run = tmp_path / "runs" / "demo"
    found = losses(run)
    assert sum(found[-5:]) / 5 < found[0] - 0.6
    assert "sample:" in done.stderr
    assert (run / "log.txt").read_text().count("sample:") == 1
    assert "\nOnce upon a time" in done.stderr
    words = ["generate", str(run), "--prompt", "One ", "--tokens", "8", "--json"]
    first, second = (json.loads(launch(*words, cwd=tmp_path).stdout) for _ in range(2))
    assert first == second
    assert first["text"].startswith("One ")
    rounded = launch(*words, "--load-bits", "8", cwd=tmp_path)
    assert json.loads(rounded.stdout)["text"].startswith("One ")
    model = open_language_model(str(run))
    writers: list[Any] = [model.writer(bits) for bits in (16, 8, 4)]
    wide, eight, four = (writer.args[0].get_memory_footprint() for writer in writers)
    assert wide > eight > four
    assert run_card(run / "final").startswith("A text begins")
