"""Tests of engine/optimization/parameter_groups.py: what a recipe says reaches the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isobatch.core.flags import flags_of
from isobatch.core.optimizers import OPTIMIZERS, OWN
from isobatch.core.recipe import Recipe
from isobatch.engine.registry import TASKS, workload
from isobatch.models.capabilities import ScalesRates
from isobatch.tests.unit.helpers import optimizer_of

ADAM: dict[str, Any] = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-3}


def stepped(recipe: Recipe, sparse: bool = False) -> torch.Tensor:
    """A weight after two steps with gradients of 1 and 0.5."""
    table = nn.Embedding(3, 2, sparse=sparse)
    nn.init.ones_(table.weight)
    optimizer = optimizer_of(table, recipe, [table.weight] if sparse else [])
    for gradient in (1.0, 0.5):
        optimizer.zero_grad()
        (table(torch.tensor([1])).sum() * gradient).backward()
        optimizer.step()
    return table.weight[1, 0].detach()


@pytest.mark.parametrize("sparse", [False, True])
def test_adam_follows_the_recipes_betas_and_eps(sparse: bool) -> None:
    recipe = Recipe(task="t", lr=0.1, weight_decay=0.0, **ADAM)
    # Kingma and Ba 2015, algorithm 1, by hand.
    weight, m, v = 1.0, 0.0, 0.0
    for step, gradient in enumerate((1.0, 0.5), 1):
        m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient**2
        eps = 1e-3 / (1 - 0.95**step) ** 0.5 if sparse else 1e-3  # SparseAdam adds it before the correction
        weight -= 0.1 * (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)) ** 0.5 + eps)
    assert float(stepped(recipe, sparse)) == pytest.approx(weight, rel=1e-5)
    assert float(stepped(Recipe(task="t", lr=0.1, weight_decay=0.0), sparse)) != pytest.approx(
        weight, rel=1e-3
    )


def test_decay_is_decoupled_in_adamw_and_l2_inside_the_momentum_of_sgd() -> None:
    lr, decay = 0.1, 0.5
    weight, momentum, m, v = 1.0, 0.0, 0.0, 0.0
    for gradient in (1.0, 0.5):  # torch.optim.SGD's own rule, by hand
        momentum = 0.9 * momentum + gradient + decay * weight
        weight -= lr * momentum
    sgd = Recipe(task="t", lr=lr, weight_decay=decay, optimizer="sgd")
    assert float(stepped(sgd)) == pytest.approx(weight, rel=1e-6)
    weight = 1.0
    for step, gradient in enumerate((1.0, 0.5), 1):  # Loshchilov and Hutter 2019, algorithm 2
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        weight -= lr * (m / (1 - 0.9**step) / (v / (1 - 0.999**step)) ** 0.5 + decay * weight)
    assert float(stepped(Recipe(task="t", lr=lr, weight_decay=decay))) == pytest.approx(weight, rel=1e-5)
    help_text = flags_of(Recipe)["weight_decay"].help
    assert "Decoupled from the gradients, but for sgd" in help_text


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_betas_or_says_that_it_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameter groups carry them, so that ZeRO and FSDP, which take these groups over, use them too."""
    groups: list[dict[str, Any]] = []

    def made(_: Any, given: list[dict[str, Any]], lr: float, __: str) -> torch.optim.Optimizer:
        groups.extend(given)
        return torch.optim.SGD(given, lr=lr)

    monkeypatch.setattr(type(OPTIMIZERS[name]), "build", made)
    optimizer_of(nn.Linear(2, 2), Recipe(task="t", optimizer=name, **ADAM))
    found = {(g.get("betas"), g.get("eps")) for g in groups}
    assert found == ({((0.8, 0.95), 1e-3)} if OPTIMIZERS[name].takes_betas else {(None, None)})
    assert OPTIMIZERS[name].takes_betas == ("adamw" in name or name in (OWN, "muon"))


@pytest.mark.parametrize("task", [n for n in TASKS if "lora_plus" in workload(n).option_flags()])
def test_a_second_matrix_learns_at_its_own_rate_in_every_task_with_the_flag(task: str) -> None:
    made, _ = workload(task).make(Recipe(task=task, options={"adapter": "lora", "lora_plus": 16.0}))
    assert isinstance(made, ScalesRates)
    name = "transformer.h.0.attn.c_attn.lora_{}.default.weight"
    assert [made.rate_share(name.format(one)) for one in "AB"] == [1.0, 16.0]
