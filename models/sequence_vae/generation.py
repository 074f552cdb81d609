"""What a trained model is asked: latent vectors, and sequences from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobatch.core.errors import UserError
from isobatch.models.sequence_vae.monitor import Posterior
from isobatch.models.sequence_vae.network import NetworkConfig, VAENetwork

ROWS_AT_A_TIME = 64
"""Rows that are encoded together."""


@dataclass(frozen=True, slots=True)
class SequenceCodec:
    """A trained model with its tokenizer; without one a sequence is written as numbers."""

    model: VAENetwork
    tokenizer: Any | None

    @classmethod
    def open(cls, final: Path) -> SequenceCodec:
        """From the folder that `export` wrote. Raises UserError where there is no model."""
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        if not (final / "config.json").is_file():
            raise UserError(f"{final} holds no trained model (config.json): has the run finished?")
        sizes = json.loads((final / "config.json").read_text())
        del sizes["model_type"]
        model = VAENetwork(NetworkConfig(**sizes))
        model.load_state_dict(load_file(final / "model.safetensors"))
        tokenizer = final / "tokenizer.json"
        return cls(model.eval(), Tokenizer.from_file(str(tokenizer)) if tokenizer.is_file() else None)

    def __call__(self, sequences: Sequence[str | Sequence[int]]) -> list[dict[str, Any]]:
        """The posterior of each: `latent` (L,), its mean; `log_variance` (L,); `kl` in nats.

        A sequence is a text, or ids. Raises UserError where one of these is none of the model's.
        """
        rows = [self._row(" ".join(map(str, s)) if not isinstance(s, str) else s) for s in sequences]
        found: list[dict[str, Any]] = []
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            posterior = self._posterior(rows[start : start + ROWS_AT_A_TIME])
            values = zip(posterior.mean.tolist(), posterior.logvar.tolist(), posterior.kl(), strict=True)
            found += [{"latent": m, "log_variance": v, "kl": float(kl.sum())} for m, v, kl in values]
        return found

    def reconstruct(self, text: str, tokens: int) -> str:
        """The likeliest sequence (token by token) at the mean of the text's posterior."""
        return self._write(self._mean(text)[None], tokens)[0]

    def interpolate(self, first: str, last: str, count: int, tokens: int) -> list[str]:
        """`count` sequences on the straight line between the posterior means of two texts, ends included."""
        share = torch.linspace(0, 1, count)[:, None]
        return self._write((1 - share) * self._mean(first) + share * self._mean(last), tokens)

    def sample(self, count: int, tokens: int, temperature: float, seed: int) -> list[str]:
        """`count` sequences whose latent vectors are drawn from the prior."""
        drawn = np.random.default_rng(seed).standard_normal((count, self.model.config.latent))
        return self._write(torch.from_numpy(drawn.astype(np.float32)), tokens, temperature, seed)

    def _mean(self, text: str) -> Tensor:
        """(L,): the mean of the posterior."""
        return self._posterior([self._row(text)]).mean[0]

    def _row(self, text: str) -> list[int]:
        """The ids that the encoder reads."""
        return [*self._ids(text)[: self.model.config.max_length - 1], self.model.config.eos]

    def _posterior(self, rows: Sequence[list[int]]) -> Posterior:
        """Of rows of ids; the encoder is causal, so that padding changes nothing."""
        width = max(map(len, rows))
        tokens = torch.tensor([row + [self.model.config.eos] * (width - len(row)) for row in rows])
        with torch.no_grad():
            return self.model.encoder(tokens, torch.tensor([len(row) for row in rows]))

    def _ids(self, text: str) -> list[int]:
        """Token ids of a text. Raises UserError where a sequence of numbers has a wrong one."""
        if self.tokenizer is not None:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        most = self.model.config.bos  # the model's own ids follow those of the data
        words = text.replace(",", " ").split()
        if wrong := [w for w in words if not w.isdecimal() or int(w) >= most]:
            reads = f"numbers from 0 to {most - 1}, as in '3 1 4'"
            raise UserError(f"{wrong[0]!r} is no id: this model reads {reads}")
        return [int(word) for word in words]

    def _write(self, z: Tensor, tokens: int, temperature: float = 0.0, seed: int = 0) -> list[str]:
        rows = decode(self.model, z, tokens, temperature, seed)
        if self.tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        return self.tokenizer.decode_batch(rows)


@torch.no_grad()
def decode(
    model: VAENetwork, z: Tensor, tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """Ids of a row for each latent vector z (N, L), without special ones; at most `tokens` of each.

    Temperature 0 takes the likeliest token; `seed`: of the draws. The whole row is read again for each token.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    rows = torch.full((len(z), 1), config.bos)
    ended = torch.zeros(len(z), dtype=torch.bool)
    for _ in range(min(tokens, config.max_length - 1)):
        logits = model.decoder.head(model.decoder.states(rows, z)[:, -1])
        logits[:, [config.bos, config.unk]] = -torch.inf
        if temperature:
            following = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)
        else:
            following = logits.argmax(1, keepdim=True)
        rows = torch.cat([rows, following], dim=1)
        ended |= following[:, 0] == config.eos
        if ended.all():
            break
    return [row[1 : row.index(config.eos) if config.eos in row else None] for row in rows.tolist()]
