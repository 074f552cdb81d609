"""The recommender network: vectors of users and items from ids and texts, and heads that score pairs.

Letters: B users, k items of a user, S items shared by all users, n users or items, d = dim.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear  # x[i] would add up gradients in any order

from isobatch.models.recommendation.catalogue import Catalogue
from isobatch.models.recommendation.text_encoder import TextEncoder

PARTS = {
    **dict.fromkeys(("user_meta_proj", "item_meta_proj"), "projection"),
    **dict.fromkeys(("user_fusion", "item_fusion"), "fusion"),
    **dict.fromkeys(("mlp_layers", "product", "sequence"), "mlp"),
    "encoder": "encoder",
}
"""Module -> its name for --trainable, but for the encoder; all others are `ids`."""
ID_INIT_STD = 0.1
"""Standard deviation of the initial id embeddings (Rendle et al. 2020)."""


class RecommenderNet(nn.Module):
    """Scores of user-item pairs.

    vector = fusion([id; proj(text)]), or the id's alone without an encoder. Heads: `dot` u.v + b, `mlp`
    MLP([u; v]), `neumf` (He et al. 2017): a weighted product of the first halves beside an MLP of the second.
    """

    has_user_vectors = True
    """Whether each user has a vector of their own."""

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
        trained_users = np.unique(catalogue.seen // items)
        self.user_ids = _ids(users, dim, trained_users) if self.has_user_vectors else None
        self.item_ids = _ids(items, dim, np.flatnonzero(catalogue.counts))
        self.item_bias = nn.Embedding(items, 1)
        nn.init.zeros_(self.item_bias.weight)
        self.user_bias = nn.Embedding(users, 1) if user_bias else None
        """How many items a user takes at all: it changes no ranking, but probabilities need it."""
        if self.user_bias is not None:
            nn.init.zeros_(self.user_bias.weight)
        self.user_text = _fixed(catalogue.user_text.astype("int64"))
        self.item_text = _fixed(catalogue.item_text.astype("int64"))
        self.seen = _fixed(catalogue.seen)
        """(n,) int64, sorted: user * items + item of every training interaction."""
        self.history, self.starts = _fixed(catalogue.history), _fixed(catalogue.starts)
        self.trained, self.recent = _fixed(catalogue.trained), _fixed(catalogue.recent)
        self.counts = _fixed(catalogue.counts)
        """(items,) number of training interactions."""
        self.repeats = False
        """Whether what a user had may come again, and stays among the candidates of a ranking."""
        self.is_trained = True
        """Whether it ranks at all: with --head none the classics alone do."""
        self.encoder = encoder
        self.text_vectors_fixed = False
        """Whether training uses `text_vectors` too, so that the encoder gets no gradient."""
        self.text_vectors: Tensor | None = None
        """(texts, hidden) vectors of all texts while the encoder does not change, else None."""
        if encoder is not None:
            sides = ("user", "item") if self.has_user_vectors else ("item",)
            made = {f"{side}_meta_proj": nn.Linear(encoder.hidden, dim) for side in sides}
            made |= {f"{side}_fusion": _fusion(dim) for side in sides}
            for name, module in made.items():
                setattr(self, name, module)
        self.mlp_layers = _mlp(2 * dim if head == "mlp" else dim, layers) if head != "dot" else None
        if head == "neumf":
            self.product = nn.Linear(dim // 2, 1, bias=False)
            nn.init.ones_(self.product.weight)

    @property
    def floats_per_score(self) -> int:
        """Most numbers that are in memory for one score."""
        if self.mlp_layers is None:
            return 1
        return 2 * max(m.out_features for m in self.mlp_layers if isinstance(m, nn.Linear))

    def forward(self, user: Any, items: list[Tensor], inputs: Tensor | None = None) -> list[Tensor]:
        """Scores of (B,) users with each of `items`: (B, k) of their own, or (S,) shared by all users.

        `user`: see `vectors`. `inputs` (B,): how many of each user's interactions are known, which
        vectors of ids do not depend on.
        """
        flat = torch.cat([i.reshape(-1) for i in items])
        user_vectors, item_vectors = self.vectors(user, flat, inputs)
        user_bias = 0.0 if self.user_bias is None else self.user_bias(user)
        found, start = [], 0
        for ids in items:
            vectors = item_vectors[start : start + ids.numel()]
            start += ids.numel()
            bias = self.item_bias(ids)[..., 0]
            shared = ids.ndim == 1
            vectors = vectors if shared else vectors.view(*ids.shape, -1)
            found.append(self.score(user_vectors, vectors, bias, shared) + user_bias)
        return found

    def vectors(self, user: Any, item: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(n, d) of users and (m, d) of items; a repeated id is computed once. `inputs`: see `forward`."""
        users, user_position = torch.unique(user, return_inverse=True)
        items, item_position = torch.unique(item, return_inverse=True)
        user_vectors, item_vectors = self._fused_vectors(users, items)
        return embedding(user_position, user_vectors), embedding(item_position, item_vectors)

    def _fused_vectors(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        """(n, d) of users and (m, d) of items: id and text fused."""
        assert self.user_ids is not None
        user_id_vectors, item_id_vectors = self.user_ids(user), self.item_ids(item)
        if self.encoder is None:
            return user_id_vectors, item_id_vectors
        user_text, item_text = self.user_text[user], self.item_text[item]
        text_vectors = self._lookup_text_vectors(torch.cat([user_text, item_text]))
        user_text_vectors, item_text_vectors = text_vectors.split([len(user), len(item)])
        users = self._fused("user", user_id_vectors, user_text, user_text_vectors)
        return users, self._fused("item", item_id_vectors, item_text, item_text_vectors)

    def _fused(self, side: str, id_vectors: Tensor, texts: Tensor, text_vectors: Tensor) -> Tensor:
        """(n, d) of users or items from (n, d) of ids and (n, hidden) of texts; text -1 is none."""
        known = getattr(self, f"{side}_meta_proj")(text_vectors) * (texts[:, None] >= 0)
        return getattr(self, f"{side}_fusion")(torch.cat([id_vectors, known], 1))

    def _lookup_text_vectors(self, texts: Tensor) -> Tensor:
        """(n, hidden) of texts by number; for -1, no text, some vector that the caller masks."""
        assert self.encoder is not None
        texts = texts.clamp_min(0)
        if self.text_vectors is None and not self.training:
            self.text_vectors = self.encoder.vectors()  # constant until the next training step
        if self.text_vectors is not None:
            return self.text_vectors[texts]
        unique_texts, position = torch.unique(texts, return_inverse=True)
        return embedding(position, self.encoder(unique_texts))

    def train(self, mode: bool = True) -> RecommenderNet:
        """Training changes the encoder, so text vectors that were computed for an evaluation are dropped."""
        if not self.text_vectors_fixed:
            self.text_vectors = None
        super().train(mode)
        if self.encoder is not None:
            self.encoder.net.eval()
        return self

    def score(self, users: Tensor, items: Tensor, bias: Tensor, shared: bool) -> Tensor:
        """(B, k) of (B, d) users with (B, k, d) items; or (B, S) with (S, d) shared ones."""
        if self.head == "dot":
            if shared:
                return torch.addmm(bias, users, items.T)
            return torch.einsum("bd,bkd->bk", users, items) + bias
        if self.head == "mlp":
            return self._mlp_scores(users, items) + bias
        half = self.dim // 2
        product = self.product(users[:, None, :half] * items[..., :half])[..., 0]
        return product + self._mlp_scores(users[:, half:], items[..., half:]) + bias

    def _mlp_scores(self, users: Tensor, items: Tensor) -> Tensor:
        """(B, k): the MLP of [u; v].

        Its first layer is linear in both, so it is computed once per user and per item and not per pair.
        """
        assert self.mlp_layers is not None
        first = cast("nn.Linear", self.mlp_layers[0])
        user_part, item_part = first.weight.split(users.shape[-1], 1)
        found = linear(users, user_part, first.bias)[:, None] + linear(items, item_part)
        return self.mlp_layers[1:](found)[..., 0]

    def seen_in_training(self, user: Tensor, items: Tensor) -> Tensor:
        """(B, k) bool: whether (B,) users had these (B, k) items in training."""
        key = user[:, None] * len(self.item_text) + items
        return self.seen[torch.searchsorted(self.seen, key).clamp_max(len(self.seen) - 1)] == key

    @torch.no_grad()
    def all_vectors(self) -> tuple[Tensor, Tensor]:
        """(users, d) and (items, d)."""
        device = self.user_text.device
        users, items = (torch.arange(len(t), device=device) for t in (self.user_text, self.item_text))
        return self._fused_vectors(users, items)


def spans(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(row, position) of each of `counts` (B,) neighbours from the position `first` (B,) on, row by row."""
    rows = torch.repeat_interleave(torch.arange(len(first), device=first.device), counts)
    start = torch.cumsum(counts, 0) - counts
    return rows, torch.arange(len(rows), device=first.device) - start[rows] + first[rows]


def _fixed(array: np.ndarray) -> nn.Buffer:
    """What the data says: on the model's device, and not in checkpoints."""
    return nn.Buffer(torch.from_numpy(array), persistent=False)


def _ids(count: int, dim: int, trained: np.ndarray) -> nn.Embedding:
    """Vectors of ids; those unseen in training start at zero, so their score comes from text alone."""
    table = nn.Embedding(count, dim)
    initial = table.weight.data.clone() * ID_INIT_STD
    table.weight.data.zero_()[trained] = initial[trained]
    return table


def _fusion(dim: int) -> nn.Linear:
    """Starts as the sum of its two inputs, so that the scale of the ids is kept."""
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
