"""What only a GPU can show. Skipped where there is none: python -m pytest tests/gpu"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from isobatch.data import corpora, tokenizers
from isobatch.engine.noise.keyed_noise import KeyedDropout, KeyedNoise, hash_bits
from isobatch.tests.integration.helpers import RAGGED, furthest, launch, losses, rows, summary

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = ["--task", RAGGED, "--steps", "60", "--quiet", "--again"]


def trained(folder: Path, name: str, *words: str) -> Path:
    done = launch("auto", *STEPS, "--name", name, *words, cwd=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


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
    gpu = trained(tmp_path, "gpu", "--precision", "fp32", "--compile", "off")
    cut = trained(tmp_path, "cut", "--precision", "fp32", "--compile", "off", "--micro-batch", "5")
    cpu = trained(tmp_path, "cpu", "--device", "cpu", "--processes", "1")
    assert summary(gpu)["invariance"] == "exact"
    assert furthest(losses(gpu), losses(cut)) < 1e-4
    assert furthest(losses(gpu), losses(cpu)) < 1e-3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(precision: str, tmp_path: Path) -> None:
    exact = trained(tmp_path, "exact", "--precision", "fp32", "--compile", "off")
    half = trained(tmp_path, "half", "--precision", precision, "--compile", "off")
    assert summary(half)["invariance"] == "precision"
    assert furthest(losses(half), losses(exact)) < 5e-2


def test_compiled_training_draws_the_same_noise(tmp_path: Path) -> None:
    eager = trained(tmp_path, "eager", "--precision", "fp32", "--compile", "off")
    compiled = trained(tmp_path, "compiled", "--precision", "fp32", "--compile", "on")
    assert furthest(losses(compiled), losses(eager)) < 1e-3


def conversations(folder: Path) -> Path:
    """Questions and answers of very different lengths, and a small model in `base`."""
    draw = np.random.default_rng(0)
    words = ["sun", "rain", "wind", "snow", "fog", "hail"]
    asked = [
        {"instruction": f"Say {n} words.", "output": " ".join(draw.choice(words, n).tolist())}
        for n in draw.integers(1, 60, 400).tolist()
    ]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    tokenizer = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), 600)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokenizers.END_OF_TEXT).save_pretrained(
        folder / "base"
    )
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_positions": 1024, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(vocab_size=600, **sizes)).save_pretrained(folder / "base")
    return folder


ASKED = ["--task", "causal-lm", "--data", "asked.jsonl", "--model", "base", "--max-length", "768", "--quiet"]
ASKED += ["--batch-size", "32", "--steps", "24", "--compile", "off"]


def test_samples_end_to_end_learn_the_same(tmp_path: Path) -> None:
    curves = []
    for pack in ("on", "off"):
        words = ["--lr", "1e-3", "--precision", "bf16", "--pack", pack, "--name", pack]
        done = launch("auto", *ASKED, *words, cwd=conversations(tmp_path), timeout=400)
        assert done.returncode == 0, done.stderr
        curves.append(losses(tmp_path / "runs" / pack))
    assert furthest(*curves) < 5e-2
    assert summary(tmp_path / "runs" / "on")["padding_fraction"] == 0


@pytest.mark.parametrize("way", [["--adapter", "lora"], ["--adapter", "qlora"], ["--load-bits", "8"]])
def test_adapters_learn_and_merge(way: list[str], tmp_path: Path) -> None:
    conversations(tmp_path)
    flags = way if "--adapter" in way else ["--adapter", "lora", *way]
    done = launch("auto", *ASKED, *flags, "--lr", "1e-2", "--name", "tuned", cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path / "runs" / "tuned")
    assert found[-1] < found[0]
    assert launch("export", "runs/tuned", "--to", "merged,adapter", cwd=tmp_path).returncode == 0


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
        curves.append([r["loss"] for r in rows(tmp_path / "runs" / name) if "lr" in r])
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
