"""The workload kto: a language model that learns from single answers, each judged good or bad.

isobatch auto --task kto --data answers.jsonl --model FOLDER --adapter lora
isobatch auto --task kto --data pairs.jsonl --model FOLDER --desirable-weight 1.2

Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", as TRL computes it
(trl/trainer/kto_trainer.py).

Letters: B answers; 2 rows of each: the prompt with this answer, and with one to another prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.core.number_ranges import AboveZero
from isobatch.models.base import Batch, Loss, ModelSize, Rows, StepContext, Sum
from isobatch.models.preference.task import TIE, DPOOptions, HasReference, added_up, token_log_probs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts

OWN, OTHER = slice(0, 1), slice(1, 2)
"""Of a sample's two rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOOptions(DPOOptions):
    """The flags of KTO: those of DPO, and how good and bad answers count."""

    desirable_weight: AboveZero = 1.0
    """Weight of the losses of good answers."""
    undesirable_weight: AboveZero = 1.0
    """Weight of the losses of bad answers."""


class KTO(HasReference):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 8).

    With r the log-ratio of an answer's probabilities under the model and under the reference, and z0 the
    baseline: a good answer costs w_d (1 - sigmoid(beta (r - z0))), a bad one w_u (1 - sigmoid(beta (z0 -
    r))). z0 is the mean of r over the whole global batch for prompts with answers to other prompts, at least
    0, and a constant for gradients. It is found before the losses, in a forward pass of its own.

    Metrics of each step and of the held-out answers, of which all together give one z0. `kl`: z0.
    `reward_accuracy`: how often beta r is on its side of beta z0. `good_reward`, `bad_reward`: means of
    beta r; `reward_margin`: by how much they differ.
    """

    Options: ClassVar = KTOOptions
    data: ClassVar = "data.preferences.answers:JudgedAnswers"

    def unread(self) -> Mapping[str, str]:
        return {**super().unread(), "label_smoothing": "KTO has none"}

    def model_size(self, facts: Facts) -> ModelSize:
        """With the passes that find the baseline: 2 FLOPs a parameter for each token of the other rows."""
        size = super().model_size(facts)
        tokens = self.recipe.batch_size * facts.mean_length
        return dataclasses.replace(size, step_flops=2.0 * size.parameters * tokens)

    def measure(self, model: nn.Module, batch: Batch, step: StepContext) -> Tensor:
        """The sum of the log-ratios of the rows with another prompt's answer."""
        return self._log_ratios(model, batch, OTHER, step.host).sum()

    def _log_ratios(self, model: nn.Module, batch: Batch, which: slice, host: Batch | None = None) -> Tensor:
        """(B,) log-ratios of one of a sample's rows, in float64."""
        found_B1 = added_up(token_log_probs(model, batch, host, which))
        return (found_B1 - batch["teacher.log_probs"][:, which])[:, 0]

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: tokens and learn (B, 2, T); label (B,), 1 of a good answer; teacher.log_probs (B, 2)."""
        ratios_B = self._log_ratios(model, batch, OWN, step.host)
        baseline = ratios_B.new_zeros(()) if step.measured is None else step.measured
        total, sums = self._judge(ratios_B, batch["label"], baseline)
        step.record("answers", sums.float())
        return {"loss": Loss(total.float(), "sample")}

    def _judge(self, ratios_B: Tensor, label_B: Tensor, baseline: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and (6,) what `figures` gets. `baseline`: the mean of the others' ratios."""
        import torch

        options, good_B, baseline = self.options, label_B.to(ratios_B.dtype), baseline.clamp(min=0)
        sides_B = options.beta * (ratios_B - baseline) * (2 * good_B - 1)
        weights_B = good_B * options.desirable_weight + (1 - good_B) * options.undesirable_weight
        known_B = options.beta * ratios_B.detach()
        right_B = (sides_B > TIE).to(known_B) + 0.5 * (sides_B.abs() <= TIE)
        sums = good_B.sum(), (1 - good_B).sum(), right_B.sum(), baseline * len(good_B)
        rewards = (known_B * good_B).sum(), (known_B * (1 - good_B)).sum()
        return ((1 - sides_B.sigmoid()) * weights_B).sum(), torch.stack([*sums, *rewards])

    def step_figures(self, recorded: Mapping[str, Any]) -> Mapping[str, float]:
        return figures(*recorded["answers"].tolist())

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        own, other = (Rows(self._log_ratios(model, batch, which)) for which in (OWN, OTHER))
        return {"label": Rows(batch["label"]), "own": own, "other": other}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, Any]:
        import torch

        own, label, other = (torch.from_numpy(parts[n]).double() for n in ("own", "label", "other"))
        total, sums = self._judge(own, label, other.mean())
        return {"loss": float(total) / len(own), **figures(*sums.tolist())}


def figures(good: float, bad: float, right: float, baseline: float, *rewards: float) -> dict[str, float]:
    """The figures of some answers, from sums over them; without those of a kind that is not among them."""
    found = {"kl": baseline / (good + bad), "reward_accuracy": right / (good + bad)}
    means = {
        name: total / count
        for name, total, count in zip(("good_reward", "bad_reward"), rewards, (good, bad), strict=True)
        if count
    }
    margin = {"reward_margin": means["good_reward"] - means["bad_reward"]} if len(means) == 2 else {}
    return found | means | margin
