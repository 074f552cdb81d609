"""Tests of models/model_card.py: what a card says, and that names in it are no Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.models import model_card
from isobatch.models.model_card import HeldOutFigures, ModelDescription

if TYPE_CHECKING:
    from pathlib import Path

NOTES = ["valid: 1 of 9 rows are in train too"]
FACTS = Facts(
    fingerprint="0123456789abcdef",
    folder="/tmp/prepared",
    samples={"train": 4000, "valid": 500},
    lengths=(3, 7),
    extra={"notes": NOTES},
)
METRICS: dict[str, Any] = {"accuracy": 0.91234, "accuracy_ci95": [0.88, 0.93], "latency_ms_p50": 3.0}


def card(chosen_by: str = "", facts: Facts = FACTS, **recipe: Any) -> str:
    model = ModelDescription(title="Text classifier", hub_fields={"library_name": "transformers"})
    measured = HeldOutFigures({"valid": METRICS}, 1200, chosen_by)
    return model_card.render(model, Recipe(task="classifier", **recipe), facts, measured)


def test_it_says_data_results_protocol_and_recipe() -> None:
    text = card(model="tiny")
    for said in (
        "demo: 4,000 samples in train, 500 in valid (fingerprint 0123456789abcdef).",
        "- valid: 1 of 9 rows are in train too",
        "Measured on all 500 samples of valid, with the weights in this folder.\n",
        "| accuracy | 0.9123 |",
        "| accuracy_ci95 | 0.8800 to 0.9300 |",
        "1,200 steps of 32 samples",
        Recipe(task="classifier", model="tiny").hash(),
        "trained from scratch: no other model's licence applies",
    ):
        assert said in text
    assert "latency" not in text
    assert "Measured on all 500 samples of valid (answers: 5 of them), " in card(options={"answers": 5})
    assert "best of the run's evaluations by f1_macro on valid" in card(chosen_by="f1_macro")


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("---\nlicense: apache-2.0\n---\n# Base\n", "says apache-2.0"),
        ("# Base\n", "is not known here"),
        ("---\nlicense: [a, : b\n---\n", "is not known here"),
    ],
)
def test_the_licence_is_that_of_the_bases_card(front: str, said: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(front)
    text = card(model=str(base))
    assert f"The licence of base, from which this was trained, {said}" in text
    fields = yaml.safe_load(text.split("---")[1])
    assert fields.get("license") == ("apache-2.0" if "apache" in said else None)
    assert str(tmp_path) not in text, "a folder of this machine is nobody else's business"


def test_figures_of_either_split_stand_in_the_table_and_a_remark_below() -> None:
    facts = Facts(**{**FACTS.to_dict(), "samples": {"train": 9, "valid": 3, "test": 4}})
    metrics = {"valid": {"hr@10": 0.5}, "test": {"hr@10": 0.25, "ease_hr@10": 0.75}}
    measured = HeldOutFigures(metrics, 7, "", "EASE ranks better")
    text = model_card.render(ModelDescription(title="R"), Recipe(task="recommender"), facts, measured)
    assert "| hr@10 | 0.5000 | 0.2500 |\n| ease_hr@10 |  | 0.7500 |\n\nEASE ranks better\n" in text
    assert "task recommender, from scratch: 7 steps" in text


def test_names_from_data_are_no_markdown(tmp_path: Path) -> None:
    strange = tmp_path / "a|b`c\n# d"
    strange.mkdir()
    facts = Facts(**{**FACTS.to_dict(), "extra": {"notes": ["<b> [x](y) \x1b[31m"]}})
    text = card(facts=facts, data=str(strange))
    assert "a\\|b\\`c \\# d" in text
    assert "- \\<b> \\[x](y) \\\\x1b\\[31m" in text
