"""What decides what is learnt beside the loss: Muon, LoRA's variants, a schedule's end, an average.

Each is the same on one and two processes, and in a run that was resumed.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from isobatch.tests.integration.helpers import furthest, launch, losses, run_code, succeed, summary
from isobatch.tests.integration.test_adapters import OPENED
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.tiny_models import save_gpt2, write_stories

if TYPE_CHECKING:
    from pathlib import Path

TASK = ["auto", "--task", "causal-lm", "--model", "base", "--data", "stories.txt", "--max-length", "64"]
TASK += ["--quiet", "--keep", "9"]
ADAPTER = ["--adapter", "lora", "--lora-targets", "c_attn,c_proj", "--lr", "1e-3"]
KINDS = {
    "muon": (["--optimizer", "muon", "--ema", "0.9"], "ddp"),
    "pissa": ([*ADAPTER, "--lora-init", "pissa", "--lora-scale", "rs", "--lora-layers", "1"], "fsdp2"),
    "plus": ([*ADAPTER, "--lora-plus", "16", "--lora-init", "gaussian", "--ema", "0.9"], "zero2"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    save_gpt2(folder / "base", 600, n_layer=2)
    write_stories(folder / "stories.txt")
    return folder


@pytest.mark.parametrize("kind", ["muon", pytest.param("pissa", marks=pytest.mark.slow), "plus"])
def test_processes_and_strategies_learn_the_same(kind: str, home: Path) -> None:
    flags, strategy = KINDS[kind]
    words = [*TASK, *flags, "--steps", "6", "--save-every", "3"]
    succeed(*words, "--name", f"{kind}-1", "--processes", "1", cwd=home)
    two = ["--processes", "2", "--strategy", strategy, "--again"]
    succeed(*words, "--name", f"{kind}-2", *two, cwd=home)
    one, other = home / "runs" / f"{kind}-1", home / "runs" / f"{kind}-2"
    assert furthest(losses(one), losses(other)) < 1e-5
    assert summary(one)["metrics"].get("ema_loss") == pytest.approx(
        summary(other)["metrics"].get("ema_loss"), abs=1e-5
    )
    assert "verified (exact)" in succeed("verify", f"runs/{kind}-2", cwd=home).stdout
    if kind != "muon":
        succeed("export", f"runs/{kind}-2", "--to", "merged", cwd=home)
        apart, learnt = map(float, run_code(OPENED, str(other), "base", cwd=home).stdout.split())
        assert apart < 1e-4 < 1e-3 < learnt
        with safe_open(other / "final" / "adapter_model.safetensors", "pt") as adapter:
            assert {name.rpartition(".lora_")[2] for name in adapter.keys()} == {"A.weight", "B.weight"}  # noqa: SIM118


def test_a_stable_run_decays_as_a_run_of_the_shorter_recipe_does(home: Path) -> None:
    words = [*TASK, "--schedule", "wsd", "--warmup", "2", "--ema", "0.9", "--eval-every", "4"]
    succeed(*words, "--steps", "20", "--decay", "6", "--save-every", "4", "--name", "stable", cwd=home)
    before = losses(home / "runs" / "stable")
    succeed("resume", "runs/stable", "--decay", "--quiet", "--processes", "2", cwd=home)
    run = home / "runs" / "stable-decay-12"
    first = losses(run)
    shutil.rmtree(run / "checkpoints")  # as if it had been killed before it had its checkpoint
    (run / "summary.json").unlink()
    succeed("resume", "runs/stable", "--decay", "--quiet", cwd=home)
    assert furthest(losses(run), first) < 1e-5
    assert "resumed" in (run / "log.txt").read_text()
    succeed(*words, "--steps", "18", "--decay", "6", "--name", "alone", "--again", cwd=home)
    alone = home / "runs" / "alone"
    assert losses(run)[:12] == before[:12]
    assert losses(home / "runs" / "stable") == before
    assert furthest(losses(run), losses(alone)) < 1e-5
    averages = [load_file(one / "final" / "ema" / "model.safetensors") for one in (run, alone)]
    assert all(float((averages[0][n] - averages[1][n]).abs().max()) < 1e-5 for n in averages[0])
    assert "verified (exact)" in succeed("verify", str(run), cwd=home).stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--optimizer", "muon", *ADAPTER], "use adamw"),
        (["--optimizer", "muon", "--strategy", "zero2", "--processes", "2"], "looks at whole matrices"),
        ([*ADAPTER, "--lora-layers", "1-4"], "there is no layer 2; the model has 0 to 1"),
        ([*ADAPTER, "--lora-layers", "x"], "give numbers or ascending ranges"),
        ([*ADAPTER, "--lora-experts", "--lora-dropout", "0"], "the model is no mixture"),
        (["--adapter", "dora", "--lora-init", "pissa"], "leave --lora-init pissa out"),
        (["--decay", "9"], "it is the end of --schedule wsd; leave it out"),
        (["--ema", "1.5"], "--ema 1.5"),
    ],
)
def test_what_does_not_go_together_is_said(flags: list[str], said: str, home: Path) -> None:
    assert said in complaint(launch(*TASK, *flags, "--steps", "2", cwd=home))
