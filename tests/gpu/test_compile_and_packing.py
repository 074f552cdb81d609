"""Compiled models and packed samples: the same losses, and attention's fast kernel stays."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from isobatch.benchmarks import child_process
from isobatch.benchmarks.gpu.runner import FOLDER
from isobatch.tests.gpu.helpers import CONFIGS, DEVICE, asked, conversations, gpu_only, on_device, ragged
from isobatch.tests.integration.helpers import RAGGED, furthest, launch, losses, summary

if TYPE_CHECKING:
    from pathlib import Path


@on_device
@pytest.mark.parametrize("model_type", CONFIGS)
def test_samples_end_to_end_learn_the_same(model_type: str, tmp_path: Path) -> None:
    """Under autocast rotary embeddings leave queries and keys in fp32; the kernel takes one type."""
    conversations(tmp_path, model_type)
    on, off = (
        asked(tmp_path, pack, "--lr", "1e-3", "--precision", "bf16", "--pack", pack) for pack in ("on", "off")
    )
    assert furthest(losses(on), losses(off)) < 5e-2
    assert losses(on)[-1] < losses(on)[0]
    assert summary(on)["padding_fraction"] == 0


@on_device
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_training_draws_the_same_noise(precision: str, tmp_path: Path) -> None:
    """With dropout, in one micro-batch and in several."""
    eager = ragged(tmp_path, "eager", "--precision", precision, "--compile", "off", steps=30)
    limit = 1e-3 if precision == "fp32" else 5e-2
    for name, micro in (("whole", "24"), ("cut", "5")):
        words = ("--precision", precision, "--compile", "on", "--micro-batch", micro)
        assert furthest(losses(ragged(tmp_path, name, *words, steps=30)), losses(eager)) < limit


@gpu_only
def test_graphs_over_several_micro_batches_keep_every_gradient(tmp_path: Path) -> None:
    """Reduce-overhead replays CUDA graphs into the same memory: equal losses, or a refusal in one line."""
    common = ["--task", RAGGED, "--steps", "30", "--precision", "fp32", "--dropout", "0", "--quiet"]
    words = [*common, "--compile", "reduce-overhead", "--micro-batch", "5", "--name", "graphs"]
    done = launch("auto", *words, cwd=tmp_path, timeout=400)
    if done.returncode == 2:
        assert "reduce-overhead" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        return
    assert done.returncode == 0, done.stderr
    words = ("--precision", "fp32", "--dropout", "0", "--compile", "off", "--micro-batch", "5")
    eager = ragged(tmp_path, "eager", *words, steps=30)
    assert furthest(losses(tmp_path / "runs" / "graphs"), losses(eager)) < 1e-3


@gpu_only
@pytest.mark.parametrize("compiled", ["off", "on", "max-autotune", "reduce-overhead"])
def test_attention_stays_a_flash_kernel(
    compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense causal mask would leave only the memory-efficient kernel, or none at all."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    found = child_process.call("gpu.profiler:kernels", compiled, "gpt2-124m", "256", timeout=300)
    assert re.search("flash|cudnn", found["attention"], re.IGNORECASE), found


@on_device
def test_without_a_compiler_dropout_falls_back_to_its_formula(tmp_path: Path) -> None:
    """The hash behind dropout is compiled by Triton, which calls a C compiler."""
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    words = ("--precision", "fp32", "--compile", "off")
    usual = ragged(tmp_path, "usual", *words, steps=20)
    without = ragged(
        tmp_path, "without", *words, steps=20, **caches, PATH="/nowhere", CC="/nowhere/cc", CXX="/nowhere/cc"
    )
    assert furthest(losses(usual), losses(without)) < 1e-4
    assert DEVICE in (tmp_path / "runs" / "without" / "plan.json").read_text()
