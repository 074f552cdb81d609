"""A trained transformers model as a folder that AutoModel and AutoTokenizer open."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
ROLES = ("eos", "bos", "pad", "unk")


def save(model: nn.Module, facts: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Weights, or those given in their place, config.json and the tokenizer of the prepared data."""
    from safetensors.torch import save_file, save_model

    # save_pretrained would import deepspeed, two seconds and a warning, to find that nothing is sharded.
    file, form = str(folder / "model.safetensors"), {"format": "pt"}
    if weights is None:
        save_model(model, file, metadata=form)
    else:
        save_file(dict(weights), file, metadata=form)
    configured: Any = model
    configured.config.architectures = [type(model).__name__]
    configured.config.save_pretrained(folder)
    if getattr(model, "_auto_class", None):  # its own code goes with it
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder)
    save_tokenizer(configured.config.to_dict(), facts, folder)


def save_tokenizer(config: Mapping[str, Any], facts: Any, folder: Path) -> None:
    """The prepared data's, as AutoTokenizer opens it for a model with this config; with its chat template."""
    from transformers import PreTrainedTokenizerFast

    prepared = tokenizer(facts)
    special = {f"{role}_token": facts.extra.get(role) for role in ROLES}
    template = facts.extra.get("template") or {}
    names = {**template.get("tokens", {})}
    names |= {k: prepared.id_to_token(v) for k, v in special.items() if v is not None}
    limit = {} if longest(config) is None else {"model_max_length": longest(config)}
    saved = PreTrainedTokenizerFast(
        tokenizer_object=prepared, model_input_names=inputs_of(config), **limit, **names
    )
    saved.chat_template = template.get("jinja")
    saved.save_pretrained(folder)


def inputs_of(config: Mapping[str, Any]) -> list[str]:
    """What the tokenizer must give this model: of pairs, which text a token is from, where it asks."""
    types = ["token_type_ids"] if (config.get("type_vocab_size") or 0) > 1 else []
    return ["input_ids", *types, "attention_mask"]


def longest(config: Mapping[str, Any]) -> int | None:
    """The longest text a model reads, in tokens; RoBERTa counts positions from behind its padding id."""
    found = config.get("max_position_embeddings")
    if found is None:
        return None
    behind = config.get("pad_token_id", 1) + 1 if config.get("model_type") in BEHIND_PADDING else 0
    return int(found) - behind


def tokenizer(facts: Any) -> Any:
    """The prepared data's, of the tokenizers library."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(facts.folder) / facts.extra["tokenizer"]))
