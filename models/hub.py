"""Hugging Face Hub models: finding them in the local cache, checking them, downloading them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from isobatch.core import hub_cache
from isobatch.core.atomic_files import read_json
from isobatch.core.errors import IsobatchError, NotHereError, UserError, first_line, nearest_file
from isobatch.core.flags import nearest_hint

ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
CARD_FILE = "README.md"
RUN_FILES = ("recipe.json", "facts.json")
TOKENIZER_FILES = ("tokenizer.json", "encoder.json", "vocab.json", "vocab.txt")


def unread_revision(*names: str | None) -> dict[str, str]:
    """--revision, unless one of these models or tokenizers is on the hub."""
    from_hub = any(name and is_id(name) for name in names)
    return {} if from_hub else {"revision": "no model here is from the hub"}


def is_id(name: str) -> bool:
    """Whether `name` is a hub id of the form `owner/name`."""
    return hub_cache.is_id(name) and "/" in name


def snapshot(name: str, revision: str | None = None) -> Path | None:
    """The snapshot folder of a model in the local cache, or None if there is none."""
    found = hub_cache.snapshot("models", name, revision)
    return found if found and (found / "config.json").is_file() else None


def require_available(name: str, revision: str | None, flag: str = "--model") -> None:
    """Raise UserError unless the model is in the cache or the hub can be reached."""
    if snapshot(name, revision) is None:
        hub_cache.require_hub(flag, name)


def last_name(place: str) -> str:
    """The last folder of a path; of a run's final/ the run."""
    path = Path(place).expanduser()
    return path.parent.name if path.name == "final" else path.name


@contextlib.contextmanager
def _asking_the_hub(name: str, revision: str | None, flag: str) -> Iterator[None]:
    """Raise UserError where the hub cannot be reached, or refuses what is asked of it inside."""
    hub_cache.require_hub(flag, name)
    try:
        yield
    except Exception as error:  # network, missing repository, gated: all are one line to the user
        raise UserError(f"{flag} {name}: {hub_cache.explain_hub_error(error, revision)}") from None


def _nearby(folder: Path) -> str:
    """Where a model is beside or below a folder that holds none, such as that of runs or of checkpoints."""
    places = ((folder, "final"), (folder, "*/final"), (folder, "*"), (folder.parent, "final"))
    found = [f.parent for start, part in places for f in sorted(start.glob(f"{part}/config.json"))]
    return f"; there is one in {found[0]}" if found else ""


def check_folder(folder: Path, tokenizer: str | None) -> None:
    """Raise UserError unless the folder holds a model, and a tokenizer unless `tokenizer` is given."""
    if not (folder / "config.json").is_file():
        adapter = " but an adapter: give its base, or merge the two (export RUN --to merged)"
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        raise UserError(f"--model {folder}: holds no config.json{adapter if is_adapter else _nearby(folder)}")
    if closed := [f.name for f in sorted(folder.glob("[!.]*")) if not os.access(f, os.R_OK)]:
        raise UserError(f"--model {folder}: {closed[0]} must be readable by this user (chmod a+r)")
    if tokenizer is None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"--model {folder}: holds no tokenizer (tokenizer.json, vocab...): add --tokenizer")


def check_model(
    name: str, revision: str | None, tokenizer: str | None, presets: Collection[str], flag: str = "--model"
) -> dict[str, Any] | None:
    """The config.json of a model; None of one that must be downloaded. Raises UserError unless it is a folder
    with a model or a hub id; `presets` are what else the flag takes.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_folder(folder, tokenizer)
        return load_config(name, None)
    if not is_id(name):
        hint = nearest_hint(name, presets) or nearest_file(name)
        raise NotHereError(
            f"{flag} {name}: is no preset{hint}, folder or hub id (owner/name, such as"
            f" openai-community/gpt2); presets: {', '.join(presets)}"
        )
    require_available(name, revision, flag)
    return load_config(name, revision) if snapshot(name, revision) else None


def check_vocabulary(name: str, embedding_rows: int | None, vocabulary: int, otherwise: str = "") -> None:
    """Raise UserError if the tokenizer has more ids than the model has embeddings.

    `otherwise` ends the message with another remedy.
    """
    if embedding_rows is not None and embedding_rows < vocabulary:
        raise UserError(
            f"--model {name}: knows {embedding_rows} tokens, and the tokenizer has {vocabulary}: "
            f"give the tokenizer that it was trained with{otherwise}"
        )


def check_length(name: str, most: int | None, length: int) -> None:
    """Raise UserError if samples may be longer than what the model reads at most, where that is known."""
    if most is not None and length > most:
        raise UserError(f"--max-length {length}: {name} reads at most {most} tokens")


def shorter_length(values: Mapping[str, Any], usual: Mapping[str, Any], limit: Any) -> dict[str, int]:
    """`max_length` of a model on this machine that reads less than is usual; empty where one is typed.

    `limit`: a config.json -> the tokens that its model reads at most, or None.
    """
    name, revision = (values.get(field) or usual.get(field) for field in ("model", "revision"))
    with contextlib.suppress(UserError):  # `check` says what is wrong with it
        if name and "max_length" not in values and local_folder(name, revision):
            most = limit(load_config(name, revision)) or usual["max_length"]
            return {"max_length": most} if most < usual["max_length"] else {}
    return {}


def check_architecture(name: str, config: Mapping[str, Any], remote_code: bool, revision: str | None) -> None:
    """Raise UserError unless transformers has a causal LM of this model type or its own code may run."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known_types

    custom_class = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if remote_code and custom_class:
        if not Path(name).expanduser().is_dir() and revision is None:
            why = f"the code of {name} may change after you have read it"
            raise UserError(f"--remote-code: {why}: add --revision COMMIT")
    elif config.get("model_type") not in known_types:
        its_own = f"read its own code ({custom_class}), then add --remote-code"
        unknown = f"transformers has no causal language model of type {config.get('model_type')}"
        raise UserError(f"--model {name}: {unknown}: {its_own if custom_class else 'take another'}")


def check_push(name: str) -> None:
    """Raise UserError unless the hub can be reached and there is a token for it: $HF_TOKEN, or of a login."""
    from huggingface_hub import get_token

    if not hub_cache.is_id(name):
        raise UserError(f"--repo {name}: is no name of a repository: give it as in owner/name")
    if get_token() is None:
        raise UserError(f"--to hub: {name} needs your account there: hf auth login, or set HF_TOKEN")
    if not hub_cache.is_reachable():
        raise UserError(f"--to hub: {hub_cache.hub_address()} cannot be reached: nothing was pushed")


def push(folders: Sequence[Path], name: str, private: bool) -> dict[str, str]:
    """Upload the files of folders as one commit each to a repository, which is made where there is none.

    Returns `repo` and `url`. The same again goes on where an upload broke off: what the hub has is not sent
    twice, and a commit is whole or not there. Raises UserError.
    """
    from huggingface_hub import HfApi

    for folder in folders:
        file = folder / ADAPTER_CONFIG
        base = read_json(file)["base_model_name_or_path"] if file.is_file() else ""
        if Path(base).is_absolute():
            raise UserError(f"--to hub: its base {base} is a folder that others lack: push --to merged,hub")
    api = HfApi()
    try:
        made = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(made.repo_id).private:
            raise UserError(f"--private: {made.repo_id} is there already, and public: make it private first")
        for folder in folders:
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, ignore_patterns=["parity.json"])
    except IsobatchError:
        raise
    except Exception as error:  # network, rights, quota: each becomes one line for the user
        reason = first_line(error)
        raise UserError(f"--to hub: {name}: {reason}: the same command again goes on from here") from None
    return {"repo": made.repo_id, "url": str(made)}


def remote_code_kwargs(remote_code: bool) -> dict[str, bool]:
    """Arguments for from_pretrained and from_config, which ask on the terminal if they get none."""
    return {"trust_remote_code": remote_code}


@contextlib.contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Raise UserError where the saved model in a folder, which is read inside, is damaged or not one."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, IsobatchError):
            raise
        raise UserError(f"{folder} cannot be opened as a saved model: {first_line(error)}") from None


def local_folder(name: str, revision: str | None) -> Path | None:
    """The folder of a model, which `name` is or the cache holds; None where it must be downloaded."""
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else snapshot(name, revision)


def local_path_or_id(name: str, revision: str | None) -> str:
    """The local folder of a model if there is one, so that no network is needed; else its hub id."""
    return str(local_folder(name, revision) or name)


def load_config(name: str, revision: str | None, flag: str = "--model") -> dict[str, Any]:
    """The model's config.json, downloaded if it is not cached. Raises UserError if it cannot be read."""
    if folder := local_folder(name, revision):
        return read_json(folder / "config.json")
    from huggingface_hub import hf_hub_download

    with _asking_the_hub(name, revision, flag):
        file = hf_hub_download(name, "config.json", revision=revision)
    return read_json(Path(file))


def fetch_weights(name: str, revision: str | None, flag: str = "--model") -> str:
    """The folder with a model's weights, downloaded if it is not cached: from_pretrained opens it.

    Raises UserError if the hub refuses or cannot be reached.
    """
    folder = local_folder(name, revision)
    if folder and has_weights(folder):
        return str(folder)
    if folder and folder != snapshot(name, revision):
        raise UserError(f"{flag} {name}: holds no {' and no '.join(WEIGHT_FILES)}, nor all parts: copy these")
    with _asking_the_hub(name, revision, flag):
        from huggingface_hub import HfApi, snapshot_download

        repository = HfApi().model_info(name, revision=revision)
        patterns = files_to_download([s.rfilename for s in repository.siblings or []])
        return snapshot_download(name, revision=revision, allow_patterns=patterns)


def has_weights(folder: Path) -> bool:
    """Whether all weight files are there: what is cached may be the tokenizer or the config alone."""
    if any((folder / name).is_file() for name in WEIGHT_FILES):
        return True
    index = next(filter(Path.is_file, (folder / f"{name}.index.json" for name in WEIGHT_FILES)), None)
    parts = set(json.loads(index.read_text())["weight_map"].values()) if index else set()
    return bool(parts) and all((folder / part).is_file() for part in parts)


def weights_hash(path: str, revision: str | None = None) -> str:
    """Hash of a model's weights and config; a hub id that is not in the cache stands for itself."""
    if (folder := local_folder(path, revision)) is None:
        return path
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"]):
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()[:16]


def files_to_download(files: list[str]) -> list[str]:
    """Of a repository's files: the small ones, and the weights in one format, safetensors before pickle.

    The card says the licence.
    """
    own = [f for f in files if "/" not in f]
    small = [f for f in own if f.endswith((".json", ".txt", ".py", ".jinja", ".model")) or f == CARD_FILE]
    for stem, suffix in (name.rsplit(".", 1) for name in WEIGHT_FILES):
        if weights := [f for f in own if f.startswith(stem) and f.endswith(suffix)]:
            return small + weights
    return small


def resolve_model(name_or_path: str, flag: str) -> str:
    """The model folder of a finished run; a folder or a hub id is returned as it is.

    Raises UserError if it is none of these, or the run is not finished. `flag` names it in messages.
    """
    folder = Path(name_or_path).expanduser()
    if all((folder / name).is_file() for name in RUN_FILES):
        if (folder / "final" / ADAPTER_CONFIG).is_file():
            whole = f"`export {name_or_path} --to merged` makes it a whole model: give exports/merged of it"
            raise UserError(f"{flag} {name_or_path}: that run trained an adapter; {whole}")
        if not (folder / "final" / "config.json").is_file():
            unfinished = f"that run has no final/ yet: finish it with `resume {name_or_path}`"
            raise UserError(f"{flag} {name_or_path}: {unfinished}")
        return str(folder / "final")
    if not folder.is_dir():
        if not is_id(name_or_path):
            raise NotHereError(f"{flag} {name_or_path}: is no run, folder or hub id (owner/name)")
        require_available(name_or_path, None, flag)
    elif near := "" if (folder / "config.json").is_file() else _nearby(folder):
        raise UserError(f"{flag} {name_or_path}: holds no config.json{near}")
    return name_or_path


def tokenizer_vocabulary(name: str) -> dict[str, int] | None:
    """The tokens of a model's tokenizer, added ones too, with their ids; None if tokenizer.json is not in the
    cache. Raises UserError.
    """
    from tokenizers import Tokenizer

    file = Path(local_path_or_id(name, None)) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None
    except Exception as error:  # the library raises bare Exception for every fault in a file
        raise UserError(f"{file}: cannot be read: {first_line(error)}") from None
