"""Pruned encoders, whose layers have different numbers of heads and neurons.

A copy of this file lies beside each pruned model, so that transformers alone can open it, as with
AutoModelForSequenceClassification.from_pretrained(FOLDER, trust_remote_code=True). The sizes are in
config.json as `per_layer_config`; everything else is the family's own model. Each of transformers' classes of
these families has a pruned one here: that of BertForTokenClassification is PrunedBertForTokenClassification.
"""

import warnings
from typing import Any, NamedTuple

import transformers
from torch import nn


class ModuleNames(NamedTuple):
    """Where a model family has its list of layers, and each layer its prunable modules."""

    layers: str
    attention: str
    qkv: tuple[str, ...]
    """The linear layers of query, key and value; or one with the rows of all three."""
    output: str
    up: str
    down: str
    neurons: str = "intermediate_size"
    """The config's name for the number of neurons of a layer."""

    def producers(self, consumer: str) -> tuple[str, ...]:
        """The linear layers that produce what `output` or `down` reads."""
        return (self.up,) if consumer == "down" else self.qkv


_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
_BERT = ("attention.self", _QKV, "attention.output.dense", "intermediate.dense", "output.dense")
_ROBERTA = ModuleNames("roberta.encoder.layer", *_BERT)
_DISTILBERT_QKV = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
_DISTILBERT = ("attention", _DISTILBERT_QKV, "attention.out_lin", "ffn.lin1", "ffn.lin2")
MODULE_NAMES = {
    "bert": ModuleNames("bert.encoder.layer", *_BERT),
    "electra": ModuleNames("electra.encoder.layer", *_BERT),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": ModuleNames("distilbert.transformer.layer", *_DISTILBERT, neurons="hidden_dim"),
    "modernbert": ModuleNames("model.layers", "attn", ("attn.Wqkv",), "attn.Wo", "mlp.Wi", "mlp.Wo"),
}
"""By model type."""


def _resize(layer: Any, names: ModuleNames, consumer: str, width: int) -> None:
    """Give the linear layers on both sides of what `consumer` reads this width.

    Those whose size changes get new weights.
    """
    old = layer.get_submodule(getattr(names, consumer))
    if old.in_features == width:
        return
    for name in names.producers(consumer):
        linear = layer.get_submodule(name)
        rows = linear.out_features // old.in_features * width  # several for each where it makes several
        layer.set_submodule(name, nn.Linear(linear.in_features, rows, bias=linear.bias is not None))
    smaller = nn.Linear(width, old.out_features, bias=old.bias is not None)
    layer.set_submodule(getattr(names, consumer), smaller)


class _PerLayerSizes:
    """Mixin that builds the family's model and then gives each layer the size in `per_layer_config`."""

    def __init__(self, config: Any) -> None:
        config.allow_global_per_layer_attribute_access = True
        super().__init__(config)  # type: ignore[call-arg]
        sizes = {int(number): own for number, own in (config.to_dict().get("per_layer_config") or {}).items()}
        names, head_size = MODULE_NAMES[config.model_type], config.hidden_size // config.num_attention_heads
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # all heads may be gone
            for number, own in sizes.items():
                layer = self.get_submodule(names.layers)[number]  # type: ignore[attr-defined]
                if "num_attention_heads" in own:
                    _resize(layer, names, "output", own["num_attention_heads"] * head_size)
                if names.neurons in own:
                    _resize(layer, names, "down", own[names.neurons])


PREFIX = "Pruned"


def __getattr__(name: str) -> Any:
    """The pruned class of this name."""
    if not name.startswith(PREFIX):
        raise AttributeError(name)
    parents = (_PerLayerSizes, getattr(transformers, name.removeprefix(PREFIX)))
    globals()[name] = found = type(name, parents, {"__module__": __name__})
    return found
