"""The losses of preference training, one value for each pair.

DPO: Rafailov et al. 2023, "Direct Preference Optimization". IPO: Azar et al. 2023, equation 17. Hinge: Zhao
et al. 2023, "SLiC-HF". Conservative DPO: Mitchell 2023. ORPO: Hong et al. 2024, equations 4 and 7. All as
TRL computes them (trl/trainer/dpo_trainer.py, orpo_trainer.py).

Letters: B pairs, 2 answers of each: the chosen one, then the rejected one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor


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
