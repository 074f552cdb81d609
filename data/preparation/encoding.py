"""Texts encoded in shards: by processes where there are several cores, kept so that a killed run goes on.

The shards come in the order of the texts, and are the same for any number of processes. A shard's file says
what it was made from; a file that is not whole, or was made from other input, counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import uuid
import zipfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from isobatch.core.errors import TrainingError
from isobatch.data.preparation.progress import position
from isobatch.data.preparation.spooled_array import SpooledColumns

SHARD_CHARACTERS = 1 << 20
SHARDS_IN_THREADS = 8
"""So many are encoded by the tokenizer's own threads: processes take a second to start."""
SHARDS_AHEAD = 2
"""Shards of each process that are encoded or wait for those before them."""
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
HEADER = " "
"""The array of a shard's file with `made_from` and the facts, in JSON."""


def short_digest(*parts: bytes) -> str:
    """BLAKE2b over these bytes, 32 hex digits."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def text_hash(text: str | bytes) -> int:
    """A number of 64 bits for a text, the same in every process."""
    found = hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8)
    return int.from_bytes(found.digest(), "little")


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """What a part of the input became."""

    arrays: Mapping[str, np.ndarray]
    """(n,) each."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""

    def keep(self, file: Path, made_from: str) -> None:
        """Write a file of arrays, whose sums of bytes zip checks. `made_from` is a digest of the input.

        It is written under another name, this writer's alone also among those of other nodes, then renamed:
        a killed process leaves no part of it.
        """
        header = np.frombuffer(json.dumps([made_from, self.facts]).encode(), np.uint8)
        arrays: dict[str, Any] = {HEADER: header, **self.arrays}
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        with temporary.open("wb") as stream:
            np.savez(stream, **arrays)
        temporary.replace(file)


@dataclass(frozen=True, kw_only=True)
class ShardEncoder(ABC):
    """Makes a shard of some texts. Its fields decide all: another process gets a copy."""

    tokenizer: Tokenizer = field(repr=False)
    dtype: type
    """Of token ids."""

    @abstractmethod
    def __call__(self, texts: list[str]) -> EncodedShard: ...


def kept_shard(file: Path, made_from: str) -> EncodedShard | None:
    """The shard in a file, if it is whole and was made from this."""
    try:
        with np.load(file) as found:
            arrays = dict(found)
        said, facts = json.loads(arrays.pop(HEADER).tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return EncodedShard(arrays, facts) if said == made_from else None


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a preparation may use."""

    workers: int = 1
    """Processes: the cores that this one may use."""
    folder: Path | None = None
    """Where shards are kept until the data is prepared; None: nowhere."""


MakeShard = Callable[[int, list[str]], EncodedShard]
"""The number of a shard, and its texts -> the shard."""


def encode_in_shards(
    encoder: ShardEncoder, name: str, texts: Iterable[str], workshop: Workshop
) -> Iterator[EncodedShard]:
    """Yield the shards of the texts, in order. `name` is what the status says.

    Raises UserError as the encoder does.
    """
    job = short_digest(f"{encoder} {name}".encode(), encoder.tokenizer.to_str().encode())
    make = partial(_made_once, encoder, workshop.folder, job)
    numbered: Iterator[tuple[int, list[str]]] = enumerate(batches(texts))
    first = list(itertools.islice(numbered, SHARDS_IN_THREADS))
    numbered = itertools.chain(first, numbered)
    if workshop.workers == 1 or len(first) < SHARDS_IN_THREADS:
        shards = (make(number, batch) for number, batch in numbered)
    else:
        shards = _in_processes(make, numbered, workshop.workers)
    with contextlib.closing(shards):
        for shard in shards:
            yield shard
            position.show(f"tokenizing {name}")


def encode_whole(
    encoder: ShardEncoder, name: str, texts: Iterable[str], workshop: Workshop
) -> tuple[dict[str, np.ndarray], list[Mapping[str, Any]]]:
    """(the arrays of all shards end to end, on disk; the facts of each). Raises UserError."""
    spooled, facts = SpooledColumns(workshop.folder), []
    for shard in encode_in_shards(encoder, name, texts, workshop):
        spooled.add(shard.arrays)
        facts.append(shard.facts)
    return spooled.arrays(), facts


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in lists of SHARD_CHARACTERS or a little more."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= SHARD_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _made_once(
    encode: ShardEncoder, folder: Path | None, job: str, number: int, texts: list[str]
) -> EncodedShard:
    """The shard of some texts, kept in a file by its number: one that a killed preparation left is taken.

    `job`: a digest of the encoder and the name of its texts.
    """
    if folder is None:
        return encode(texts)
    made_from = short_digest(job.encode(), json.dumps(texts).encode())
    file = folder / f"{job}-{number:06d}.shard"
    if (shard := kept_shard(file, made_from)) is None:
        shard = encode(texts)
        shard.keep(file, made_from)
    return shard


def _in_processes(
    make: MakeShard, numbered: Iterable[tuple[int, list[str]]], workers: int
) -> Generator[EncodedShard, None, None]:
    """Yield the shards in order, each made by one of `workers` processes.

    Raises UserError as the encoder does, TrainingError where a process was killed.
    """
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (make,))
    waiting: deque[Future[EncodedShard]] = deque()
    try:
        for number, batch in numbered:
            with _own_program():
                waiting.append(pool.submit(_make, number, batch))
            if len(waiting) >= SHARDS_AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise TrainingError(
            "a process that tokenizes was killed, perhaps for its memory: run again, and it goes on"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _own_program() -> Iterator[None]:
    """Processes that start meanwhile make isobatch known in place of running the user's script again.

    They are programs of their own, not forks, as a process with threads of a tokenizer or of torch cannot be
    forked; each has one thread.
    """
    main, environment = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__file__ = str(Path(__file__).resolve().parents[2] / "launch" / "_root.py")
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in ONE_THREAD:
            del os.environ[name]
        os.environ.update({name: environment[name] for name in ONE_THREAD if name in environment})


_makers: list[MakeShard] = []
"""That of a process that encodes for another."""


def _begin(make: MakeShard) -> None:
    """Begin a process that encodes; it ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started it says when it ends
    os.dup2(2, 1)  # what a library prints is no output of the command that prepares
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _makers.append(make)


def _end_with_parent() -> None:
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _make(number: int, texts: list[str]) -> EncodedShard:
    return _makers[0](number, texts)
