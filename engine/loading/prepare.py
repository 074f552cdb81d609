"""Prepare data once, before processes start: fetch, tokenize, count; cached under a hash of its settings."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.core.package import cache_folder
from isobatch.core.terminal import doing
from isobatch.data.base import Data, fingerprint, length_quantiles
from isobatch.data.digests import FACTS_FILE, changed_file, write_digests
from isobatch.data.preparation.encoding import Workshop
from isobatch.data.tokenizers import open_tokenizer, vocabulary_size
from isobatch.engine.machine.detect import allowed_cpus

CHECK_SECONDS = 2.0
"""How long a cache is checked when it is found; what is not checked then is when samples are fetched."""
GPT2_VOCABULARY = 50257
ASSUMED_SAMPLES = 10_000
"""Training samples of `assumed_facts`."""


def prepare(data: Data, say: Callable[[str], None] = lambda _: None) -> Facts:
    """Prepare the data unless it is in the cache; its facts. Safe when several processes call it at once.

    Where a file of the cache was changed, `say` is told which, and the data is prepared again. Raises
    UserError where the data holds no training samples or the cache cannot be written.
    """
    from filelock import FileLock

    folder = folder_of(data)
    doing("looking for the data")
    with (
        atomic_files.explain_write_errors(folder.parent),
        atomic_files.shared_folder(folder.parent),
        FileLock(f"{folder}.lock"),
    ):
        if (folder / FACTS_FILE).exists() and (changed := changed_file(folder, CHECK_SECONDS)):
            say(f"{changed} was changed after it was prepared: it is prepared again")
            (folder / FACTS_FILE).unlink()
        if not (folder / FACTS_FILE).exists():
            _make(data, folder)
        return Facts.from_dict({**atomic_files.read_json(folder / FACTS_FILE), "folder": str(folder)})


def folder_of(data: Data) -> Path:
    """The folder of the cache that has the data when it is prepared."""
    class_name = f"{type(data).__module__}.{type(data).__qualname__}"
    identity = {"kind": data.cache_name or class_name, "version": data.version}
    identity |= {**data.identity(), "code": data.recipe.options.get("code")}
    text = json.dumps(identity, sort_keys=True, default=str)
    return cache_folder() / "prepared" / hashlib.sha256(text.encode()).hexdigest()[:16]


def _make(data: Data, folder: Path) -> None:
    temporary, shards = (folder.with_name(f".{folder.name}.{kind}") for kind in ("tmp", "shards"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        doing("preparing the data")
        data.workshop = Workshop(allowed_cpus(Path("/"), os.environ), shards)
        extra = data.prepare(temporary)
        atomic_files.write_json(temporary / FACTS_FILE, _measure(data, temporary, extra).to_dict())
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
        shutil.rmtree(shards, ignore_errors=True)
    except (UserError, TrainingError) as error:
        shutil.rmtree(shards, ignore_errors=True)
        if isinstance(error, UserError):
            raise
        raise UserError(str(error)) from None  # a damaged object, for one, is wrong input here
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _measure(data: Data, folder: Path, extra: dict[str, object]) -> Facts:
    splits = sorted(p.parent.name for p in folder.glob("*/index.json"))
    sources = {split: data.open(folder, split) for split in splits}
    if "train" not in sources or len(sources["train"]) == 0:
        raise UserError(f"--data {data.recipe.data}: holds no training samples")
    return Facts(
        fingerprint=fingerprint(folder),
        folder=str(folder),
        samples={split: len(s) for split, s in sources.items() if len(s)},
        lengths=length_quantiles(sources["train"]),
        extra=dict(extra),
        digest=write_digests(folder),
    )


def assumed_facts(data: Data, length: int, samples: int | None) -> Facts:
    """Facts for planning without prepared data: every sample is of `length` tokens. Where `samples` does not
    say how many there are, files of --data that are here do.

    The vocabulary is that of the tokenizer, a file or folder, where it is there; else GPT-2's.
    """
    vocabulary, tokenizer = GPT2_VOCABULARY, data.recipe.tokenizer
    if tokenizer and (path := Path(tokenizer).expanduser()).exists():
        vocabulary = vocabulary_size(open_tokenizer(path))
    return Facts(
        fingerprint="assumed",
        folder="",
        samples={"train": samples or data.count_samples(length) or ASSUMED_SAMPLES},
        lengths=(length,),
        extra={"vocabulary": vocabulary, "assumed": True, **data.assumed},
    )
