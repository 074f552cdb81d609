"""The last layer of an encoder for the first token alone, where a classification head reads only that one.

Its keys and values are those of all tokens; query, output and feed-forward are the first token's, which saves
10/12 of the layer's products for each other token. Logits and gradients are the same; keyed dropout draws the
same for a token wherever its row ends. The layer's states are (B, 1, H) in place of (B, T, H).
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from isobatch.models.attention_functions import known_attention

if TYPE_CHECKING:
    from torch import Tensor


AFTER = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), "attention.output"),
    "distilbert": "sa_layer_norm",
}
"""Model type -> the module of a layer that gets the attention's output with the states that the layer got. Of
these types transformers' sequence classifiers read the first token alone."""


def compute_first_alone(model: Any) -> bool:
    """Let a classifier's last layer compute its first token alone, in place; whether that is all it reads.

    Other models are left alone. Once for a model: weights and modules in the layer may change afterwards.
    """
    config, kind = model.config, model.config.model_type
    reads_first = type(model).__name__.endswith("ForSequenceClassification")
    if kind not in AFTER or not reads_first or getattr(config, "is_decoder", False):
        return False
    from isobatch.models.encoder.modeling_pruned import MODULE_NAMES

    names = MODULE_NAMES[kind]
    layer = model.get_submodule(names.layers)[-1]
    attention = layer.get_submodule(names.attention)
    attention.projections = [name.rpartition(".")[2] for name in names.qkv]
    attention.forward = MethodType(_attend, attention)
    layer.get_submodule(AFTER[kind]).register_forward_pre_hook(_take_first)
    return True


def _take_first(_module: Any, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x[:, :1] for x in states)


def _attend(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: None = None,  # noqa: ARG001  an encoder has none
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """As the family's own attention, from states (B, T, H) to the first token's (B, 1, H)."""
    read = hidden_states[:, :1], hidden_states, hidden_states
    projected = [getattr(self, name)(x) for name, x in zip(self.projections, read, strict=True)]
    heads = (x.view(*x.shape[:2], -1, self.attention_head_size).transpose(1, 2) for x in projected)
    if attention_mask is not None and attention_mask.ndim == 4:
        attention_mask = attention_mask[:, :, :1]
    dropout = self.dropout.p if self.training else 0.0
    attention, _ = known_attention(self.config._attn_implementation)  # noqa: SLF001  no public name
    found, weights = attention(self, *heads, attention_mask, dropout=dropout, scaling=self.scaling, **named)
    output = found.flatten(2)
    return (self.out_lin(output) if hasattr(self, "out_lin") else output), weights  # DistilBERT's
