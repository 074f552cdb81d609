"""The demo of a language model: trained, reopened, continued, rounded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from isobatch.launch.commands.chat import open_language_model
from isobatch.tests.integration.helpers import launch, losses, run_card, succeed

if TYPE_CHECKING:
    from pathlib import Path


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
