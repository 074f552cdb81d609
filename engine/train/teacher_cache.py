"""The teacher cache: a teacher's outputs for the training samples, computed once and kept on disk.

They are computed in batches that depend on the recipe alone, so they are the same under any plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.terminal.status import doing
from isobatch.data.base import Source
from isobatch.engine.loading.device_copies import to_device, to_tensors

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.sampler import Sampler
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.models.base import Teacher

BATCH = 64
"""Samples per forward pass of the teacher."""
PREFIX = "teacher."
"""Begins the names of the columns with teacher outputs."""
DIGESTS = "digests.npy"
"""File of uint64: a digest of the outputs for each sample, compared when they are first used; 0: none yet."""
TRAIN = "train"
INDEX = "index.json"
"""File with the names of the outputs."""


class TeacherSource(Source):
    """A source with the teacher's outputs as further columns of each sample."""

    def __init__(self, source: Source, folder: Path, borders: np.ndarray | None = None) -> None:
        """`borders`: of each sample's tokens in answers that have values for each."""
        self.source, self.folder, self.weights = source, folder, source.weights
        self._borders = borders
        self.answers, self._digests = _open(folder, "r")
        self._unchecked = self._digests != 0

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self.source.lengths(indices)

    def check(self, indices: np.ndarray) -> None:
        self.source.check(indices)
        first = indices[self._unchecked[indices]]
        if not first.size:
            return
        rows = {name: _rows(a, first, self._borders) for name, a in self.answers.items()}
        found = row_digests(rows, len(first))
        if (changed := first[found != self._digests[first]]).size:
            np.load(self.folder / DIGESTS, mmap_mode="r+")[changed] = 0
            raise TrainingError(
                f"the teacher's answers in {self.folder} were changed, as for sample {changed[0]}: run again,"
                " and they are computed again"
            )
        self._unchecked[first] = False

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        self.check(indices)
        found = self.source.fetch(indices, pad_to)
        if self._borders is None:
            return found | {PREFIX + name: np.take(a, indices, axis=0) for name, a in self.answers.items()}
        width = max(pad_to, int(found["length"].max()))
        for name, answers in self.answers.items():
            padded = np.zeros((len(indices), width, *answers.shape[1:]), answers.dtype)
            for row, values in zip(padded, _rows(answers, indices, self._borders), strict=True):
                row[: len(values)] = values
            found[PREFIX + name] = padded
        return found


def samples_used(sampler: Sampler, schedules: Sequence[PhaseSchedule]) -> np.ndarray:
    """Numbers of the samples that a run trains on, ascending."""
    steps = max(s.steps for s in schedules)
    if not sampler.parts:  # a mixture of sets has other samples in every epoch
        steps = min(steps, sampler.steps_per_epoch)
    return np.unique(np.concatenate([sampler.batch(step) for step in range(steps)]))


def with_teacher_outputs(
    source: Source,
    teacher: Teacher,
    facts: Facts,
    used: np.ndarray,
    world: Communicator,
    say: Callable[[str], None],
    split: str = TRAIN,
) -> TeacherSource:
    """The source of a split with the teacher's outputs for the samples in `used`.

    Those not on disk are computed.
    All ranks call this and share the work. Several runs may call it at once: they write the same values.
    Raises UserError where the cache cannot be read or written.
    """
    folder = _folder(facts, teacher, split)
    order, file = used[np.argsort(source.lengths(used), kind="stable")], folder / DIGESTS
    digests = np.load(file, mmap_mode="r") if file.is_file() else np.zeros(len(source), np.uint64)
    batches = (order[start : start + BATCH] for start in range(0, len(order), BATCH))
    missing = [batch for batch in batches if not digests[batch].all()]
    if missing := world.broadcast_object(missing):
        say(f"the {teacher.name} answers {sum(map(len, missing)):,} samples, once, in {folder}")
        with atomic_files.explain_write_errors(folder):
            _fill(folder, source, teacher, facts, missing, world)
    return TeacherSource(source, folder, _borders(source, teacher))


def _borders(source: Source, teacher: Teacher) -> np.ndarray | None:
    """(samples + 1,) where each sample's tokens begin and end, for a teacher that answers for each token."""
    if not teacher.per_token:
        return None
    return np.concatenate([[0], np.cumsum(source.lengths(np.arange(len(source))), dtype=np.int64)])


def _rows(array: np.ndarray, samples: np.ndarray, borders: np.ndarray | None) -> Any:
    """What `array` holds of each of these samples."""
    if borders is None:
        return np.take(array, samples, axis=0)
    return [array[start:stop] for start, stop in zip(borders[samples], borders[samples + 1], strict=True)]


def row_digests(answers: Mapping[str, Sequence[np.ndarray]], count: int) -> np.ndarray:
    """(count,) uint64: a digest of each row of the outputs."""
    found = b""
    for place in range(count):
        joined = b"".join(np.ascontiguousarray(answers[name][place]).tobytes() for name in sorted(answers))
        found += hashlib.blake2b(joined, digest_size=8).digest()
    return np.frombuffer(found, np.uint64)


def _folder(facts: Facts, teacher: Teacher, split: str) -> Path:
    """The cache folder of this teacher and split, beside the prepared data, where every rank can read it."""
    key = hashlib.sha256(f"{teacher.identity} {facts.fingerprint}".encode()).hexdigest()[:12]
    prepared = Path(facts.folder)
    of_split = "" if split == TRAIN else f"-{split}"
    return prepared.with_name(f"{prepared.name}-teacher-{key}{of_split}")


def _fill(
    folder: Path,
    source: Source,
    teacher: Teacher,
    facts: Facts,
    missing: list[np.ndarray],
    world: Communicator,
) -> None:
    model, borders = teacher.build(facts).to(world.device).eval(), _borders(source, teacher)

    @torch.no_grad()
    def answer(batch: np.ndarray) -> dict[str, Any]:
        host = to_tensors(source.fetch(batch), pin=False)
        found = teacher.answers(model, to_device(host, world.device))
        arrays = {name: values.cpu().numpy() for name, values in found.items()}
        if borders is None:
            return arrays
        lengths = source.lengths(batch)
        return {n: [row[:k] for row, k in zip(a, lengths, strict=True)] for n, a in arrays.items()}

    if world.is_main and not (folder / INDEX).exists():
        _create(folder, len(source), answer(missing[0]), borders)
    world.barrier()
    answers, digests = _open(folder, "r+")
    for done, batch in enumerate(missing[world.rank :: world.size]):
        doing("asking the teacher", done * world.size, len(missing))
        world.mark_progress("the teacher's answers")
        found = answer(batch)
        for name, values in found.items():
            for row, sample in zip(values, batch, strict=True):
                rows = slice(sample, sample + 1) if borders is None else slice(*borders[sample : sample + 2])
                answers[name][rows] = row
        digests[batch] = row_digests(found, len(batch))
    for array in (*answers.values(), digests):
        array.flush()
    world.barrier()


def _create(
    folder: Path, count: int, example: Mapping[str, Sequence[np.ndarray]], borders: np.ndarray | None
) -> None:
    """Create empty arrays for `count` samples, shaped like `example`, and rename the folder into place.

    Another run may create and fill the same folder at the same time: then its folder is used.
    """
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    fresh.mkdir(parents=True)
    for name, (first, *_) in example.items():
        shape = (count, *first.shape) if borders is None else (int(borders[-1]), *first.shape[1:])
        # Sparse zeros: they take disk space only as they are filled.
        np.lib.format.open_memmap(fresh / f"{name}.npy", "w+", first.dtype, shape).flush()
    np.lib.format.open_memmap(fresh / DIGESTS, "w+", np.dtype(np.uint64), (count,)).flush()
    atomic_files.write_text(fresh / INDEX, json.dumps(sorted(example)))
    try:
        fresh.rename(folder)
    except OSError:  # another run was first
        shutil.rmtree(fresh)


def _open(folder: Path, mode: Any) -> tuple[dict[str, np.memmap[Any, Any]], np.memmap[Any, Any]]:
    """The outputs by name, and the digests."""
    try:
        names = json.loads((folder / INDEX).read_text())
        found = {name: np.load(folder / f"{name}.npy", mmap_mode=mode) for name in names}
        return found, np.load(folder / DIGESTS, mmap_mode=mode)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the teacher's answers in {folder} cannot be read ({error}): delete it and run again"
        ) from None
