"""The network of a sequence VAE: encoder to a Gaussian posterior, autoregressive decoder, objective.

Letters: B samples, T tokens of a row, D hidden width, L latent dimensions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.models.causal_block import CausalBlock
from isobatch.models.causal_lm.chunked_cross_entropy import IGNORE_INDEX, chunked_loss
from isobatch.models.sequence_vae.monitor import Posterior, PosteriorMonitor

if TYPE_CHECKING:
    from isobatch.models.sequence_vae.task import SequenceVAEOptions

HEAD_WIDTH = 64
"""Width of an attention head, where the hidden width is a multiple of it."""
EMBEDDING_RANGE = 0.1
"""Embeddings begin uniform in +-0.1, as in He et al. 2019."""
RISING = 0.5
"""Share of a cycle in which the weight of the KL rises (Fu et al. 2019: R = 0.5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """The sizes of the network: config.json in final/."""

    backbone: str
    """gru or transformer."""
    vocabulary: int
    bos: int
    eos: int
    unk: int
    hidden: int
    layers: int
    latent: int
    max_length: int
    dropout: float


class GRUBackbone(nn.Module):
    """GRU layers with dropout between them. torch's own dropout of a GRU would not be keyed."""

    def __init__(self, config: NetworkConfig, width: int) -> None:
        super().__init__()
        widths = [width] + [config.hidden] * (config.layers - 1)
        self.layers = nn.ModuleList(nn.GRU(w, config.hidden, batch_first=True) for w in widths)
        self.between = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """(B, T, width) -> (B, T, D). `state` (B, D): the first hidden state of every layer."""
        for number, layer in enumerate(self.layers):
            x, _ = layer(x if number == 0 else self.between(x), None if state is None else state[None])
        return x


class TransformerBackbone(nn.Module):
    """Learned positions and causal transformer layers."""

    def __init__(self, config: NetworkConfig, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, config.hidden)
        self.positions = nn.Embedding(config.max_length, config.hidden)
        heads = config.hidden // HEAD_WIDTH if config.hidden % HEAD_WIDTH == 0 else 1
        self.layers = nn.ModuleList(CausalBlock(config.hidden, heads, F.gelu) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """(B, T, width) -> (B, T, D). `state` (B, D) is added to every token."""
        x = self.enter(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        x = x if state is None else x + state[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


BACKBONES: dict[str, type[nn.Module]] = {"gru": GRUBackbone, "transformer": TransformerBackbone}


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Initial weights, the same for a seed on every machine: torch's ranges, and embeddings in +-0.1."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            bound = EMBEDDING_RANGE
        elif isinstance(part, nn.Linear | nn.GRU):
            bound = (part.in_features if isinstance(part, nn.Linear) else part.hidden_size) ** -0.5
        else:
            continue  # norms begin at one and zero
        for weights in part.parameters(recurse=False):
            weights.copy_(torch.empty(weights.shape).uniform_(-bound, bound, generator=generator))


class Encoder(nn.Module):
    """Reads a sequence from left to right; the state at its last token gives the posterior.

    It is causal, so that padding on the right changes nothing.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.backbone = BACKBONES[config.backbone](config, config.hidden)
        self.posterior = nn.Linear(config.hidden, 2 * config.latent)

    def forward(self, tokens: Tensor, length: Tensor) -> Posterior:
        """tokens (B, T) int64, length (B,)."""
        states = self.backbone(self.embedding(tokens))
        last = (length - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
        mean, logvar = self.posterior(states.gather(1, last)[:, 0]).float().chunk(2, dim=1)
        return Posterior(mean, logvar)


class Head(nn.Linear):
    """A linear layer to the vocabulary that returns the cross-entropy of targets without all the logits."""

    @torch.compiler.disable  # the number of targets changes with every batch
    def forward(self, states: Tensor, targets: Tensor | None = None, count: int | None = None) -> Tensor:
        """states (N, D): logits (N, V), or with targets (N,) the sum of -log p in nats, 0-d.

        `count`: how many targets there are without the ignored ones, where the host knows it.
        """
        if targets is None:
            return super().forward(states)
        return chunked_loss(states, targets, self, count)


class Decoder(nn.Module):
    """p(x|z): predicts each token from those before it and from z, which is part of every input.

    z is concatenated to every token's embedding and also gives the first state, as in He et al. 2019.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.input_dropout, self.output_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        self.state = nn.Linear(config.latent, config.hidden)
        self.backbone = BACKBONES[config.backbone](config, config.hidden + config.latent)
        self.head = Head(config.hidden, config.vocabulary)

    def states(self, inputs: Tensor, z: Tensor) -> Tensor:
        """(B, T, D): the state that predicts the token after each of `inputs` (B, T)."""
        embedded = self.input_dropout(self.embedding(inputs))
        repeated = z[:, None].expand(-1, inputs.shape[1], -1).to(embedded.dtype)
        states = self.backbone(torch.cat([embedded, repeated], dim=2), torch.tanh(self.state(z)))
        return self.output_dropout(states)

    def forward(self, inputs: Tensor, z: Tensor, targets: Tensor, count: int | None = None) -> Tensor:
        """Sum of -log p(target) in nats, 0-d. `inputs`, `targets` (B, T); z (B, L); `count`: see Head."""
        return self.head(self.states(inputs, z).flatten(0, 1), targets.flatten(), count)


class Objective(nn.Module):
    """The weighted KL. Free bits, which a remedy switches on, are a buffer, so that checkpoints hold them."""

    free_bits: Tensor

    def __init__(self, options: SequenceVAEOptions) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("free_bits", torch.tensor(float(options.free_bits)))

    def weight(self, step: int, total: int) -> float:
        """The scheduled weight of the KL at step `step` (from 0) of `total`.

        constant: `beta` (1: the ELBO of Kingma and Welling 2014; else Higgins et al. 2017). linear: from 0 to
        `beta` over the first `kl_warmup` of the steps (Bowman et al. 2016). cyclical: `kl_cycles` times from
        0 to `beta` over half a cycle, then `beta` (Fu et al. 2019).
        """
        options, done = self.options, step / max(1, total)
        if options.kl_schedule == "linear":
            return options.beta * min(1.0, done / options.kl_warmup)
        if options.kl_schedule == "cyclical":
            return options.beta * min(1.0, math.modf(done * options.kl_cycles)[0] / RISING)
        return options.beta

    def kl_term(self, kl: Tensor, step: int, total: int) -> Tensor:
        """0-d: the sum over samples of the weighted KL. `kl` (B,): nats per sample, summed over dimensions.

        Free bits (Kingma et al. 2016) hold for the whole KL of a sample: below them it costs nothing more.
        """
        return self.weight(step, total) * torch.maximum(kl, self.free_bits).sum()


class VAENetwork(nn.Module):
    """Encoder and decoder; while it trains also its objective, and the monitor where there is one."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.objective: Objective | None = None
        self.monitor: PosteriorMonitor | None = None

    def forward(
        self,
        tokens: Tensor,
        length: Tensor,
        noise: Tensor,
        dropped: Tensor | None = None,
        tokens_in_all: int | None = None,
    ) -> tuple[Tensor, Posterior]:
        """The sum of -log p(x|z) of tokens (B, T) int64 whose rows end with the end token, length (B,), 0-d
        and in nats; their posterior.

        `noise` (B, L) standard normal. `dropped` (B, T) bool: inputs that the decoder reads as unknown.
        `tokens_in_all`: the sum of `length`, where the host knows it.
        """
        posterior = self.encoder(tokens, length)
        inputs, targets = self.inputs_and_targets(tokens, length)
        if dropped is not None:
            inputs = inputs.masked_fill(dropped, self.config.unk)
        return self.decoder(inputs, posterior.sample(noise), targets, tokens_in_all), posterior

    def inputs_and_targets(self, tokens: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) each: tokens moved right behind the first token, and tokens with padding ignored."""
        inputs = F.pad(tokens[:, :-1], (1, 0), value=self.config.bos)
        padding = torch.arange(tokens.shape[1], device=tokens.device) >= length[:, None]
        return inputs, tokens.masked_fill(padding, IGNORE_INDEX)
