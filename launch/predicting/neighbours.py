"""`predict --neighbours`: the training texts that a finished classifier takes for the most alike.

A text is the mean over its tokens of the states that the last layer reads, made as long as 1 (Reimers and
Gurevych 2019); two are as near as their product, the cosine.

Letters: H hidden width, n training texts, q texts asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isobatch.core import atomic_files
from isobatch.core.terminal import doing
from isobatch.launch.local.run_setup import known_data
from isobatch.launch.predicting.tables import CHUNK_ROWS
from isobatch.models import hub

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.encoder.prediction import TextClassifier

PRODUCTS = 1 << 24
"""Pairs of texts that are compared at a time."""


def nearest(vectors: Tensor, asked: Tensor, count: int) -> Iterator[tuple[list[float], list[int]]]:
    """For each row of (q, H) its `count` largest products with rows of (n, H), falling, and these rows."""
    for some in asked.split(max(1, PRODUCTS // len(vectors))):
        products, numbers = (some @ vectors.T).topk(min(count, len(vectors)))
        yield from zip(products.tolist(), numbers.tolist(), strict=True)


def training_neighbours(
    run: RunFolder, classifier: TextClassifier, count: int
) -> Callable[[np.ndarray], list[list[dict[str, Any]]]]:
    """(q, H) -> the nearest training texts of each, the nearest first, with label and `similarity`.

    The training texts' vectors are kept in the run's folder, (n, H) float16. Raises UserError where the data
    is not there any more, or is another.
    """
    data: Any = known_data(run, "--neighbours")
    written, file = data.written(), run.folder / f"neighbours-{hub.weights_hash(str(run.final))}.npy"
    if not file.is_file():
        found = []
        for start in range(0, len(written), CHUNK_ROWS):
            doing("representing the training texts", start, len(written))
            some = written[start : start + CHUNK_ROWS]
            texts = [(one["text"], one["pair"]) if "pair" in one else one["text"] for one in some]
            found.append(classifier.represent(texts))
        with atomic_files.explain_write_errors(file), file.with_suffix(".tmp").open("wb") as stream:
            np.save(stream, np.concatenate(found).astype(np.float16))
        file.with_suffix(".tmp").replace(file)
    vectors = torch.from_numpy(np.load(file).astype(np.float32))
    return lambda asked: [
        [{**written[n], "similarity": one} for one, n in zip(*found, strict=True)]
        for found in nearest(vectors, torch.from_numpy(asked), count)
    ]
