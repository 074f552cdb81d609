"""LoRA adapters: they learn, resume, merge, and open in peft and transformers."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import save_model
from transformers import GPT2Config, GPT2LMHeadModel

from isobatch.data import corpora, tokenizers
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.tests.integration.helpers import (
    launch,
    losses,
    resumed_from,
    run_code,
    succeed,
    summary,
)
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.paths import REGISTER
from isobatch.tests.tiny_models import save_gpt2, write_stories

if TYPE_CHECKING:
    from pathlib import Path

TASK = ["auto", "--task", "causal-lm", "--model", "base", "--data", "stories.txt", "--lr", "1e-2"]
TASK += ["--quiet", "--save-every", "6"]
WAYS = {
    "lora": ["--adapter", "lora", "--lora-targets", "c_attn,c_proj"],
    "dora": ["--adapter", "dora"],
    "qlora": ["--adapter", "qlora"],
    "int8": ["--adapter", "lora", "--load-bits", "8"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pretrained model, `base`."""
    folder = tmp_path_factory.mktemp("adapters")
    write_stories(folder / "stories.txt")
    save_gpt2(folder / "base", 600, n_layer=2, n_embd=64)  # bitsandbytes rounds 64 at a time
    return folder


def trained(home: Path, way: str, name: str, *more: str) -> Path:
    words = [*TASK, *WAYS[way], "--max-length", "64", "--steps", "12", "--keep", "9", "--name", name, *more]
    succeed(*words, cwd=home)
    return home / "runs" / name


def parameters(folder: Path) -> int:
    return sum(p.numel() for p in GPT2LMHeadModel.from_pretrained(folder).parameters())


AFTERWARDS = f"""{REGISTER}
import sys
from isobatch.launch.cli import main
run = sys.argv[1]
assert main(["export", run, "--to", "merged"]) == 0
sys.exit(main(["generate", run, "--prompt", "def f", "--tokens", "5"]))
"""


@pytest.mark.parametrize("way", [w if w == "lora" else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_every_way_trains_resumes_merges_and_writes(way: str, home: Path) -> None:
    run = trained(home, way, way)
    first = losses(run)
    assert first[-1] < first[0]
    found = summary(run)
    assert found["parameters"] - found["trainable_parameters"] == parameters(home / "base")
    saved = SavedCheckpoint(run / "checkpoints" / "train-12").entries
    weights = [name for name in saved if name.startswith("weight")]
    assert weights
    assert all("lora_" in name for name in weights)
    assert losses(resumed_from(run, 6)) == first
    done = run_code(AFTERWARDS, str(run), cwd=home)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "exports" / "merged" / "parity.json").read_text())["max_logit_difference"] < 1e-4
    assert "\ndef f" in done.stdout


OPENED = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
run, base = sys.argv[1:]
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"{run}/final").eval()
merged = AutoModelForCausalLM.from_pretrained(f"{run}/exports/merged").eval()
ids = AutoTokenizer.from_pretrained(f"{run}/exports/merged")("def read(self):", return_tensors="pt").input_ids
plain = AutoModelForCausalLM.from_pretrained(base).eval()
a, b, c = (net(ids).logits for net in (adapted, merged, plain))
print(float((a - b).abs().max()), float((a - c).abs().max()))
"""


@pytest.mark.parametrize("way", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_peft_opens_the_adapter_and_transformers_the_merged_model(way: str, home: Path) -> None:
    run = home / "runs" / way if (home / "runs" / way).is_dir() else trained(home, way, way)
    if not (run / "exports" / "merged").is_dir():
        succeed("export", str(run), "--to", "merged", cwd=home)
    done = run_code(OPENED, str(run), "base", cwd=home)
    assert done.returncode == 0, done.stderr
    apart, learnt = map(float, done.stdout.split())
    assert apart < 1e-4
    assert learnt > 1e-2


def test_an_adapter_is_for_its_base_alone(home: Path) -> None:
    run = home / "runs" / "lora" if (home / "runs" / "lora").is_dir() else trained(home, "lora", "lora")
    said = complaint(launch("auto", "--task", "causal-lm", "--model", f"{run}/final", cwd=home))
    assert "an adapter: give its base" in said
    other = home / "other"
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=600)
    config.save_pretrained(other)
    save_model(GPT2LMHeadModel(config), str(other / "model.safetensors"), metadata={"format": "pt"})
    strange = home / "runs" / "strange"
    shutil.copytree(run, strange)
    for base, wanted in ((str(other), "is no adapter for"), (str(home / "gone"), "is not there")):
        file = strange / "final" / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))
        asked = ["generate", str(strange), "--prompt", "x"]
        said = complaint(launch(*asked, cwd=home))
        assert f"a base model that this user has not named here: {base}" in said
        assert wanted in complaint(launch(*asked, "--trust", cwd=home))


def test_rounded_weights_cannot_be_cut(home: Path) -> None:
    flags = ["--adapter", "qlora", "--strategy", "zero3", "--processes", "2", "--max-length", "64"]
    assert "bitsandbytes' weights cannot be cut" in complaint(launch(*TASK, *flags, cwd=home))


def test_another_tokenizer_is_refused(home: Path, tmp_path: Path) -> None:
    other = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), 700)
    other.save(str(tmp_path / "tokenizer.json"))
    words = [*TASK, "--tokenizer", str(tmp_path), "--max-length", "64", "--steps", "2", "--name", "resized"]
    said = complaint(launch(*words, cwd=home))
    assert "its tokens are not those that base was trained with" in said
