"""The prunable parts of encoders, and models whose layers have different sizes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.models import hub

if TYPE_CHECKING:
    from torch import nn

FAMILIES = ("bert", "roberta", "distilbert")
"""Model types with a pruning map (models/encoder/modeling_pruned.py)."""
SIZES = {
    "bert": ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    "roberta": ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    "distilbert": ("n_layers", "dim", "n_heads", "hidden_dim"),
}
DEFAULTS = {"bert": (12, 768, 12, 3072), "roberta": (12, 768, 12, 3072), "distilbert": (6, 768, 12, 3072)}


class Sizes(NamedTuple):
    """An unpruned encoder."""

    layers: int
    hidden: int
    heads: int
    neurons: int

    @property
    def head_weights(self) -> int:
        """Weights of one head: its rows of query, key and value, its columns of the output."""
        return 4 * self.hidden * (self.hidden // self.heads)

    @property
    def neuron_weights(self) -> int:
        return 2 * self.hidden

    @property
    def weights(self) -> int:
        """Weights of all heads and neurons."""
        return self.layers * (self.heads * self.head_weights + self.neurons * self.neuron_weights)


def sizes(config: Mapping[str, Any], name: str) -> Sizes:
    """From a config.json. Raises UserError for families without a pruning map."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UserError(f"--model {name}: is a {kind}; heads and neurons are known of {', '.join(FAMILIES)}")
    found = (config.get(k, default) for k, default in zip(SIZES[kind], DEFAULTS[kind], strict=True))
    return Sizes(*map(int, found))


def is_pruned(config: Mapping[str, Any]) -> bool:
    return bool(config.get("per_layer_config") or config.get("pruned_heads"))


class Layer:
    """One layer of a model: its parts, and their full names."""

    def __init__(self, model: nn.Module, prefix: str, parts: Any) -> None:
        self.model, self.prefix, self.parts = model, prefix, parts

    def __getattr__(self, part: str) -> Any:
        return self.model.get_submodule(self.name(part))

    def name(self, part: str) -> str:
        """Full name of `query`, `key`, `value`, `output`, `up`, `down` or `attention`."""
        if part not in self.parts._fields:
            raise AttributeError(part)
        return f"{self.prefix}.{getattr(self.parts, part)}"

    def put(self, part: str, module: nn.Module) -> None:
        self.model.set_submodule(self.name(part), module)


def layers(model: Any) -> list[Layer]:
    """The layers of a classifier of one of the families, in order."""
    from isobatch.models.encoder.modeling_pruned import PARTS

    parts = PARTS[model.config.model_type]
    count = len(model.get_submodule(parts.layers))
    return [Layer(model, f"{parts.layers}.{number}", parts) for number in range(count)]


INNER_HEADS = {"bert": "bert.pooler.dense", "roberta": "classifier.dense", "distilbert": "pre_classifier"}
OUTER_HEADS = {"bert": "classifier", "roberta": "classifier.out_proj", "distilbert": "classifier"}


def inner_head(model: Any) -> str:
    """Name of the linear layer between the encoder and the logits' own."""
    return INNER_HEADS[model.config.model_type]


def head_size(config: Any) -> int:
    """Width of a head: pruning takes whole heads, so it is the unpruned model's."""
    config.allow_global_per_layer_attribute_access = True
    return int(config.hidden_size // config.num_attention_heads)


def heads_and_neurons(model: Any) -> list[tuple[int, int]]:
    """What each layer has."""
    size = head_size(model.config)
    return [(layer.query.out_features // size, layer.up.out_features) for layer in layers(model)]


def macs(model: Any, tokens: int) -> int:
    """Multiply-adds of a text's forward: linear layers per token, attention, and the head once."""
    size, hidden = head_size(model.config), model.config.hidden_size
    total = hidden * hidden + hidden * model.config.num_labels
    for heads, neurons in heads_and_neurons(model):
        width = heads * size
        total += tokens * (4 * hidden * width + 2 * hidden * neurons) + 2 * tokens * tokens * width
    return int(total)


def describe_sizes(model: Any, folder: Path) -> None:
    """Write each layer's sizes into a saved model's config.json, and the file that reads them beside it."""
    import json

    from isobatch.models.encoder import modeling_pruned

    file = folder / "config.json"
    config = json.loads(file.read_text())
    kind = config["model_type"]
    if kind not in FAMILIES:
        return
    whole, neurons = sizes(config, str(folder)), modeling_pruned.PARTS[kind].neurons
    own = {
        str(number): {"num_attention_heads": heads, neurons: width}
        for number, (heads, width) in enumerate(heads_and_neurons(model))
        if (heads, width) != (whole.heads, whole.neurons)
    }
    if not own:
        return
    architecture = modeling_pruned.CLASSES[kind].__name__
    place = f"{Path(modeling_pruned.__file__).stem}.{architecture}"
    config |= {
        "per_layer_config": own,
        "architectures": [architecture],
        "auto_map": {"AutoModelForSequenceClassification": place},
    }
    file.write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(modeling_pruned.__file__, folder)


def unloaded(config: Any) -> Any:
    """A classifier of this configuration with new weights."""
    if is_pruned(config.to_dict()):
        return class_for(config)(config)
    return class_for(config).from_config(config)


def class_for(config: Any) -> Any:
    """The class that builds a classifier of this configuration."""
    from transformers import AutoModelForSequenceClassification

    from isobatch.models.encoder.modeling_pruned import CLASSES

    return CLASSES[config.model_type] if is_pruned(config.to_dict()) else AutoModelForSequenceClassification


def open_classifier(place: str) -> Any:
    """A saved classifier in fp32, pruned or not."""
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = hub.fetch_weights(place, None)
    config = AutoConfig.from_pretrained(where)
    return class_for(config).from_pretrained(where, config=config, dtype=torch.float32).eval()
