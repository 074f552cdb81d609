"""Recommenders for other systems: scores of sequences as ONNX, vectors as Parquet files with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import ExportError, UserError
from isobatch.core.extras import has
from isobatch.models.protocols import Batches
from isobatch.models.recommendation.recommendations import CONFIG_FILE, VECTORS_FILE, open_recommendations
from isobatch.models.recommendation.sequence import SequenceEncoder

TOLERANCE = 1e-3
"""Largest difference of an exported score, of the largest score where that is above 1."""
COMPARED = 1000
"""Users whose products of vectors are compared."""


class ScoresOfItems(nn.Module):
    """The model of sequences in a folder `final`."""

    def __init__(self, final: Path) -> None:
        from safetensors.torch import load_file

        super().__init__()
        arrays, prefix = load_file(final / VECTORS_FILE), "sequence."
        weights = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        blocks = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
        heads = json.loads((final / CONFIG_FILE).read_text())["attention_heads"]
        longest, dim = weights["positions.weight"].shape
        self.sequence = SequenceEncoder(longest, dim, blocks, heads, 0.0)
        self.sequence.load_state_dict(weights)
        self.items, self.bias = nn.Buffer(arrays["items"]), nn.Buffer(arrays["bias"])

    def forward(self, items: Tensor, length: Tensor) -> Tensor:
        """(B, I) scores for (B, T) numbers of items in time, at most --max-length, `length` (B,) of each."""
        states = self.sequence(self.items[items])
        last = (length - 1).clamp_min(0)[:, None, None].expand(-1, 1, states.shape[-1])
        return (states.gather(1, last)[:, 0] * (length > 0)[:, None]) @ self.items.T + self.bias


def export_onnx(final: Path, folder: Path, net: Any, batches: Batches) -> dict[str, Any]:
    """Write the file, and the names of the items; largest difference to torch over the held-out users.

    `net`: a SequenceNet of the same data, for the items of users. Raises UserError and ExportError.
    """
    from isobatch.models.encoder.evaluation import onnx_session
    from isobatch.models.encoder.export import ONNX_FILES
    from isobatch.models.encoder.onnx_graph import traced

    model, dynamic = ScoresOfItems(final).eval(), torch.export.Dim.DYNAMIC
    example = torch.ones(2, min(4, model.sequence.longest), dtype=torch.int64), torch.tensor([2, 1])
    inputs = {"items": (example[0], {0: dynamic, 1: dynamic}), "length": (example[1], {0: dynamic})}
    traced(model, inputs, "scores", "model of sequences").save(folder / ONNX_FILES["onnx"])
    session, rows, worst = onnx_session(folder / ONNX_FILES["onnx"], threads=1), 0, 0.0
    with torch.no_grad():
        for batch in batches():
            items, length = net.windows(batch["user"].long(), batch["inputs"])
            trained = model(items, length).numpy()
            (found,) = session.run(None, {"items": items.numpy(), "length": length.numpy()})
            off = abs(trained - found).max() / max(1.0, abs(trained).max())
            rows, worst = rows + len(items), float(np.maximum(worst, off))  # NaN stays
    if not worst <= TOLERANCE:
        raise ExportError(f"--to onnx: scores differ by {worst:.2g} of the largest, at most {TOLERANCE:g}")
    return {"max_logit_difference": worst, "samples": rows}


def export_vectors(final: Path, folder: Path, by: str) -> dict[str, Any]:
    """users.parquet and items.parquet (id, vector) of the model or of ALS, and items.usearch where usearch is
    installed; the largest difference of products of vectors to its scores.

    An item's bias is one more dimension, of which a user has 1, so that inner products rank as scores do.
    Keys of the index are rows of items.parquet. Raises UserError where scores are no products.
    """
    from pyarrow import FixedSizeListArray, parquet, table

    lists = open_recommendations(final, by)
    if not lists.has_vectors:
        raise UserError(f"--to vectors: --head {lists.head} has no vectors to multiply: --to vectors-als")
    users = lists.vectors(np.arange(len(lists.users)))
    users = np.column_stack([users, np.ones_like(users[:, 0])])
    items = np.column_stack([lists.arrays["items"], lists.arrays["bias"]])
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

        # Products of long vectors and short ones need more neighbours than usearch's own 16 of 128.
        index = Index(ndim=items.shape[1], metric="ip", dtype="f32", connectivity=32, expansion_add=512)
        index.add(np.arange(len(items)), items.astype(np.float32))
        index.save(str(folder / "items.usearch"))
    return {"max_logit_difference": worst, "samples": compared}
