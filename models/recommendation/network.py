"""Users and items as vectors of their ids and texts, and heads that score pairs of them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear  # embedding: x[i] adds its gradient up in any order

from isobatch.models.recommendation.catalogue import Catalogue
from isobatch.models.recommendation.text_encoder import TextEncoder

ID_STD = 0.1
"""Standard deviation of initial id embeddings (Rendle et al. 2020)."""


class RecommenderNet(nn.Module):
    """Scores of pairs.

    vector = fusion([id; proj(text)]), and the id's alone without an encoder. Heads: `dot` u.v + b, `mlp`
    MLP([u; v]), `neumf` (He et al. 2017): a weighted product of the first halves beside an MLP of the second.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        dim: int,
        layers: tuple[int, ...],
        head: str,
        encoder: TextEncoder | None,
        user_bias: bool = False,
    ) -> None:
        super().__init__()
        self.head, self.dim = head, dim
        users, items = len(catalogue.user_text), len(catalogue.item_text)
        self.user_ids, self.item_ids = nn.Embedding(users, dim), nn.Embedding(items, dim)
        taken = (np.unique(catalogue.seen // items), np.flatnonzero(catalogue.counts))
        for table, known in zip((self.user_ids, self.item_ids), taken, strict=True):
            drawn = table.weight.data.clone() * ID_STD
            table.weight.data.zero_()[known] = drawn[known]  # the others' texts speak for them
        self.item_bias = nn.Embedding(items, 1)
        nn.init.zeros_(self.item_bias.weight)
        self.user_bias = nn.Embedding(users, 1) if user_bias else None
        """How much a user takes at all: it ranks nothing, but probabilities need it."""
        if self.user_bias is not None:
            nn.init.zeros_(self.user_bias.weight)
        for name, texts in (("user_text", catalogue.user_text), ("item_text", catalogue.item_text)):
            self.register_buffer(name, torch.from_numpy(texts.astype("int64")), persistent=False)
        for name, array in (("seen", catalogue.seen), ("counts", catalogue.counts)):
            self.register_buffer(name, torch.from_numpy(array.copy()), persistent=False)
        self.user_text: Tensor
        self.item_text: Tensor
        self.seen: Tensor
        """(n,) int64, sorted: user * items + item of every training interaction."""
        self.counts: Tensor
        """(items,) training interactions."""
        self.encoder = encoder
        self.cached = False
        """Whether the texts' vectors are taken from `table`, which passes no gradient to the encoder."""
        self.table: Tensor | None = None
        """(texts, hidden), while the encoder does not change."""
        self.deduplicate = True
        if encoder is not None:
            self.user_meta_proj = nn.Linear(encoder.hidden, dim)
            self.item_meta_proj = nn.Linear(encoder.hidden, dim)
            self.user_fusion, self.item_fusion = _fusion(dim), _fusion(dim)
        self.mlp_layers = _mlp(2 * dim if head == "mlp" else dim, layers) if head != "dot" else None
        if head == "neumf":
            self.product = nn.Linear(dim // 2, 1, bias=False)
            nn.init.ones_(self.product.weight)

    @property
    def numbers_a_score(self) -> int:
        """How many are in memory for one score at a time."""
        if self.mlp_layers is None:
            return 1
        return 2 * max(m.out_features for m in self.mlp_layers if isinstance(m, nn.Linear))

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """What --trainable names, besides the encoder."""
        found: dict[str, list[nn.Parameter]] = {"projection": [], "fusion": [], "mlp": [], "ids": []}
        kinds = {"meta_proj": "projection", "fusion": "fusion", "mlp_layers": "mlp", "product": "mlp"}
        for name, p in self.named_parameters():
            if not name.startswith("encoder."):
                first = name.partition(".")[0]
                kind = next((v for k, v in kinds.items() if k in first), "ids")
                found[kind].append(p)
        return found

    def forward(self, user: Tensor, items: list[Tensor]) -> list[Tensor]:
        """Scores of (B,) users with each of: (B, k) items of their own, or (S,) that all users share."""
        flat = torch.cat([user.new_zeros(0), *(i.reshape(-1) for i in items)])
        of_users, of_items = self.vectors(user, flat)
        of_user = 0.0 if self.user_bias is None else self.user_bias(user)
        found, start = [], 0
        for ids in items:
            vectors = of_items[start : start + ids.numel()]
            start += ids.numel()
            bias = self.item_bias(ids)[..., 0]
            shared = ids.ndim == 1
            vectors = vectors if shared else vectors.view(*ids.shape, -1)
            found.append(self.score(of_users, vectors, bias, shared) + of_user)
        return found

    def vectors(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        """(n, dim) of users and (m, dim) of items; what is named twice is computed once."""
        if not self.deduplicate:
            return self._sides(user, item)
        users, user_place = torch.unique(user, return_inverse=True)
        items, item_place = torch.unique(item, return_inverse=True)
        of_users, of_items = self._sides(users, items)
        return embedding(user_place, of_users), embedding(item_place, of_items)

    def _sides(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        by_user, by_item = self.user_ids(user), self.item_ids(item)
        if self.encoder is None:
            return by_user, by_item
        user_text, item_text = self.user_text[user], self.item_text[item]
        meaning = self._meanings(torch.cat([user_text, item_text]))
        of_users, of_items = meaning.split([len(user), len(item)])
        has_user, has_item = (t[:, None] >= 0 for t in (user_text, item_text))
        return (
            self.user_fusion(torch.cat([by_user, self.user_meta_proj(of_users) * has_user], 1)),
            self.item_fusion(torch.cat([by_item, self.item_meta_proj(of_items) * has_item], 1)),
        )

    def _meanings(self, texts: Tensor) -> Tensor:
        """(n, hidden) of numbered texts; of no text, some vector that is not used."""
        assert self.encoder is not None
        texts = texts.clamp_min(0)
        if self.table is None and not self.training:
            self.table = self.encoder.vectors()  # an evaluation wants all, and nothing changes meanwhile
        if self.table is not None:
            return self.table[texts]
        if not self.deduplicate:
            repeated: Tensor = self.encoder(texts)
            return repeated
        different, place = torch.unique(texts, return_inverse=True)
        return embedding(place, self.encoder(different))

    def train(self, mode: bool = True) -> RecommenderNet:
        """Training changes the encoder, so that the vectors of an evaluation do not outlive it."""
        if not self.cached:
            self.table = None
        super().train(mode)
        if self.encoder is not None:
            self.encoder.net.eval()
        return self

    def score(self, users: Tensor, items: Tensor, bias: Tensor, shared: bool) -> Tensor:
        """(B, k) of (B, dim) users with (B, k, dim) items, or (k, dim) shared ones."""
        if self.head == "dot":
            products = users @ items.T if shared else torch.einsum("bd,bkd->bk", users, items)
            return products + bias
        if self.head == "mlp":
            return self._deep(users, items) + bias
        half = self.dim // 2
        product = self.product(users[:, None, :half] * items[..., :half])[..., 0]
        return product + self._deep(users[:, half:], items[..., half:]) + bias

    def _deep(self, users: Tensor, items: Tensor) -> Tensor:
        """(B, k): the MLP of [u; v]. Its first layer is linear in both, so it is computed once for each user
        and item and not for each pair."""
        assert self.mlp_layers is not None
        first = cast(nn.Linear, self.mlp_layers[0])
        of_user, of_item = first.weight.split(users.shape[-1], 1)
        found = linear(users, of_user, first.bias)[:, None] + linear(items, of_item)
        found = self.mlp_layers[1:](found)
        return found[..., 0]

    def were_seen(self, user: Tensor, items: Tensor) -> Tensor:
        """(B, k) bool: whether (B,) users had these (B, k) items in training."""
        key = user[:, None] * len(self.item_text) + items
        place = torch.searchsorted(self.seen, key).clamp_max(len(self.seen) - 1)
        return self.seen[place] == key

    def seen_by(self, user: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, items) of all training interactions of (B,) users."""
        items = len(self.item_text)
        first, last = (torch.searchsorted(self.seen, (user + n) * items) for n in (0, 1))
        rows = torch.repeat_interleave(torch.arange(len(user), device=user.device), last - first)
        start = torch.cumsum(last - first, 0) - (last - first)
        place = torch.arange(len(rows), device=user.device) - start[rows] + first[rows]
        return rows, self.seen[place] % items

    @torch.no_grad()
    def all_vectors(self) -> tuple[Tensor, Tensor]:
        """(users, dim) and (items, dim)."""
        device = self.user_text.device
        users, items = (torch.arange(len(t), device=device) for t in (self.user_text, self.item_text))
        return self._sides(users, items)


def _fusion(dim: int) -> nn.Linear:
    """Begins as the sum of the two, so that the ids' scale is kept."""
    fusion = nn.Linear(2 * dim, dim)
    with torch.no_grad():
        fusion.weight.copy_(torch.cat([torch.eye(dim), torch.eye(dim)], 1))
        fusion.bias.zero_()
    return fusion


def _mlp(width: int, layers: tuple[int, ...]) -> nn.Sequential:
    parts: list[Any] = []
    for size in layers:
        parts += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*parts, nn.Linear(width, 1))
