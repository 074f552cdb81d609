"""What a teacher says of every training sample: computed once, kept on disk beside the prepared data.

The answers are data: they are computed in batches that depend on the recipe alone, so the same on any plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.data.base import Source
from isobatch.engine.loading.loader import to_device, to_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.sampler import Sampler
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.models.base import Teacher

BATCH = 64
PREFIX = "teacher."
FILLED = "filled.npy"
INDEX = "index.json"


class TeacherSource(Source):
    """Samples, each with its teacher's answers as further columns."""

    def __init__(self, source: Source, answers: dict[str, np.ndarray]) -> None:
        self.source, self.answers = source, answers
        self.weights = source.weights

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self.source.lengths(indices)

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        taught = {PREFIX + name: np.take(a, indices, axis=0) for name, a in self.answers.items()}
        return {**self.source.fetch(indices, pad_to), **taught}


def samples_used(sampler: Sampler, stretches: Sequence[PhaseSchedule]) -> np.ndarray:
    """The samples that a run sees, in ascending order."""
    steps = max(s.steps for s in stretches)
    if not sampler.parts:  # of sets by shares, another epoch has other samples
        steps = min(steps, sampler.steps_per_epoch)
    return np.unique(np.concatenate([sampler.batch(step) for step in range(steps)]))


def with_teacher_outputs(
    source: Source,
    teacher: Teacher,
    facts: Facts,
    used: np.ndarray,
    world: Communicator,
    say: Callable[[str], None],
) -> TeacherSource:
    """The source with the teacher's answers to the samples in `used`; what is not on disk is computed.

    All ranks call this and share the work. Two runs may ask at once: they write the same.
    """
    folder = _folder(facts, teacher)
    batches = _batches(source, used)
    missing = [batch for batch in batches if not _is_filled(folder, batch)]
    if missing := world.broadcast_object(missing):
        say(f"the teacher answers {sum(map(len, missing)):,} samples, once, in {folder}")
        with atomic_files.explain_write_errors(folder):
            _fill(folder, source, teacher, facts, missing, world)
    return TeacherSource(source, _open(folder, "r"))


def _folder(facts: Facts, teacher: Teacher) -> Path:
    """Beside the prepared data: whoever sees that sees this."""
    key = hashlib.sha256(f"{teacher.identity} {facts.fingerprint}".encode()).hexdigest()[:12]
    prepared = Path(facts.folder)
    return prepared.with_name(f"{prepared.name}-teacher-{key}")


def _batches(source: Source, used: np.ndarray) -> list[np.ndarray]:
    order = used[np.argsort(source.lengths(used), kind="stable")]
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def _is_filled(folder: Path, batch: np.ndarray) -> bool:
    file = folder / FILLED
    return file.is_file() and bool(np.load(file, mmap_mode="r")[batch].all())


def _fill(
    folder: Path,
    source: Source,
    teacher: Teacher,
    facts: Facts,
    missing: list[np.ndarray],
    world: Communicator,
) -> None:
    model = teacher.build(facts).to(world.device).eval()
    if world.is_main and not (folder / INDEX).exists():
        _create(folder, len(source), _answer(source, missing[0], teacher, model, world))
    world.barrier()
    answers, filled = _open(folder, "r+"), np.load(folder / FILLED, mmap_mode="r+")
    for batch in missing[world.rank :: world.size]:
        world.mark_progress("the teacher's answers")
        for name, values in _answer(source, batch, teacher, model, world).items():
            answers[name][batch] = values
        filled[batch] = True
    for array in (*answers.values(), filled):
        array.flush()
    world.barrier()


def _answer(
    source: Source, batch: np.ndarray, teacher: Teacher, model: nn.Module, world: Communicator
) -> dict[str, np.ndarray]:
    host = to_tensors(source.fetch(batch), pin=False)
    with torch.no_grad():
        found = teacher.answers(model, to_device(host, world.device))
    return {name: values.cpu().numpy() for name, values in found.items()}


def _create(folder: Path, count: int, example: dict[str, np.ndarray]) -> None:
    """Made beside its place: another run may make the same, and fill it, at this very moment."""
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    fresh.mkdir(parents=True)
    for name, values in example.items():
        _new(fresh / f"{name}.npy", values.dtype, (count, *values.shape[1:]))
    _new(fresh / FILLED, np.dtype(bool), (count,))
    atomic_files.write_text(fresh / INDEX, json.dumps(sorted(example)))
    try:
        fresh.rename(folder)
    except OSError:  # theirs came first
        shutil.rmtree(fresh)


def _new(file: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """A file of zeros that takes room on disk only as it is filled."""
    np.lib.format.open_memmap(file, "w+", kind, shape).flush()


def _open(folder: Path, mode: Any) -> dict[str, np.ndarray]:
    try:
        names = json.loads((folder / INDEX).read_text())
        return {name: np.load(folder / f"{name}.npy", mmap_mode=mode) for name in names}
    except (OSError, ValueError) as error:
        raise UserError(
            f"the teacher's answers in {folder} cannot be read ({error}): delete it and run again"
        ) from None
