"""Recommendations of a trained recommender, computed from its files with numpy and safetensors alone.

A copy of this file lies beside each exported recommender. The folder holds the vectors of users and items,
the head if it is more than a product, the items that each user had, and names.

    from recommendations import Recommendations
    Recommendations("final").top("user id", 10)
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

VECTORS_FILE = "model.safetensors"
NAMES_FILE = "names.json"
CONFIG_FILE = "config.json"


class UnknownUserError(ValueError):
    """A user id that is not in the training data."""


class Recommendations:
    """Exact recommendation lists: every item is scored, and items that the user had are left out."""

    def __init__(self, folder: str | Path) -> None:
        from safetensors.numpy import load_file

        folder = Path(folder)
        self.arrays = load_file(folder / VECTORS_FILE)
        names = json.loads((folder / NAMES_FILE).read_text())
        self.users: list[str] = names["users"]
        self.items: list[str] = names["items"]
        self.titles: list[str] = names["titles"]
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
        if user not in self.users:
            shown = ", ".join(self.users[:5])
            raise UnknownUserError(f"--user {user}: is not in the training data (ids such as {shown})")
        number, items = self.users.index(user), len(self.items)
        scores = self.scores(number)
        had = self.arrays["had"]
        start, stop = np.searchsorted(had, [number * items, (number + 1) * items])
        scores[had[start:stop] - number * items] = -np.inf
        best = np.argsort(-scores, kind="stable")[:count]
        return [(self.titles[i], float(scores[i])) for i in best if np.isfinite(scores[i])]
