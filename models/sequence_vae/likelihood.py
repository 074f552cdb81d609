"""The importance-weighted likelihood of held-out sequences (Burda et al. 2016)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from isobatch.models.causal_lm.perplexity import finite_exp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from isobatch.models.base import Batch
    from isobatch.models.sequence_vae.network import VAENetwork

DECODED_TOKENS = 1 << 11
"""Tokens that are decoded at a time."""
_SEED = 0x1A11


@torch.no_grad()
def importance_weighted_nll(
    model: VAENetwork, batches: Iterable[Batch], draws: int, seed: int
) -> Mapping[str, float]:
    """-log (1/K sum_k p(x|z_k) p(z_k) / q(z_k|x)), K = `draws`: `iw_nll` and `iw_perplexity`.

    Means over samples, nats. The draws are keyed by seed and sample, so that batches do not matter. As papers
    report the likelihood (He et al. 2019: 500 draws); never below the true -log p(x) on average.
    """
    device = next(model.parameters()).device
    total, samples, tokens = 0.0, 0, 0
    for batch in batches:
        for row in range(len(batch["index"])):
            length = int(batch["length"][row])
            noise = _draws(seed, int(batch["index"][row]), draws, model.config.latent).to(device)
            one = batch["tokens"][row : row + 1, :length].long().to(device)
            total -= _log_likelihood(model, one, noise)
            samples, tokens = samples + 1, tokens + length
    return {"iw_nll": total / samples, "iw_perplexity": finite_exp(total / tokens), "iw_samples": draws}


def _draws(seed: int, sample: int, count: int, latent: int) -> Tensor:
    generator = np.random.default_rng([_SEED, seed, sample])
    return torch.from_numpy(generator.standard_normal((count, latent), dtype=np.float32))


def _log_likelihood(model: VAENetwork, tokens: Tensor, noise: Tensor) -> float:
    """log p(x) of one sequence, tokens (1, T), by the draws `noise` (K, L)."""
    length = torch.tensor([tokens.shape[1]], device=tokens.device)
    posterior = model.encoder(tokens, length)
    inputs, targets = model.inputs_and_targets(tokens, length)
    weights = []
    for part in noise.split(max(1, DECODED_TOKENS // tokens.shape[1])):
        z = posterior.sample(part)
        decoded = model.decoder.log_likelihood(inputs.expand(len(part), -1), z, targets.expand(len(part), -1))
        # log p(z) - log q(z|x): the constants of both Gaussians cancel.
        prior_over_posterior = 0.5 * (part.square() + posterior.logvar - z.square()).sum(1)
        weights.append(decoded.double() + prior_over_posterior.double())
    return float(torch.logsumexp(torch.cat(weights), 0)) - math.log(len(noise))
