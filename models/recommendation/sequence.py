"""The network of sequences: a causal transformer over the items that a user took gives the user's vector.

SASRec (Kang and McAuley 2018), with blocks that normalize first. Letters: B rows, T items of a row, N places
whose next item is scored, M items, d = dim.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, relu, scaled_dot_product_attention

from isobatch.core.errors import ExportError
from isobatch.core.extras import need
from isobatch.models.recommendation.network import ID_INIT_STD, RecommenderNet
from isobatch.models.recommendation.recommendations import CONFIG_FILE, VECTORS_FILE

if TYPE_CHECKING:
    from isobatch.models.protocols import Batches
    from isobatch.models.recommendation.catalogue import Catalogue
    from isobatch.models.recommendation.text_encoder import TextEncoder

USERS_AT_ONCE = 1024
"""Users whose vectors are computed together."""
INIT_STD = 0.02
"""Standard deviation of the initial ids and positions."""
TOLERANCE = 1e-3
"""Largest difference of a score in an ONNX file, of the largest score where that is above 1."""
WIDENING = 4
"""The MLP of a block is so many times as wide as an item's vector."""


class SequenceBlock(nn.Module):
    """A transformer layer whose items attend to themselves and those before."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, WIDENING * dim), nn.Linear(WIDENING * dim, dim)
        self.attention_dropout, self.mlp_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        rows, items, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, items, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_dropout(self.out(seen.transpose(1, 2).reshape(rows, items, dim)))
        return x + self.mlp_dropout(self.down(relu(self.up(self.mlp_norm(x)))))


class SequenceEncoder(nn.Module):
    """Positions from the first item of a row on, and blocks."""

    def __init__(self, longest: int, dim: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.longest = longest
        self.positions = nn.Embedding(longest, dim)
        self.positions.weight.data.mul_(INIT_STD)
        self.input_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(SequenceBlock(dim, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, items: Tensor) -> Tensor:
        """(B, T, d) vectors of items -> (B, T, d) states; padding on the right changes no state before it."""
        x = items * items.shape[-1] ** 0.5 + self.positions.weight[: items.shape[1]]
        x = self.input_dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class SequenceNet(RecommenderNet):
    """Scores u.v + b, where u is the state of a `SequenceEncoder` at the last item known of a user."""

    has_user_vectors = False

    def __init__(self, catalogue: Catalogue, dim: int, encoder: TextEncoder | None, **sizes: float) -> None:
        """`sizes`: those of SequenceEncoder beside `dim`."""
        super().__init__(catalogue, dim, (), "dot", encoder)
        self.item_ids.weight.data.mul_(INIT_STD / ID_INIT_STD)
        self.sequence = SequenceEncoder(dim=dim, **sizes)  # type: ignore[arg-type]

    def vectors(self, user: Any, item: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, d) of (B,) users of whom `inputs` (B,) interactions, or all, are known; (M, d) of items.

        In training `user` is ((B, T) rows of items, (N,) places in them), and (N, d) are the states there.
        """
        if isinstance(user, tuple):
            (rows, places), known = user, torch.ones((), device=item.device)
        else:
            rows, length = self.windows(user, inputs)
            places = torch.arange(len(rows), device=rows.device) * rows.shape[1] + (length - 1).clamp_min(0)
            known = (length > 0)[:, None]  # of whom nothing is known has the vector 0
        entered, scored = self.item_vectors(torch.cat([rows.reshape(-1), item])).split(
            [rows.numel(), len(item)]
        )
        states = embedding(places, self.sequence(entered.view(*rows.shape, -1)).flatten(0, 1))
        return states * known, scored

    def item_vectors(self, item: Tensor) -> Tensor:
        """(M, d)."""
        if self.encoder is None:
            return self.item_ids(item)
        items, position = torch.unique(item, return_inverse=True)
        texts = self.item_text[items]
        vectors = self._fused("item", self.item_ids(items), texts, self._lookup_text_vectors(texts))
        return embedding(position, vectors)

    def windows(self, user: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """((B, T) the last items among the first `counts` (B,) of each user, padded by 0; (B,) how many)."""
        first = self.starts[user]
        counts = self.starts[user + 1] - first if counts is None else counts.long()
        length = counts.clamp_max(self.sequence.longest)
        columns = torch.arange(max(1, int(length.max())), device=user.device)
        places = (first + counts - length)[:, None] + columns
        rows = self.history[places.clamp_max(len(self.history) - 1)].long()
        return rows * (columns < length[:, None]), length

    @torch.no_grad()
    def all_vectors(self) -> tuple[Tensor, Tensor]:
        """(users, d), each of all that the user had, and (items, d)."""
        device = self.user_text.device
        users, items = (torch.arange(len(t), device=device) for t in (self.user_text, self.item_text))
        found = [self.vectors(part, items[:0])[0] for part in users.split(USERS_AT_ONCE)]
        return torch.cat(found), self.item_vectors(items)


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
        known = (length > 0)[:, None]
        return (states.gather(1, last)[:, 0] * known) @ self.items.T + self.bias


def export_onnx(final: Path, folder: Path, net: Any, batches: Batches) -> dict[str, Any]:
    """Write the file, and the names of the items; largest difference to torch over the held-out users.

    `net`: a SequenceNet of the same data, for the items of users. Raises UserError and ExportError.
    """
    from isobatch.models.encoder.evaluation import onnx_session
    from isobatch.models.encoder.export import ONNX_FILES

    need("onnxscript", "an ONNX file")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    model, dynamic = ScoresOfItems(final).eval(), torch.export.Dim.DYNAMIC
    example = torch.ones(2, min(4, model.sequence.longest), dtype=torch.int64), torch.tensor([2, 1])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PyTorch's, of its own code
        program = torch.onnx.export(
            model,
            example,
            dynamo=True,
            verbose=False,
            input_names=["items", "length"],
            output_names=["scores"],
            dynamic_shapes=({0: dynamic, 1: dynamic}, {0: dynamic}),
        )
        assert program is not None, "dynamo gives a program"
        program.save(folder / ONNX_FILES["onnx"])
        session, rows, worst = onnx_session(folder / ONNX_FILES["onnx"], threads=1), 0, 0.0
        for batch in batches():
            items, length = net.windows(batch["user"].long(), batch["inputs"])
            trained = model(items, length).numpy()
            (found,) = session.run(None, {"items": items.numpy(), "length": length.numpy()})
            off = abs(trained - found).max() / max(1.0, abs(trained).max())
            rows, worst = rows + len(items), float(np.maximum(worst, off))  # NaN stays
    if not worst <= TOLERANCE:
        raise ExportError(f"--to onnx: scores differ by {worst:.2g} of the largest, at most {TOLERANCE:g}")
    return {"max_logit_difference": worst, "samples": rows}
