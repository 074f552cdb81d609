"""Fits of classic recommenders to the training interactions: recent popularity, item-kNN, EASE and ALS.

Letters: B users, k neighbours of an item, d = dim. `x` is a sparse CSR matrix (users, items) of ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from isobatch.core.measures import return_freed_memory
from isobatch.models.recommendation.recommendations import ALS, EASE, KNN, RECENT

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
Settings = dict[str, float]
Arrays = dict[str, Tensor]
"""What final/ keeps of a fit, by name."""

EXACT_ITEMS = 5000
"""Largest catalogue whose EASE is exact: each regularization takes items ** 3 multiplications."""
EASE_LAMBDAS: tuple[float, ...] = (1000.0, 100.0, 300.0, 3000.0)
"""L2 regularizations of EASE. Of all settings the best on the validation split is taken, where there is none
the first."""
EASE_WEIGHTS = 1024
"""Weights that exact EASE keeps of each item: what this and other cuts cost is in benchmarks/LOG.md."""
EASE_NEIGHBOURS = 100
"""Items by which each item of a larger catalogue is predicted: those that most of its users took."""
KNN_SHRINKAGES: tuple[float, ...] = (10.0, 1.0, 100.0)
"""Added to the denominator of a cosine, so that a few users in common count little."""
NEIGHBOURS = 100
"""Most similar items that item-kNN keeps of each item."""
ALS_SETTINGS: tuple[tuple[float, ...], ...]
ALS_SETTINGS = ((128, 0.003, 0.1), (64, 0.01, 0.3), (256, 0.003, 0.03), (256, 0.003, 0.01))
"""(dim, regularization, weight of what was not taken)."""
ALS_ROUNDS = 12
ROWS_AT_ONCE = 128
FLOATS_AT_ONCE = 1 << 22
GRAMS_AT_ONCE = 1 << 25
"""Numbers in the matrices of items that a ridge regression is solved for together."""


class TrainingPairs(NamedTuple):
    """The training interactions."""

    x: Tensor
    of_items: Tensor
    """(items, users): x transposed."""
    recent: Tensor
    """(windows, items) counts of the latest interactions."""
    rows: int
    """Number of interactions, also those of one pair."""


class Classic(NamedTuple):
    """A classic recommender: how it is fitted, and how what is kept of it scores."""

    fit: Callable[[TrainingPairs, slice], Iterable[tuple[Settings, Arrays]]]
    """(data, which of its settings) -> these with their fits; the first is the default."""
    score: Callable[[Arrays, Tensor], Tensor]
    """(arrays, (B, items) CSR of what users had) -> (B, items)."""


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """These rows of a CSR matrix."""
    starts, places = _entries(x, rows)
    return torch.sparse_csr_tensor(
        starts, x.col_indices()[places], x.values()[places], (len(rows), x.shape[1]), check_invariants=False
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) a b of CSR matrices, dense; `a` holds ones.

    PyTorch 2.13 never frees the values of its own sparse product.
    """
    owner, sources = torch.repeat_interleave(torch.arange(len(a)), a.crow_indices().diff()), a.col_indices()
    found = torch.zeros(len(a) * b.shape[1])
    most = int(b.crow_indices().diff().max())
    for part in torch.arange(len(sources)).split(max(1, FLOATS_AT_ONCE // max(1, most))):
        starts, places = _entries(b, sources[part])
        first = torch.repeat_interleave(owner[part] * b.shape[1], starts.diff())
        found.index_add_(0, first + b.col_indices()[places], b.values()[places])
    return found.view(len(a), -1)


def _entries(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(where each of these rows of a CSR matrix starts among their entries, places of the entries in it)"""
    first, counts = x.crow_indices()[rows], x.crow_indices().diff()[rows]
    starts = _starts(counts)
    return starts, torch.repeat_interleave(first - starts[:-1], counts) + torch.arange(int(starts[-1]))


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def gram_rows(data: TrainingPairs, items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(place among `items`, item, how many users took both), where any did; without an item with itself."""
    gram = product(rows_of(data.of_items, items), data.x)
    gram[torch.arange(len(items)), items] = 0
    owner, others = gram.nonzero(as_tuple=True)
    return owner, others, gram[owner, others]


def _largest(owner: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(places of the `count` largest scores of each owner, their ranks), owner by owner."""
    order = scores.argsort(descending=True, stable=True)
    order = order[owner[order].argsort(stable=True)]
    ordered = owner[order]
    rank = torch.arange(len(order)) - torch.searchsorted(ordered, ordered)
    return order[rank < count], rank[rank < count]


def item_weights(parts: Iterable[tuple[Tensor, ...]], items: int) -> Arrays:
    """A sparse (items, items) W: a user's score of item i is the sum of W[j, i] over his items j.

    `starts` (items + 1,): row j has the weights from starts[j] to starts[j + 1]; `targets`, ascending in
    each row, and `values` fp16 (weights,). `parts`: j, i and W[j, i] (n,) of some.
    """
    sources, targets, values = map(torch.cat, zip(*parts, strict=True))
    kept = (values := values.half()) != 0
    sources, targets, values = sources[kept], targets[kept], values[kept]
    order = (sources.long() * items + targets).argsort()
    narrow = torch.uint16 if items <= 1 << 16 else torch.int32
    starts = _starts(sources.bincount(minlength=items))
    return {"starts": starts, "targets": targets[order].to(narrow), "values": values[order]}


def weighted_sums(kept: Arrays, x: Tensor) -> Tensor:
    """(B, items) scores by `item_weights`."""
    size = (x.shape[1], x.shape[1])
    parts = kept["starts"], kept["targets"].long(), kept["values"].float()
    weights = torch.sparse_csr_tensor(*parts, size, check_invariants=False)
    return x @ weights.to_dense() if len(weights) <= EXACT_ITEMS else product(x, weights)


def fit_recent(data: TrainingPairs, which: slice) -> Iterator[tuple[Settings, Arrays]]:
    """Popularity in the latest interactions; `share`: of all, that are counted."""
    for counts in data.recent[which]:
        yield {"share": round(int(counts.sum()) / data.rows, 4)}, {"counts": counts.clone()}


def fit_knn(data: TrainingPairs, which: slice) -> Iterator[tuple[Settings, Arrays]]:
    """Shrunk cosines: users of both / (geometric mean of the users of each + shrinkage)."""
    items, shrinkages = data.x.shape[1], KNN_SHRINKAGES[which]
    norms = data.of_items.crow_indices().diff().float().sqrt()
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in shrinkages]
    for targets in torch.arange(items).split(ROWS_AT_ONCE):
        owner, others, users = gram_rows(data, targets)
        return_freed_memory()
        for parts, shrinkage in zip(found, shrinkages, strict=True):
            cosines = users / (norms[targets[owner]] * norms[others] + shrinkage)
            kept, _ = _largest(owner, cosines, NEIGHBOURS)
            parts.append((others[kept], targets[owner[kept]], cosines[kept]))
    for shrinkage, parts in zip(shrinkages, found, strict=True):
        yield {"shrinkage": shrinkage}, item_weights(parts, items)


def fit_ease(data: TrainingPairs, which: slice) -> Iterator[tuple[Settings, Arrays]]:
    """EASE (Steck 2019): each item is predicted by all others, or in a large catalogue by a few."""
    lambdas = EASE_LAMBDAS[which]
    if data.x.shape[1] > EXACT_ITEMS:
        yield from _sparse_ease(data, lambdas)
        return
    gram = _gram(data)
    for l2 in lambdas:
        yield {"lambda": l2}, _exact_ease(gram, l2)


def _gram(data: TrainingPairs) -> Tensor:
    """(items, items) X'X, fp64."""
    items = data.x.shape[1]
    gram = torch.empty(items, items, dtype=torch.float64)
    for rows in torch.arange(items).split(ROWS_AT_ONCE):
        gram[rows] = product(rows_of(data.of_items, rows), data.x).double()
    return gram


def _exact_ease(gram: Tensor, l2: float) -> Arrays:
    """B = I - P / diag(P), P = (X'X + lambda I)^-1; the largest weights of each column."""
    items, parts = len(gram), []
    regular = gram.clone()
    regular.diagonal().add_(l2)
    torch.linalg.cholesky(regular, out=regular)
    inverse = torch.cholesky_inverse(regular, out=regular)
    for targets in torch.arange(items).split(ROWS_AT_ONCE):
        weights = -inverse[targets] / inverse.diagonal()[targets, None]  # rows of P, which is symmetric
        weights[torch.arange(len(targets)), targets] = 0
        sources = weights.abs().topk(min(EASE_WEIGHTS, items)).indices
        same = targets[:, None].expand_as(sources)
        parts.append((sources.flatten(), same.flatten(), weights.gather(1, sources).float().flatten()))
    return item_weights(parts, items)


def _sparse_ease(data: TrainingPairs, lambdas: Iterable[float]) -> Iterator[tuple[Settings, Arrays]]:
    """b = (G_SS + lambda I)^-1 G_Si of item i, S the k items that most of its users took.

    As fsSLIM (Ning and Karypis 2011) selects, with a ridge in place of an elastic net.
    """
    items, k = data.x.shape[1], EASE_NEIGHBOURS
    found = {l2: torch.zeros(items, k) for l2 in lambdas}
    sources = torch.full((items, k), items, dtype=torch.int32)
    for targets in torch.arange(items).split(GRAMS_AT_ONCE // (k * k)):
        nearest, shared = _nearest(data, targets, k)
        grams = _grams_of(data, nearest)
        sources[targets] = nearest.int()
        for part in torch.arange(len(targets)).split(max(1, FLOATS_AT_ONCE // (k * k))):
            for l2, weights in found.items():
                factors = torch.linalg.cholesky(grams[part] + l2 * torch.eye(k))
                weights[targets[part]] = torch.cholesky_solve(shared[part, :, None], factors)[..., 0]
        del grams  # it would stay while the fits are ranked
        return_freed_memory()
    there = sources < items
    same = torch.arange(items, dtype=torch.int32).repeat_interleave(there.sum(1))
    for l2, weights in found.items():
        yield {"lambda": l2, "neighbours": k}, item_weights([(sources[there], same, weights[there])], items)


def _nearest(data: TrainingPairs, targets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(n, k) the items that most of each target's users took, `items` for none; (n, k) how many did."""
    nearest = torch.full((len(targets), k), data.x.shape[1])
    shared = torch.zeros(len(targets), k)
    for rows in torch.arange(len(targets)).split(ROWS_AT_ONCE):
        owner, others, users = gram_rows(data, targets[rows])
        return_freed_memory()
        kept, rank = _largest(owner, users, k)
        nearest[rows[owner[kept]], rank], shared[rows[owner[kept]], rank] = others[kept], users[kept]
    return nearest, shared


def _grams_of(data: TrainingPairs, nearest: Tensor) -> Tensor:
    """(n, k, k) how many users took each two of the (n, k) items of a row."""
    (n, k), items = nearest.shape, data.x.shape[1]
    grams = torch.zeros(n * k, k)
    order = nearest.flatten().argsort(stable=True)
    distinct, counts = nearest.flatten()[order].unique_consecutive(return_counts=True)
    starts, size = _starts(counts), max(1, FLOATS_AT_ONCE // (items + 1))
    for first in range(0, len(distinct[distinct < items]), size):
        sources = distinct[first : first + size]
        sources = sources[sources < items]
        rows = product(rows_of(data.of_items, sources), data.x)
        rows = torch.cat([rows, rows.new_zeros(len(rows), 1)], 1).view(-1)  # the last for no item
        return_freed_memory()
        local = torch.repeat_interleave(torch.arange(len(sources)), counts[first : first + len(sources)])
        places = order[starts[first] : starts[first + len(sources)]]
        for part in torch.arange(len(places)).split(FLOATS_AT_ONCE // k):
            some, row = places[part], local[part]
            grams[some] = rows[row[:, None] * (items + 1) + nearest[some // k]]
    return grams.view(n, k, k)


def fit_als(data: TrainingPairs, which: slice) -> Iterator[tuple[Settings, Arrays]]:
    """Alternating least squares of implicit feedback; see `als_vectors`."""
    for dim, l2, alpha in ALS_SETTINGS[which]:
        shape = (data.x.shape[1], int(dim))
        vectors = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.1 / dim**0.5
        for _ in range(ALS_ROUNDS):
            vectors = als_vectors(als_vectors(vectors, data.x, l2, alpha), data.of_items, l2, alpha)
        settings = {"dim": dim, "lambda": l2, "alpha": alpha}
        yield settings, {"items": vectors, "settings": torch.tensor([l2, alpha])}


def als_vectors(fixed: Tensor, x: Tensor, l2: float, alpha: float) -> Tensor:
    """(B, d) vectors w of the rows of `x` (B, m), given the (m, d) `fixed` v of its columns.

    Each minimizes the sum of (1 - w.v)^2 over what was taken, plus alpha (w.v)^2 over all columns (Hu, Koren
    and Volinsky 2008), plus lambda (taken + alpha m) |w|^2 (Rendle et al. 2022, Revisiting iALS).
    """
    (m, d), counts = fixed.shape, x.crow_indices().diff()
    spread, basis = torch.linalg.eigh(alpha * fixed.T @ fixed)  # in which all but the user's part is diagonal
    padded = torch.cat([fixed @ basis, fixed.new_zeros(1, d)])
    found, order, start = fixed.new_zeros(len(x), d), counts.argsort(descending=True), 0
    while start < len(order):
        longest = max(1, int(counts[order[start]]))
        rows = order[start : start + max(1, FLOATS_AT_ONCE // (d * longest))]
        places = torch.full((len(rows), longest), m)
        places[torch.arange(longest) < counts[rows, None]] = rows_of(x, rows).col_indices()
        v, diagonal = padded[places], spread.clamp_min(0) + l2 * (counts[rows, None] + alpha * m)
        if longest < d:  # (D + V'V)^-1 V' = D^-1 V' (I + V D^-1 V')^-1, which is smaller
            scaled = v / diagonal[:, None]
            factors = torch.linalg.cholesky(scaled @ v.mT + torch.eye(longest))
            found[rows] = (scaled * torch.cholesky_solve(v.new_ones(len(rows), longest, 1), factors)).sum(1)
        else:
            factors = torch.linalg.cholesky(v.mT @ v + torch.diag_embed(diagonal))
            found[rows] = torch.cholesky_solve(v.sum(1)[..., None], factors)[..., 0]
        start += len(rows)
    return found @ basis.T


def als_users(kept: Arrays, x: Tensor) -> Tensor:
    """(B, d) the users' vectors, solved for what they had."""
    return als_vectors(kept["items"], x, *kept["settings"].tolist())


CLASSICS = {
    RECENT: Classic(fit_recent, lambda kept, x: kept["counts"].float().expand(len(x), -1)),
    KNN: Classic(fit_knn, weighted_sums),
    EASE: Classic(fit_ease, weighted_sums),
    ALS: Classic(fit_als, lambda kept, x: als_users(kept, x) @ kept["items"].T),
}
