"""Saving a trained transformers model as a folder that AutoModel and AutoTokenizer open."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.core.facts import Facts

POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Model types whose position ids start after the padding id."""
SHARD_SIZE = "5GB"
SPECIAL_TOKEN_ROLES = ("eos", "bos", "pad", "unk")


def save(
    model: Any, facts: Facts, folder: Path, weights: Mapping[str, Tensor] | None = None, whole: bool = True
) -> None:
    """Write model.safetensors (of `weights` if given), config.json and the prepared data's tokenizer.

    Weights that are not to be `whole` are in files of 5 GB.
    """
    from safetensors.torch import save_file, save_model

    # save_pretrained imports deepspeed (2 s and a warning) only to see that nothing is sharded.
    file, metadata = str(folder / "model.safetensors"), {"format": "pt"}
    if not whole:
        from huggingface_hub import save_torch_model

        save_torch_model(model, folder, max_shard_size=SHARD_SIZE)
    elif weights is None:
        save_model(model, file, metadata=metadata)
    else:
        save_file(dict(weights), file, metadata=metadata)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if getattr(model, "_auto_class", None):  # a model with custom code: save the code too
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder)
    save_tokenizer(model.config.to_dict(), facts, folder)


def save_tokenizer(config: Mapping[str, Any], facts: Facts, folder: Path) -> None:
    """Write the prepared data's tokenizer and chat template for a model with this config."""
    from transformers import PreTrainedTokenizerFast

    prepared = load_tokenizer(facts)
    special = {f"{role}_token": facts.extra.get(role) for role in SPECIAL_TOKEN_ROLES}
    template = facts.extra.get("template") or {}
    names = {**template.get("tokens", {})}
    names |= {k: prepared.id_to_token(v) for k, v in special.items() if v is not None}
    jinja, eos = template.get("jinja"), names.get("eos_token")
    if (end := template.get("end")) and end != eos:  # programs stop at eos_token: it is what ends an answer
        names["eos_token"] = end
        jinja = f"{{% set eos_token = {json.dumps(eos)} %}}{jinja}" if "eos_token" in str(jinja) else jinja
    longest = max_input_tokens(config)
    limit = {} if longest is None else {"model_max_length": longest}
    saved = PreTrainedTokenizerFast(
        tokenizer_object=prepared, model_input_names=model_input_names(config), **limit, **names
    )
    saved.chat_template = jinja
    saved.save_pretrained(folder)


def model_input_names(config: Mapping[str, Any]) -> list[str]:
    """The inputs that the tokenizer makes for this model; token_type_ids only if it has types."""
    types = ["token_type_ids"] if (config.get("type_vocab_size") or 0) > 1 else []
    return ["input_ids", *types, "attention_mask"]


def max_input_tokens(config: Mapping[str, Any]) -> int | None:
    """The longest input of a model in tokens, or None; RoBERTa's positions start after its padding id."""
    found = config.get("max_position_embeddings")
    if found is None:
        return None
    offset = config.get("pad_token_id", 1) + 1 if config.get("model_type") in POSITIONS_AFTER_PADDING else 0
    return int(found) - offset


def load_tokenizer(facts: Facts) -> Any:
    """The prepared data's tokenizer, as an object of the tokenizers library. It is read once (a large one
    takes a second), and nobody may change it.
    """
    return _open(Path(facts.folder) / facts.extra["tokenizer"])


@functools.lru_cache(maxsize=1)
def _open(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
