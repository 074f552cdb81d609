"""Baselines of the same interactions: popularity, item-kNN and EASE; and the model held against each of them.

They are fitted at the end of training and kept in final/, item-kNN and EASE as the largest weights of other
items for each item. What is measured is what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isobatch.core import atomic_files
from isobatch.core.terminal.status import doing
from isobatch.models.recommendation import ranking
from isobatch.models.recommendation.recommendations import (
    BASELINES,
    BASELINES_FILE,
    EASE,
    KNN,
    MODEL,
    POPULARITY,
)

if TYPE_CHECKING:
    from isobatch.models.base import Batch

    Batches = Callable[[], Iterable[Batch]]

METRICS = ("hr", "ndcg", "mrr")
MAX_ITEMS = 10_000
"""Item-kNN and EASE need an (items, items) matrix: they are left out for larger catalogues."""
EASE_LAMBDAS = (1000.0, 100.0, 300.0, 3000.0)
"""L2 regularizations of EASE. Of all settings the best on the validation split is taken, where there is none
the first."""
EASE_WEIGHTS = 1024
"""Weights that EASE keeps of each item: what this and other cuts cost is in benchmarks/LOG.md."""
KNN_SHRINKAGES = (10.0, 100.0)
"""Added to the denominator of a cosine, so that a few users in common count little."""
NEIGHBOURS = 100
"""Most similar items that item-kNN keeps of each item."""


class ItemWeights(NamedTuple):
    """A sparse (items, items) matrix W: a user's score of item i is the sum of W[j, i] over his items j."""

    starts: Tensor
    """(items + 1,) int64: the weights of row j are those from starts[j] to starts[j + 1]."""
    targets: Tensor
    """(weights,) uint16 columns, ascending in each row."""
    values: Tensor
    """(weights,) fp16."""

    @classmethod
    def largest(cls, weights: Tensor, count: int) -> ItemWeights:
        """The `count` largest, by their absolute value, of each column of an (items, items) matrix."""
        rows = weights.abs().topk(min(count, len(weights)), dim=0).indices
        kept = torch.zeros_like(weights).scatter_(0, rows, weights.gather(0, rows)).half().to_sparse()
        sources, targets = kept.indices()
        starts = torch.searchsorted(sources, torch.arange(len(weights) + 1))
        return cls(starts, targets.to(torch.uint16), kept.values())

    def dense(self) -> Tensor:
        """(items, items) fp32."""
        rows = torch.arange(len(self.starts) - 1)
        found = torch.zeros(len(rows), len(rows))
        found[torch.repeat_interleave(rows, self.starts.diff()), self.targets.long()] = self.values.float()
        return found


def ease_weights(gram: Tensor, l2: float) -> Tensor:
    """(items, items) weights of EASE (Steck 2019): B = I - P / diag(P), P = (X'X + lambda I)^-1."""
    regular = gram + l2 * torch.eye(len(gram), dtype=gram.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regular))
    return (inverse / -inverse.diagonal()).float().fill_diagonal_(0)


def knn_weights(gram: Tensor, shrinkage: float) -> Tensor:
    """(items, items) shrunk cosines: users of both / (geometric mean of the users of each + shrinkage)."""
    norms = gram.diagonal().sqrt()
    return (gram / (norms[:, None] * norms + shrinkage)).float().fill_diagonal_(0)


class Fit(NamedTuple):
    """A baseline with a setting that is tuned."""

    setting: str
    values: tuple[float, ...]
    make: Callable[[Tensor, float], ItemWeights]


FITS: Mapping[str, Fit] = {
    KNN: Fit("shrinkage", KNN_SHRINKAGES, lambda g, v: ItemWeights.largest(knn_weights(g, v), NEIGHBOURS)),
    EASE: Fit("lambda", EASE_LAMBDAS, lambda g, v: ItemWeights.largest(ease_weights(g, v), EASE_WEIGHTS)),
}


@torch.no_grad()
def fit_unmeasured(net: Any, final: Path) -> None:
    """Keep the baselines in `final` where nothing is held out, with the model for BEST."""
    _write(final, net, {name: one.weights for name, one in _fitted(net, None, 0).items()}, MODEL)


@torch.no_grad()
def final_figures(
    net: Any, final: Path, batches: Batches, validation: Batches | None, k: int
) -> dict[str, Any]:
    """Keep the baselines in `final`; the metrics of each, and how sure its difference to the model's is.

    Settings are those with the best NDCG among all items in `validation`, never in `batches`.
    """
    fitted, best = _fitted(net, validation, k), MODEL
    found: dict[str, Any] = {f"{name}_{FITS[name].setting}": one.value for name, one in fitted.items()}
    if validation is not None:
        own = {n: ranking.measure(net, s, validation(), k).figures for n, s in _scorers(net, {}).items()}
        ndcg = {name: figures[f"full_ndcg@{k}"] for name, figures in own.items()}
        ndcg |= {name: one.full_ndcg for name, one in fitted.items()}
        best = found["best_on_validation"] = max(ndcg, key=lambda name: ndcg[name])
    _write(final, net, {name: one.weights for name, one in fitted.items()}, best)
    return found | kept_metrics(net, final, batches, k)


class TriedSetting(NamedTuple):
    """A baseline with a value of its setting, and its figure on the validation data."""

    full_ndcg: float
    value: float
    weights: ItemWeights


def _fitted(net: Any, validation: Batches | None, k: int) -> dict[str, TriedSetting]:
    """Each baseline as it ranks best among all items; without `validation` with the first value of its
    setting.
    """
    net.eval()
    if len(net.item_text) > MAX_ITEMS:
        return {}
    gram, found = gram_matrix(net), {}
    for name, fit in FITS.items():
        tried = []
        for value in fit.values if validation else fit.values[:1]:
            doing(f"fitting {BASELINES[name]}, {fit.setting} {value:g}")
            scorer = _linear_scorer(net, weights := fit.make(gram, value))
            figures = ranking.measure(net, scorer, validation(), k).figures if validation else {}
            tried.append(TriedSetting(figures.get(f"full_ndcg@{k}", 0.0), value, weights))
        found[name] = max(tried, key=lambda one: one.full_ndcg)
    return found


@torch.no_grad()
def kept_metrics(net: Any, final: Path, batches: Batches, k: int) -> dict[str, Any]:
    """How the baselines in `final` rank, and 95 % intervals of their full_ndcg less the model's."""
    doing("measuring baselines beside the model")
    net.eval()
    user, item = (torch.cat([batch[name].long() for batch in batches()]) for name in ("user", "item"))
    ranked = {n: ranking.measure(net, s, batches(), k) for n, s in _scorers(net, _read(final)).items()}
    found: dict[str, Any] = {"held_out_users": len(user.unique())}
    cold = {"cold_users": user[net.trained.cpu()[user] == 0], "cold_items": item[net.counts.cpu()[item] == 0]}
    found |= {name: len(ids.unique()) for name, ids in cold.items() if len(ids)}
    evaluated = {f"{way}{m}@{k}" for way in ("", "full_") for m in METRICS}
    for name, (figures, full_ndcg) in ranked.items():
        prefix = "" if name == MODEL else f"{name}_"
        for figure, value in figures.items():
            if name not in (MODEL, POPULARITY) or figure not in evaluated:
                way = "full_" * figure.startswith("full_")
                found[f"{way}{prefix}{figure.removeprefix(way)}"] = value
        interval = paired_interval(full_ndcg - ranked[MODEL].full_ndcg, user)
        if name != MODEL and interval is not None:
            found[f"full_{prefix}ndcg@{k}_difference_ci95"] = interval
    return found


def _write(final: Path, net: Any, kept: Mapping[str, ItemWeights], best: str) -> None:
    from safetensors.torch import save_file

    arrays = {POPULARITY: net.counts.cpu()}
    for name, weights in kept.items():
        arrays |= {f"{name}.{part}": array for part, array in weights._asdict().items()}
    save_file(arrays, final / BASELINES_FILE, {"best": best})
    atomic_files.share_as_umask_allows(final)


def _read(final: Path) -> dict[str, ItemWeights]:
    """The baselines with weights that a trained model keeps."""
    from safetensors.torch import load_file

    arrays = load_file(final / BASELINES_FILE)
    names = [name for name in FITS if f"{name}.starts" in arrays]
    return {n: ItemWeights(*(arrays[f"{n}.{part}"] for part in ItemWeights._fields)) for n in names}


def _scorers(net: Any, kept: Mapping[str, ItemWeights]) -> dict[str, ranking.Scorer]:
    device = net.seen.device
    return {
        MODEL: lambda user, inputs: (
            ranking.score_all_items(net, user.to(device), inputs.to(device)).float().cpu()
        ),
        POPULARITY: lambda user, _: net.counts.float().cpu().expand(len(user), -1),
        **{name: _linear_scorer(net, weights) for name, weights in kept.items()},
    }


def _linear_scorer(net: Any, weights: ItemWeights) -> ranking.Scorer:
    matrix = weights.dense()
    return lambda user, inputs: input_matrix(net, user, inputs) @ matrix


def paired_interval(differences: Tensor, users: Tensor) -> list[float] | None:
    """The 95 % interval of the mean of (rows,) differences; None of fewer than two users.

    Rows of one user are not independent: their deviations are added up first (cluster-robust error).
    """
    _, groups = users.unique(return_inverse=True)
    count = int(groups.max()) + 1
    if count < 2:
        return None
    mean = differences.mean()
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, groups, differences - mean)
    half = 1.96 * sums.square().sum().mul(count / (count - 1)).sqrt() / len(differences)
    return [float(mean - half), float(mean + half)]


def input_matrix(net: Any, user: Tensor, inputs: Tensor) -> Tensor:
    """(B, items), sparse: 1 where an item is among the first `inputs` (B,) interactions of (B,) users."""
    rows, items = net.interactions(user.to(net.seen.device), inputs.to(net.seen.device))
    size = len(user), len(net.item_text)
    pairs = (rows * size[1] + items).unique().cpu()
    places = torch.stack((pairs // size[1], pairs % size[1]))
    return torch.sparse_coo_tensor(places, torch.ones(len(pairs)), size, check_invariants=False)


def gram_matrix(net: Any) -> Tensor:
    """(items, items) X'X of the training interactions, fp64."""
    items, users = len(net.item_text), torch.arange(len(net.user_text))
    gram, trained = torch.zeros(items, items, dtype=torch.float64), net.trained.cpu()
    for chunk in users.split(max(1, ranking.MAX_SCORES_AT_ONCE // items)):
        x = input_matrix(net, chunk, trained[chunk])
        gram += x.T @ x.to_dense()
    return gram
