"""Predictions of a task of your own: rows are read by its Data, the model is that of its checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isobatch.core.errors import UserError
from isobatch.data.base import ArraySource
from isobatch.engine.loading.device_copies import to_device, to_tensors
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.evaluate import replay_trained
from isobatch.launch.predicting import tables
from isobatch.models.encoder.prediction import batches_of_one_width
from isobatch.models.protocols import PredictsBatches


def predict_own_rows(run: RunFolder, file: str | None, split: str | None) -> Iterator[list[dict[str, Any]]]:
    """Chunks of a dict per sample, `sample` its number, behind the rows of a table that has one for each.

    Raises UserError.
    """
    if not file and split not in run.facts.samples:
        raise UserError(f"predict: give --file FILE, or --split {'|'.join(run.facts.samples)}")
    source, rows = None, list[Mapping[str, Any]]()
    if file:
        recipe = dataclasses.replace(run.recipe, data=str(Path(file).expanduser()))
        source = ArraySource(workload_of(recipe).make(recipe)[1].read_rows())
        rows = [row for _, row in tables.read_table(file)]
        if not len(source):
            raise UserError(f"--file {file}: the task's read_rows found no sample in it")
    state = replay_trained(run)[0].state
    task, model, device = state.task, state.model.eval(), state.world.device
    assert isinstance(task, PredictsBatches), "the caller has asked"
    samples = source or state.splits[str(split)]
    for start in range(0, len(samples), tables.CHUNK_ROWS):
        numbers = np.arange(start, min(start + tables.CHUNK_ROWS, len(samples)))
        answers: list[dict[str, Any]] = [{} for _ in numbers]
        for places in batches_of_one_width(samples.lengths(numbers).tolist()):
            with torch.no_grad():
                batch = to_device(to_tensors(samples.fetch(numbers[places]), pin=False), device)
                found = _columns(task.predict(model, batch), len(places))
            for place, *values in zip(places, *found.values(), strict=True):
                answers[place] = {"sample": int(numbers[place]), **dict(zip(found, values, strict=True))}
        if len(rows) == len(samples):
            answers = [tables.beside(rows[number], one) for number, one in zip(numbers, answers, strict=True)]
        yield answers


def _columns(found: Any, count: int) -> dict[str, list[Any]]:
    """What `predict` returned as lists. Raises UserError unless each has a row per sample."""
    if not isinstance(found, Mapping):
        raise UserError(f"predict(model, batch): returned {type(found).__name__}: return name -> tensor")
    columns = {name: torch.as_tensor(value).tolist() for name, value in found.items()}
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != count:
            raise UserError(f"predict(model, batch): {name}: give a row for each of the {count} samples")
    return columns
