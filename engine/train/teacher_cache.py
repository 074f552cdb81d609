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
from typing import Any

import numpy as np
import torch

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.core.terminal import doing
from isobatch.data.base import Source
from isobatch.data.preparation.encoding import text_hash
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.device_copies import to_device, to_tensors
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.optimization.schedule import PhaseSchedule
from isobatch.models.base import Teacher

BATCH = 64
"""Samples per forward pass of the teacher."""
PREFIX = "teacher."
"""Begins the names of the columns with teacher outputs."""
DIGESTS = "digests"
"""File of uint64: a digest of the outputs for each sample, compared when they are first used; 0: none yet."""
TRAIN = "train"
INDEX = "index.json"
"""File with the names of the outputs."""


class TeacherSource(Source):
    """A source with the teacher's outputs as further columns of each sample, once they are there."""

    answers: dict[str, np.memmap[Any, Any]]
    """The outputs by name: a row for each sample, or for each of its tokens."""
    digests: np.memmap[Any, Any]

    def __init__(self, source: Source, folder: Path, per_token: bool) -> None:
        self.source, self.folder, self.weights, self.per_token = source, folder, source.weights, per_token
        every = np.arange(len(source))
        lengths = source.lengths(every) if per_token else np.ones_like(every)
        self.borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def open(self, mode: Any = "r") -> None:
        """Map the files. Raises UserError where they cannot be read."""
        try:
            names = json.loads((self.folder / INDEX).read_text())
            self.answers = {name: np.load(self.folder / f"{name}.npy", mmap_mode=mode) for name in names}
            self.digests = np.load(self.folder / f"{DIGESTS}.npy", mmap_mode=mode)
        except (OSError, ValueError) as error:
            raise UserError(
                f"the teacher's answers in {self.folder} cannot be read ({error}): delete it and run again"
            ) from None
        self._unchecked = self.digests != 0

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self.source.lengths(indices)

    def rows(self, name: str, samples: np.ndarray) -> list[np.ndarray]:
        """What an output holds of each of these samples, to read or to write."""
        return [self.answers[name][self.borders[n] : self.borders[n + 1]] for n in samples]

    def digests_of(self, samples: np.ndarray) -> np.ndarray:
        """(samples,) uint64: of what all outputs hold of each."""
        found = zip(*(self.rows(name, samples) for name in sorted(self.answers)), strict=True)
        return np.array([text_hash(b"".join(part.tobytes() for part in parts)) for parts in found], np.uint64)

    def check(self, indices: np.ndarray) -> None:
        self.source.check(indices)
        first = indices[self._unchecked[indices]]
        if (changed := first[self.digests_of(first) != self.digests[first]]).size:
            np.load(self.folder / f"{DIGESTS}.npy", mmap_mode="r+")[changed] = 0
            raise TrainingError(
                f"the teacher's answers in {self.folder} were changed, as for sample {changed[0]}: run again,"
                " and they are computed again"
            )
        self._unchecked[first] = False

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        self.check(indices)
        found = self.source.fetch(indices, pad_to)
        if not self.per_token:
            return found | {PREFIX + name: answers[indices] for name, answers in self.answers.items()}
        width = max(pad_to, int(found["length"].max()))
        for name, answers in self.answers.items():
            padded = np.zeros((len(indices), width, *answers.shape[1:]), answers.dtype)
            for row, values in zip(padded, self.rows(name, indices), strict=True):
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
    order, file = used[np.argsort(source.lengths(used), kind="stable")], folder / f"{DIGESTS}.npy"
    taught = TeacherSource(source, folder, teacher.per_token)
    digests = np.load(file, mmap_mode="r") if file.is_file() else np.zeros(len(source), np.uint64)
    batches = (order[start : start + BATCH] for start in range(0, len(order), BATCH))
    missing = [batch for batch in batches if not digests[batch].all()]
    if missing := world.broadcast_object(missing):
        say(f"the {teacher.name} answers {sum(map(len, missing)):,} samples, once, in {folder}")
        with atomic_files.explain_write_errors(folder):
            _fill(taught, teacher, facts, missing, world)
    taught.open()
    return taught


def _folder(facts: Facts, teacher: Teacher, split: str) -> Path:
    """The cache folder of this teacher and split, beside the prepared data, where every rank can read it."""
    key = hashlib.sha256(f"{teacher.identity} {facts.fingerprint}".encode()).hexdigest()[:12]
    prepared = Path(facts.folder)
    of_split = "" if split == TRAIN else f"-{split}"
    return prepared.with_name(f"{prepared.name}-teacher-{key}{of_split}")


def _fill(
    taught: TeacherSource, teacher: Teacher, facts: Facts, missing: list[np.ndarray], world: Communicator
) -> None:
    model = teacher.build(facts).to(world.device).eval()

    @torch.no_grad()
    def answer(samples: np.ndarray) -> dict[str, np.ndarray]:
        host = to_tensors(taught.source.fetch(samples), pin=False)
        found = teacher.answers(model, to_device(host, world.device))
        return {name: (v if taught.per_token else v[:, None]).cpu().numpy() for name, v in found.items()}

    if world.is_main and not (taught.folder / INDEX).exists():
        _create(taught, answer(missing[0]))
    world.barrier()
    taught.open("r+")
    for done, samples in enumerate(missing[world.rank :: world.size]):
        doing("asking the teacher", done * world.size, len(missing))
        world.mark_progress("the teacher's answers")
        for name, rows in answer(samples).items():
            for place, row in zip(taught.rows(name, samples), rows, strict=True):
                place[:] = row[: len(place)]
        taught.digests[samples] = taught.digests_of(samples)
    for array in (*taught.answers.values(), taught.digests):
        array.flush()
    world.barrier()


def _create(taught: TeacherSource, example: Mapping[str, np.ndarray]) -> None:
    """Create empty arrays for rows like the `example`'s, and rename the folder into place.

    Another run may create and fill the same folder at the same time: then its folder is used.
    """
    folder, count = taught.folder, int(taught.borders[-1])
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    kinds = {name: ((count, *rows.shape[2:]), rows.dtype) for name, rows in example.items()}
    kinds[DIGESTS] = (len(taught),), np.dtype(np.uint64)
    with atomic_files.shared_folder(fresh):
        for name, (shape, dtype) in kinds.items():
            # Sparse zeros: they take disk space only as they are filled.
            np.lib.format.open_memmap(fresh / f"{name}.npy", "w+", dtype, shape).flush()
        atomic_files.write_text(fresh / INDEX, json.dumps(sorted(example)))
    try:
        fresh.rename(folder)
    except OSError:  # another run was first
        shutil.rmtree(fresh)
