"""The log-probabilities, losses and figures of preference training.

DPO: Rafailov et al. 2023, "Direct Preference Optimization". IPO: Azar et al. 2023, equation 17. Hinge: Zhao
et al. 2023, "SLiC-HF". Conservative DPO: Mitchell 2023. ORPO: Hong et al. 2024, equations 4 and 7. All as
TRL computes them (trl/trainer/dpo_trainer.py, orpo_trainer.py).

Letters: B pairs, 2 answers of each: the chosen one, then the rejected one; T tokens of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from isobatch.models.causal_lm import chunked_cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.models.base import Batch

TIE = 1e-4
"""Rewards that differ by no more may differ by rounding alone: such a pair counts as half right."""


def token_log_probs(model: Any, batch: Batch, host: Batch | None, learns_prompts: bool) -> Tensor:
    """(B, 2, T) log p, at each position, of the token behind it; 0 where the loss reads none.

    `host`: the batch in host memory; `learns_prompts`: whether the loss reads the chosen answer's prompt too.
    """
    tokens_B2T = batch["tokens"].long()
    ignored = ~_predicts(batch, learns_prompts)
    targets_B2T = tokens_B2T.roll(-1, -1).masked_fill(ignored, chunked_cross_entropy.IGNORE_INDEX)
    count = None if host is None else int(_predicts(host, learns_prompts).numpy().sum())
    rows = tokens_B2T.flatten(0, 1), targets_B2T.flatten(0, 1)
    return chunked_cross_entropy.token_log_probs(model, *rows, count).view(tokens_B2T.shape)


def _predicts(batch: Batch, learns_prompts: bool) -> Tensor:
    """(B, 2, T) bool: whether the loss reads the prediction at a position, of the token behind it."""
    found = _before_answers(batch)
    if learns_prompts:
        position = torch.arange(found.shape[-1], device=found.device)
        in_chosen = position < (batch["row_length"][:, :1] - 1)
        found = torch.stack([in_chosen, found[:, 1]], 1)
    return found


def _before_answers(batch: Batch) -> Tensor:
    """(B, 2, T) bool: the positions whose next token is an answer's."""
    return F.pad(batch["learn"][..., 1:] != 0, (0, 1))


def added_up(token_log_probs_B2T: Tensor, batch: Batch) -> Tensor:
    """(B, 2) sums over the tokens of each answer, in float64: a loss is of small differences between them."""
    own = token_log_probs_B2T.masked_fill(~_before_answers(batch), 0.0)
    return own.sum(-1, dtype=torch.float32 if own.device.type == "mps" else torch.float64)


def sums_of_figures(rewards_B2: Tensor, log_probs_B2: Tensor) -> Tensor:
    """(5,) pairs, and over them the sums of accuracy, margin and both answers' log-probabilities."""
    margin_B = _first_minus_second(rewards_B2)
    right_B = (margin_B > TIE).float() + 0.5 * (margin_B.abs() <= TIE).float()
    sums = (right_B.sum().to(margin_B.dtype), margin_B.sum(), *log_probs_B2.sum(0))
    return torch.stack([torch.full_like(sums[0], len(margin_B)), *sums])


def dpo_loss(policy_B2: Tensor, reference_B2: Tensor, beta: float, kind: str, smoothing: float) -> Tensor:
    """(B,) losses from the answers' log-probabilities under the trained model and under the reference.

    They are sums over an answer's tokens; for ipo means. `smoothing`: the share of pairs that are taken to be
    the wrong way round; of the sigmoid loss alone.
    """
    advantage_B = _first_minus_second(policy_B2 - reference_B2)
    if kind == "ipo":
        return (advantage_B - 1 / (2 * beta)).square()
    if kind == "hinge":
        return F.relu(1 - beta * advantage_B)
    logits_B = beta * advantage_B
    return -F.logsigmoid(logits_B) * (1 - smoothing) - F.logsigmoid(-logits_B) * smoothing


def odds_ratio_loss(mean_B2: Tensor) -> Tensor:
    """(B,) ORPO's -log sigmoid of the log odds ratio, from the answers' mean log-probabilities of a token."""
    # An answer that is certain has infinite odds.
    log_p_B2 = mean_B2.clamp(max=-1e-6)
    log_odds_B2 = log_p_B2 - (-log_p_B2.expm1()).log()
    return -F.logsigmoid(_first_minus_second(log_odds_B2))


def _first_minus_second(values_B2: Tensor) -> Tensor:
    return values_B2[:, 0] - values_B2[:, 1]
