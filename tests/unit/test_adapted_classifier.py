"""Tests of adapters for classifiers: what trains, what is counted, what is saved, and who opens it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel

from isobatch.core.errors import UserError
from isobatch.models import lora
from isobatch.models.classification.adapted import AdaptedClassifier, AdaptedClassifierOptions, head_modules
from isobatch.models.encoder import encoders
from isobatch.tests.unit.test_classifier import VOCABULARY, batch, facts

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES: dict[str, tuple[dict[str, int], list[str]]] = {
    "bert": (SMALL, ["classifier", "bert.pooler"]),
    "roberta": ({**SMALL, "pad_token_id": 0}, ["classifier"]),
    "distilbert": (
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
        ["pre_classifier", "classifier"],
    ),
}
"""Model type -> sizes, and the modules of its classification head."""
LABELS = ("10", "9", "odd")


def base_of(family: str, folder: Path) -> Path:
    """A pretrained encoder without a head, of random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**FAMILIES[family][0], "vocab_size": VOCABULARY}
    AutoModel.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(folder / "base")
    return folder / "base"


def make(base: Path | str, **options: Any) -> AdaptedClassifier:
    recipe = {"revision": None, "tokenizer": "t", "max_length": 12, "dropout": None, "label_smoothing": 0.0}
    values = SimpleNamespace(model=str(base), seed=0, patience=0, noise="keyed", **recipe)
    return AdaptedClassifier(values, AdaptedClassifierOptions(**{"adapter": "lora", **options}))


@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_and_head_train_are_counted_and_saved(family: str, adapter: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordPiece({"[UNK]": 0, "film": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    task, known = make(base_of(family, tmp_path), adapter=adapter, lora_dropout=0.0), facts(LABELS, tmp_path)
    torch.manual_seed(1)
    model: Any = task.build_model(known)
    head = FAMILIES[family][1]
    assert sorted(head_modules(model)) == sorted(head)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.startswith(tuple(head)) for name in trains)
    assert {name for name, _ in model.named_parameters() if name.startswith(tuple(head))} <= trains
    size = task.model_size(known)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)

    rows = batch([5, 9, 3], 9)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):  # the second matrix of LoRA begins at zero
        task.loss(model, rows, SimpleNamespace())["loss"].sum.backward()  # type: ignore[arg-type]
        optimizer.step()
    final = tmp_path / "final"
    final.mkdir()
    task.export(model, final, known)
    with safe_open(final / lora.ADAPTER_FILE, "pt") as file:
        assert all(any(part in name for part in ("lora_", *head)) for name in file.keys())  # noqa: SIM118
    assert json.loads((final / "labels.json").read_text()) == {"10": 0, "9": 1, "odd": 2}
    expected = task.logits(model.eval(), rows)
    for opened in (encoders.open_adapted(final), encoders.open_classifier(str(final))):
        assert torch.allclose(task.logits(opened, rows), expected, atol=1e-5)
        assert opened.config.id2label == {0: "10", 1: "9", 2: "odd"}


@pytest.mark.parametrize(
    ("base", "options", "says"),
    [
        ("tiny", {}, "--adapter lora: a model from scratch has nothing to adapt"),
        ("tiny", {"adapter": "none", "lora_r": 4}, "--lora-r: means nothing without an adapter"),
    ],
)
def test_what_cannot_be_is_answered_in_a_line(base: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make(base, **options).check()


def test_targets_are_matrices_of_the_blocks_and_never_the_head(tmp_path: Path) -> None:
    base = base_of("bert", tmp_path)
    model: Any = make(base, lora_targets="all-linear").build_model(facts(LABELS, tmp_path))
    assert not any("lora_" in name for name, _ in model.classifier.named_parameters())
    assert not any("lora_" in name for name, _ in model.bert.pooler.named_parameters())
    assert sum(hasattr(m, "lora_A") for m in model.modules()) == 2 * 6
    with pytest.raises(UserError, match="--lora-targets qery: qery is no matrix of the blocks"):
        make(base, lora_targets="qery").build_model(facts(LABELS, tmp_path))


def test_an_adapter_is_no_teacher_before_it_is_merged(tmp_path: Path) -> None:
    from isobatch.models.classification.distillation import resolve_model

    (tmp_path / "final").mkdir()
    for name in ("recipe.json", "facts.json", "final/adapter_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        UserError, match=r"--teacher .*: that run trained an adapter: `export .* --to merged`"
    ):
        resolve_model(str(tmp_path), "--teacher")
