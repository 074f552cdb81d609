"""Baselines of the same interactions: classic recommenders, a blend of the two best, and the model held
against each of them.

They are fitted at the end of training and kept in final/. What is measured is what is kept.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from isobatch.core import atomic_files
from isobatch.core.terminal import doing
from isobatch.models.protocols import Batches
from isobatch.models.recommendation import ranking, recommendations
from isobatch.models.recommendation.classics import CLASSICS, Arrays, Settings, TrainingPairs, als_users
from isobatch.models.recommendation.network import spans
from isobatch.models.recommendation.recommendations import ALS, BASELINES_FILE, BLEND, EASE, MODEL, POPULARITY

METRICS = ("hr", "ndcg", "mrr")
BLEND_WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the best on the validation split in a blend with the second."""
SCORES_TO_TUNE_BY = 1 << 29
"""Settings are chosen by every n-th row of the validation split, so that about so many scores are ranked."""


class Fitted(NamedTuple):
    """A candidate with the best of its settings, and its figure on the validation data."""

    full_ndcg: float
    settings: Settings
    arrays: Arrays
    number: int | None = None
    """The place of its settings among those that are tried, where they were chosen."""


@torch.no_grad()
def fit_unmeasured(net: Any, final: Path, earlier: Path | None = None) -> str:
    """Keep the baselines in `final` where nothing is held out. BEST is what the run in `earlier` chose on its
    validation data, which is said; "" where it chose nothing, and BEST the model, or EASE without a network.
    """
    fitted, has_model = _fitted(net, None, 0, earlier), net.is_trained
    kept, best = _read(earlier) if earlier and (earlier / BASELINES_FILE).is_file() else ({}, "")
    shares = {name: float(share) for name, share in kept.get(BLEND, {}).items()}
    if not shares or not {*fitted, POPULARITY, BLEND, *[MODEL] * has_model}.issuperset({best, *shares}):
        _write(final, net, fitted, MODEL if has_model else EASE)
        return ""
    _write(final, net, {**fitted, BLEND: Fitted(0.0, {}, kept[BLEND])}, best)
    return " + ".join(f"{share:g} {name}" for name, share in shares.items()) if best == BLEND else best


@torch.no_grad()
def final_figures(
    net: Any, final: Path, batches: Batches, validation: Batches | None, k: int, earlier: Path | None = None
) -> dict[str, Any]:
    """Keep the baselines in `final`; the metrics of each, and how sure its difference to the model's is.

    Settings, and the best of all, are those with the best NDCG among all items in `validation`, never in
    `batches`; it stands in the place of a network that was not trained. `earlier`: final/ of the run that
    this one goes on from, whose settings of the classics are not chosen again.
    """
    thin = validation and _thinned(net, validation)
    fitted, best = _fitted(net, thin, k, earlier), MODEL if net.is_trained else EASE
    found: dict[str, Any] = {f"{n}_{of}": v for n, one in fitted.items() for of, v in one.settings.items()}
    if thin is not None:
        scorers = _scorers(net, {name: one.arrays for name, one in fitted.items()})
        ndcg = {name: one.full_ndcg for name, one in fitted.items()}
        others = [MODEL, POPULARITY] if net.is_trained else [POPULARITY]
        ndcg |= {name: _ndcg(net, scorers[name], thin, k) for name in others}
        first, second = sorted(ndcg, key=lambda name: -ndcg[name])[:2]
        blends = []
        for share in BLEND_WEIGHTS:
            doing(f"blending {first} and {second}, {share:g} of {first}")
            arrays = {first: torch.tensor([share]), second: torch.tensor([1 - share])}
            scorer = _scorers(net, {**{n: one.arrays for n, one in fitted.items()}, BLEND: arrays})[BLEND]
            blends.append(Fitted(_ndcg(net, scorer, thin, k), {}, arrays))
        fitted[BLEND] = max(blends, key=lambda one: one.full_ndcg)
        ndcg[BLEND] = fitted[BLEND].full_ndcg
        shares = [f"{float(share):g} {name}" for name, share in fitted[BLEND].arrays.items()]
        best = max(ndcg, key=lambda name: ndcg[name])
        found |= {"blend_of": " + ".join(shares), "best_on_validation": best}
        found[f"full_ndcg@{k}_on_validation"] = ndcg
    _write(final, net, fitted, best)
    return found | kept_metrics(net, final, batches, k)


def _thinned(net: Any, batches: Batches) -> Batches:
    """Every n-th row of all batches, see SCORES_TO_TUNE_BY."""
    every = max(1, sum(len(b["user"]) for b in batches()) * len(net.item_text) // SCORES_TO_TUNE_BY)
    return lambda: ({name: part[::every] for name, part in batch.items()} for batch in batches())


def _ndcg(net: Any, scorer: ranking.Scorer, batches: Batches, k: int) -> float:
    return ranking.measure(net, scorer, batches(), k).figures[f"full_ndcg@{k}"]


def _fitted(net: Any, validation: Batches | None, k: int, earlier: Path | None) -> dict[str, Fitted]:
    """Each classic as it ranks best among all items; without `validation` with the first of its settings."""
    chosen: dict[str, int] = {}
    if earlier is not None and (kept := earlier / BASELINES_FILE).is_file():
        with safe_open(kept, "pt") as file:
            chosen = json.loads(file.metadata().get("settings", "{}"))
    net.eval()
    x, found = input_matrix(net, torch.arange(len(net.user_text)), net.trained.cpu()), dict[str, Fitted]()
    data = TrainingPairs(x, x.t().to_sparse_csr(), net.recent.cpu(), int(net.counts.sum()))
    for name, classic in CLASSICS.items():
        doing(f"fitting {recommendations.BASELINES[name]}")
        first = int(chosen.get(name, 0))
        which = slice(first, None if validation and name not in chosen else first + 1)
        for number, (settings, arrays) in enumerate(classic.fit(data, which), first):
            ndcg = _ndcg(net, _scorers(net, {name: arrays})[name], validation, k) if validation else 0.0
            if name not in found or ndcg > found[name].full_ndcg:
                found[name] = Fitted(ndcg, settings, arrays, number if validation or name in chosen else None)
    return found


@torch.no_grad()
def kept_metrics(net: Any, final: Path, batches: Batches, k: int) -> dict[str, Any]:
    """How the baselines in `final` rank, and 95 % intervals of their full_ndcg less the model's.

    Where the network was not trained, the best on the validation data has the names of the model's metrics.
    """
    has_model, (kept, best) = net.is_trained, _read(final)
    doing("measuring baselines beside the model" if has_model else "measuring the classics")
    net.eval()
    user, item = (torch.cat([batch[name].long() for batch in batches()]) for name in ("user", "item"))
    scorers, own = _scorers(net, kept), MODEL if has_model else best
    ranked = {n: ranking.measure(net, s, batches(), k) for n, s in scorers.items() if has_model or n != MODEL}
    found: dict[str, Any] = {"held_out_users": len(user.unique())}
    cold = {"cold_users": user[net.trained.cpu()[user] == 0], "cold_items": item[net.counts.cpu()[item] == 0]}
    found |= {name: len(ids.unique()) for name, ids in cold.items() if len(ids)}
    evaluated = {f"{way}{m}@{k}" for way in ("", "full_") for m in METRICS}
    for name, (figures, full_ndcg) in ranked.items():
        prefixes = sorted({"" if name == MODEL else f"{name}_", "" if name == own else f"{name}_"})
        for prefix, (figure, value) in itertools.product(prefixes, figures.items()):
            if name not in (MODEL, POPULARITY) or figure not in evaluated:
                way = "full_" * figure.startswith("full_")
                found[f"{way}{prefix}{figure.removeprefix(way)}"] = value
        interval = paired_interval(full_ndcg - ranked[own].full_ndcg, user)
        if name != own and interval is not None:
            found[f"full_{name}_ndcg@{k}_difference_ci95"] = interval
    return found


def _write(final: Path, net: Any, fitted: Mapping[str, Fitted], best: str) -> None:
    from safetensors.torch import save_file

    arrays, kept = {POPULARITY: net.counts.cpu()}, {name: one.arrays for name, one in fitted.items()}
    for name, parts in kept.items():
        arrays |= {f"{name}.{part}": array for part, array in parts.items()}
    if best == ALS or (best == BLEND and ALS in kept[BLEND]):  # solved once, for the lists of all users
        x = input_matrix(net, torch.arange(len(net.user_text)), net.starts.diff())
        arrays[f"{ALS}.users"] = als_users(kept[ALS], x)
    # Windows of time are the data's own.
    numbers = {n: fitted[n].number for n in (recommendations.KNN, EASE, ALS) if fitted[n].number is not None}
    save_file(arrays, final / BASELINES_FILE, {"best": best, "settings": json.dumps(numbers)})
    atomic_files.share_as_umask_allows(final)


def _read(final: Path) -> tuple[dict[str, Arrays], str]:
    """(the baselines with arrays that a trained model keeps, the best of all)"""
    found: dict[str, Arrays] = {}
    with safe_open(final / BASELINES_FILE, "pt") as file:
        for key in file.keys():  # noqa: SIM118  it is no mapping
            name, _, part = key.partition(".")
            if part:
                found.setdefault(name, {})[part] = file.get_tensor(key)
        return found, file.metadata()["best"]


def _scorers(net: Any, kept: Mapping[str, Arrays]) -> dict[str, ranking.Scorer]:
    device = net.seen.device
    found: dict[str, ranking.Scorer] = {
        MODEL: lambda user, inputs: (
            ranking.score_all_items(net, user.to(device), inputs.to(device)).float().cpu()
        ),
        POPULARITY: lambda user, _: net.counts.float().cpu().expand(len(user), -1),
    }
    found |= {name: partial(_score_classic, net, name, kept[name]) for name in CLASSICS if name in kept}
    if BLEND in kept:
        shares = [(found[name], float(share)) for name, share in kept[BLEND].items()]
        found[BLEND] = lambda user, inputs: sum(
            (share * recommendations.standardized(one(user, inputs)) for one, share in shares),
            torch.zeros(()),
        )
    return found


def _score_classic(net: Any, name: str, arrays: Arrays, user: Tensor, inputs: Tensor) -> Tensor:
    return CLASSICS[name].score(arrays, input_matrix(net, user, inputs))


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
    """(B, items) CSR: 1 where an item is among the first `inputs` (B,) interactions of (B,) users."""
    device, size = net.starts.device, (len(user), len(net.item_text))
    rows, positions = spans(net.starts[user.to(device)], inputs.long().to(device))
    pairs = (rows * size[1] + net.history[positions]).unique().cpu()
    starts = torch.searchsorted(pairs, torch.arange(size[0] + 1) * size[1])
    ones = torch.ones(len(pairs))
    return torch.sparse_csr_tensor(starts, pairs % size[1], ones, size, check_invariants=False)
