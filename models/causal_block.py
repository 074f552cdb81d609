"""A layer of a small transformer that reads from left to right: of recommenders, and of sequence VAEs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDENING = 4
"""The MLP of a block is so many times as wide as a token's state."""


class CausalBlock(nn.Module):
    """A pre-norm layer of a transformer: tokens attend to themselves and those before. B rows, T tokens."""

    def __init__(
        self, dim: int, heads: int, activation: Callable[[Tensor], Tensor], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.activation = heads, activation
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, WIDENING * dim), nn.Linear(WIDENING * dim, dim)
        kind = nn.Dropout if dropout else nn.Identity
        self.attention_dropout, self.mlp_dropout = kind(dropout), kind(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        rows, tokens, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, tokens, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_dropout(self.out(seen.transpose(1, 2).reshape(rows, tokens, dim)))
        return x + self.mlp_dropout(self.down(self.activation(self.up(self.mlp_norm(x)))))
