"""Adapters on frozen weights of 16, 8 and 4 bits, and 8-bit optimizers: they learn, resume and merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.tests.gpu.helpers import asked, conversations, on_device
from isobatch.tests.integration.helpers import furthest, launch, losses, resumed_from, summary

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = on_device

WAYS = {
    "lora": ["--adapter", "lora"],
    "qlora": ["--adapter", "qlora"],
    "int8": ["--adapter", "lora", "--load-bits", "8"],
}
SAVED = ("--save-every", "8", "--keep", "9")


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("way", WAYS)
def test_adapters_learn_resume_and_merge(way: str, model_type: str, tmp_path: Path) -> None:
    """8-bit weights that were moved after loading kept their statistics on the CPU."""
    pytest.importorskip("peft")
    if way != "lora":
        pytest.importorskip("bitsandbytes")
    conversations(tmp_path, model_type)
    run = asked(tmp_path, "tuned", *WAYS[way], "--lr", "1e-2", "--precision", "bf16", *SAVED)
    assert losses(run)[-1] < losses(run)[0]
    entries = SavedCheckpoint(run / "checkpoints" / "train-24").entries
    assert all("lora_" in name for name in entries if name.startswith("weight"))
    again = resumed_from(run, 8)
    assert summary(again)["resumed_from"] == "train-8"
    assert furthest(losses(again), losses(run)) < 2e-2
    done = launch("export", str(run), "--to", "merged,adapter", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("optimizer", ["adamw8bit", "paged-adamw8bit", "adamw"])
def test_moments_are_saved_and_resumed(optimizer: str, tmp_path: Path) -> None:
    """Paged moments lie in memory of host and device, and Adam's fused step wants its counter on the GPU."""
    if optimizer != "adamw":
        pytest.importorskip("bitsandbytes")
    conversations(tmp_path)
    run = asked(tmp_path, "run", "--optimizer", optimizer, "--lr", "1e-3", "--precision", "fp32", *SAVED)
    again = resumed_from(run, 16)
    assert furthest(losses(again), losses(run)) < 1e-3
    assert losses(again)[-1] < losses(again)[0]


def test_a_checkpoint_while_training_changes_nothing(tmp_path: Path) -> None:
    """Its copies to the host are made beside the next steps."""
    conversations(tmp_path)
    words = ("--lr", "1e-3", "--precision", "fp32")
    often = asked(tmp_path, "often", *words, "--save-every", "1", "--keep", "30")
    once = asked(tmp_path, "once", *words)
    assert furthest(losses(often), losses(once)) < 1e-4
    for step in (3, 17):
        assert furthest(losses(resumed_from(often, step)), losses(once)) < 1e-3
