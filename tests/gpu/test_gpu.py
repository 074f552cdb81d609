"""Every workload learns on a GPU what it learns on a CPU: python -m pytest tests/gpu"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from isobatch.engine.noise.keyed_noise import KeyedDropout, KeyedNoise, hash_bits
from isobatch.tests.gpu.helpers import finished, gpu_only, ragged
from isobatch.tests.integration.helpers import figure, furthest, launch, losses, plan_of, rows, summary

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = gpu_only


def test_noise_is_the_same_numbers_as_on_the_cpu() -> None:
    keys = torch.randint(-(2**31), 2**31 - 1, (7, 2), dtype=torch.int32)
    assert torch.equal(hash_bits(keys, 1001), hash_bits(keys.cuda(), 1001).cpu())
    noise = KeyedNoise(3)
    layer = KeyedDropout(0.1, noise, "here")
    x = torch.ones(5, 17, 32)
    noise.bind(4, np.arange(5), torch.device("cpu"))
    on_cpu = layer(x)
    noise.bind(4, np.arange(5), torch.device("cuda"))
    assert torch.equal(on_cpu, layer(x.cuda()).cpu())


def test_fp32_on_the_gpu_learns_what_the_cpu_learns(tmp_path: Path) -> None:
    """Learnt positions, attention dropout and uneven lengths, in any cut."""
    gpu = ragged(tmp_path, "gpu", "--precision", "fp32", "--compile", "off")
    cut = ragged(tmp_path, "cut", "--precision", "fp32", "--compile", "off", "--micro-batch", "5")
    cpu = ragged(tmp_path, "cpu", "--device", "cpu")
    assert summary(gpu)["invariance"] == "exact"
    assert furthest(losses(gpu), losses(cut)) < 1e-4
    assert furthest(losses(gpu), losses(cpu)) < 1e-3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(precision: str, tmp_path: Path) -> None:
    exact = ragged(tmp_path, "exact", "--precision", "fp32", "--compile", "off")
    half = ragged(tmp_path, "half", "--precision", precision, "--compile", "off")
    assert summary(half)["invariance"] == "precision"
    assert furthest(losses(half), losses(exact)) < 5e-2


def test_without_nvidia_smi_the_gpu_is_found(tmp_path: Path) -> None:
    """As in containers without the driver's utilities: torch is asked."""
    words = ["--task", "causal-lm", "--steps", "5", "--name", "found", "--compile", "off", "--dropout", "0"]
    done = launch("auto", *words, cwd=tmp_path, PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert plan_of(tmp_path / "runs" / "found")["device"] == "cuda"


def test_a_classifier_is_pruned_and_quantized_as_on_the_cpu(tmp_path: Path) -> None:
    """Each trains its own baseline first; in fp32 the same heads and neurons go."""
    words = ["--task", "pruning", "--sparsity", "0.4", "--steps", "24", "--prune-every", "4"]
    words += ["--precision", "fp32", "--again", "--quiet"]
    decided = []
    for device in ("cuda", "cpu"):
        done = launch("auto", *words, "--device", device, "--name", device, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        text = (tmp_path / "runs" / device / "decisions.jsonl").read_text()
        decided.append([line for line in text.splitlines() if "change of the model" in line])
    assert decided[0] == decided[1]
    qat = ["--task", "qat", "--pruned", "runs/cuda", "--steps", "12", "--name", "small", "--quiet"]
    done = launch("auto", *qat, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "runs" / "small")["metrics"]
    assert found["max_logit_difference"] < 1e-3


def test_a_recommender_learns_what_the_cpu_learns(tmp_path: Path) -> None:
    """Both phases: kept vectors, then LoRA above a kept prefix, its backward in chunks."""
    common = ["--task", "recommender", "--epochs", "1,0.3", "--text-chunk", "500", "--quiet", "--again"]
    curves = []
    for name, words in {
        "cpu": ["--device", "cpu", "--processes", "1"],
        "gpu": ["--precision", "fp32", "--compile", "off"],
    }.items():
        done = launch("auto", *common, "--name", name, *words, cwd=tmp_path, timeout=400)
        assert done.returncode == 0, done.stderr
        curves.append(figure(tmp_path / "runs" / name))
    assert furthest(*curves) < 1e-3


def test_a_vae_on_the_gpu_sees_what_the_cpu_sees(tmp_path: Path) -> None:
    """Losses, and what its posterior monitor reports."""
    words = ["auto", "--task", "sequence-vae", "--steps", "60", "--hidden", "32", "--quiet"]
    found = []
    for device in ("cuda", "cpu"):
        more = ["--device", device, "--processes", "1", "--precision", "fp32", "--compile", "off"]
        done = launch(*words, *more, "--name", device, cwd=tmp_path, timeout=400)
        assert done.returncode == 0, done.stderr
        found.append(tmp_path / "runs" / device)
    assert furthest(*map(losses, found)) < 1e-3
    reports = [[row for row in rows(run) if "verdict" in row] for run in found]
    for ours, theirs in zip(*reports, strict=True):
        for name in ("window_kl", "mutual_information", "kl_per_dimension"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-3)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_text_is_written_on_the_gpu(bits: int, tmp_path: Path) -> None:
    """The model lies there, in bf16 or rounded, and writes as many tokens as it is asked for."""
    from isobatch.models.causal_lm.generation import Sampling, TextStream, open_for_generation

    words = ("--task", "causal-lm", "--model", "tiny", "--steps", "2", "--compile", "off", "--name", "run")
    final = finished(tmp_path, "run", *words) / "final"
    model, tokenizer = open_for_generation(final, bits)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert bits != 16 or {p.dtype for p in model.parameters()} == {torch.bfloat16}
    stream = TextStream(model, tokenizer, "a", Sampling(max_new_tokens=8, temperature=0, stop_token_id=None))
    assert len("".join(stream)) > 0
    assert 0 < stream.tokens <= 8
