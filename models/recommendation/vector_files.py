"""Vectors of users and items for other systems: Parquet files, and an index of the items by inner product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import ExportError, UserError
from isobatch.core.extras import has
from isobatch.models.recommendation.recommendations import ALS, BASELINES_FILE, open_recommendations

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.models.recommendation.recommendations import Recommendations

TOLERANCE = 1e-3
"""Largest difference of a product from the model's score, of the largest score where that is above 1."""
COMPARED = 1000
"""Users whose products are compared."""


def export_vectors(final: Path, folder: Path, by: str) -> dict[str, Any]:
    """users.parquet and items.parquet (id, vector) of the model or of ALS, and items.usearch where usearch is
    installed; the largest difference of products of vectors to its scores.

    An item's bias is one more dimension, of which a user has 1, so that inner products rank as scores do.
    Keys of the index are rows of items.parquet. Raises UserError where scores are no products.
    """
    from pyarrow import FixedSizeListArray, parquet, table

    lists = open_recommendations(final, by)
    if by == ALS:
        users, items = als_users(final, lists), lists.arrays["items"]
    elif lists.head == "dot":
        users, items, bias = (lists.arrays[name] for name in ("users", "items", "bias"))
        users, items = np.column_stack([users, np.ones_like(users[:, 0])]), np.column_stack([items, bias])
    else:
        raise UserError(f"--to vectors: --head {lists.head} has no vectors to multiply: --to vectors-als")
    compared = min(COMPARED, len(users))
    scores = np.stack([lists.scores(number) for number in range(compared)])
    worst = float(abs(users[:compared] @ items.T - scores).max() / max(1.0, abs(scores).max()))
    if not worst <= TOLERANCE:
        raise ExportError(f"--to vectors: products differ from scores by {worst:.2g}, at most {TOLERANCE:g}")
    for name, ids, vectors in (("users", lists.users, users), ("items", lists.items, items)):
        column = FixedSizeListArray.from_arrays(vectors.astype(np.float32).reshape(-1), vectors.shape[1])
        parquet.write_table(table({"id": ids, "vector": column}), folder / f"{name}.parquet")
    if has("usearch"):
        from usearch.index import Index

        index = Index(ndim=items.shape[1], metric="ip", dtype="f32")
        index.add(np.arange(len(items)), items.astype(np.float32))
        index.save(str(folder / "items.usearch"))
    return {"max_logit_difference": worst, "samples": compared}


def als_users(final: Path, lists: Recommendations) -> Any:
    """(users, dim) the vectors that ALS solves for what users had."""
    import torch
    from safetensors import safe_open

    from isobatch.models.recommendation.classics import als_vectors

    with safe_open(final / BASELINES_FILE, "numpy") as file:
        l2, alpha = file.get_tensor(f"{ALS}.settings").tolist()
    items = torch.from_numpy(lists.arrays["items"])
    owner, item = np.divmod(lists.arrays["had"], len(items))
    starts = np.searchsorted(owner, np.arange(len(lists.users) + 1))
    parts = (*(torch.from_numpy(part) for part in (starts, item)), torch.ones(len(item)))
    had = torch.sparse_csr_tensor(*parts, (len(lists.users), len(items)), check_invariants=False)
    return als_vectors(items, had, l2, alpha).numpy()
