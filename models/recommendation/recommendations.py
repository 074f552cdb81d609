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
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

VECTORS_FILE = "model.safetensors"
NAMES_FILE = "names.json"
CONFIG_FILE = "config.json"
BASELINES_FILE = "baselines.safetensors"
MODEL, BEST = "model", "best"
POPULARITY, KNN, EASE = "popularity", "knn", "ease"
BASELINES = {POPULARITY: "popularity alone", KNN: "item-kNN", EASE: "EASE"}
"""Baselines of the same interactions -> their names in a sentence."""
UNTRAINED = "nobody took it in training, and no text of it was read"
WAY_OUT = "train again when it has interactions, or with texts of items"
MAX_SCORES_AT_ONCE = 1 << 22
"""Numbers of a block of users by all items."""
NEWTON_STEPS = 30
TOLERANCE = 1e-6
"""The largest step at which a new user's vector is found."""
RIDGE = 1e-6
"""Share of the mean variance that is added to each, where there are fewer users than dimensions."""
SHRINKAGE = 5.0
"""An item without text that n users took is as similar as n / (n + SHRINKAGE) of its cosine: vectors that
were seldom trained are alike by chance (as Koren 2010 shrinks similarities by their support)."""


class RecommendationError(ValueError):
    """What is asked cannot be answered."""


class UnknownUserError(RecommendationError):
    """A user id that is not in the training data."""


class UnknownItemError(RecommendationError):
    """Neither the id nor the title of an item in the training data."""


class SharedTitleError(RecommendationError):
    """A title that several items have, where one is asked for."""


class UntrainedItemError(RecommendationError):
    """An item of which nothing is known: nobody took it in training, and no text of it was read."""


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
    """What ranked the validation data best, as full_ndcg has it. Where none was held out, what the recipe
    names (--best-by), else the model."""
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
        self._item_numbers: dict[str, list[int]] = {}
        """Id or title -> the items that have it; an id is no title."""
        for number, title in enumerate(self.titles):
            self._item_numbers.setdefault(title, []).append(number)
        self._item_numbers |= {item: [number] for number, item in enumerate(self.items)}
        config = json.loads((folder / CONFIG_FILE).read_text())
        self.head: str = config["head"]
        # Older files lack the next two: held-out interactions count then, and a read text is every item's.
        if "counts" not in names:
            names["counts"] = np.bincount(self.arrays["had"] % len(self.items), minlength=len(self.items))
        self.counts = np.asarray(names["counts"])
        """(items,) training interactions."""
        reads = [config.get("encoder") is not None] * len(self.items)
        self.described = np.array(names.get("described", reads), bool)
        """(items,) whether the model reads a text of the item."""
        self._offered = np.ones(len(self.items), bool)
        self._with_seen = False

    def restrict(
        self, only: Sequence[str] | None = None, without: Sequence[str] = (), with_seen: bool = False
    ) -> list[str]:
        """From now on, lists hold items of `only` (ids or titles) alone, none of `without`, and with
        `with_seen` also those that the user had; a title stands for all that have it. Returns the names that
        no item has.
        """
        known = [[n for name in names for n in self._numbers_of(name)] for names in (only or (), without)]
        if only is not None:
            self._offered[:] = False
            self._offered[known[0]] = True
        self._offered[known[1]] = False
        self._with_seen = with_seen
        return [name for name in (*(only or ()), *without) if not self._numbers_of(name)]

    @property
    def offered(self) -> int:
        """How many items lists may hold."""
        return int(self._offered.sum())

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
        number = self._user_numbers.get(_as_known(user, self._user_numbers))
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

        An item counts once however often it is given. Raises UnknownItemError; SharedTitleError;
        UntrainedItemError where none of them tells anything; HeadError where a score is more than a product
        of two vectors.
        """
        taken, telling = self._taken_numbers(items)
        scores = self.arrays["items"] @ self.new_user(telling) + self.arrays["bias"]
        return self._best(self._without_taken(taken, scores), top)

    def _taken_numbers(self, items: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(the numbers of these items, those of them that tell something of a user who took them)."""
        taken = np.array([*dict.fromkeys(self._item_number(item) for item in items)])
        telling = taken[self._known[taken]]
        if not len(telling):
            names = f"item {items[0]}" if len(items) == 1 else f"items {', '.join(items[:3])}"
            raise UntrainedItemError(
                f"{names}: {UNTRAINED}, so that nothing is told of a user by it: {WAY_OUT}"
            )
        return taken, telling

    @cached_property
    def _known(self) -> np.ndarray:
        """(items,) whether anything is known of an item: an interaction in training, or a text."""
        known: np.ndarray = (self.counts > 0) | self.described
        return known

    def remarks(self, items: Sequence[str]) -> list[str]:
        """Lines for a person on which of these items, given by id or title, tell nothing or little."""
        found = []
        for item in items:
            number = self._item_number(item)
            count = int(self.counts[number])
            if not self._known[number]:
                found.append(f"item {item}: {UNTRAINED}: it tells nothing, and is left out")
            elif count < SHRINKAGE and not self.described[number]:
                times = "once" if count == 1 else f"{count} times"
                found.append(f"item {item}: was taken {times} in training: little is known of it")
        return found

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
        numbers = self._numbers_of(item)
        if len(numbers) > 1:
            ids = ", ".join(self.items[n] for n in numbers[:5])
            raise SharedTitleError(
                f"item {item}: {len(numbers)} items have this title: give one by its id ({ids})"
            )
        if not numbers:
            # An id that is much like another one is still another item: titles alone are guessed.
            titles = [] if self.titles == self.items else self.titles
            close = difflib.get_close_matches(item, titles, n=1)
            hint = f"did you mean {close[0]}?" if close else f"ids such as {', '.join(self.items[:5])}"
            raise UnknownItemError(f"item {item}: is not in the training data ({hint})")
        return numbers[0]

    def _numbers_of(self, item: str) -> list[int]:
        return self._item_numbers.get(_as_known(item, self._item_numbers), [])

    def knows_user(self, user: str) -> bool:
        """Whether it is the id of a user."""
        return _as_known(user, self._user_numbers) in self._user_numbers

    def knows_item(self, item: str) -> bool:
        """Whether it is the id or title of an item of which something is known."""
        return bool(self._known[self._numbers_of(item)].any())

    def split_items(self, text: str) -> list[str]:
        """Ids and titles in a text that commas part; a title may hold commas itself."""
        return _split(text, self._item_numbers)

    def split_users(self, text: str) -> list[str]:
        """Ids of users in a text that commas part; an id may hold commas itself."""
        return _split(text, self._user_numbers)

    def similar(self, item: str, top: int) -> list[dict[str, Any]]:
        """The items with the largest cosine of their vectors to an item's, by its id or title; not itself.

        Cosines of items without text are shrunk, see SHRINKAGE; items of which nothing is known are none.
        Raises UnknownItemError and UntrainedItemError.
        """
        number = self._item_number(item)
        if not self._known[number]:
            raise UntrainedItemError(
                f"item {item}: {UNTRAINED}, so that nothing is known to be like it: {WAY_OUT}"
            )
        return self._best_similar(number, top)

    def similar_to_all(self, top: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """(item, what `similar` gives) of every item of which something is known."""
        for number in np.flatnonzero(self._known).tolist():
            yield self.items[number], self._best_similar(number, top)

    def _best_similar(self, number: int, top: int) -> list[dict[str, Any]]:
        scores = self._similarities(number)
        scores[number] = -np.inf
        scores[~self._known] = -np.inf
        return self._best(scores, top)

    def _similarities(self, number: int) -> np.ndarray:
        """(items,) how alike each item is to this one."""
        trust = np.where(self.described, 1.0, self.counts / (self.counts + SHRINKAGE))
        found: np.ndarray = self._directions @ self._directions[number] * trust
        return found

    @cached_property
    def _directions(self) -> np.ndarray:
        """(items, dim) vectors of items with length 1."""
        v = self.arrays["items"]
        directions: np.ndarray = v / np.maximum(
            np.linalg.norm(v, axis=1, keepdims=True), np.finfo(v.dtype).tiny
        )
        return directions

    def _without_taken(self, taken: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Scores with minus infinity for these items, if lists leave out what users had."""
        if not self._with_seen:
            scores[taken] = -np.inf
        return scores

    def _without_had(self, user: int, scores: np.ndarray) -> np.ndarray:
        """Scores with minus infinity for the items that the user had, if lists leave them out."""
        if self._with_seen:
            return scores
        had, items = self.arrays["had"], len(self.items)
        start, stop = np.searchsorted(had, [user * items, (user + 1) * items])
        scores[had[start:stop] - user * items] = -np.inf
        return scores

    def _best(self, scores: np.ndarray, count: int) -> list[dict[str, Any]]:
        """The largest scores, the first item first where two are equal; infinite ones are left out."""
        scores = np.where(self._offered, scores, -np.inf)
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
        self.described[:] = False
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
        """What `recommend` gives, for a new user who took these items. Raises as the model's does."""
        taken, telling = self._taken_numbers(items)
        return self._best(self._without_taken(taken, self._scores_for(np.unique(telling))), top)

    def _similarities(self, number: int) -> np.ndarray:
        """(items,) for which an item speaks most: its weights. Raises BaselineError for popularity."""
        if self.by == POPULARITY:
            raise BaselineError("popularity knows no items like another: ask by the model, knn or ease")
        scores = self._scores_for(np.array([number]))
        return np.where(scores > 0, scores, -np.inf)


def _as_known(name: str, known: Container[str]) -> str:
    """The name, or `3` for `3.0` where only that is known: a column of numbers with a gap writes it so."""
    whole = re.sub(r"\.0*$", "", name)
    return whole if name not in known and whole in known else name


def _split(text: str, known: Container[str]) -> list[str]:
    """What commas part in a text, the longest known names first."""
    parts, found = text.split(","), []
    while parts:
        ends = range(len(parts), 0, -1)
        end = next((n for n in ends if ",".join(parts[:n]).strip() in known), 1)
        found.append(",".join(parts[:end]).strip())
        parts = parts[end:]
    return found


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
