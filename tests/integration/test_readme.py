"""What the README and its pages show works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import isobatch
from isobatch.data import corpora, tokenizers
from isobatch.launch.commands.compress import parse_stages
from isobatch.tests.integration.helpers import ROOT, launch, losses, summary
from isobatch.tests.zygote import Zygote

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Hub = Callable[[list[str], Path, str], subprocess.CompletedProcess[str]]

README = (ROOT / "README.md").read_text(encoding="utf-8")
OWN_TASKS = (ROOT / "docs" / "own-tasks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", OWN_TASKS, re.S)
NAMED = ("class Sine(", "def make_optimizer", "class Table(", "isobatch.plan(")
CODE, OPTIMIZER, DATA, FROM_PYTHON = (next(b for b in BLOCKS if text in b) for text in NAMED)
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def wish(title: str) -> tuple[list[str], list[list[str]]]:
    """Of an "I want to" of the README: its samples of data or code, and its commands as words."""
    section = README.partition(f"### ... {title}")[2].partition("\n## ")[0].partition("\n### ")[0]
    blocks = re.findall(r"```(?:python)?\n(.*?)```", section, re.S)
    typed = [shlex.split(line)[1:] for b in blocks for line in b.splitlines() if line.startswith("isobatch ")]
    assert typed, title
    return [b for b in blocks if not b.startswith("isobatch ")], typed


def run(words: list[str], folder: Path, hub: Hub | None = None, given: str = "") -> str:
    """What a command says, both streams; it must end well."""
    done = hub(words, folder, given) if hub else launch(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Runs commands with a cache of the hub in which the README's models are there, and tiny."""
    folder = tmp_path_factory.mktemp("hub")
    trained = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), 400)
    end = tokenizers.END_OF_TEXT
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=end, pad_token=end)
    size = {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)  # whatever other tests drew before
    gpt = GPT2LMHeadModel(GPT2Config(**size, n_positions=1024, n_embd=32, n_layer=2, n_head=2))
    bert = DistilBertForSequenceClassification(
        DistilBertConfig(**size, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=512)
    )
    chats = {f"Qwen/Qwen2.5-{size}-Instruct": gpt for size in ("0.5B", "7B")}
    for name, model in (*chats.items(), ("distilbert/distilbert-base-uncased", bert)):
        repository = folder / f"models--{name.replace('/', '--')}"
        for part in (model, tokenizer):
            part.save_pretrained(repository / "snapshots" / "0")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0")
    environment = {**os.environ, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}
    warm = Zygote(environment)
    yield lambda words, cwd, given: warm.run(words, cwd, environment, 240, given=given)
    warm.close()


def test_fine_tune_a_chat_model(hub: Hub, tmp_path: Path) -> None:
    (sample,), (train, talk, pack) = wish("fine-tune a chat model")
    (tmp_path / "chats.jsonl").write_text(8 * sample)
    said = run(train, tmp_path, hub)
    assert re.search(r"runs/bot: done, \d+ steps, valid: loss", said)
    run(talk, tmp_path, hub, "When do you open?\n")
    run(pack, tmp_path, hub)
    assert (tmp_path / "runs/bot/exports/ollama/Modelfile").is_file()


def test_make_a_classifier_small_and_fast(hub: Hub, tmp_path: Path) -> None:
    (sample,), (train, ask) = wish("make a classifier small and fast")
    head, *rows = sample.splitlines()
    (tmp_path / "reviews.csv").write_text("\n".join([head, *(20 * rows)]) + "\n")
    said = run([*train, "--steps", "60"], tmp_path, hub)  # of hundreds
    assert "\nsmall-qat, onnxruntime 4-bit, against small-classifier: " in said
    assert re.search(r"good|bad", run(ask, tmp_path, hub))
    (named,) = re.findall(r"`(runs/small-qat/[^`]+)` needs no torch", README)
    assert (tmp_path / named).stat().st_size > 0


def test_recommend_items(tmp_path: Path) -> None:
    (sample,), (train, *asked) = wish("recommend items")
    (tmp_path / "shop").mkdir()
    names = ["lamp", "desk", *(f"i{n}" for n in range(2, 17))]
    more = [f"u{n % 24},{names[n * n % 17]},{1700000300 + n}" for n in range(300)]
    (tmp_path / "shop" / "interactions.csv").write_text(sample + "\n".join(more) + "\n")
    run([*train, "--quiet"], tmp_path)
    counts = [
        len(re.findall(r"^ .*\b(?:i\d+|lamp|desk)$", run(ask, tmp_path), re.MULTILINE)) for ask in asked
    ]
    assert counts[0] == 3
    assert counts[1] > 3


def test_train_a_model_of_my_own(tmp_path: Path) -> None:
    (code,), (train, check) = wish("train a model of my own")
    assert len(code.strip().splitlines()) < 25
    (tmp_path / "mine.py").write_text(code)
    run([*train, "--quiet"], tmp_path)
    assert losses(tmp_path / "runs" / "sine")[-1] < 0.1 * losses(tmp_path / "runs" / "sine")[0]
    assert "verified (exact)" in run(check, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_file_is_planned_on_its_data(recipe: Path, hub: Hub, tmp_path: Path) -> None:
    """By the command in its comment. Of a sweep one point has a plan; of a chain the flags are sorted."""
    (typed,) = re.findall(r"^#.*?isobatch (auto --config .*)", recipe.read_text(), re.M)
    if recipe.stem == "compress":
        _, _, stages = parse_stages(["--config", str(recipe), "--model", "tiny", "--data", "demo"])
        assert [flags["mode"] for flags in stages.values()] == 3 * ["fast"]
        return
    (tmp_path / recipe.name).write_bytes(recipe.read_bytes())
    (chats,), (rated,), (sold,) = (wish(title)[0] for title in ("fine-tune", "make a", "recommend"))
    pair = {"prompt": "When do you open?", "chosen": "At nine.", "rejected": "No."}
    (tmp_path / "chats.jsonl").write_text(8 * chats)
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 24)
    (tmp_path / "reviews.csv").write_text(rated + 19 * rated.partition("\n")[2])
    for name in ("shop", "texts"):
        (tmp_path / name).mkdir()
    bought = "".join(f"u{n % 24},i{n * n % 17},{1700000300 + n}\n" for n in range(300))
    (tmp_path / "shop" / "interactions.csv").write_text(sold + bought)
    (tmp_path / "texts" / "train.txt").write_text("A quiet street with lamps and rain.\n" * 900)
    point = ["--lr", "1e-3", "--seed", "0"] if recipe.stem == "sweep" else []
    assert run([*typed.split(), *point, "--dry-run"], tmp_path, hub)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the file that the page on own tasks tells to save."""
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def test_a_users_own_task(folder: Path) -> None:
    assert len(CODE.strip().splitlines()) < 45
    (folder / "waves.csv").write_text("".join(f"{n / 100},{n % 3}\n" for n in range(160)))
    words = ["auto", "--task", "./mine.py:Sine", "--data", "waves.csv", "--width", "32", "--name", "r"]
    run([*words, "--quiet"], folder)
    found = isobatch.load(folder / "runs" / "r")
    assert found.facts.samples == {"train": 80, "valid": 20}
    assert found.recipe.options["width"] == 32
    assert "absolute_error" in summary(folder / "runs" / "r")["metrics"]
    described = launch("describe", "./mine.py:Sine", cwd=folder).stdout
    assert "--batch-size" in described
    assert "Units of the hidden layer." in described


def test_an_optimizer_of_ones_own(folder: Path) -> None:
    (folder / "mine.py").write_text(CODE + OPTIMIZER)
    words = ["auto", "--task", "./mine.py:SineByMuon", "--epochs", "3", "--name", "r", "--quiet"]
    run(words, folder)
    assert losses(folder / "runs" / "r")[-1] < 0.5 * losses(folder / "runs" / "r")[0]
    assert "verified" in run(["verify", "runs/r"], folder)
    refused = launch(*words, "--weight-decay", "0.5", cwd=folder)
    assert "--weight-decay 0.5: no file of this task names it; leave it out" in refused.stderr


def test_isobatch_from_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(FROM_PYTHON, names)
    assert names["run"].status == "done"
    assert names["model"](torch.zeros(1, 1)).shape == (1, 1)


def test_every_command_shown_exists() -> None:
    from isobatch.launch.cli import find_command

    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    fences = [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)]
    shown = set(re.findall(r"^(?:\$ )?isobatch (.*)", "\n".join(fences), re.M))
    assert {"auto", "plan", "resume", "verify"} <= {find_command(line.split())[0] for line in shown}


def test_the_readme_is_short() -> None:
    assert len(README.split()) < 900


def test_every_page_is_linked_from_the_readme_or_a_page() -> None:
    linked = {name for page in PAGES for name in re.findall(r"([\w-]+\.md)\)", page.read_text())}
    assert {page.name for page in PAGES[1:]} <= linked


def test_data_of_ones_own_comes_from_a_table_and_from_the_hubs_library(tmp_path: Path) -> None:
    import datasets

    names: dict[str, Any] = {}
    exec(DATA, names)
    rows_of_file = "".join(f"{n},{n * n},{9 - n}\n" for n in range(40))
    (tmp_path / "houses.csv").write_text(f"rooms,age,price\n{rows_of_file}")
    table = names["Table"](SimpleNamespace(data=str(tmp_path / "houses.csv")), None).read()
    assert {split: c["x"].shape for split, c in table.items()} == {"valid": (4, 2), "train": (36, 2)}
    assert sorted(np.concatenate([c["y"][:, 0] for c in table.values()])) == list(range(-30, 10))
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [5.0, 6.0]})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    found = names["Hub"](SimpleNamespace(data=str(tmp_path / "saved")), None).read()["train"]
    assert (found["x"].tolist(), found["y"].tolist()) == ([[1, 2], [3, 4]], [[5], [6]])
