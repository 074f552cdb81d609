"""Predictions of a task of your own: rows are read by its Data, the model is that of its checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isobatch.core.errors import UserError
from isobatch.core.plan import PlanOptions
from isobatch.data.base import ArraySource
from isobatch.engine.loading.device_copies import to_device, to_tensors
from isobatch.engine.registry import workload_of
from isobatch.engine.verification.replay import Replay
from isobatch.launch.local.run_setup import locate_data, plan_for_this_machine
from isobatch.launch.predicting import tables
from isobatch.models.encoder.prediction import batches_of_one_width
from isobatch.models.protocols import PredictsBatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.data.base import Source
    from isobatch.engine.runs.run_folder import RunFolder

CHUNK_SAMPLES = 4096
"""Samples that are answered and written together."""


def predict_own_rows(run: RunFolder, file: str | None, split: str | None) -> Iterator[list[dict[str, Any]]]:
    """Chunks of a dict per sample, `sample` its number, behind the rows of a table that has one for each.

    Raises UserError.
    """
    if (file is None) == (split is None):
        splits = "|".join(run.facts.samples)
        raise UserError(f"predict: give --file FILE, or --split {splits} for prepared samples")
    if split is not None and split not in run.facts.samples:
        raise UserError(f"--split {split}: the data has {', '.join(run.facts.samples)}")
    source = None if file is None else _read_file(run, file)
    rows = [] if file is None else [row for _, row in tables.read_table(file)]
    for answers in _predict(run, source, split or ""):
        if source is not None and len(rows) == len(source):
            yield [tables.beside(rows[answer["sample"]], answer) for answer in answers]
        else:
            yield answers


def _read_file(run: RunFolder, file: str) -> Source:
    """The samples that the run's Data reads from a file."""
    path = Path(file).expanduser()
    recipe = dataclasses.replace(run.recipe, data=str(path))
    _, data = workload_of(run.recipe).make(recipe)
    source = ArraySource(data.read_rows())
    if not len(source):
        raise UserError(f"--file {file}: holds no rows")
    return source


def _predict(run: RunFolder, source: Source | None, split: str) -> Iterator[list[dict[str, Any]]]:
    """Answers to the samples of `source`, else of a split, computed in batches of one length."""
    locate_data(run, run.recipe, None)
    plan = plan_for_this_machine(run.recipe, run.facts, PlanOptions(processes=1, compile="off"))
    replay = Replay(run, plan)
    if not replay.load_trained():
        raise UserError(f"{run.folder} has no checkpoint: train it first")
    session = replay.session
    task, model, device = session.task, session.model.eval(), session.world.device
    assert isinstance(task, PredictsBatches), "the caller has asked"
    samples = source or session.splits[split]
    for start in range(0, len(samples), CHUNK_SAMPLES):
        numbers = np.arange(start, min(start + CHUNK_SAMPLES, len(samples)))
        answers: list[dict[str, Any]] = [{} for _ in numbers]
        for places in batches_of_one_width(samples.lengths(numbers).tolist()):
            with torch.no_grad():
                batch = to_device(to_tensors(samples.fetch(numbers[places]), pin=False), device)
                found = _arrays(task.predict(model, batch), len(places))
            for row, place in enumerate(places):
                values = {name: array[row].tolist() for name, array in found.items()}
                answers[place] = {"sample": int(numbers[place]), **values}
        yield answers


def _arrays(found: Any, count: int) -> dict[str, np.ndarray]:
    """What `predict` returned as arrays. Raises UserError unless each has a row per sample."""
    if not isinstance(found, Mapping):
        raise UserError(f"predict(model, batch): returned {type(found).__name__}: return name -> tensor")
    arrays = {}
    for name, value in found.items():
        tensor = torch.as_tensor(value).detach().cpu()
        if tensor.ndim == 0 or len(tensor) != count:
            shape = tuple(tensor.shape)
            raise UserError(
                f"predict(model, batch): {name} has shape {shape}: give a row per sample ({count})"
            )
        arrays[name] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return arrays
