"""Whether texts help a recommender, for which users and items, and what each way of using them costs.

python -m benchmarks texts --data NCF_FOLDER --model ENCODER_FOLDER

A tenth of the items are taken from training altogether, and a tenth of the users keep three interactions.
Items that were taken away are ranked among each other, others among the given negatives.
"""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isobatch.benchmarks import child_process
from isobatch.benchmarks.sessions import make_session, train
from isobatch.core.measures import peak_resident_bytes
from isobatch.data.interactions import movielens
from isobatch.models.recommendation import ranking
from isobatch.models.recommendation.catalogue import read_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.benchmarks.report import Row
    from isobatch.core.facts import Facts
    from isobatch.engine.training.session import Session

HIDDEN_SHARE, KEPT = 0.1, 3
FEW = 50
"""Interactions in training below which an item counts as rare."""
MOST_PAIRS = 20_000
WAYS = {"ids alone": "off", "frozen": "frozen", "frozen, then lora": None}


def measure(quick: bool, data: str, model: str) -> list[Row]:
    return [*schemes(quick), *helped(quick, Path(data), model)]


# Ways to train the text encoder, on the demo data


def schemes(quick: bool) -> Iterator[Row]:
    """Each in a process of its own: after one frozen phase, the second phase in four ways."""
    for way in ("frozen only", "lora over cached vectors", "lora, naive", "lora"):
        yield child_process.call("quality.texts:scheme", way, "quick" if quick else "")


def scheme(way: str, quick: str) -> Row:
    """Train the demo in one way: seconds of a step of the second phase, memory, and what was learnt."""
    naive = {"text_dedup": False, "text_cache": "off"} if way == "lora, naive" else {}
    text = {"text": "frozen"} if way == "frozen only" else {}
    short = {"epochs": [1, 0.3]} if quick and not text else {}
    seconds: dict[str, list[float]] = defaultdict(list)
    with make_session("recommender", {**text, **naive, **short}) as session:
        if way == "lora over cached vectors":
            _use_cached_vectors(session.task)
        train(session, functools.partial(_append, seconds))
        encoder: Any = session.model.encoder
        lora = [p.detach() for name, p in encoder.net.named_parameters() if "lora_B" in name]
        moved = float(sum(p.square().sum() for p in lora) ** 0.5)
        found = session.evaluate("test")
    return {
        "way": way,
        "ms a step": round(1e3 * median(seconds.get("lora") or seconds["frozen"]), 1),
        "peak MB": round(peak_resident_bytes() / 1e6),
        "HR@10": round(found["hr@10"], 4),
        "NDCG@10": round(found["ndcg@10"], 4),
        "LoRA moved by": round(moved, 4),
    }


def _append(seconds: dict[str, list[float]], phase: str, took: float) -> None:
    seconds[phase].append(took)


def _use_cached_vectors(task: Any) -> None:
    """Let LoRA train while text vectors come from a cache; the task's own flags refuse this."""
    begin = task.begin_phase

    def cached(model: Any, phase: str, first: Any) -> None:
        begin(model, phase, first)
        model.text_vectors, model.text_vectors_fixed = model.encoder.vectors(), True

    task.begin_phase, task.observe = cached, lambda *_: {}


# Where texts help


def helped(quick: bool, data: Path, model: str) -> Iterator[Row]:
    """HR@10 of ids alone and with texts, by how often the user or the item was seen in training."""
    with tempfile.TemporaryDirectory() as place:
        folder, hidden = remove_pairs(data, Path(place))
        for way, text in WAYS.items():
            values: dict[str, Any] = {
                "data": str(folder),
                "text": text,
                "batch_size": 4096,
                **({} if text == "off" else {"model": model}),
                **({} if text else {"lora_blocks": 1}),
            }
            length = [2, 2] if quick else [2400, 60]
            values["steps"] = length if text is None else length[:1]
            seconds: dict[str, list[float]] = defaultdict(list)
            with make_session("recommender", values) as session:
                train(session, functools.partial(_append, seconds))
                with torch.no_grad():
                    found = hit_rates(session, hidden)
            yield {"uses": way, **found, "minutes": round(sum(map(sum, seconds.values())) / 60, 1)}


def remove_pairs(data: Path, place: Path) -> tuple[Path, np.ndarray]:
    """Write the data with fewer training pairs; also returns the removed (user, item) pairs, (n, 2)."""
    found = movielens.FORMATS["ncf"].read(data)
    train = found.splits["train"].whole()
    draw = np.random.default_rng(0)
    user, item = (train[name].to_numpy() for name in ("user", "item"))
    worded = np.array([int(name) for name in found.items])
    cold = np.isin(item, draw.choice(worded, round(len(worded) * HIDDEN_SHARE), replace=False))
    users = np.unique(user)
    poor = np.isin(user, draw.choice(users, round(len(users) * HIDDEN_SHARE), replace=False))
    order = np.lexsort((draw.random(len(user)), user))
    nth = np.empty(len(user), np.int64)
    nth[order] = np.arange(len(user)) - np.searchsorted(user[order], user[order])
    kept = ~cold & (~poor | (nth < KEPT))
    folder = place / data.name
    folder.mkdir()
    for file in (f for f in data.iterdir() if ".train." not in f.name):
        (folder / file.name).symlink_to(file.resolve())
    (place / "ml-1m").symlink_to((data.parent / "ml-1m").resolve())
    stem = next(data.glob("*.test.negative")).name.removesuffix(".test.negative")
    np.savetxt(folder / f"{stem}.train.rating", np.stack([user, item], 1)[kept], fmt="%d", delimiter="\t")
    return folder, np.stack([user, item], 1)[cold]


def hit_rates(session: Session, hidden: np.ndarray) -> dict[str, float]:
    """HR@10 by how often the user or the item was seen in training."""
    net: Any = session.model.eval()
    test = session.splits["test"].fetch(np.arange(len(session.splits["test"])))
    user, item, rivals = (torch.from_numpy(test[k]).long() for k in ("user", "item", "rivals"))
    taken = torch.bincount(net.seen // len(net.item_text), minlength=len(net.user_text))
    known = net.counts[item] > 0
    groups = {
        "all known": known,
        f"users of at most {KEPT}": known & (taken[user] <= KEPT),
        f"items of under {FEW}": known & (net.counts[item] < FEW),
    }
    found = {}
    for name, rows in groups.items():
        if not rows.any():
            continue
        (scores,) = net(user[rows], [torch.cat([item[rows, None], rivals[rows]], 1)])
        found[name] = _hits(scores[:, 0], scores[:, 1:], torch.ones_like(scores[:, 1:], dtype=torch.bool))
    return {**found, "items never seen": _among_hidden(net, _numbers(session.facts, hidden))}


def _numbers(facts: Facts, hidden: np.ndarray) -> np.ndarray:
    """The data's names of pairs -> the model's numbers."""
    written = read_names(facts.folder)
    place = [{name: n for n, name in enumerate(written[kind])} for kind in ("users", "items")]
    return np.array([[place[0][str(u)], place[1][str(i)]] for u, i in hidden])


def _among_hidden(net: Any, pairs: np.ndarray) -> float:
    """HR@10 of each pair's item among all removed items, without others that the same user had."""
    items = torch.from_numpy(np.unique(pairs[:, 1]))
    had = torch.zeros(len(net.user_text), len(net.item_text), dtype=torch.bool)
    had[pairs[:, 0], pairs[:, 1]] = True
    some = np.random.default_rng(0).permutation(len(pairs))[:MOST_PAIRS]
    user, item = torch.from_numpy(pairs[some]).unbind(1)
    (scores,) = net(user, [items])
    own = scores.gather(1, torch.searchsorted(items, item)[:, None])[:, 0]
    return _hits(own, scores, ~had[user][:, items])


def _hits(own: Tensor, others: Tensor, there: Tensor) -> float:
    return round(float((ranking.ranks(own, others, there) < 10).float().mean()), 4)
