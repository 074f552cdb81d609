"""BERT-like encoders: their sizes, the prunable modules of their layers, loading and saving pruned ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.package import table_beside
from isobatch.models import hub
from isobatch.models.activations import fuse_gelu
from isobatch.models.encoder.last_layer import compute_first_alone

if TYPE_CHECKING:
    from torch import nn


class Family(NamedTuple):
    """What sets a model type apart whose heads and neurons can be pruned (see modeling_pruned.py)."""

    sizes: Sequence[int]
    """What a config leaves out."""
    dense: str
    """The linear layer between the encoder and the output layer of the classification head, if it has one."""
    keys: Sequence[str] = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    """Config keys of the first of EncoderSizes' fields."""
    ups: int = 1


_TABLES = table_beside(__file__, "families")
FAMILIES = {kind: Family(**values) for kind, values in _TABLES["family"].items()}
"""By model type."""
UNTRACEABLE = _TABLES["untraceable"].split()
"""Types of which no ONNX file is made."""
SEQUENCE, TOKENS = "SequenceClassification", "TokenClassification"
"""What transformers' classes end with that answer a text, and each of its tokens."""


class EncoderSizes(NamedTuple):
    """The sizes of an unpruned encoder: layers, hidden width, heads and neurons of a layer."""

    layers: int
    hidden: int
    heads: int
    neurons: int
    ups: int = 1
    """Rows of the up projection for each neuron: 2 of a gated linear unit."""


def sizes_from_config(config: Mapping[str, Any], name: str) -> EncoderSizes:
    """Sizes from a config.json. Raises UserError for a model type that cannot be pruned."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"--model {name}: is a {model_type}; heads and neurons are known of {known}; it gets smaller by"
            " --task classifier and then `export RUN --to onnx-dynamic,onnx-static`"
        )
    family = FAMILIES[model_type]
    found = (int(config.get(*pair)) for pair in zip(family.keys, family.sizes, strict=True))
    return EncoderSizes(*found)._replace(ups=family.ups)


def check_type(name: str, config: Mapping[str, Any]) -> None:
    """Raise UserError unless transformers has a classifier of this model type, and ONNX can hold it."""
    model_type = str(config.get("model_type"))
    if model_type in FAMILIES:  # known without an import of a second
        return
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if model_type not in known or model_type in UNTRACEABLE:
        why = "no ONNX file can be made" if model_type in known else "transformers has no classifier"
        raise UserError(
            f"--model {name}: {why} of type {model_type}: take an encoder such as BERT, RoBERTa, ELECTRA or"
            " ModernBERT, or a decoder such as GPT-2"
        )


def is_pruned(config: Mapping[str, Any]) -> bool:
    """Whether this config.json is of a model from which heads or neurons were removed."""
    return bool(config.get("per_layer_config") or config.get("pruned_heads"))


class EncoderLayer:
    """One layer of a model: `attention`, `output`, `up` and `down` give its modules."""

    def __init__(self, model: nn.Module, prefix: str, names: Any, head_size: int) -> None:
        self.model, self.prefix, self.names, self.head_size = model, prefix, names, head_size

    def __getattr__(self, part: str) -> Any:
        return self.model.get_submodule(self.name(part))

    def name(self, part: str) -> str:
        """Full name of one of these modules. Raises AttributeError for another `part`."""
        return f"{self.prefix}.{getattr(self.names, part)}"

    def producers(self, consumer: str) -> list[tuple[str, Any, int]]:
        """(full name, module, groups of rows) of what produces the inputs of `output` or `down`.

        A module with the rows of query, key and value has 3 groups, of a gated linear unit 2.
        """
        width, names = getattr(self, consumer).in_features, self.names.producers(consumer)
        found = [(name := f"{self.prefix}.{part}", self.model.get_submodule(name)) for part in names]
        return [(name, one, one.out_features // width if width else 1) for name, one in found]

    def replace(self, part: str, module: nn.Module) -> None:
        """Put another module in the place of this one."""
        self.model.set_submodule(self.name(part), module)


def layers(model: Any) -> list[EncoderLayer]:
    """The layers of a classifier of one of the FAMILIES, in order."""
    from isobatch.models.encoder.modeling_pruned import MODULE_NAMES

    names, config = MODULE_NAMES[model.config.model_type], model.config
    config.allow_global_per_layer_attribute_access = True
    # Pruning removes whole heads, so their width is the unpruned model's.
    head = int(config.hidden_size // config.num_attention_heads)
    count = len(model.get_submodule(names.layers))
    return [EncoderLayer(model, f"{names.layers}.{number}", names, head) for number in range(count)]


def pruned_inputs(model: Any) -> list[tuple[Any, int]]:
    """(linear layer, how many of its inputs go together) of all layers whose inputs are pruned."""
    return [pair for one in layers(model) for pair in ((one.output, one.head_size), (one.down, 1))]


def row_groups(model: Any) -> dict[str, int]:
    """Groups of rows of parameters, by name, whose rows are pruned in each group alike."""
    found = layers(model) if model.config.model_type in FAMILIES else []
    producers = (one for layer in found for part in ("output", "down") for one in layer.producers(part))
    return {f"{name}.{kind}": groups for name, _, groups in producers for kind in ("weight", "bias")}


def heads_and_neurons(model: Any) -> list[tuple[int, int]]:
    """(heads, neurons) of each layer, as they are now."""
    return [(one.output.in_features // one.head_size, one.down.in_features) for one in layers(model)]


def write_layer_sizes(model: Any, folder: Path) -> None:
    """Write a pruned model's layer sizes into its saved config.json, and copy modeling_pruned.py beside it.

    An unpruned model's folder is left as it is.
    """
    from isobatch.models.encoder import modeling_pruned

    file = folder / "config.json"
    config = json.loads(file.read_text())
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        return
    unpruned = sizes_from_config(config, str(folder))
    neurons = modeling_pruned.MODULE_NAMES[model_type].neurons
    changed_layers = {
        str(number): {"num_attention_heads": heads, neurons: width}
        for number, (heads, width) in enumerate(heads_and_neurons(model))
        if (heads, width) != (unpruned.heads, unpruned.neurons)
    }
    if not changed_layers:
        return
    architecture = modeling_pruned.PREFIX + type(model).__name__.removeprefix(modeling_pruned.PREFIX)
    class_path = f"{Path(modeling_pruned.__file__).stem}.{architecture}"
    config.pop("allow_global_per_layer_attribute_access", None)  # what ran before it may have set it
    config |= {"per_layer_config": changed_layers, "architectures": [architecture]}
    config["auto_map"] = {f"AutoModelFor{head_of(config)}": class_path}
    file.write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(modeling_pruned.__file__, folder)


def head_of(config: Mapping[str, Any]) -> str:
    """What transformers' classes for the labels of a saved classifier end with, after `For`."""
    return TOKENS if (config.get("architectures") or [""])[0].endswith(TOKENS) else SEQUENCE


def new_classifier(config: Any, head: str | None = None) -> Any:
    """A classifier of this config with random weights."""
    kind = classifier_class(config, head)
    return kind(config) if is_pruned(config.to_dict()) else kind.from_config(config)


def classifier_class(config: Any, head: str | None = None) -> Any:
    """The class that builds a classifier of this config.

    `head`: SEQUENCE for an answer to a text, TOKENS for one to each token; by default that of a saved one.
    """
    import transformers

    from isobatch.models.encoder import modeling_pruned

    fuse_gelu()
    values = config.to_dict()
    head = head or head_of(values)
    if not is_pruned(values):
        return getattr(transformers, f"AutoModelFor{head}")
    return getattr(modeling_pruned, values["auto_map"][f"AutoModelFor{head}"].rpartition(".")[2])


def open_classifier(path: str) -> Any:
    """A saved classifier in fp32 and evaluation mode, pruned or not. Raises UserError where it is damaged."""
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, no_code = hub.fetch_weights(path, None), hub.remote_code_kwargs(False)
    with hub.reading(path):
        config = AutoConfig.from_pretrained(folder, **no_code)
        kind = classifier_class(config)
        model = kind.from_pretrained(folder, config=config, dtype=torch.float32, **no_code)
        compute_first_alone(model)
        return model.eval()
