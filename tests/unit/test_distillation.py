"""Tests of distillation: the losses of classifiers against their formulas, and whose teacher one may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn import functional as F

from isobatch.core.errors import UserError
from isobatch.models.causal_lm import distillation
from isobatch.models.causal_lm.task import DistilledOptions
from isobatch.models.classification.distillation import hidden_state_loss
from isobatch.models.encoder.problems import Classes

if TYPE_CHECKING:
    from pathlib import Path


def test_soft_loss_of_classes_is_kl_at_temperature_times_its_square() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 3), torch.randn(5, 3)
    p, q = F.softmax(teacher / 2, -1), F.softmax(student / 2, -1)
    wanted = 4 * (p * (p.log() - q.log())).sum()
    soft_loss = Classes("abc").soft_loss
    torch.testing.assert_close(soft_loss(student, teacher, {}, 2.0).sum, wanted)
    assert float(soft_loss(teacher, teacher, {}, 2.0).sum) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("student", "teacher", "places"),
    [(3, 3, [0, 1, 2]), (3, 6, [1, 3, 5]), (6, 3, [0, 0, 1, 1, 2, 2]), (3, 4, [1, 2, 3])],
)
def test_layers_are_matched_in_order_and_last_with_last(
    student: int, teacher: int, places: list[int]
) -> None:
    assert len(places) == student
    torch.manual_seed(0)
    states = torch.randn(2, teacher, 8)
    assert float(hidden_state_loss(states[:, places], states)) == pytest.approx(0, abs=1e-6)
    assert float(hidden_state_loss(states[:, places].flip(1), states)) > 0.1


def test_a_teacher_reads_the_students_added_tokens(tmp_path: Path) -> None:
    for name, added in {"plain": [], "student": ["<a>"], "teacher": ["<a>", "<b>"]}.items():
        tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
        tokenizer.add_special_tokens(added)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    plain, student, teacher = (str(tmp_path / name) for name in ("plain", "student", "teacher"))
    distillation.check(DistilledOptions(teacher=teacher), student)
    with pytest.raises(UserError, match="its tokenizer is not that of"):
        distillation.check(DistilledOptions(teacher=plain), student)
