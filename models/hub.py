"""Models of the hub: in the cache, or to be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hub import cache
from models.base import ModelError

ADAPTER = "adapter_config.json"
TOKENIZERS = ("tokenizer.json", "encoder.json", "vocab.json", "vocab.txt")


def is_id(name: str) -> bool:
    """Whether `name` has the form `owner/name`."""
    return cache.is_id(name) and "/" in name


def snapshot(name: str, revision: str | None = None) -> Path | None:
    """The cached folder of a model, or None."""
    found = cache.snapshot("models", name, revision)
    return found if found and (found / "config.json").is_file() else None


def require(name: str, revision: str | None, flag: str = "--model") -> None:
    """Raise unless the model is in the cache or the hub answers."""
    if snapshot(name, revision) is None and not cache.reachable():
        raise ModelError(
            f"{flag} {name}: there is no such folder; as a hub id it is not in the cache {cache.home()},"
            " and the hub cannot be reached: give a folder, set HF_HOME to a cache that holds it,"
            " or run `prepare` on a machine with internet"
        )


def check_folder(folder: Path, tokenizer: str | None) -> None:
    """Raise unless a saved model is there, and a tokenizer where none was given."""
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        base = json.loads((folder / ADAPTER).read_text()).get("base_model_name_or_path")
        raise ModelError(
            f"--model {folder}: is an adapter for {base}: give that, or merge the two (export RUN --to"
            " merged)"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"--model {folder}: holds no config.json, so it is no saved model")
    if tokenizer is None and not any((folder / name).is_file() for name in TOKENIZERS):
        raise ModelError(
            f"--model {folder}: holds no tokenizer (tokenizer.json, vocab.json...): add --tokenizer"
        )


def check_vocabulary(name: str, rows: int | None, vocabulary: int, otherwise: str = "") -> None:
    """Raise where the tokenizer has ids beyond the model's embeddings; `otherwise` is another way out."""
    if rows is not None and rows < vocabulary:
        raise ModelError(
            f"--model {name}: knows {rows} tokens, and the tokenizer has {vocabulary}: "
            f"leave out --tokenizer, or give the one that the model was trained with{otherwise}"
        )


def place(name: str, revision: str | None) -> str:
    """What from_pretrained should open: a folder where there is one, so that it asks no network."""
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
        raise ModelError(f"--model {name}: {file} cannot be read: {error}") from None


def _fetch_config(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    require(name, revision)
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # network, missing repository, gated: all are one line to the user
        raise ModelError(
            f"--model {name}: cannot be had from the hub: {str(error).splitlines()[0]}"
        ) from None
