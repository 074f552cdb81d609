"""A trained transformers model as a folder that AutoModel and AutoTokenizer open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ROLES = ("eos", "bos", "pad", "unk")


def save(model: nn.Module, facts: Any, folder: Path) -> None:
    """Weights, config.json and the tokenizer that the data was prepared with."""
    from safetensors.torch import save_model
    from transformers import PreTrainedTokenizerFast

    # save_pretrained would import deepspeed, two seconds and a warning, to find that nothing is sharded.
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    configured: Any = model
    configured.config.architectures = [type(model).__name__]
    configured.config.save_pretrained(folder)
    prepared = tokenizer(facts)
    special = {f"{role}_token": facts.extra.get(role) for role in ROLES}
    names = {k: prepared.id_to_token(v) for k, v in special.items() if v is not None}
    PreTrainedTokenizerFast(tokenizer_object=prepared, **names).save_pretrained(folder)


def tokenizer(facts: Any) -> Any:
    """The prepared data's, of the tokenizers library."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(facts.folder) / facts.extra["tokenizer"]))
