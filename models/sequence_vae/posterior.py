"""The posterior, and measures of it over data: active units, mutual information, a projection to a plane.

Letters: B or N samples, L latent dimensions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ACTIVE = 0.01
"""Variance of the posterior mean over the data above which a dimension is active (Burda et al. 2016)."""
ROWS_AT_A_TIME = 512
"""Rows of the N x N table of densities that are computed at once."""


class Posterior(NamedTuple):
    """q(z|x): a Gaussian with independent dimensions. Both (B, L), fp32."""

    mean: Tensor
    logvar: Tensor

    def kl(self) -> Tensor:
        """(B, L) nats: KL(q(z|x) || N(0, 1)) per dimension (Kingma and Welling 2014, appendix B)."""
        return 0.5 * (self.mean.square() + self.logvar.exp() - 1 - self.logvar)

    def sample(self, noise: Tensor) -> Tensor:
        """(B, L): mean + noise times the standard deviation; `noise` (B, L) is standard normal."""
        return self.mean + noise * (0.5 * self.logvar).exp()


def mean_variance(total: Tensor, squares: Tensor, count: Tensor | float) -> Tensor:
    """(L,) variance over the data of the posterior mean, from its sums and sums of squares (L,)."""
    return squares / count - (total / count).square()


def variance_within(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """(L,) variance over the data of the posterior mean, within S batches: (S, L), (S, L) and (S, 1).

    A mean that drifts from step to step while the encoder trains does not count. Where no batch has two
    samples there is no such variance, and it is that of all.
    """
    freedom = (count - 1).clamp(min=0).sum()
    if float(freedom) == 0:
        return mean_variance(total.sum(0), squares.sum(0), count.sum().clamp(min=1))
    return (squares - total.square() / count.clamp(min=1)).sum(0) / freedom


def active_dimensions(variance: Tensor) -> Tensor:
    """(L,) bool."""
    return variance > ACTIVE


def mutual_information(mean: Tensor, logvar: Tensor, noise: Tensor) -> float:
    """Nats: E[log q(z|x) - log q(z)] under the aggregate posterior of these N samples.

    mean, logvar, noise (N, L); one z is drawn for a sample, by `noise`. Hoffman and Johnson 2016,
    estimated as by He et al. 2019, but with the same draws in both terms: their errors cancel. At most log N.
    """
    z = mean + noise * (0.5 * logvar).exp()
    # log q(z_i|x_j) without the constant: -0.5 sum_l ((z_il - mean_jl)^2 / var_jl + logvar_jl), as products.
    conditional = -0.5 * (noise.square() + logvar).sum(1)
    precision = (-logvar).exp()
    scaled = mean * precision
    of_other = (mean * scaled + logvar).sum(1)
    aggregate = torch.cat(
        [
            torch.logsumexp(-0.5 * (rows.square() @ precision.T - 2 * rows @ scaled.T + of_other), dim=1)
            for rows in z.split(ROWS_AT_A_TIME)
        ]
    )
    return float((conditional - aggregate).mean()) + math.log(len(z))


def projection(mean: Tensor) -> Tensor:
    """(N, 2): posterior means on their two first principal components; (N, 1) padded for one dimension."""
    centred = mean - mean.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    largest = axes[:, -2:].flip(1)
    # An eigenvector's sign is arbitrary: its largest entry is made positive, so that plots do not jump.
    signs = largest.gather(0, largest.abs().argmax(0, keepdim=True)).sign()
    points = centred @ (largest * signs)
    return torch.nn.functional.pad(points, (0, 2 - points.shape[1]))
