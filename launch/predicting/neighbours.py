"""`predict --neighbours`: the training texts that a finished classifier takes for the most alike.

A text is the mean over its tokens of the states that the last layer reads, made as long as 1 (Reimers and
Gurevych 2019); two are as near as their product, the cosine.

Letters: H hidden width, n training texts, q texts asked for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.terminal.status import doing
from isobatch.data.tokenized import TokenizedData
from isobatch.engine.loading.prepare import folder_of
from isobatch.engine.registry import workload_of
from isobatch.launch.local.run_setup import locate_data
from isobatch.models import hub
from isobatch.models.encoder import evaluation, prediction

if TYPE_CHECKING:
    from isobatch.data.base import Source
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.encoder.evaluation import Runner

PRODUCTS = 1 << 24
"""Pairs of texts that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The training texts' vectors, and how the nearest are told."""

    vectors: np.ndarray
    """(n, H) of length 1, perhaps mapped from a file."""
    count: int
    describe: Callable[[Sequence[int]], list[dict[str, Any]]]
    """Numbers of training texts -> text and label of each."""

    def __call__(self, asked: np.ndarray) -> list[list[dict[str, Any]]]:
        """For each row of (q, H) its nearest texts, the nearest first, each with its `similarity`."""
        numbers, similarities = nearest(self.vectors, asked, self.count)
        return [
            [{**one, "similarity": value} for one, value in zip(self.describe(row), values, strict=True)]
            for row, values in zip(numbers.tolist(), similarities.tolist(), strict=True)
        ]


def nearest(vectors: np.ndarray, asked: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, products): the `count` rows of (n, H) with the largest products with each of (q, H), both
    (q, count), the largest first.
    """
    numbers: np.ndarray = np.empty((len(asked), 0), np.int64)
    products: np.ndarray = np.empty((len(asked), 0), np.float32)
    rows = max(1, PRODUCTS // max(1, len(asked)))
    for start in range(0, len(vectors), rows):
        block = asked @ vectors[start : start + rows].astype(np.float32).T
        numbers = np.hstack([numbers, np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)])
        products = np.hstack([products, block])
        if products.shape[1] > count:
            best = np.argpartition(-products, count - 1, 1)[:, :count]
            numbers, products = (np.take_along_axis(one, best, 1) for one in (numbers, products))
    order = np.argsort(-products, 1, kind="stable")
    return np.take_along_axis(numbers, order, 1), np.take_along_axis(products, order, 1)


def encode_samples(encode: Runner, source: Source) -> np.ndarray:
    """(n, H) of all samples."""
    found, done = dict[int, np.ndarray](), 0
    for places in prediction.batches_of_one_width(source.lengths(np.arange(len(source))).tolist()):
        doing("representing the training texts", done, len(source))
        batch: Any = source.fetch(np.array(places))
        found |= zip(places, encode(evaluation.model_inputs(batch)), strict=True)
        done += len(places)
    return np.stack([found[place] for place in range(len(source))])


def training_neighbours(run: RunFolder, encode: Runner, count: int) -> Neighbours:
    """Of the run's prepared data; its vectors are kept in the run's folder, (n, H) float16.

    `encode`: a model's inputs -> (B, H). Raises UserError where the data is not there any more.
    """
    locate_data(run, run.recipe, None)
    data: Any = workload_of(run.recipe).make(run.recipe)[1]
    facts, written = run.facts, None
    source = data.open(Path(facts.folder), "train")
    file = run.folder / f"neighbours-{hub.weights_hash(str(run.final))}.npy"
    if not file.is_file():
        with atomic_files.explain_write_errors(file), file.with_suffix(".tmp").open("wb") as stream:
            np.save(stream, encode_samples(encode, source).astype(np.float16))
        file.with_suffix(".tmp").replace(file)
    if folder_of(data) == Path(facts.folder):  # the data is what it was
        with contextlib.suppress(UserError):
            written = data.written()

    def describe(numbers: Sequence[int]) -> list[dict[str, Any]]:
        batch = source.fetch(np.array(numbers))
        texts = TokenizedData.describe_rows(data, facts, batch)
        lines = zip(data.describe_rows(facts, batch), texts, strict=True)
        labels = [line.removesuffix(f": {text}") for line, text in lines]
        rows = zip(texts, itertools.repeat(None)) if written is None else (written[n] for n in numbers)
        return [
            {"text": text, **({} if pair is None else {"pair": pair}), "label": label}
            for (text, pair), label in zip(rows, labels, strict=True)
        ]

    return Neighbours(np.load(file, mmap_mode="r"), count, describe)
