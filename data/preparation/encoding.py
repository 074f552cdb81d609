"""Texts encoded in shards: by processes where there are several cores, kept so that a killed run goes on.

The shards come in the order of the texts, and are the same for any number of processes. A shard's file says
what it was made from; a file that is not whole, or was made from other input, counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
import uuid
import zipfile
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.data.preparation import worker
from isobatch.data.preparation.progress import position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from multiprocessing.connection import Connection

    from tokenizers import Tokenizer  # noqa: TC004  heavy, and no class here has flags

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
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


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

    def pack(self, made_from: str) -> bytes:
        """A file of arrays, whose sums of bytes zip checks. `made_from` is a digest of the input."""
        header = np.frombuffer(json.dumps([made_from, self.facts]).encode(), np.uint8)
        packed = io.BytesIO()
        arrays: dict[str, Any] = {HEADER: header, **self.arrays}
        np.savez(packed, **arrays)
        return packed.getvalue()

    def keep(self, file: Path, made_from: str) -> None:
        """Write the file under another name, then rename it: a killed process leaves no part of it.

        The other name is this writer's alone, also among those of other nodes.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        temporary.write_bytes(self.pack(made_from))
        temporary.replace(file)


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


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """How texts are encoded: in any process the same."""

    place: str
    """Of the function that makes the encoder from (tokenizer, settings): isobatch.MODULE:FUNCTION. The
    encoder makes a EncodedShard from a list of texts."""
    settings: dict[str, Any]
    """JSON."""
    tokenizer: Tokenizer


def encode_in_shards(
    job: EncodingJob, name: str, texts: Iterable[str], workshop: Workshop, texts_together: int = 1
) -> Iterator[EncodedShard]:
    """Yield the shards of the texts, in order. `name` is what the status says.

    `texts_together`: a shard ends behind so many texts, or a multiple. Raises UserError as the encoder does.
    """
    described = json.dumps([job.place, job.settings, name]).encode()
    keeper = _Keeper(workshop.folder, short_digest(described, job.tokenizer.to_str().encode()))
    numbered: Iterator[tuple[int, list[str]]] = enumerate(batches(texts, texts_together))
    workers = workshop.workers
    first = list(itertools.islice(numbered, SHARDS_IN_THREADS))
    numbered = itertools.chain(first, numbered)
    if workers == 1 or len(first) < SHARDS_IN_THREADS:
        encode = worker.make_encoder(job.place, job.settings, job.tokenizer)
        for number, batch in numbered:
            yield keeper.made_once(number, batch, encode)
            position.show(f"tokenizing {name}")
        return
    with _processes(job, workers) as submit:
        waiting: deque[Future[EncodedShard]] = deque()
        for number, batch in numbered:
            waiting.append(submit(keeper.made_once, number, batch))
            if len(waiting) >= SHARDS_AHEAD * workers:
                yield waiting.popleft().result()
            position.show(f"tokenizing {name}")
        while waiting:
            yield waiting.popleft().result()


def batches(texts: Iterable[str], together: int = 1) -> Iterator[list[str]]:
    """The texts in lists of SHARD_CHARACTERS or a little more."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= SHARD_CHARACTERS and len(batch) % together == 0:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Keeper:
    """Makes each shard once: one that a killed preparation left is taken."""

    def __init__(self, folder: Path | None, job: str) -> None:
        self.folder, self.job = folder, job

    def file_of(self, number: int) -> Path:
        """Where a shard is kept."""
        assert self.folder is not None
        return self.folder / f"{self.job}-{number:06d}.shard"

    def made_once(
        self, number: int, texts: list[str], encode: Callable[[list[str]], EncodedShard]
    ) -> EncodedShard:
        """The shard of some texts, kept in a file by its number."""
        if self.folder is None:
            return encode(texts)
        made_from = short_digest(self.job.encode(), json.dumps(texts).encode())
        file = self.file_of(number)
        if (shard := kept_shard(file, made_from)) is None:
            shard = encode(texts)
            shard.keep(file, made_from)
        return shard


@contextlib.contextmanager
def _processes(job: EncodingJob, count: int) -> Iterator[Callable[..., Future[EncodedShard]]]:
    """Gives a function that calls another in a thread, with what encodes by one of `count` processes.

    They are programs of their own, not forks: a process that has threads of a tokenizer or of torch cannot be
    forked, and multiprocessing's other ways run the user's script again.
    """
    started = [_start() for _ in range(count)]
    idle: SimpleQueue[tuple[subprocess.Popen[bytes], Connection]] = SimpleQueue()

    def encode(texts: list[str]) -> EncodedShard:
        """What a process that is idle makes of texts. Raises UserError as the encoder does."""
        child, connection = idle.get()
        try:
            connection.send(texts)
            found: EncodedShard | Exception = connection.recv()
        except (EOFError, OSError):
            found = RuntimeError(f"a process that encodes texts ended with {child.wait()}")
        finally:
            idle.put((child, connection))
        if isinstance(found, Exception):
            raise found
        return found

    threads = ThreadPoolExecutor(count)
    try:
        for child, connection in started:
            connection.send((job.place, job.settings, job.tokenizer.to_str()))
            idle.put((child, connection))
        yield lambda made_once, number, texts: threads.submit(made_once, number, texts, encode)
    finally:
        for child, _ in started:
            child.kill()
        threads.shutdown(cancel_futures=True)
        for child, connection in started:
            child.wait()
            connection.close()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    from multiprocessing.connection import Pipe

    ours, theirs = Pipe()
    with theirs:
        words = [sys.executable, "-P", worker.__file__, str(theirs.fileno())]
        # What a library prints is no output of the command that prepares.
        child = subprocess.Popen(
            words, stdout=2, env={**os.environ, **ONE_THREAD}, pass_fds=[theirs.fileno()]
        )
    return child, ours
