"""Encoders whose layers have different numbers of heads and neurons, after structured pruning.

A copy of this file lies beside each pruned model, so that transformers alone opens it:
AutoModelForSequenceClassification.from_pretrained(FOLDER, trust_remote_code=True).
The sizes stand in config.json as `per_layer_config`; everything else is the family's own model.
"""

import warnings
from typing import Any, NamedTuple

from torch import nn
from transformers import (
    BertForSequenceClassification,
    DistilBertForSequenceClassification,
    RobertaForSequenceClassification,
)


class Parts(NamedTuple):
    """Where the prunable parts of a family are: the list of layers, and modules of each layer."""

    layers: str
    attention: str
    query: str
    key: str
    value: str
    output: str
    up: str
    down: str
    neurons: str = "intermediate_size"
    """The config's name for a layer's neurons."""


_BERT = ("attention.self", "attention.self.query", "attention.self.key", "attention.self.value")
_BERT_REST = ("attention.output.dense", "intermediate.dense", "output.dense")
_DISTIL = ("attention", "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin")
PARTS = {
    "bert": Parts("bert.encoder.layer", *_BERT, *_BERT_REST),
    "roberta": Parts("roberta.encoder.layer", *_BERT, *_BERT_REST),
    "distilbert": Parts("distilbert.transformer.layer", *_DISTIL, "ffn.lin1", "ffn.lin2", "hidden_dim"),
}


def resize(layer: Any, parts: Parts, width: int, neurons: int) -> None:
    """Give a layer attention of this inner width and this many neurons; new weights where it changes."""
    hidden = layer.get_submodule(parts.output).out_features
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # all heads may be gone
        _resize(layer, parts, hidden, width, neurons)


def _resize(layer: Any, parts: Parts, hidden: int, width: int, neurons: int) -> None:
    if layer.get_submodule(parts.query).out_features != width:
        for name in (parts.query, parts.key, parts.value):
            layer.set_submodule(name, nn.Linear(hidden, width))
        layer.set_submodule(parts.output, nn.Linear(width, hidden))
    if layer.get_submodule(parts.up).out_features != neurons:
        layer.set_submodule(parts.up, nn.Linear(hidden, neurons))
        layer.set_submodule(parts.down, nn.Linear(neurons, hidden))


def _resize_all(model: Any, config: Any, sizes: dict[Any, dict[str, int]]) -> None:
    parts = PARTS[config.model_type]
    head = config.hidden_size // config.num_attention_heads
    for number, layer in enumerate(model.get_submodule(parts.layers)):
        own = sizes[number] if number in sizes else sizes.get(str(number), {})
        query, up = layer.get_submodule(parts.query), layer.get_submodule(parts.up)
        heads = own.get("num_attention_heads", query.out_features // head)
        resize(layer, parts, heads * head, own.get(parts.neurons, up.out_features))


class _Pruned:
    """Builds the family's model, then gives each layer its own size."""

    def __init__(self, config: Any) -> None:
        config.allow_global_per_layer_attribute_access = True
        super().__init__(config)  # type: ignore[call-arg]
        _resize_all(self, config, config.to_dict().get("per_layer_config") or {})


class PrunedBertForSequenceClassification(_Pruned, BertForSequenceClassification):
    """BERT, MiniLM and other models of that shape."""


class PrunedRobertaForSequenceClassification(_Pruned, RobertaForSequenceClassification):
    """RoBERTa."""


class PrunedDistilBertForSequenceClassification(_Pruned, DistilBertForSequenceClassification):
    """DistilBERT."""


CLASSES = {
    "bert": PrunedBertForSequenceClassification,
    "roberta": PrunedRobertaForSequenceClassification,
    "distilbert": PrunedDistilBertForSequenceClassification,
}
