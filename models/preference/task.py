"""The workloads dpo and orpo: language models that learn which of two answers is preferred.

isobatch auto --task dpo --data pairs.jsonl --model FOLDER
isobatch auto --task dpo --data pairs.jsonl --model FOLDER --adapter lora --beta 0.1
isobatch auto --task orpo --data pairs.jsonl --model FOLDER

DPO: Rafailov et al. 2023, "Direct Preference Optimization". ORPO: Hong et al. 2024, equations 4 and 7. Both
as TRL computes them (trl/trainer/dpo_trainer.py, orpo_trainer.py).

Letters: B pairs, 2 answers of each: the chosen one, then the rejected one; T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from isobatch.core.errors import refuse
from isobatch.core.number_ranges import AboveZero
from isobatch.core.package import table_beside
from isobatch.models import hub
from isobatch.models.base import Batch, Loss, ModelSize, Rows, StepContext, Sum, Teacher
from isobatch.models.causal_lm.model_sizes import PRESETS
from isobatch.models.causal_lm.task import CausalLMOptions, LanguageModelTask, OnLanguageModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts

Measured: TypeAlias = "tuple[dict[str, Loss], Tensor]"
SITUATIONS = table_beside(__file__, "situations")
TIE = 1e-4
"""Rewards that differ by no more may differ by rounding alone: such a pair counts as half right."""
REFERENCE_TOKENS = 16384
"""Padded tokens that the reference reads at a time. No plan decides it: the answers are the same anywhere."""


class JudgedTask(OnLanguageModel):
    """A task that learns from judged answers."""

    defaults, fast, demo = (SITUATIONS[kind] for kind in ("defaults", "fast", "demo"))
    adapter_lr: ClassVar = 1e-5
    """The rate of an adapter: ten times the model's."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """As for any causal language model; an adapter trains at ten times the rate, without dropout."""
        found = {**super().complete(values)}
        if values.get("adapter", "none") != "none":
            found |= {k: v for k, v in {"lr": cls.adapter_lr, "lora_dropout": 0.0}.items() if k not in values}
        return found


class JudgedLanguageModel(JudgedTask, LanguageModelTask):
    """A causal language model that learns from judged answers."""

    def model_size(self, facts: Facts) -> ModelSize:
        return dataclasses.replace(super().model_size(facts), packs=False)


class HasReference(JudgedLanguageModel):
    """It is held to a reference: the model as training finds it, asked once for log p of every answer."""

    def teacher(self) -> Teacher:
        answers = self._reference_identity(), self._build_reference, self._reference_answers
        return Teacher(*answers, held_out=True, name="reference")

    def model_size(self, facts: Facts) -> ModelSize:
        size = super().model_size(facts)
        return dataclasses.replace(size, teacher_bytes=size.weight_bytes)

    def _reference_identity(self) -> str:
        """All that the reference's answers depend on, beside the samples."""
        name, recipe, options = self.model_name, self.recipe, self.options
        if name in PRESETS:
            weights = [name, recipe.seed, recipe.max_length, recipe.options.get("vocab_size")]
        else:
            weights = [hub.weights_hash(str(Path(name).expanduser()), recipe.revision), recipe.tokenizer]
        whole = [options.also_train] if options.also_train else []  # which are not rounded
        return json.dumps(["float64", *weights, options.load_bits, options.frozen_dtype, *whole])

    def _build_reference(self, facts: Facts) -> nn.Module:
        import torch

        torch.manual_seed(self.recipe.seed)  # as the engine does for the model that trains
        options = dataclasses.replace(self.options, lora_init="kaiming")  # what it begins with adds nothing
        return type(self)(self.recipe, options).build_model(facts)

    def _reference_answers(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch

        pairs = max(1, REFERENCE_TOKENS // (2 * batch["tokens"].shape[-1]))
        parts = zip(*(batch[name].split(pairs) for name in ("tokens", "learn")), strict=True)
        found = (token_log_probs(model, {"tokens": t, "learn": learn}) for t, learn in parts)
        return {"log_probs": torch.cat([*map(added_up, found)])}


class PairTask(JudgedTask):
    """It learns from pairs of answers; a sample is a pair."""

    rows_per_sample: ClassVar = 2
    figures: ClassVar[tuple[str, ...]]
    """Names of the figures of each step and of held-out pairs, means over pairs."""

    @abstractmethod
    def losses_and_sums(self, model: nn.Module, batch: Batch, host: Batch | None, trains: bool) -> Measured:
        """The losses; and (1 + figures,): pairs, and the sum of each figure. `trains`: in training."""

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: tokens (B, 2, T), each a prompt and an answer; learn, of the same shape, 1 where a token is
        an answer's; perhaps teacher.log_probs (B, 2).
        """
        losses, figures = self.losses_and_sums(model, batch, step.host, trains=True)
        step.record("pairs", figures.float())
        return losses

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        losses, figures = self.losses_and_sums(model, batch, step.host, trains=False)
        pairs = len(batch["tokens"])
        weights = {k.removesuffix(".weight"): v.sum() for k, v in batch.items() if k.endswith(".weight")}
        parts: dict[str, Sum | Rows] = {n: Sum(v.sum, weights.get(v.unit, pairs)) for n, v in losses.items()}
        return parts | {n: Sum(v, pairs) for n, v in zip(self.figures, figures[1:], strict=True)}

    def step_figures(self, recorded: Mapping[str, Any]) -> Mapping[str, float]:
        pairs, *sums = recorded["pairs"].tolist()
        return {name: total / pairs for name, total in zip(self.figures, sums, strict=True)}


class PreferenceTask(PairTask, JudgedLanguageModel):
    """A causal language model that learns from pairs of answers.

    Metrics of each step and of held-out pairs, means over pairs. `reward_accuracy`: how often the chosen
    answer has the larger reward. `reward_margin`: by how much. `chosen_log_prob`, `rejected_log_prob`: in
    nats, added up over the tokens of an answer, or their mean where `averages` is set.
    """

    figures: ClassVar = ("reward_accuracy", "reward_margin", "chosen_log_prob", "rejected_log_prob")
    data: ClassVar = "data.preferences.dataset:Preferences"
    averages = False
    """Whether an answer's log-probability is the mean over its tokens, and not their sum."""

    @abstractmethod
    def pair_losses(self, logp_B2: Tensor, tokens_B2T: Tensor, batch: Batch, trains: bool) -> Measured:
        """The losses, and (B, 2) rewards of the answers; from the log-probabilities of answers and of single
        tokens. `trains`: in training.
        """

    def losses_and_sums(self, model: nn.Module, batch: Batch, host: Batch | None, trains: bool) -> Measured:
        tokens_B2T = token_log_probs(model, batch, host)
        sums_B2 = added_up(tokens_B2T)
        log_probs_B2 = sums_B2 / batch["learn"].sum(-1) if self.averages else sums_B2
        losses, rewards_B2 = self.pair_losses(log_probs_B2, tokens_B2T, batch, trains)
        return losses, figures_of(rewards_B2.detach(), log_probs_B2.detach())


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOOptions(CausalLMOptions):
    """The flags of DPO."""

    beta: AboveZero = 0.1
    """How closely the model is held to the reference: the larger, the closer."""


class DPO(HasReference, PreferenceTask):
    """Direct preference optimization (Rafailov et al. 2023).

    The reward of an answer is beta times the log-ratio of its probabilities under the model and under the
    reference, which is the model as training finds it: with an adapter, the model without what the adapter
    learns. The reference's log-probabilities are computed once and kept on disk. --label-smoothing is the
    share of pairs that are taken to be the wrong way round (Mitchell 2023, conservative DPO).
    """

    Options: ClassVar = DPOOptions

    def check(self) -> None:
        super().check()
        share = self.recipe.label_smoothing
        half = "is the share of pairs that are the wrong way round: give less than 0.5"
        refuse({f"--label-smoothing {share:g}: {half}": share >= 0.5})

    def pair_losses(self, logp_B2: Tensor, tokens_B2T: Tensor, batch: Batch, trains: bool) -> Measured:
        from torch.nn import functional as F

        smoothing = self.recipe.label_smoothing if trains else 0.0
        rewards_B2 = (logp_B2 - batch["teacher.log_probs"]) * self.options.beta
        logits_B = first_minus_second(rewards_B2)
        losses_B = -F.logsigmoid(logits_B) * (1 - smoothing) - F.logsigmoid(-logits_B) * smoothing
        return {"loss": Loss(losses_B.sum().float(), "sample")}, rewards_B2


@dataclass(frozen=True, kw_only=True, slots=True)
class ORPOOptions(CausalLMOptions):
    """The flags of ORPO."""

    beta: AboveZero = 0.1
    """Weight of the odds ratio's part of the loss: the paper's lambda."""


class ORPO(PreferenceTask):
    """Odds ratio preference optimization (Hong et al. 2024): fine-tuning and preference in one, no reference.

    loss = `nll` + `odds_ratio`: the mean over tokens of -log p of the chosen answers, and beta times the mean
    over pairs of -log sigmoid of the log odds ratio. The reward of an answer is beta times its mean log p.
    """

    Options: ClassVar = ORPOOptions
    averages = True

    def unread(self) -> Mapping[str, str]:
        return {**super().unread(), "label_smoothing": "ORPO has none"}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, Any]:
        means = super().metrics(parts, split, facts)
        return {**means, "loss": means["nll"] + means["odds_ratio"]}

    def pair_losses(self, logp_B2: Tensor, tokens_B2T: Tensor, batch: Batch, trains: bool) -> Measured:
        from torch.nn import functional as F

        # An answer that is certain has infinite odds.
        log_p_B2 = logp_B2.clamp(max=-1e-6)
        log_odds_B2 = log_p_B2 - (-log_p_B2.expm1()).log()
        odds_B = -F.logsigmoid(first_minus_second(log_odds_B2)) * self.options.beta
        nll = -tokens_B2T[:, 0].sum(dtype=logp_B2.dtype)
        losses = {"nll": Loss(nll.float(), "token"), "odds_ratio": Loss(odds_B.sum().float(), "sample")}
        return losses, logp_B2 * self.options.beta


def token_log_probs(
    model: Any, batch: Batch, host: Batch | None = None, which: slice = slice(None)
) -> Tensor:
    """(B, 2, T) log p, at each position, of the token behind it; 0 where that is none of an answer.

    `host`: the batch in host memory; `which` of a sample's two rows.
    """
    from isobatch.models.causal_lm import chunked_cross_entropy

    tokens_B2T = batch["tokens"][:, which].long()
    ignored = ~_before_answers(batch, which)
    targets_B2T = tokens_B2T.roll(-1, -1).masked_fill(ignored, chunked_cross_entropy.IGNORE_INDEX)
    count = None if host is None else int(_before_answers(host, which).numpy().sum())
    rows = tokens_B2T.flatten(0, 1), targets_B2T.flatten(0, 1)
    return chunked_cross_entropy.token_log_probs(model, *rows, count).view(tokens_B2T.shape)


def _before_answers(batch: Batch, which: slice) -> Tensor:
    """(B, 2, T) bool: the positions whose next token is an answer's."""
    from torch.nn import functional as F

    return F.pad(batch["learn"][:, which, 1:] != 0, (0, 1))


def added_up(token_log_probs_B2T: Tensor) -> Tensor:
    """(B, 2) sums over the tokens of each answer, in float64: a loss is of small differences between them."""
    import torch

    on_mps = token_log_probs_B2T.device.type == "mps"
    return token_log_probs_B2T.sum(-1, dtype=torch.float32 if on_mps else torch.float64)


def first_minus_second(values_B2: Tensor) -> Tensor:
    """(B,): what the chosen answer has more than the rejected one."""
    return values_B2[:, 0] - values_B2[:, 1]


def figures_of(rewards_B2: Tensor, known_B2: Tensor) -> Tensor:
    """(5,): pairs; and over them the sums of how often the chosen answer's reward is larger, a tie half, of
    by how much, and of what is known of both answers.
    """
    import torch

    margin_B = first_minus_second(rewards_B2)
    right_B = (margin_B > TIE).float() + 0.5 * (margin_B.abs() <= TIE).float()
    sums = (right_B.sum().to(margin_B.dtype), margin_B.sum(), *known_B2.sum(0))
    return torch.stack([torch.full_like(sums[0], len(margin_B)), *sums])
