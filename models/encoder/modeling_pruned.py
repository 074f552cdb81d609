"""Pruned encoders: BERT, RoBERTa and DistilBERT whose layers have different numbers of heads and neurons.

A copy of this file lies beside each pruned model, so that transformers alone can open it:
AutoModelForSequenceClassification.from_pretrained(FOLDER, trust_remote_code=True). The sizes are in
config.json as `per_layer_config`; everything else is the family's own model.
"""

import warnings
from typing import Any, NamedTuple

from torch import nn
from transformers import (
    BertForSequenceClassification,
    DistilBertForSequenceClassification,
    RobertaForSequenceClassification,
)


class ModuleNames(NamedTuple):
    """Where a model family has its list of layers, and each layer its prunable modules."""

    layers: str
    attention: str
    query: str
    key: str
    value: str
    output: str
    up: str
    down: str
    neurons: str = "intermediate_size"
    """The config's name for the number of neurons of a layer."""


_BERT_ATTENTION = ("attention.self", "attention.self.query", "attention.self.key", "attention.self.value")
_BERT_DENSE = ("attention.output.dense", "intermediate.dense", "output.dense")
_DISTILBERT = ("attention", "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin")
MODULE_NAMES = {
    "bert": ModuleNames("bert.encoder.layer", *_BERT_ATTENTION, *_BERT_DENSE),
    "roberta": ModuleNames("roberta.encoder.layer", *_BERT_ATTENTION, *_BERT_DENSE),
    "distilbert": ModuleNames(
        "distilbert.transformer.layer", *_DISTILBERT, "ffn.lin1", "ffn.lin2", "hidden_dim"
    ),
}


def resize(layer: Any, names: ModuleNames, attention_width: int, neurons: int) -> None:
    """Give a layer this width of attention (heads x head size) and this many neurons.

    Modules whose size changes get new weights.
    """
    hidden = layer.get_submodule(names.output).out_features
    if layer.get_submodule(names.query).out_features != attention_width:
        for part in (names.query, names.key, names.value):
            layer.set_submodule(part, nn.Linear(hidden, attention_width))
        layer.set_submodule(names.output, nn.Linear(attention_width, hidden))
    if layer.get_submodule(names.up).out_features != neurons:
        layer.set_submodule(names.up, nn.Linear(hidden, neurons))
        layer.set_submodule(names.down, nn.Linear(neurons, hidden))


def _resize_all(model: Any, config: Any, sizes: dict[Any, dict[str, int]]) -> None:
    names = MODULE_NAMES[config.model_type]
    head_size = config.hidden_size // config.num_attention_heads
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # all heads may be gone
        for number, layer in enumerate(model.get_submodule(names.layers)):
            own = sizes[number] if number in sizes else sizes.get(str(number), {})
            query, up = layer.get_submodule(names.query), layer.get_submodule(names.up)
            heads = own.get("num_attention_heads", query.out_features // head_size)
            resize(layer, names, heads * head_size, own.get(names.neurons, up.out_features))


class _PerLayerSizes:
    """Mixin that builds the family's model and then gives each layer the size in `per_layer_config`."""

    def __init__(self, config: Any) -> None:
        config.allow_global_per_layer_attribute_access = True
        super().__init__(config)  # type: ignore[call-arg]
        _resize_all(self, config, config.to_dict().get("per_layer_config") or {})


class PrunedBertForSequenceClassification(_PerLayerSizes, BertForSequenceClassification):
    """BERT, MiniLM and other models of that shape."""


class PrunedRobertaForSequenceClassification(_PerLayerSizes, RobertaForSequenceClassification):
    """RoBERTa."""


class PrunedDistilBertForSequenceClassification(_PerLayerSizes, DistilBertForSequenceClassification):
    """DistilBERT."""


CLASSES = {
    "bert": PrunedBertForSequenceClassification,
    "roberta": PrunedRobertaForSequenceClassification,
    "distilbert": PrunedDistilBertForSequenceClassification,
}
