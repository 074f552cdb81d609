"""Predictions of a task of your own: rows are read by its Data, the model is that of its checkpoint."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isobatch.core.errors import UserError, first_line
from isobatch.data.base import ArraySource, Data, Source, is_text
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
        source, rows = _read_rows(run, Path(file).expanduser())
        table = [row for _, row in tables.read_table(file)] if tables.is_table(file) else []
        if len(table) == len(rows):
            rows = [{**row, **read, **row} for row, read in zip(table, rows, strict=True)]  # a column once
        if not len(source):
            raise UserError(f"--file {file}: the task's read_rows found no sample in it")
    model = OwnModel(run)
    samples = source or model.state.splits[str(split)]
    for start in range(0, len(samples), tables.CHUNK_ROWS):
        numbers = np.arange(start, min(start + tables.CHUNK_ROWS, len(samples)))
        answers = [{"sample": n, **one} for n, one in enumerate(model.answer(samples, numbers), start)]
        beside = rows[start : start + len(answers)] or [{}] * len(answers)
        yield [tables.beside(*both) for both in zip(beside, answers, strict=True)]


def _read_rows(run: RunFolder, path: Path) -> tuple[ArraySource, list[Mapping[str, Any]]]:
    """The samples that the run's Data reads from a path, and the columns of text of each."""
    recipe = dataclasses.replace(run.recipe, data=str(path))
    columns = workload_of(recipe).make(recipe)[1].read_rows()
    source = ArraySource({name: column for name, column in columns.items() if not is_text(column)})
    texts: dict[str, Any] = {name: column.tolist() for name, column in columns.items() if is_text(column)}
    return source, [{name: text[n] for name, text in texts.items()} for n in range(len(source))]


class OwnModel:
    """The trained model of a run of such a task. Called with rows, of a table by column, it answers each."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.state = run, replay_trained(run)[0].state
        self.state.model.eval()

    def answer(self, samples: Source, numbers: np.ndarray) -> list[dict[str, Any]]:
        """What the task's `predict` says of these samples, in order. Raises UserError."""
        task, model, device = self.state.task, self.state.model, self.state.world.device
        assert isinstance(task, PredictsBatches), "the caller has asked"
        answers: list[dict[str, Any]] = [{} for _ in numbers]
        for places in batches_of_one_width(samples.lengths(numbers).tolist()):
            with torch.no_grad():
                batch = to_device(to_tensors(samples.fetch(numbers[places]), pin=False), device)
                found = _columns(task.predict(model, batch), len(places))
            for place, *values in zip(places, *found.values(), strict=True):
                answers[place] = dict(zip(found, values, strict=True))
        return answers

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows are read from a file as that of training, by its ending: .jsonl, .parquet, or else .csv.

        Raises UserError, also for what the task's code raises.
        """
        # In one table rows with other fields would fill each other's gaps.
        if any(row.keys() != rows[0].keys() for row in rows):
            raise UserError("rows: must all have the same fields")
        ending = Path(self.run.recipe.data).suffix.lower()
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            path = Path(folder) / f"rows{ending if ending in tables.OUT_ENDINGS else '.csv'}"
            tables.open_writer(path, path.suffix, rows, opened)(rows)
            opened.close()
            try:
                source, texts = _read_rows(self.run, path)
            except Exception as error:
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                said = kind + first_line(error).replace(str(path), "rows")
                raise UserError(f"the task's read_rows cannot read these rows: {said}") from error
        if len(source) != len(rows):
            raise UserError(f"the task's read_rows found {len(source)} samples in {len(rows)} rows")
        found = self.answer(source, np.arange(len(rows)))
        return [{**text, **one} for text, one in zip(texts, found, strict=True)]


def refuse_without_read_rows(run: RunFolder) -> None:
    """Raise UserError where the run's Data reads no new rows."""
    kind = type(workload_of(run.recipe).make(run.recipe)[1])
    if kind.read_rows is Data.read_rows:
        lacks = f"its {kind.__name__} has no method read_rows, which reads the rows that are sent"
        raise UserError(f"{run.folder}: {lacks}: add it and train again (docs/own-tasks.md)")


def _columns(found: Any, count: int) -> dict[str, list[Any]]:
    """What `predict` returned as lists. Raises UserError unless each has a row per sample."""
    if not isinstance(found, Mapping):
        raise UserError(f"predict(model, batch): returned {type(found).__name__}: return name -> tensor")
    columns = {k: v if isinstance(v, list) else torch.as_tensor(v).tolist() for k, v in found.items()}
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != count:
            raise UserError(f"predict(model, batch): {name}: give a row for each of the {count} samples")
    return columns
