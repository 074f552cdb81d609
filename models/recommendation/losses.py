"""Losses of recommenders: each user-item pair against negative items, as a sum over the pairs.

Letters: B pairs, n negatives of a pair, S shared negatives, I items. In sequences a pair is what is known of
a user at one of B places, and the next item; `user` is then what `next_items` gives.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from isobatch.models.base import StepContext
from isobatch.models.recommendation.model_size import num_negatives


def next_items(rows: Tensor, length: np.ndarray, step: StepContext) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(user, item) for `ranking_loss` of (R, T) items in time, `length` (R,) of each row."""
    places = step.to_device(np.flatnonzero(np.arange(rows.shape[1] - 1) < length[:, None] - 1))
    return (rows[:, :-1], places), rows[:, 1:].reshape(-1)[places]


def ranking_loss(
    model: Any, user: Any, item: Tensor, options: Any, step: StepContext, seed: int
) -> tuple[Tensor, Tensor | float]:
    """(the loss that the flags ask for, with --l2 also the squared id vectors), sums over (B,) pairs."""
    net, count = getattr(model, "module", model), num_negatives(options)
    items, pairs = len(net.item_text), item[:, None]
    if options.cohort:
        total = in_batch_softmax(model, user, item, options.cohort)
    elif options.loss != "bce" or isinstance(user, tuple):
        shared = draw_shared_negatives(count, items, (seed, step.phase, step.number)).to(item.device)
        if options.loss == "sampled-softmax":
            total = sampled_softmax(model, user, item, shared)
        else:
            # gBCE (Petrov and Macdonald 2023, RecSys): with S of I - 1 items drawn alpha = S / (I - 1), and
            # beta = alpha (t (1 - 1/alpha) + 1/alpha); with t = 1 nothing is overestimated.
            beta = 1 + options.calibration * (options.loss == "gbce") * (len(shared) / (items - 1) - 1)
            total = binary_cross_entropy(model, user, item, shared, shared == item[:, None], beta)
    else:
        drawn = step.noise.integers("negatives", (count, 2), items)
        negatives, is_positive = avoid_positives(net, user, drawn)
        total = binary_cross_entropy(model, user, item, negatives, is_positive)
        pairs = torch.cat([pairs, negatives], 1)
    return total, squared_norms(net, user, pairs) if options.l2 else 0.0


def draw_shared_negatives(count: int, items: int, step_key: tuple[int, str, int]) -> Tensor:
    """(count,) different items that all pairs of a step share; at most all items.

    `step_key`: (seed, phase, step number); the draw depends on nothing else, so every process has the same.
    Items that nobody took in training are drawn too: left out, they would end above all items that serve as
    negatives.
    """
    if count >= items:
        return torch.arange(items)
    seed, phase, number = step_key
    generator = np.random.default_rng([seed, zlib.crc32(phase.encode()), number])
    return torch.from_numpy(generator.choice(items, count, replace=False, shuffle=False))


def sampled_softmax(model: Any, user: Any, item: Tensor, shared: Tensor) -> Tensor:
    """-log softmax of each pair's item against (S,) shared negatives, except those that are its own item.

    S of I items are drawn uniformly, so log(I/S) is added to their scores: in expectation the sum over all
    items (logQ correction, Bengio and Senecal 2008; Yi et al. 2019).
    """
    net = getattr(model, "module", model)
    positive, others = model(user, [item[:, None], shared])
    others = others.float().masked_fill(shared == item[:, None], torch.finfo(torch.float32).min)
    shift = math.log(len(net.item_text) / len(shared))
    return softplus(torch.logsumexp(others, 1) + shift - positive[:, 0].float()).sum()


def in_batch_softmax(model: Any, user: Tensor, item: Tensor, cohort: int) -> Tensor:
    """-log softmax of each pair's item among the items of its cohort: `cohort` rows, the last has fewer.

    An item is a negative as often as it is taken, so the log of its expected count is subtracted (logQ
    correction).
    """
    net = getattr(model, "module", model)
    expected = net.counts[item].clamp_min(1).float() * (cohort / net.counts.sum())
    total = torch.zeros((), device=user.device)
    for start in range(0, len(user), cohort):
        rows = slice(start, start + cohort)
        cohort_items = item[rows]
        (scores,) = model(user[rows], [cohort_items])
        scores = scores.float() - torch.log(expected[rows])
        is_own = torch.eye(len(cohort_items), dtype=torch.bool, device=user.device)
        scores = scores.masked_fill((cohort_items[:, None] == cohort_items) & ~is_own, -torch.inf)
        total = total + (torch.logsumexp(scores, 1) - scores.diagonal()).sum()
    return total


def avoid_positives(net: Any, user: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) negatives from (B, n, 2) drawn items, and (B, n) bool: whether it is a positive even so.

    The first of two drawn items is taken, the second if the user had the first in training.
    """
    first, second = drawn.unbind(-1)
    items = torch.where(net.seen_in_training(user, first), second, first)
    return items, net.seen_in_training(user, items)


def binary_cross_entropy(
    model: Any, user: Any, item: Tensor, negatives: Tensor, is_positive: Tensor, beta: float = 1.0
) -> Tensor:
    """Binary cross-entropy of each pair, whose probability is taken to the power `beta`, and its (B, n) or
    (S,) shared negatives, except those that `is_positive` marks.
    """
    positive, scores = model(user, [item[:, None], negatives])
    negative_terms = logsigmoid(-scores.float()).masked_fill(is_positive, 0.0)
    return -(beta * logsigmoid(positive.float()).sum() + negative_terms.sum())


def squared_norms(net: Any, user: Tensor, items: Tensor) -> Tensor:
    """Sum of |u|^2 + |v|^2 over the id vectors of (B,) users with each of their (B, k) items."""
    total = torch.zeros((), device=user.device)
    for table, rows, repeats in ((net.user_ids, user, items.shape[1]), (net.item_ids, items, 1)):
        unique_rows, counts = torch.unique(rows, return_counts=True)
        total = total + (table(unique_rows).square().sum(1) * counts).sum() * repeats
    return total
