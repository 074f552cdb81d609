"""Two networks that learn by turns, each with an optimizer of its own: a generator of points, and a critic.

The loss is that of Goodfellow et al. 2014, "Generative Adversarial Nets", with the generator's in the form
that does not saturate (section 3). In this folder:

    isobatch auto --task ./adversarial.py:Adversarial --name ring
    isobatch auto --task ./adversarial.py:Adversarial --data points.csv --critic-steps 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch import Batch, Columns, Data, Loss, Rows, StepContext, Sum, Task, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

DIRECTIONS = 32


class Ring(Data):
    """Column `x` (n, 2), float32: the points of a csv file, or a ring made here."""

    def read(self) -> Mapping[str, Columns]:
        if self.recipe.data == "demo":
            generator = np.random.default_rng(0)
            angle = generator.uniform(0, 2 * np.pi, 2048)
            x = np.stack([np.cos(angle), np.sin(angle)], axis=1) + generator.normal(0, 0.05, (2048, 2))
        else:
            x = np.loadtxt(self.recipe.data, delimiter=",", ndmin=2)
        x = np.float32(x)
        return {"valid": {"x": x[::8]}, "train": {"x": np.delete(x, np.s_[::8], axis=0)}}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdversarialOptions:
    """Flags of this task."""

    latent: int = 8
    """Numbers of which the generator makes a point."""
    width: int = 64
    """Units of each hidden layer."""
    critic_steps: int = 1
    """Steps of the critic before each of the generator."""


class Adversarial(Task):
    """Steps take turns by their number; each has a global batch of its own."""

    Options, data = AdversarialOptions, Ring
    defaults = {"epochs": 30, "lr": 2e-3, "batch_size": 64, "schedule": "constant"}
    monitor = ("distance", "min")

    def check(self) -> None:
        if self.options.critic_steps < 1:
            raise UserError(f"--critic-steps {self.options.critic_steps}: must be at least 1")

    def build_model(self, facts: Any) -> nn.Module:
        from torch import nn

        def network(inputs: int, outputs: int) -> nn.Module:
            width = self.options.width
            hidden = nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
            return nn.Sequential(*hidden, nn.Linear(width, outputs))

        return nn.ModuleDict({"generator": network(self.options.latent, 2), "critic": network(2, 1)})

    def turn_of(self, number: int) -> str:
        """Which network step `number` trains: what the names of its parameters begin with."""
        last = number % (self.options.critic_steps + 1) == self.options.critic_steps
        return "generator." if last else "critic."

    def make_optimizer(
        self, named: Mapping[str, nn.Parameter], lr: float, device: str
    ) -> Sequence[torch.optim.Optimizer]:
        import torch

        def adam(network: str, rate: float) -> torch.optim.Optimizer:
            parameters = [p for name, p in named.items() if name.startswith(network)]
            return torch.optim.Adam(parameters, lr=rate, betas=(0.5, 0.9))

        return [adam("critic.", lr), adam("generator.", lr / 2)]

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        from torch.nn import functional

        made = model["generator"](step.noise.normal("latent", (self.options.latent,)))
        real, fake = model["critic"](batch["x"]), model["critic"](made)
        critic = (functional.softplus(-real) + functional.softplus(fake)).sum()
        generator = functional.softplus(-fake).sum()
        # Both are logged in each step; the one whose turn it is not has no gradient.
        if self.turn_of(step.number) == "critic.":
            generator = generator.detach()
        else:
            critic = critic.detach()
        return {"critic": Loss(critic, "sample"), "generator": Loss(generator, "sample")}

    def evaluate(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        made = model["generator"](step.noise.normal("latent", (self.options.latent,)))
        return {"made": Rows(made), "real": Rows(batch["x"])}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Any) -> dict[str, float]:
        """The sliced Wasserstein distance between as many points that were made and that are real."""
        angle = np.pi * np.arange(DIRECTIONS) / DIRECTIONS
        along = np.stack([np.cos(angle), np.sin(angle)])
        made, real = (np.sort(parts[name] @ along, axis=0) for name in ("made", "real"))
        distance = float(np.abs(made - real).mean())
        return {"loss": distance, "distance": distance}
