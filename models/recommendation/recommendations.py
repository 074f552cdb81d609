"""Recommendations of a trained recommender, computed from its files with numpy and safetensors alone.

A copy of this file lies beside each exported recommender. The folder holds the vectors of users and items,
the head if it is more than a product, the items that each user had, and names.

    from recommendations import Recommendations
    Recommendations("final").top("user id", 10)
    Recommendations("final").for_items(["item id", "item id"], 10)  # of a user who was not there
    open_recommendations("final").top("user id", 10)  # by what was best on the validation data
    open_recommendations("final", by="ease").top("user id", 10)
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Container, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

VECTORS_FILE = "model.safetensors"
NAMES_FILE = "names.json"
CONFIG_FILE = "config.json"
BASELINES_FILE = "baselines.safetensors"
MODEL, BEST = "model", "best"
POPULARITY, RECENT, KNN, EASE, ALS = "popularity", "recent", "knn", "ease", "als"
BLEND = "blend"
BASELINES = {
    **{POPULARITY: "popularity alone", RECENT: "recent popularity", KNN: "item-kNN", EASE: "EASE"},
    **{ALS: "ALS", BLEND: "the blend"},
}
"""Baselines of the same interactions -> their names in a sentence."""
COUNTED = (POPULARITY, RECENT)
"""Those that know nothing of a user, and no items like another."""
UNTRAINED = "nobody took it in training, and no text of it was read"
ALONE = "nobody took it with another item in training"
READS_TEXTS = "--preset sequence --text frozen --text-model FOLDER reads them"
WAY_OUT = f"train again when it is taken with others, or with texts of items ({READS_TEXTS})"
READ = "nobody took it in training, and of its text the model alone knows"
BY_MODEL = "ask the model for it, --by model"
LETTERS = re.compile(r"^\D*0*(?=\d)|\s+$")
"""What may stand around a number in an id."""
NEWTON_STEPS = 30
TOLERANCE = 1e-6
"""The largest step at which a new user's vector is found."""
RIDGE = 1e-6
"""Share of the mean variance that is added to each, where there are fewer users than dimensions."""
TINY = 1e-9
SHRINKAGE = 5.0
"""An item without text that n users took is as similar as n / (n + SHRINKAGE) of its cosine: vectors that
were seldom trained are alike by chance (as Koren 2010 shrinks similarities by their support)."""
BLOCK = 3 << 19
"""Scores that are computed at a time: few enough to stay in a processor's cache."""
EXACT_AT_A_TIME = 1 << 16
STRIPES = 16
"""Items whose largest score stands for them while a list's candidates are found."""
ROUNDING = 1e-4
"""Share of a user's largest score by which two ways to compute an MLP's scores may differ, with room."""


Scored = tuple[np.ndarray, Any, Any]
"""(n, items) scores, `slack` and `exact` of `Recommendations._top`."""
DENSE = 1 << 25
"""Weights of items among each other that are multiplied as a matrix, zeros included."""
FEW = 32
"""Fewer users are not worth that."""

try:
    from isobatch.core.errors import UserError as RecommendationError
except ImportError:  # a copy beside an exported model, where isobatch is not

    class RecommendationError(ValueError):  # type: ignore[no-redef]
        """What is asked cannot be answered."""


def open_recommendations(
    folder: str | Path, by: str = BEST, whole: Recommendations | None = None
) -> Recommendations:
    """Lists by the `best` on the validation data, by the model, or by one of BASELINES.

    Where none was held out, the best is the model, or EASE where no network was trained. Raises
    RecommendationError. `whole`: a blend that has read the folder, of which this is a part.
    """
    if by == BEST and not (Path(folder) / BASELINES_FILE).is_file():
        by = MODEL
    elif by == BEST:
        from safetensors import safe_open

        with safe_open(Path(folder) / BASELINES_FILE, "numpy") as file:
            by = file.metadata()["best"]
    if by != MODEL:
        return BaselineRecommendations(folder, by, whole)
    if (found := Recommendations(folder, whole)).head == "none":
        raise RecommendationError("--by model: this run trained none, and fitted the classics alone")
    return found


def standardized(scores: Any) -> Any:
    """(..., items) scores, numpy's or torch's, with mean 0 and deviation 1 over items; 0 if all are equal."""
    off = scores - scores.mean(-1)[..., None]
    return off / ((off**2).mean(-1)[..., None] ** 0.5 + TINY)


class Recommendations:
    """Exact recommendation lists: every item is scored, and items that the user had are left out.

    What cannot be answered raises RecommendationError.
    """

    by = MODEL
    """What ranks the items."""
    _parts: Sequence[tuple[float, Recommendations]] = ()
    """Of a blend: shares and what they are of, the largest first."""

    def __init__(self, folder: str | Path, whole: Recommendations | None = None) -> None:
        from safetensors.numpy import load_file

        if whole is not None:
            vars(self).update(vars(whole), by=MODEL)
            return
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
        self.attention_heads = int(config.get("attention_heads", 0))
        """Of the transformer that makes a user's vector of the items that they took; 0: there is none."""
        self.counts = np.array(names["counts"])
        """(items,) training interactions."""
        self._told = self.counts > 0
        """(items,) whether interactions say for what ranks the items what goes with each."""
        self.described = np.array(names["described"], bool)
        """(items,) whether what ranks the items reads a text of the item."""
        self._read = self.described
        """The same of the model, whatever ranks them."""
        self._offered = np.ones(len(self.items), bool)
        self._with_seen = self._repeats = bool(names.get("repeats"))
        """Whether lists hold what the user had, as where repeated interactions were trained on."""

    def restrict(
        self, only: Sequence[str] | None = None, without: Sequence[str] = (), with_seen: bool = False
    ) -> list[str]:
        """From now on, lists hold items of `only` (ids or titles) alone, none of `without`, and with
        `with_seen` also those that the user had; a title stands for all that have it. Returns the names that
        no item has. Raises RecommendationError, and changes nothing, where no item is left.
        """
        known = [[n for name in names for n in self._numbers_of(name)] for names in (only or (), without)]
        offered = np.full(len(self.items), only is None)
        offered[known[0]] = True
        offered[known[1]] = False
        if not offered.any():
            raise RecommendationError("--only, --without: no item is left to offer: give others")
        self._offered[:], self._with_seen = offered, with_seen or self._repeats
        return [name for name in (*(only or ()), *without) if not self._numbers_of(name)]

    def scores(self, user: int) -> Any:
        """(items,) scores of a user by number."""
        room = np.empty((1 + len(self._parts), 1, len(self.items)), self.arrays["items"].dtype)
        return self._score(np.array([user]), *room)[0][0]

    def _pairs(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """(n,) scores of (n, dim) users with (n, dim) items, without the items' bias."""
        if self.head == "dot":
            return (u * v).sum(1)
        if self.head == "mlp":
            return self._mlp(np.concatenate([u, v], 1))
        half = v.shape[1] // 2
        product = (u[:, :half] * v[:, :half]) @ self.arrays["product.weight"][0]
        return product + self._mlp(np.concatenate([u[:, half:], v[:, half:]], 1))

    def _mlp(self, x: np.ndarray) -> np.ndarray:
        """(items,) outputs of the head's MLP for (items, width) inputs."""
        weights = [n for n in self.arrays if n.startswith("mlp_layers.") and n.endswith(".weight")]
        *hidden, last = sorted(weights, key=lambda name: int(name.split(".")[1]))
        for name in (*hidden, last):
            x = x @ self.arrays[name].T + self.arrays[name.replace("weight", "bias")]
            x = x if name == last else np.maximum(x, 0)
        return x[:, 0]

    def top(self, user: str, count: int) -> list[tuple[str, float]]:
        """(title, score) of the best items for a user by id, best first, without items that the user had."""
        return [(entry["title"], entry["score"]) for entry in self.recommend(user, count)]

    def recommend(self, user: str, top: int) -> list[dict[str, Any]]:
        """`item`, `title` and `score` of the same items."""
        return self.recommend_each([user], top)[0]

    def recommend_each(self, users: Sequence[str], top: int) -> list[list[dict[str, Any]]]:
        """The same for each of these users, computed together."""
        if unknown := [user for user in users if not self.knows_user(user)]:
            close = self.meant(unknown[0], is_user=True)
            hint = f"did you mean {close}?" if close else f"ids such as {', '.join(self.users[:5])}"
            raise RecommendationError(f"user {unknown[0]}: is not in the training data ({hint})")
        numbers = [self._user_numbers[_as_known(user, self._user_numbers)] for user in users]
        return self._entries(*self.lists(numbers, top)) if numbers else []

    def popular(self, top: int) -> list[dict[str, Any]]:
        """What most users took in training, for somebody of whom nothing is known."""
        return self._entries(*self._top(self.counts[None].astype(float), np.arange(0), top))[0]

    def ids_of(self, item: str) -> list[str]:
        """Of the items that have this id or title."""
        return [self.items[number] for number in self._numbers_of(item)]

    def lists(self, users: Sequence[int], top: int) -> tuple[np.ndarray, np.ndarray]:
        """(users, top) numbers of the best items of users by number, the best first, and their scores.

        Of equal ones the first item comes first. A shorter list ends with -1 and -inf. A list is the same
        whoever else is asked for with it.
        """
        step = max(1, BLOCK // len(self.items))
        rooms = 1 + len(self._parts), min(step, len(users)), len(self.items)
        room = np.empty(rooms, self.arrays["items"].dtype)  # new memory takes as long as a product
        found = []
        for start in range(0, len(users), step):
            some = np.asarray(users[start : start + step])
            owner, item = self._had_by(some)
            scored = self._score(some, *room[:, : len(some)])
            found.append(self._top(scored[0], owner * len(self.items) + item, top, *scored[1:]))
        items, scores = map(np.concatenate, zip(*found, strict=True))
        return items, scores

    def _score(self, users: np.ndarray, room: np.ndarray, *_: np.ndarray) -> Scored:
        """Scores of users by number, which are put in `room` (users, items); a blend's parts have others."""
        return self._by_vectors(self.arrays["users"][users], room)

    def _standardized(self, users: np.ndarray, share: float, room: np.ndarray) -> Scored:
        """`share` of `_score`, standardized, and the same for a user whoever else is asked for.

        Where scores are products, their moments are computed of the vectors: those of a block's scores
        would differ with the block.
        """
        if not self.has_vectors:
            self._score(users, room)
            room -= room.mean(1)[:, None]
            deviation = np.sqrt(np.einsum("ui,ui->u", room, room) / len(self.items))
            room *= (share / (deviation + TINY))[:, None]
            return room, 0.0, lambda rows, items: room[rows, items]
        items, covariance = self._centred
        u = np.pad(self.vectors(users).astype(np.float64), ((0, 0), (0, 1)), constant_values=1)
        variance = (np.matmul(u[:, None], covariance)[:, 0] * u).sum(1)
        u *= share / (np.sqrt(variance)[:, None] + TINY)
        return self._by_products(u, items, np.zeros_like(items[:, 0]), room)

    @property
    def has_vectors(self) -> bool:
        """Whether scores are products of vectors."""
        return self.head == "dot"

    def vectors(self, users: np.ndarray) -> np.ndarray:
        """(n, dim) of users by number."""
        return self.arrays["users"][users]

    @cached_property
    def _centred(self) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of items, each with its bias, less their mean; their covariance."""
        v = np.column_stack([self.arrays["items"], self.arrays["bias"]]).astype(np.float64)
        v -= v.mean(0)
        return v.astype(self.arrays["items"].dtype), v.T @ v / len(v)

    def _by_vectors(self, u: np.ndarray, room: Any = None) -> Scored:
        """Scores of (n, dim) users by vector."""
        v, bias = self.arrays["items"], self.arrays["bias"]
        if self.has_vectors:
            return self._by_products(u, v, bias, room)
        scores = np.stack([self._pairs(np.broadcast_to(one, v.shape), v) + bias for one in u], out=room)

        def exact(rows: np.ndarray, items: np.ndarray) -> np.ndarray:
            found = self._pairs(u[rows].astype(np.float64), v[items].astype(np.float64)) + bias[items]
            return found.astype(np.float32)  # the same for the same pair of vectors, wherever it stands

        return scores, ROUNDING * np.abs(scores).max(1), exact

    def _by_products(self, u: np.ndarray, v: np.ndarray, bias: np.ndarray, room: Any = None) -> Scored:
        """Scores that are products of vectors and a bias.

        A product of matrices rounds as its shape has it, by at most dim * eps * |u| * |v|: the items that
        this may move into a list are compared by what is computed for each alone.
        """
        u = u.astype(v.dtype)
        scores = np.matmul(u, v.T, out=room)
        if bias.any():
            scores += bias
        size = np.linalg.norm(u, axis=1) * np.sqrt((v**2).sum(1).max()) + np.abs(bias).max()

        def exact(rows: np.ndarray, items: np.ndarray) -> np.ndarray:
            found = (u[rows].astype(np.float64) * v[items]).sum(1) + bias[items]
            return found.astype(np.float32)  # the same for the same pair of vectors, wherever it stands

        return scores, (v.shape[1] + 3) * np.finfo(v.dtype).eps * size, exact

    def for_items(
        self, items: Sequence[str], top: int, quantities: Sequence[float] | None = None
    ) -> list[dict[str, Any]]:
        """What `recommend` gives, for a user who was not in training and took these items (ids or titles).

        They are in time, which counts in a model of sequences. It needs an item that tells something, but by
        popularity, and a head that is a product of two vectors. `quantities` weigh the items against each
        other; without them an item counts once however often it is given, where it is last.
        """
        numbers = [self._item_number(item) for item in items]
        taken = np.array([*dict.fromkeys(reversed(numbers))], np.int64)[::-1]
        taken = taken if self.attention_heads else np.sort(taken)
        weights = np.ones(len(taken)) if quantities is None else np.bincount(numbers, quantities)[taken]
        kept = self._known[taken]
        telling = taken[kept]
        if not len(telling) and self.by not in COUNTED:
            names = f"item {items[0]}" if len(items) == 1 else f"items {', '.join(items[:3])}"
            raise RecommendationError(f"{names}: {self._why_unknown(taken, 'nothing is told of a user')}")
        return self._entries(*self._top(self.scores_for(telling, weights[kept])[None], taken, top))[0]

    def with_items(self, user: str, items: Sequence[str], top: int) -> list[dict[str, Any]]:
        """What `for_items` gives for all that a user of the training data had, and these items behind it."""
        if any(part.by == MODEL and part.attention_heads for part in (self, *(p for _, p in self._parts))):
            raise RecommendationError("the order of what a user had, which this model reads, is not kept")
        had = self._had_by(np.array([self._user_numbers[_as_known(user, self._user_numbers)]]))[1]
        return self.for_items([*(self.items[n] for n in had), *items], top)

    def scores_for(self, taken: np.ndarray, amounts: Any = 1.0) -> Any:
        """(items,) scores for a user who was not in training and took these different items, by number."""
        vector = self.new_user(taken, amounts * np.ones(len(taken)))
        return (self.arrays["items"] * vector).sum(1) + self.arrays["bias"]  # the same for equal vectors

    @cached_property
    def _known(self) -> Any:
        """(items,) whether anything is known of an item: an interaction in training, or a text."""
        return self._told | self.described

    def remarks(self, items: Sequence[str]) -> list[str]:
        """Lines for a person on which of these items, given by id or title, tell nothing."""
        silent = {item: n for item in items if not self._known[n := self._item_number(item)]}
        return [f"item {item}: {self._why_unknown(n, 'it is left out')}" for item, n in silent.items()]

    def _why_unknown(self, numbers: Any, so: str) -> str:
        """Why items by number tell nothing here, what follows, and the way out."""
        why, way_out = ALONE if self.counts[numbers].any() else UNTRAINED, WAY_OUT
        why, way_out = (READ, BY_MODEL) if self._read[numbers].any() else (why, way_out)
        return f"{why}, so that {so}: {way_out}"

    def new_user(self, taken: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """(dim,) the likeliest vector of a user who took these items, by number; of sequences `_last_state`.

        Each item taken has the probability softmax(V u + b), and u itself, before anything is known, the
        normal distribution of the trained users' vectors. `weights` say how much each item counts against
        the others; together they count as many as there are items.
        """
        if self.attention_heads:
            return self._last_state(taken)
        if self.head != "dot":
            has = f"this model has --head {self.head}"
            raise RecommendationError(f"a new user's vector needs --head dot; {has}")
        v, b = (self.arrays[name].astype(np.float64) for name in ("items", "bias"))
        mean, precision = self._prior
        shares = np.ones(len(taken)) if weights is None else weights * len(taken) / weights.sum()
        observed, count, u = shares @ v[taken], len(taken), mean

        def posterior(u: np.ndarray) -> float:
            scores, off = v @ u + b, u - mean
            log_total = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            return float(observed @ u - count * log_total - off @ precision @ off / 2)

        for _ in range(NEWTON_STEPS):  # with halved steps: the function is concave, and has one maximum
            scores = v @ u + b
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            expected = shares @ v
            gradient = observed - count * expected - precision @ (u - mean)
            spread = (v * shares[:, None]).T @ v - np.outer(expected, expected)
            step = np.linalg.solve(count * spread + precision, gradient)
            while posterior(u + step) < posterior(u) and np.abs(step).max() > TOLERANCE:
                step = step / 2
            u = u + step
            if np.abs(step).max() <= TOLERANCE:
                break
        return u

    @cached_property
    def _prior(self) -> tuple[np.ndarray, np.ndarray]:
        """(dim,) mean and (dim, dim) precision of the trained users' vectors."""
        users = self.arrays["users"].astype(np.float64)
        mean, covariance = users.mean(0), np.atleast_2d(np.cov(users.T, ddof=0))
        scale = covariance.trace() / len(mean) or 1.0
        return mean, np.linalg.inv(covariance + RIDGE * scale * np.eye(len(mean)))

    def _last_state(self, taken: np.ndarray) -> np.ndarray:
        """(dim,) the state of the transformer at the last of these items, by number and in time."""
        named = ((*name.partition("sequence."), values) for name, values in self.arrays.items())
        w = {name: values.astype(np.float64) for _, is_its, name, values in named if is_its}
        positions = w["positions.weight"]
        items = self.arrays["items"][taken[-len(positions) :]]
        (count, dim), later = items.shape, np.triu(np.full((len(items),) * 2, -np.inf), 1)
        x = items * dim**0.5 + positions[:count]

        def linear(name: str, x: np.ndarray) -> np.ndarray:
            return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

        def norm(name: str, x: np.ndarray) -> np.ndarray:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            return x * w[f"{name}.weight"] + w[f"{name}.bias"]

        for block in sorted({name.split(".")[1] for name in w if name.startswith("blocks.")}, key=int):
            at = f"blocks.{block}."
            qkv = linear(at + "qkv", norm(at + "attention_norm", x))
            q, k, v = qkv.reshape(count, 3, self.attention_heads, -1).transpose(1, 2, 0, 3)
            scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5 + later
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            seen = shares / shares.sum(-1, keepdims=True) @ v
            x = x + linear(at + "out", seen.swapaxes(0, 1).reshape(count, dim))
            x = x + linear(at + "down", np.maximum(linear(at + "up", norm(at + "mlp_norm", x)), 0))
        return norm("norm", x)[-1]

    def _item_number(self, item: str) -> int:
        numbers = self._numbers_of(item)
        if len(numbers) == 1:
            return numbers[0]
        ids = ", ".join(self.items[n] for n in numbers[:5] or range(min(5, len(self.items))))
        if numbers:
            said = f"{len(numbers)} items have this title"
            raise RecommendationError(f"item {item}: {said}: give one by its id ({ids})")
        # An id that is much like another one is still another item: titles alone are guessed.
        titles = [] if self.titles == self.items else self.titles
        close = self.meant(item) or next(iter(difflib.get_close_matches(item, titles, n=1)), "")
        hint = f"did you mean {close}?" if close else f"ids such as {ids}"
        raise RecommendationError(f"item {item}: is not in the training data ({hint})")

    def _numbers_of(self, item: str) -> list[int]:
        return self._item_numbers.get(_as_known(item, self._item_numbers), [])

    def meant(self, name: str, is_user: bool = False) -> str:
        """The id of an item, or a user, that differs from this one as `written_otherwise` says, in small and
        large letters, or by the letters and zeros before its number; of several known ones, with commas.
        """
        known: Container[str] = self._user_numbers if is_user else self._item_numbers
        several = re.split(r"\s*[;|]\s*", name)
        if several[1:] and all(one in known for one in several):
            return ",".join(several)
        close = written_otherwise(name, known)
        other = self._bare[is_user].get(LETTERS.sub("", name), "")
        end, whole = (re.sub(r"(?<!\d)0+(?=\d)", "", one.strip().lower()) for one in (name, other))
        return close or other * (other != name and whole.endswith(end))

    @cached_property
    def _bare(self) -> list[dict[str, str]]:
        """Of items and users: an id without its LETTERS -> the id, of several the last."""
        return [{LETTERS.sub("", one): one for one in ids} for ids in (self.items, self.users)]

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
        """
        number = self._item_number(item)
        if not self._known[number]:
            raise RecommendationError(f"item {item}: {self._why_unknown(number, 'nothing known is like it')}")
        scores = np.where(self._known, self.similarities(number), -np.inf)
        scores[number] = -np.inf
        return self._entries(*self._top(scores[None], np.arange(0), top))[0]

    def similarities(self, number: int) -> Any:
        """(items,) how alike each item is to this one."""
        trust = np.where(self.described, 1.0, self.counts / (self.counts + SHRINKAGE))
        return (self._directions * self._directions[number]).sum(1) * trust

    @cached_property
    def _directions(self) -> Any:
        """(items, dim) vectors of items with length 1."""
        v = self.arrays["items"].astype(np.float64)
        return v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), np.finfo(v.dtype).tiny)

    def _had_by(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(place among `users`, item) of all that they had, items ascending."""
        owner, places = _spans(self._starts, users)
        return owner, self.arrays["had"][places] - users[owner] * len(self.items)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.searchsorted(self.arrays["had"], np.arange(len(self.users) + 1) * len(self.items))

    def _top(
        self, scores: np.ndarray, taken: np.ndarray, top: int, slack: Any = 0.0, exact: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """What `lists` gives, by (n, items) scores; infinite ones, and items not offered, are left out.

        So are those `taken` (places in the flattened scores), unless lists hold those too. `exact`: (rows,
        items) -> scores that are compared in their place, and differ from them by at most `slack` / 2.
        """
        if not self._offered.all():
            scores[:, ~self._offered] = -np.inf
        if not self._with_seen:
            scores.reshape(-1)[taken] = -np.inf
        rows, items = _candidates(scores, top, slack)
        parts = np.array_split(np.arange(len(rows)), 1 + len(rows) // EXACT_AT_A_TIME)
        values = np.concatenate([exact(rows[n], items[n]) for n in parts]) if exact else scores[rows, items]
        # Where few of a restricted catalogue are near, the rest have equal scores: what most took is first.
        order = np.lexsort((items, -self.counts[items] * (not self._offered.all()), -values, rows))
        rows, items, values = rows[order], items[order], values[order]
        place = np.arange(len(rows)) - np.searchsorted(rows, rows)
        kept = (place < top) & np.isfinite(values)
        where = rows[kept], place[kept]
        shape = len(scores), min(top, scores.shape[1])
        found, best = np.full(shape, -1), np.full(shape, -np.inf)
        found[where], best[where] = items[kept], values[kept]
        return found, best

    def _entries(self, items: np.ndarray, scores: np.ndarray) -> list[list[dict[str, Any]]]:
        """The lists as dictionaries."""
        return [
            [
                {"item": self.items[n], "title": self.titles[n], "score": score}
                for n, score in zip(*one, strict=True)
                if n >= 0
            ]
            for one in zip(items.tolist(), scores.tolist(), strict=True)
        ]


class BaselineRecommendations(Recommendations):
    """Lists by a baseline: counts, sums of weights of what the user had (item-kNN, EASE), a vector solved for
    that (ALS), or a blend of the standardized scores of two others.
    """

    def __init__(self, folder: str | Path, by: str, whole: Recommendations | None = None) -> None:
        from safetensors import safe_open

        super().__init__(folder, whole)
        self.by = by
        with safe_open(Path(folder) / BASELINES_FILE, "numpy") as file:
            names = [name for name in file.keys() if name.partition(".")[0] == by]  # noqa: SIM118  no mapping
            self._kept = {name.removeprefix(f"{by}."): file.get_tensor(name) for name in names}
        if not self._kept:
            why = "nothing was held out to choose one by" if by == BLEND else "no times, or few interactions"
            raise RecommendationError(f"--by {by}: {BASELINES.get(by, by)} is not kept here: {why}")
        if by == BLEND:
            shares = sorted(((float(share[0]), name) for name, share in self._kept.items()), reverse=True)
            self._parts = [(share, open_recommendations(folder, name, self)) for share, name in shares]
            if telling := [part for _, part in self._parts if part.by not in COUNTED]:
                self._told = np.logical_or.reduce([part._known for part in telling])  # noqa: SLF001
        elif by == ALS:
            self.arrays = {**self.arrays, "items": self._kept["items"], "bias": self._kept["items"][:, 0] * 0}
        elif by not in COUNTED:
            weights = np.diff(self._kept["starts"])
            weights += np.bincount(self._kept["targets"], minlength=len(weights))
            self._told = (weights > 0) & self._told
        if not any(part.by == MODEL for _, part in self._parts):
            self.described = np.zeros_like(self.described)

    @property
    def has_vectors(self) -> bool:
        return self.by == ALS

    def vectors(self, users: np.ndarray) -> np.ndarray:
        if "users" in self._kept:
            return self._kept["users"][users]
        return np.stack([self.new_user(self._had_by(users[[n]])[1]) for n in range(len(users))])

    def _score(self, users: np.ndarray, room: np.ndarray, *rooms: np.ndarray) -> Scored:
        if self.by == ALS:
            return self._by_vectors(self.vectors(users), room)
        if self.by in COUNTED:
            room[:] = counts = next(iter(self._kept.values())).astype(np.float64)
            slack = 4 * np.finfo(room.dtype).eps * counts.max(initial=0)
            return room, np.full(len(room), slack), lambda _, items: counts[items]
        if not self._parts:
            return self._sums(*self._had_by(users), room), 0.0, None
        parts = zip(self._parts, rooms, strict=True)
        found = [part._standardized(users, share, place) for (share, part), place in parts]  # noqa: SLF001
        np.add(rooms[0], rooms[1], out=room)
        # No standardized score is above the root of how many there are.
        slack = sum(slack for _, slack, _ in found) + 8 * np.finfo(room.dtype).eps * len(self.items) ** 0.5
        return room, slack, lambda rows, items: sum(exact(rows, items) for *_, exact in found)

    def _sums(self, owner: np.ndarray, item: np.ndarray, room: np.ndarray, amounts: Any = 1.0) -> np.ndarray:
        """(n, items) sums of the weights of the items that (pairs,) owners had.

        Exact in fp32, and so the same in any order: weights are multiples of 2**-24 of the largest sum.
        """
        starts, _, _, dense = weights = self._weights
        amounts = amounts * np.ones(len(item), np.float32)
        if dense is not None and len(room) >= FEW:
            x = np.zeros((len(room), len(self.items)), room.dtype)
            x[owner, item] = 1
            np.matmul(x, dense, out=room)
        else:
            room.fill(0)
            _add_weights(room, weights[:3], owner, item, amounts)
        silent = np.bincount(owner, np.diff(starts)[item], len(room)) == 0
        if (quiet := silent[owner]).any():  # among the nearest of no other an item speaks for its own nearest
            _add_weights(room, self._columns, owner[quiet], item[quiet], amounts[quiet])
        # What nobody took together tells nothing.
        room[np.bincount(owner, self._told[item], len(room)) == 0] = self.counts
        return room

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Of each item `starts` (items + 1,) of its weights, their targets and values; (items, items) the
        same as a matrix, or None of many items.
        """
        starts, items = self._kept["starts"], len(self.items)
        targets, values = self._kept["targets"].astype(np.int64), self._kept["values"].astype(np.float64)
        largest = np.bincount(targets, np.abs(values), items).max(initial=TINY)
        grid = 2.0 ** (np.ceil(np.log2(largest)) - 24)
        values, dense = (np.round(values / grid) * grid).astype(np.float32), None
        if items**2 <= DENSE:
            dense = np.zeros((items, items), np.float32)
            np.add.at(dense, (_spans(starts, np.arange(items))[0], targets), values)
        return starts, targets, values, dense

    @cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same by target: `starts`, the items whose weights these are, and values."""
        starts, targets, values, _ = self._weights
        order, every = np.argsort(targets, kind="stable"), np.arange(len(starts))
        return np.searchsorted(targets[order], every), _spans(starts, every[:-1])[0][order], values[order]

    def scores_for(self, taken: np.ndarray, amounts: Any = 1.0) -> Any:
        """(items,) scores of a user who took these different items, by number."""
        if self._parts:
            return sum(share * standardized(part.scores_for(taken, amounts)) for share, part in self._parts)
        if self.by in COUNTED:
            return next(iter(self._kept.values())).astype(np.float64)
        if self.by == ALS:
            user = self.new_user(taken, amounts * np.ones(len(taken), np.float32))
            return (self._kept["items"] * user).sum(1)  # the same for equal vectors
        room = np.empty((1, len(self.items)), np.float32)
        return self._sums(np.zeros(len(taken), np.int64), taken, room, amounts)[0]

    def new_user(self, taken: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """(dim,) the vector of ALS of a user who took these items: `als_vectors` of the project."""
        v, (l2, alpha) = self._kept["items"], self._kept["settings"]
        w = np.ones(len(taken), v.dtype) if weights is None else weights
        system = (v[taken].T * w) @ v[taken] + alpha * self._gram
        system += l2 * (w.sum() + alpha * len(v)) * np.eye(v.shape[1], dtype=v.dtype)
        return np.linalg.solve(system, w @ v[taken])

    @cached_property
    def _gram(self) -> Any:
        return self._kept["items"].T @ self._kept["items"]

    def similarities(self, number: int) -> Any:
        """(items,) for which an item speaks most: its weights; of a blend those of its larger part that knows
        the item.
        """
        if self._parts:
            knows = (p for _, p in self._parts if p._known[number] and p.by not in COUNTED)  # noqa: SLF001
            return next(knows, self._parts[0][1]).similarities(number)
        if self.by in COUNTED:
            raise RecommendationError("popularity knows no items like another: ask by the model, knn or ease")
        if self.by == ALS:
            return super().similarities(number)
        scores = self.scores_for(np.array([number]))
        return np.where(scores > 0, scores, -np.inf)


def _candidates(scores: np.ndarray, top: int, slack: Any) -> tuple[np.ndarray, np.ndarray]:
    """(row, item) of the scores that are at most `slack` below the `top` largest of their row, and finite.

    Perhaps of a few more: of `top` groups the largest scores are at least `least`, so that no smaller one
    is in a list. To sort, or only to part, all scores takes longer than to compute them.
    """
    items = scores.shape[1]
    groups = -(-items // (STRIPES if items > 4 * STRIPES * top else 1))
    starts = np.arange(0, items, groups)
    best = scores[:, :groups].copy()
    for start in starts[1:].tolist():  # no item is in two groups: it would stand for two of a list
        stripe = scores[:, start : start + groups]
        np.maximum(best[:, : stripe.shape[1]], stripe, out=best[:, : stripe.shape[1]])
    place = groups - min(top, groups)
    least = np.partition(best, place)[:, place] - slack
    least = np.maximum(least, np.finfo(scores.dtype).min)[:, None]
    row, group = np.nonzero(best >= least)
    item = group[:, None] + starts
    there = scores[row[:, None], np.minimum(item, items - 1)] >= least[row]
    kept, stripe = np.nonzero(there & (item < items))
    return row[kept], item[kept, stripe]


def _spans(starts: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place among `rows`, position) of what lies from starts[row] to starts[row + 1], row by row."""
    counts = starts[rows + 1] - starts[rows]
    owner = np.repeat(np.arange(len(rows)), counts)
    return owner, np.arange(len(owner)) + (starts[rows] + counts - counts.cumsum())[owner]


def _add_weights(room: np.ndarray, weights: Any, owner: np.ndarray, item: np.ndarray, amounts: Any) -> None:
    """Add to `room` (n, items) the weights of the items that (pairs,) owners had, so often."""
    starts, targets, values = weights
    pair, places = _spans(starts, item)
    at = owner[pair] * room.shape[1] + targets[places]
    np.add.at(room.reshape(-1), at, values[places] * amounts[pair])


def written_otherwise(name: str, known: Container[str]) -> str:
    """The known id that differs from this one by what tables and JSON change: blanks, `.0`, and zeros before
    a number, of at most 32 digits; "" where none does.
    """
    bare = re.sub(r"\.0*$", "", name.strip())
    zeros = map(bare.lstrip("0").zfill, range(1, 33)) if bare.isdecimal() else ()
    return next((one for one in (bare, *zeros) if one != name and one in known), "")


def _as_known(name: str, known: Container[str]) -> str:
    """The name, or `3` for `3.0` where only that is known: a column of numbers with a gap writes it so."""
    whole = re.sub(r"\.0*$", "", name)
    return whole if name not in known and whole in known else name


def _split(text: str, known: Container[str]) -> list[str]:
    """What commas part in a text, the longest known names first."""
    parts, found = text.split(","), []
    while parts:
        end = next((n for n in range(len(parts), 0, -1) if ",".join(parts[:n]).strip() in known), 1)
        found.append(",".join(parts[:end]).strip())
        parts = parts[end:]
    return found
