"""Recommendations of a trained recommender, computed from its files with numpy and safetensors alone.

A copy of this file lies beside each exported recommender. The folder holds the vectors of users and items,
the head if it is more than a product, the items that each user had, and names.

    from recommendations import Recommendations
    Recommendations("final").top("user id", 10)
    Recommendations("final").for_items(["item id", "item id"], 10)  # of a user who was not there
    open_recommendations("final", by="ease").top("user id", 10)  # by a baseline
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VECTORS_FILE = "model.safetensors"
NAMES_FILE = "names.json"
CONFIG_FILE = "config.json"
BASELINES_FILE = "baselines.safetensors"
MODEL, BEST = "model", "best"
POPULARITY, KNN, EASE = "popularity", "knn", "ease"
BASELINES = {POPULARITY: "popularity alone", KNN: "item-kNN", EASE: "EASE"}
"""Baselines of the same interactions -> their names in a sentence."""
MAX_SCORES_AT_ONCE = 1 << 22
"""Numbers of a block of users by all items."""
NEWTON_STEPS = 30
TOLERANCE = 1e-6
"""The largest step at which a new user's vector is found."""
RIDGE = 1e-6
"""Share of the mean variance that is added to each, where there are fewer users than dimensions."""


class RecommendationError(ValueError):
    """What is asked cannot be answered."""


class UnknownUserError(RecommendationError):
    """A user id that is not in the training data."""


class UnknownItemError(RecommendationError):
    """Neither the id nor the title of an item in the training data."""


class HeadError(RecommendationError):
    """A head for which a new user has no vector."""


class BaselineError(RecommendationError):
    """A baseline that is not kept beside the model."""


def open_recommendations(folder: str | Path, by: str = MODEL) -> Recommendations:
    """Lists by the model, by one of BASELINES, or by the `best` of them all on the validation data.

    Raises BaselineError.
    """
    by = best_by(folder) if by == BEST else by
    return Recommendations(folder) if by == MODEL else BaselineRecommendations(folder, by)


def best_by(folder: str | Path) -> str:
    """What ranked the validation data best, as full_ndcg has it; the model where none was held out."""
    from safetensors import safe_open

    with safe_open(_baselines_file(folder), "numpy") as file:
        best: str = file.metadata()["best"]
    return best


def _baselines_file(folder: str | Path) -> Path:
    file = Path(folder) / BASELINES_FILE
    if not file.is_file():
        raise BaselineError(f"there is no {BASELINES_FILE} beside the model: an older version trained it")
    return file


class Recommendations:
    """Exact recommendation lists: every item is scored, and items that the user had are left out."""

    by = MODEL
    """What ranks the items."""

    def __init__(self, folder: str | Path) -> None:
        from safetensors.numpy import load_file

        folder = Path(folder)
        self.arrays = load_file(folder / VECTORS_FILE)
        names = json.loads((folder / NAMES_FILE).read_text())
        self.users: list[str] = names["users"]
        self.items: list[str] = names["items"]
        self.titles: list[str] = names["titles"]
        self._user_numbers = {user: number for number, user in enumerate(self.users)}
        titles = {title: number for number, title in enumerate(self.titles)}
        self._item_numbers = titles | {item: number for number, item in enumerate(self.items)}
        self.head: str = json.loads((folder / CONFIG_FILE).read_text())["head"]

    def scores(self, user: int) -> np.ndarray:
        """(items,) scores of a user by number."""
        u, v = self.arrays["users"][user], self.arrays["items"]
        if self.head == "dot":
            pair_scores = v @ u
        elif self.head == "mlp":
            pair_scores = self._mlp(np.concatenate([np.broadcast_to(u, v.shape), v], 1))
        else:
            half = v.shape[1] // 2
            product = (v[:, :half] * u[:half]) @ self.arrays["product.weight"][0]
            pairs = np.concatenate([np.broadcast_to(u[half:], v[:, half:].shape), v[:, half:]], 1)
            pair_scores = product + self._mlp(pairs)
        scores: np.ndarray = pair_scores + self.arrays["bias"]
        return scores

    def block_scores(self, users: np.ndarray) -> np.ndarray:
        """(len(users), items) scores of users by number: as `scores`, up to float rounding."""
        if self.head != "dot":
            return np.stack([self.scores(int(user)) for user in users])
        found: np.ndarray = self.arrays["users"][users] @ self.arrays["items"].T + self.arrays["bias"]
        return found

    def _mlp(self, x: np.ndarray) -> np.ndarray:
        """(items,) outputs of the head's MLP for (items, width) inputs."""
        layer_numbers = sorted(
            {int(name.split(".")[1]) for name in self.arrays if name.startswith("mlp_layers.")}
        )
        for number in layer_numbers:
            weight, bias = (self.arrays[f"mlp_layers.{number}.{part}"] for part in ("weight", "bias"))
            x = x @ weight.T + bias
            if number != layer_numbers[-1]:
                x = np.maximum(x, 0)
        return x[:, 0]

    def top(self, user: str, count: int) -> list[tuple[str, float]]:
        """(title, score) of the best items for a user by id, best first, without items that the user had.

        Raises UnknownUserError.
        """
        return [(entry["title"], entry["score"]) for entry in self.recommend(user, count)]

    def recommend(self, user: str, top: int) -> list[dict[str, Any]]:
        """`item`, `title` and `score` of the same items. Raises UnknownUserError."""
        number = self._user_numbers.get(user)
        if number is None:
            shown = ", ".join(self.users[:5])
            raise UnknownUserError(f"user {user}: is not in the training data (ids such as {shown})")
        return self._best(self._without_had(number, self.scores(number)), top)

    def recommend_to_all(self, top: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """(user, what `recommend` gives) of every user, computed in blocks."""
        rows = max(1, MAX_SCORES_AT_ONCE // max(1, len(self.items)))
        for start in range(0, len(self.users), rows):
            numbers = np.arange(start, min(start + rows, len(self.users)))
            for number, scores in zip(numbers.tolist(), self.block_scores(numbers), strict=True):
                yield self.users[number], self._best(self._without_had(number, scores), top)

    def for_items(self, items: Sequence[str], top: int) -> list[dict[str, Any]]:
        """What `recommend` gives, for a user who was not in training and took these items (ids or titles).

        Raises UnknownItemError; HeadError where a score is more than a product of two vectors.
        """
        taken = np.array([self._item_number(item) for item in items])
        scores = self.arrays["items"] @ self.new_user(taken) + self.arrays["bias"]
        scores[taken] = -np.inf
        return self._best(scores, top)

    def new_user(self, taken: np.ndarray) -> np.ndarray:
        """(dim,) the likeliest vector of a user who took these items, by number. Raises HeadError.

        Each item taken has the probability softmax(V u + b), and u itself, before anything is known, the
        normal distribution of the trained users' vectors.
        """
        if self.head != "dot":
            raise HeadError(f"a new user's vector needs --head dot; this model has --head {self.head}")
        v, b, users = (self.arrays[name].astype(np.float64) for name in ("items", "bias", "users"))
        mean, covariance = users.mean(0), np.atleast_2d(np.cov(users.T, ddof=0))
        scale = covariance.trace() / len(mean) or 1.0
        precision = np.linalg.inv(covariance + RIDGE * scale * np.eye(len(mean)))
        return _likeliest(v, b, taken, mean, precision)

    def _item_number(self, item: str) -> int:
        number = self._item_numbers.get(item)
        if number is None:
            close = difflib.get_close_matches(item, self.titles, n=1)
            hint = f"did you mean {close[0]}?" if close else f"ids such as {', '.join(self.items[:5])}"
            raise UnknownItemError(f"item {item}: is not in the training data ({hint})")
        return number

    def split_items(self, text: str) -> list[str]:
        """Ids and titles in a text that commas part; a title may hold commas itself."""
        parts, found = text.split(","), []
        while parts:
            ends = range(len(parts), 0, -1)
            end = next((n for n in ends if ",".join(parts[:n]).strip() in self._item_numbers), 1)
            found.append(",".join(parts[:end]).strip())
            parts = parts[end:]
        return found

    def similar(self, item: str, top: int) -> list[dict[str, Any]]:
        """The items with the largest cosine of their vectors to an item's, by its id or title; not itself.

        Raises UnknownItemError.
        """
        number = self._item_number(item)
        v = self.arrays["items"]
        lengths = np.maximum(np.linalg.norm(v, axis=1), np.finfo(v.dtype).tiny)
        cosines = v @ v[number] / (lengths * lengths[number])
        cosines[number] = -np.inf
        return self._best(cosines, top)

    def _without_had(self, user: int, scores: np.ndarray) -> np.ndarray:
        """Scores with minus infinity for the items that the user had."""
        had, items = self.arrays["had"], len(self.items)
        start, stop = np.searchsorted(had, [user * items, (user + 1) * items])
        scores[had[start:stop] - user * items] = -np.inf
        return scores

    def _best(self, scores: np.ndarray, count: int) -> list[dict[str, Any]]:
        """The largest scores, the first item first where two are equal; infinite ones are left out."""
        if count < len(scores):  # to sort all items takes ten times as long
            least = np.partition(scores, -count)[-count]
            found = np.flatnonzero(scores >= least)
        else:
            found = np.arange(len(scores))
        best = found[np.argsort(-scores[found], kind="stable")][:count]
        return [
            {"item": self.items[i], "title": self.titles[i], "score": float(scores[i])}
            for i in best.tolist()
            if np.isfinite(scores[i])
        ]


class BaselineRecommendations(Recommendations):
    """Lists by popularity, or by item-kNN or EASE (Steck 2019): sums of weights of what the user had."""

    def __init__(self, folder: str | Path, by: str) -> None:
        from safetensors import safe_open

        super().__init__(folder)
        self.by = by
        with safe_open(_baselines_file(folder), "numpy") as file:
            names = [name for name in file.keys() if name.partition(".")[0] == by]  # noqa: SIM118 (no mapping)
            self._kept = {name.removeprefix(f"{by}."): file.get_tensor(name) for name in names}
        if not names:
            raise BaselineError(f"{BASELINES.get(by, by)} was not fitted: the catalogue is too large")

    def scores(self, user: int) -> np.ndarray:
        items = len(self.items)
        start, stop = np.searchsorted(self.arrays["had"], [user * items, (user + 1) * items])
        return self._scores_for(self.arrays["had"][start:stop] - user * items)

    def block_scores(self, users: np.ndarray) -> np.ndarray:
        return np.stack([self.scores(int(user)) for user in users])

    def _scores_for(self, taken: np.ndarray) -> np.ndarray:
        """(items,) scores for a user who took these different items."""
        if self.by == POPULARITY:
            return self._kept[POPULARITY].astype(np.float64)
        starts = self._kept["starts"]
        places = np.concatenate([np.arange(0), *(np.arange(starts[n], starts[n + 1]) for n in taken)])
        targets, weights = (self._kept[name][places] for name in ("targets", "values"))
        return np.bincount(targets, weights, len(self.items))

    def for_items(self, items: Sequence[str], top: int) -> list[dict[str, Any]]:
        """What `recommend` gives, for a new user who took these items. Raises UnknownItemError."""
        taken = np.unique([self._item_number(item) for item in items])
        scores = self._scores_for(taken)
        scores[taken] = -np.inf
        return self._best(scores, top)

    def similar(self, item: str, top: int) -> list[dict[str, Any]]:
        """The items for which an item speaks most: the largest of its weights.

        Raises UnknownItemError; BaselineError for popularity, which knows of no likeness.
        """
        if self.by == POPULARITY:
            raise BaselineError("popularity knows no items like another: ask by the model, knn or ease")
        number = self._item_number(item)
        scores = self._scores_for(np.array([number]))
        scores[scores <= 0] = -np.inf
        return self._best(scores, top)


def _likeliest(
    v: np.ndarray, b: np.ndarray, taken: np.ndarray, mean: np.ndarray, precision: np.ndarray
) -> np.ndarray:
    """(dim,) the largest sum of log softmax(v u + b) over `taken` and log normal(u; mean, 1/precision).

    By Newton's method with halved steps: the function is concave, so that it has one maximum.
    v: (items, dim); b: (items,); taken: (n,) numbers of items; mean: (dim,); precision: (dim, dim).
    """
    observed, count = v[taken].sum(0), len(taken)

    def posterior(u: np.ndarray) -> float:
        scores, off = v @ u + b, u - mean
        highest = scores.max()
        log_total = highest + np.log(np.exp(scores - highest).sum())
        return float(observed @ u - count * log_total - off @ precision @ off / 2)

    def newton_step(u: np.ndarray) -> np.ndarray:
        scores = v @ u + b
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        expected = shares @ v
        gradient = observed - count * expected - precision @ (u - mean)
        spread = (v * shares[:, None]).T @ v - np.outer(expected, expected)
        step: np.ndarray = np.linalg.solve(count * spread + precision, gradient)
        return step

    u = mean
    for _ in range(NEWTON_STEPS):
        step = newton_step(u)
        while posterior(u + step) < posterior(u) and np.abs(step).max() > TOLERANCE:
            step = step / 2
        u = u + step
        if np.abs(step).max() <= TOLERANCE:
            break
    return u
