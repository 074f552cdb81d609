"""The objective of a VAE: the weight of the KL term over the steps, free bits, and a controlled KL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Schedule = Literal["constant", "linear", "cyclical"]
RISING = 0.5
"""Share of a cycle in which the weight rises (Fu et al. 2019: R = 0.5)."""
CONTROL_RATE = 0.01
"""How fast the logarithm of a controlled weight follows the relative error of the KL, per step."""
LARGEST_WEIGHT, SMALLEST_WEIGHT = 10.0, 1e-4
"""Bounds of a controlled weight."""


@dataclass(frozen=True, slots=True)
class KLSchedule:
    """The weight of the KL term as a function of the step.

    constant: `beta` (1: the ELBO of Kingma and Welling 2014; else Higgins et al. 2017). linear: from 0 to
    `beta` over the first `warmup` of the steps (Bowman et al. 2016). cyclical: `cycles` times from 0 to
    `beta` over half a cycle, then `beta` (Fu et al. 2019).
    """

    kind: Schedule
    beta: float
    warmup: float
    cycles: int

    def weight(self, step: int, total: int) -> float:
        """The weight at step `step` (from 0) of `total`."""
        done = step / max(1, total)
        if self.kind == "linear":
            return self.beta * min(1.0, done / self.warmup)
        if self.kind == "cyclical":
            return self.beta * min(1.0, math.modf(done * self.cycles)[0] / RISING)
        return self.beta


class Objective(nn.Module):
    """What of the objective is decided while training: free bits, and the weight under --target-kl.

    They are buffers, so that checkpoints hold them and every process has the same.
    """

    free_bits: Tensor
    log_weight: Tensor

    def __init__(self, schedule: KLSchedule, free_bits: float, target_kl: float | None) -> None:
        super().__init__()
        self.schedule, self.target_kl = schedule, target_kl
        self.register_buffer("free_bits", torch.tensor(float(free_bits)))
        self.register_buffer("log_weight", torch.tensor(math.log(max(schedule.beta, SMALLEST_WEIGHT))))

    def kl_term(self, kl: Tensor, step: int, total: int) -> Tensor:
        """0-d: the sum over samples of the weighted KL. `kl` (B,): nats per sample, summed over dimensions.

        Free bits (Kingma et al. 2016) hold for the whole KL of a sample: below them it costs nothing more.
        """
        weight = self.log_weight.exp() if self.target_kl else self.schedule.weight(step, total)
        return weight * torch.maximum(kl, self.free_bits).sum()

    def control(self, mean_kl: Tensor) -> None:
        """After a step, with a target: raise the weight where the KL is above it, lower it where it is below.

        `mean_kl`: 0-d, nats per sample of the global batch. Dual ascent on the constraint KL = target, as in
        Rezende and Viola 2018 ("Taming VAEs").
        """
        assert self.target_kl
        error = (mean_kl.to(self.log_weight.dtype) / self.target_kl - 1).clamp(-1, 1)
        bounds = math.log(SMALLEST_WEIGHT), math.log(LARGEST_WEIGHT)
        self.log_weight.add_(CONTROL_RATE * error).clamp_(*bounds)
