"""Tests of models/classification/distillation.py: the losses against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from isobatch.models.classification.distillation import hidden_state_loss, soft_label_loss


def test_soft_label_loss_is_kl_at_temperature_times_its_square() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 3), torch.randn(5, 3)
    p, q = F.softmax(teacher / 2, -1), F.softmax(student / 2, -1)
    wanted = 4 * (p * (p.log() - q.log())).sum()
    torch.testing.assert_close(soft_label_loss(student, teacher, 2.0), wanted)
    assert float(soft_label_loss(teacher, teacher, 2.0)) == pytest.approx(0, abs=1e-6)


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
