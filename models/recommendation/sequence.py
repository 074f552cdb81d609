"""The network of sequences: a causal transformer over the items that a user took gives the user's vector.

SASRec (Kang and McAuley 2018), with blocks that normalize first. Letters: B rows, T items of a row, N places
whose next item is scored, M items, d = dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, relu

from isobatch.models.causal_block import CausalBlock
from isobatch.models.recommendation.catalogue import Catalogue
from isobatch.models.recommendation.network import ID_INIT_STD, RecommenderNet
from isobatch.models.recommendation.text_encoder import TextEncoder

USERS_AT_ONCE = 1024
"""Users whose vectors are computed together."""
INIT_STD = 0.02
"""Standard deviation of the initial ids and positions."""


class SequenceEncoder(nn.Module):
    """Positions from the first item of a row on, and blocks."""

    def __init__(self, longest: int, dim: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.longest = longest
        self.positions = nn.Embedding(longest, dim)
        self.positions.weight.data.mul_(INIT_STD)
        self.input_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(CausalBlock(dim, heads, relu, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, items: Tensor) -> Tensor:
        """(B, T, d) vectors of items -> (B, T, d) states; padding on the right changes no state before it."""
        x = items * items.shape[-1] ** 0.5 + self.positions.weight[: items.shape[1]]
        x = self.input_dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class SequenceNet(RecommenderNet):
    """Scores u.v + b, where u is the state of a `SequenceEncoder` at the last item known of a user."""

    has_user_vectors = False

    def __init__(self, catalogue: Catalogue, dim: int, encoder: TextEncoder | None, **sizes: float) -> None:
        """`sizes`: those of SequenceEncoder beside `dim`."""
        super().__init__(catalogue, dim, (), "dot", encoder)
        self.item_ids.weight.data.mul_(INIT_STD / ID_INIT_STD)
        self.sequence = SequenceEncoder(dim=dim, **sizes)  # type: ignore[arg-type]

    def vectors(self, user: Any, item: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, d) of (B,) users of whom `inputs` (B,) interactions, or all, are known; (M, d) of items.

        In training `user` is ((B, T) rows of items, (N,) places in them), and (N, d) are the states there.
        """
        if isinstance(user, tuple):
            (rows, places), known = user, torch.ones((), device=item.device)
        else:
            rows, length = self.windows(user, inputs)
            places = torch.arange(len(rows), device=rows.device) * rows.shape[1] + (length - 1).clamp_min(0)
            known = (length > 0)[:, None]  # of whom nothing is known has the vector 0
        entered, scored = self.item_vectors(torch.cat([rows.reshape(-1), item])).split(
            [rows.numel(), len(item)]
        )
        states = embedding(places, self.sequence(entered.view(*rows.shape, -1)).flatten(0, 1))
        return states * known, scored

    def item_vectors(self, item: Tensor) -> Tensor:
        """(M, d)."""
        if self.encoder is None:
            return self.item_ids(item)
        items, position = torch.unique(item, return_inverse=True)
        texts = self.item_text[items]
        vectors = self._fused("item", self.item_ids(items), texts, self._lookup_text_vectors(texts))
        return embedding(position, vectors)

    def windows(self, user: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """((B, T) the last items among the first `counts` (B,) of each user, padded by 0; (B,) how many)."""
        first = self.starts[user]
        counts = self.starts[user + 1] - first if counts is None else counts.long()
        length = counts.clamp_max(self.sequence.longest)
        columns = torch.arange(max(1, int(length.max())), device=user.device)
        places = (first + counts - length)[:, None] + columns
        rows = self.history[places.clamp_max(len(self.history) - 1)].long()
        return rows * (columns < length[:, None]), length

    def _fused_vectors(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        """(n, d) of users, each of all that the user had, and (m, d) of items."""
        found = [self.vectors(part, item[:0])[0] for part in user.split(USERS_AT_ONCE)]
        return torch.cat(found), self.item_vectors(item)
