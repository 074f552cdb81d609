"""Texts encoded in shards: by processes where there are several cores, kept so that a killed run goes on.

The shards come in the order of the texts, and are the same for any number of processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.data.preparation import worker
from isobatch.data.preparation.progress import position
from isobatch.data.preparation.shards import EncodedShard, kept_shard, short_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from tokenizers import Tokenizer  # noqa: TC004  heavy, and no class here has flags

SHARD_CHARACTERS = 1 << 20
SHARDS_IN_THREADS = 8
"""So many are encoded by the tokenizer's own threads: processes take a second to start."""
SHARDS_AHEAD = 2
"""Shards of each process that are encoded or wait for those before them."""


@dataclass(slots=True)
class Share:
    """What one of `count` tasks encodes: each `count`-th shard, from its `number` (1 to `count`) on."""

    number: int
    count: int
    taken: int = 0
    """Shards of this share so far."""
    others: list[Path] = field(default_factory=list)
    """The files in which other tasks keep their shards."""

    def takes(self, shard: int, file: Path) -> bool:
        """Whether a shard is of this share."""
        if shard % self.count != self.number - 1:
            self.others.append(file)
            return False
        self.taken += 1
        return True

    def missing(self) -> int:
        """Shards that other tasks have not kept yet."""
        return sum(not file.exists() for file in self.others)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a preparation may use."""

    workers: int = 1
    """Processes: the cores that this one may use."""
    folder: Path | None = None
    """Where shards are kept until the data is prepared; None: nowhere."""
    share: Share | None = None
    """The shards that are to be made, where other tasks make the others."""


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
    """Yield the shards of the texts, in order; of a share the first one. `name` is what the status says.

    `texts_together`: a shard ends behind so many texts, or a multiple. Raises UserError as the encoder does.
    """
    described = json.dumps([job.place, job.settings, name]).encode()
    keeper = _Keeper(workshop.folder, short_digest(described, job.tokenizer.to_str().encode()))
    numbered = enumerate(_batches(texts, texts_together))
    if (share := workshop.share) is None:
        yield from _encode(job, name, numbered, workshop.workers, keeper)
        return
    # The first is encoded in every share: a split without samples would be refused.
    own = ((n, batch) for n, batch in numbered if share.takes(n, keeper.file_of(n)) or n == 0)
    shards = _encode(job, name, own, workshop.workers, keeper)
    yield from itertools.islice(shards, 1)
    deque(shards, maxlen=0)


def _encode(
    job: EncodingJob, name: str, numbered: Iterator[tuple[int, list[str]]], workers: int, keeper: _Keeper
) -> Iterator[EncodedShard]:
    """Yield the shards of numbered batches of texts, in order."""
    first = list(itertools.islice(numbered, SHARDS_IN_THREADS))
    numbered = itertools.chain(first, numbered)
    if workers == 1 or len(first) < SHARDS_IN_THREADS:
        encode = worker.make_encoder(job.place, job.settings, job.tokenizer)
        for number, batch in numbered:
            yield keeper.made_once(
                number, worker.pack_texts(batch), lambda packed: encode(worker.unpack_texts(packed))
            )
            position.show(f"tokenizing {name}")
        return
    with _Processes(job, workers) as processes:
        waiting: deque[Future[EncodedShard]] = deque()
        for number, batch in numbered:
            waiting.append(processes.submit(keeper.made_once, number, worker.pack_texts(batch)))
            if len(waiting) >= SHARDS_AHEAD * workers:
                yield waiting.popleft().result()
            position.show(f"tokenizing {name}")
        while waiting:
            yield waiting.popleft().result()


def _batches(texts: Iterable[str], together: int) -> Iterator[list[str]]:
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

    def made_once(self, number: int, packed: bytes, make: Callable[[bytes], EncodedShard]) -> EncodedShard:
        """The shard of packed texts, kept in a file by its number."""
        if self.folder is None:
            return make(packed)
        made_from = short_digest(self.job.encode(), packed)
        file = self.file_of(number)
        if found := kept_shard(file, made_from):
            return found
        shard = make(packed)
        shard.keep(file, made_from)
        return shard


class _Processes:
    """Processes that encode, each spoken to by one thread at a time.

    They are programs of their own, not forks: a process that has threads of a tokenizer or of torch cannot be
    forked, and multiprocessing's other ways run the user's script again.
    """

    def __init__(self, job: EncodingJob, count: int) -> None:
        asked = {"place": job.place, "settings": job.settings, "tokenizer": job.tokenizer.to_str()}
        self.first_frame = json.dumps(asked).encode()
        self.idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self.children = [self._start() for _ in range(count)]
        self.threads = ThreadPoolExecutor(count)

    def __enter__(self) -> _Processes:
        for child in self.children:
            assert child.stdin is not None
            worker.write_frame(child.stdin, self.first_frame)
            self.idle.put(child)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()
        self.threads.shutdown(cancel_futures=True)
        for child in self.children:
            child.wait()
            for stream in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]

    def _start(self) -> subprocess.Popen[bytes]:
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread},
        )

    def submit(
        self,
        made_once: Callable[[int, bytes, Callable[[bytes], EncodedShard]], EncodedShard],
        number: int,
        packed: bytes,
    ) -> Future[EncodedShard]:
        return self.threads.submit(made_once, number, packed, self._encode)

    def _encode(self, packed: bytes) -> EncodedShard:
        """What a process that is idle makes of packed texts. Raises UserError as the encoder does."""
        child = self.idle.get()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            worker.write_frame(child.stdin, packed)
            answer = worker.read_frame(child.stdout)
        finally:
            self.idle.put(child)
        return _shard_in(answer, child)


def _shard_in(answer: bytes | None, child: subprocess.Popen[bytes]) -> EncodedShard:
    if answer is None:
        raise RuntimeError(f"a process that encodes texts ended with {child.wait()}")
    shard = EncodedShard.unpack(answer)
    if shard is not None:
        return shard
    said = json.loads(answer)
    if "refused" in said:
        raise UserError(said["refused"])
    raise RuntimeError(said["failed"])
