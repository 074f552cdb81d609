"""Models of the hub: in the cache, or to be had."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.core.hub_cache import explain_hub_error

ADAPTER = "adapter_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZERS = ("tokenizer.json", "encoder.json", "vocab.json", "vocab.txt")


def is_id(name: str) -> bool:
    """Whether `name` has the form `owner/name`."""
    return hub_cache.is_id(name) and "/" in name


def snapshot(name: str, revision: str | None = None) -> Path | None:
    """The cached folder of a model, or None."""
    found = hub_cache.snapshot("models", name, revision)
    return found if found and (found / "config.json").is_file() else None


def require(name: str, revision: str | None, flag: str = "--model") -> None:
    """Raise unless the model is in the cache or the hub answers."""
    if snapshot(name, revision) is None and not hub_cache.is_reachable():
        raise UserError(
            f"{flag} {name}: there is no such folder; as a hub id it is not in the cache"
            f" {hub_cache.cache_home()}, and the hub cannot be reached: give a folder, set HF_HOME to a"
            " cache that holds it, or run `prepare` on a machine with internet"
        )


def check_folder(folder: Path, tokenizer: str | None) -> None:
    """Raise unless a saved model is there, and a tokenizer where none was given."""
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        base = json.loads((folder / ADAPTER).read_text()).get("base_model_name_or_path")
        raise UserError(
            f"--model {folder}: is an adapter for {base}: give that, or merge the two (export RUN --to"
            " merged)"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {folder}: holds no config.json, so it is no saved model")
    if tokenizer is None and not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(
            f"--model {folder}: holds no tokenizer (tokenizer.json, vocab.json...): add --tokenizer"
        )


def check_vocabulary(name: str, rows: int | None, vocabulary: int, otherwise: str = "") -> None:
    """Raise where the tokenizer has ids beyond the model's embeddings; `otherwise` is another way out."""
    if rows is not None and rows < vocabulary:
        raise UserError(
            f"--model {name}: knows {rows} tokens, and the tokenizer has {vocabulary}: "
            f"give the tokenizer that it was trained with{otherwise}"
        )


def check_architecture(name: str, config: Mapping[str, Any], remote_code: bool, revision: str | None) -> None:
    """Raise unless transformers has a language model of this kind, or its own code may run."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind, brought = config.get("model_type"), (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if remote_code and brought:
        if not Path(name).expanduser().is_dir() and revision is None:
            raise UserError(
                f"--remote-code: the code of {name} may change after you have read it: add --revision COMMIT"
            )
    elif brought and kind not in KNOWN:
        raise UserError(
            f"--model {name}: transformers knows no {kind}, and the model brings Python code of its own"
            f" ({brought}): read it, then add --remote-code"
        )
    elif kind not in KNOWN:
        raise UserError(
            f"--model {name}: transformers has no causal language model of type {kind}: take another, or a"
            " newer transformers"
        )


def trust(remote_code: bool) -> dict[str, bool]:
    """For from_pretrained and from_config, which would ask on the terminal if nothing were said."""
    return {"trust_remote_code": remote_code}


def place(name: str, revision: str | None) -> str:
    """What opens for a config: a folder where there is one, so that no network is asked."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    return str(snapshot(name, revision) or name)


def config(name: str, revision: str | None) -> dict[str, Any]:
    """The model's config.json, fetched if need be."""
    folder = Path(place(name, revision))
    file = folder / "config.json" if folder.is_dir() else _fetch_config(name, revision)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model {name}: {file} cannot be read: {error}") from None


def _fetch_config(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    require(name, revision)
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # network, missing repository, gated: all are one line to the user
        raise UserError(f"--model {name}: {explain_hub_error(error, revision)}") from None


def fetch(name: str, revision: str | None, flag: str = "--model") -> str:
    """What from_pretrained should open for the weights: a folder, downloaded if need be."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    found = snapshot(name, revision)
    if found and _has_weights(found):
        return str(found)
    if not hub_cache.is_reachable():
        raise UserError(
            f"{flag} {name}: its weights are not in the cache {hub_cache.cache_home()}, and the hub cannot be"
            " reached: run `prepare` on a machine with internet that shares this cache"
        )
    from huggingface_hub import HfApi, snapshot_download

    try:
        there = HfApi().model_info(name, revision=revision)
        wanted = _wanted([s.rfilename for s in there.siblings or []])
        return snapshot_download(name, revision=revision, allow_patterns=wanted)
    except Exception as error:
        raise UserError(f"{flag} {name}: {explain_hub_error(error, revision)}") from None


def _has_weights(folder: Path) -> bool:
    """A tokenizer or config fetched before leaves a folder without them."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return True
        if index.is_file():
            parts = set(json.loads(index.read_text())["weight_map"].values())
            return all((folder / part).is_file() for part in parts)
    return False


def _wanted(files: list[str]) -> list[str]:
    """Of a repository: its small files and one form of its weights, safetensors before pickles."""
    own = [f for f in files if "/" not in f]
    small = [f for f in own if f.endswith((".json", ".txt", ".py", ".jinja", ".model"))]
    for stem, suffix in (name.rsplit(".", 1) for name in WEIGHTS):
        if weights := [f for f in own if f.startswith(stem) and f.endswith(suffix)]:
            return small + weights
    return small
