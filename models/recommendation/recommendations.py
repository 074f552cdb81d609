"""A trained recommender as files, and lists from them: numpy is all it takes.

final/ holds vectors of users and items, a head if it is more than a product, what each user had, names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VECTORS_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
"""The weights as they were trained, for another training to begin with."""
NAMES_FILE = "names.json"
CONFIG_FILE = "config.json"


class UnknownUser(ValueError):
    """Somebody who was not in the data."""

    exit_code = 2


def write(net: Any, folder: Path, facts: Any) -> None:
    """Everything that `Recommendations` reads."""
    import shutil

    from safetensors.numpy import save_file

    from isobatch.models.recommendation import catalogue

    net.eval()
    users, items = net.all_vectors()
    arrays = {"users": users, "items": items, "bias": net.item_bias.weight[:, 0]}
    for name, p in net.named_parameters():
        if name.startswith(("mlp_layers.", "product.")):
            arrays[name] = p
    found = {k: np.ascontiguousarray(v.detach().cpu().numpy()) for k, v in arrays.items()}
    found["had"] = np.array(catalogue.Catalogue.read(facts.folder).had)
    save_file(found, folder / VECTORS_FILE)
    own = {n: p for n, p in net.named_parameters() if "encoder." not in n or "lora_" in n or p.requires_grad}
    save_file({n: p.detach().cpu().contiguous().numpy() for n, p in own.items()}, folder / TRAINING_FILE)
    names = catalogue.names(facts.folder)
    (folder / NAMES_FILE).write_text(json.dumps(names, ensure_ascii=False))
    encoder = None if net.encoder is None else net.encoder.weights_identity()
    config = {"model_type": "isobatch-recommender", "head": net.head, "encoder": encoder}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    shutil.copy(__file__, folder / "recommendations.py")


class Recommendations:
    """Exact lists: every item is scored, what the user had is left out."""

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
            found = v @ u
        elif self.head == "mlp":
            found = self._mlp(np.concatenate([np.broadcast_to(u, v.shape), v], 1))
        else:
            half = v.shape[1] // 2
            product = (v[:, :half] * u[:half]) @ self.arrays["product.weight"][0]
            pairs = np.concatenate([np.broadcast_to(u[half:], v[:, half:].shape), v[:, half:]], 1)
            found = product + self._mlp(pairs)
        scores: np.ndarray = found + self.arrays["bias"]
        return scores

    def _mlp(self, x: np.ndarray) -> np.ndarray:
        numbers = sorted({int(name.split(".")[1]) for name in self.arrays if name.startswith("mlp_layers.")})
        for number in numbers:
            weight, bias = (self.arrays[f"mlp_layers.{number}.{part}"] for part in ("weight", "bias"))
            x = x @ weight.T + bias
            if number != numbers[-1]:
                x = np.maximum(x, 0)
        return x[:, 0]

    def top(self, user: str, count: int) -> list[tuple[str, float]]:
        """(title, score) of the best items that a user, by id, has not had."""
        if user not in self.users:
            shown = ", ".join(self.users[:5])
            raise UnknownUser(f"--user {user}: is not in the training data (ids such as {shown})")
        number, items = self.users.index(user), len(self.items)
        scores = self.scores(number)
        had = self.arrays["had"]
        first, last = np.searchsorted(had, [number * items, (number + 1) * items])
        scores[had[first:last] - number * items] = -np.inf
        best = np.argsort(-scores, kind="stable")[:count]
        return [(self.titles[i], float(scores[i])) for i in best if np.isfinite(scores[i])]
