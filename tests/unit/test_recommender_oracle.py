"""Every figure of every protocol once more in numpy, from docs/recommender.md alone, Protocols."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.core.recipe import Recipe
from isobatch.data.interactions.dataset import InteractionOptions, Interactions
from isobatch.engine.loading.prepare import prepare
from isobatch.models.recommendation.catalogue import Catalogue, read_names
from isobatch.models.recommendation.task import Recommender, RecommenderOptions

K, USERS, ITEMS, DAYS = 4, 30, 23, 90
Row = tuple[int, int, int]
"""(user, item, time): a user's and an item's number is its id."""
SPLITS = ("leave-one-out", "last", "time", "users", "given")
CASES = [*itertools.product(SPLITS, ("all", "train"), (0, 6), ("once", "all"))]


def log(seed: int) -> list[Row]:
    """With repeats, equal times, users of one interaction, items liked more and items that nobody had."""
    draw, rows = np.random.default_rng(seed), []
    for user in range(USERS):
        for _ in range(1 if user % 7 == 3 else draw.integers(3, 12)):
            item = min(draw.integers(ITEMS - 2, size=2)) if draw.random() < 0.7 else user % 5 * 4
            rows.append((user, int(item), int(draw.integers(DAYS))))
    return rows


def written(folder: Path, split: str) -> tuple[Path, list[list[Row]]]:
    """The files, and their rows: of all, or of train, valid and test."""
    folder.mkdir()
    rows = log(5)
    thirds = [rows[n::3] for n in range(3)]
    parts = {"train": thirds[0] + thirds[1], "valid": thirds[2][::2], "test": thirds[2][1::2]}
    parts = parts if split == "given" else {"interactions": rows}
    for name, part in parts.items():
        lines = "".join(f"{u},{i},{t}\n" for u, i, t in part)
        (folder / f"{name}.csv").write_text("user,item,timestamp\n" + lines)
    (folder / "items.csv").write_text("item,title\n" + "".join(f"{i},thing {i}\n" for i in range(ITEMS)))
    return folder, [*parts.values()]


def without_repeats(rows: list[Row]) -> list[Row]:
    last = {}
    for user, item, time in rows:
        last[user, item] = max(time, last.get((user, item), time))
    return [(u, i, t) for (u, i), t in last.items()]


def of_user(rows: list[Row], user: int) -> list[int]:
    """In time; of one time the larger item is later."""
    return [i for _, i in sorted((t, i) for u, i, t in rows if u == user)]


def split_rows(parts: list[list[Row]], split: str, held_users: dict[str, set[int]]) -> dict[str, Any]:
    """Split -> (user, item) held out; and `train` and `before`: user -> items in time."""
    train: dict[int, list[int]] = {}
    held: dict[str, list[tuple[int, int]]] = {"valid": [], "test": []}
    before: dict[int, list[int]] = {}
    if split == "given":
        train = {u: of_user(parts[0], u) for u in range(USERS)}
        held = {s: [(u, i) for u, i, _ in part] for s, part in zip(held, parts[1:], strict=True)}
    elif split == "time":
        times = sorted(t for _, _, t in parts[0])
        valid_from, test_from = (times[round(share * len(times))] for share in (0.8, 0.9))
        train = {u: of_user([r for r in parts[0] if r[2] < valid_from], u) for u in range(USERS)}
        held["valid"] = [(u, i) for u, i, t in parts[0] if valid_from <= t < test_from]
        held["test"] = [(u, i) for u, i, t in parts[0] if t >= test_from]
    else:
        for user in range(USERS):
            own = of_user(parts[0], user)
            names = {"leave-one-out": ("test", "valid"), "last": ("test",)}.get(split, ())
            names = names or tuple(s for s in held if user in held_users.get(s, set()))
            for name in names:
                if len(own) > 1:
                    held[name].append((user, own.pop()))
            (before if split == "users" and names else train)[user] = own
    return {**held, "train": train, "before": before}


def half_tied(scores: np.ndarray, item: int, others: set[int]) -> float:
    rest = scores[sorted(others - {item})]
    return float((rest > scores[item]).sum() + (rest == scores[item]).sum() / 2)


def of_ranks(ranks: list[float]) -> dict[str, float]:
    hits = [r for r in ranks if r < K]
    sums = (len(hits), sum(1 / np.log2(r + 2) for r in hits), sum(1 / (r + 1) for r in hits))
    return dict(zip(("hr", "ndcg", "mrr"), (s / len(ranks) for s in sums), strict=True))


def oracle(
    made: dict[str, Any],
    split: str,
    test_input: str,
    repeats: str,
    scores_of: Any,
    rivals: list[tuple[int, int, list[int]]],
) -> dict[str, float]:
    """Figures of `split`; `scores_of(user, known items)` gives (items,) scores. `rivals`: (user, item,
    what was sampled) of each row.
    """
    known = {u: made["before"].get(u, []) + made["train"].get(u, []) for u in range(USERS)}
    later = {u: {i for s in ("valid", "test") for v, i in made[s] if v == u} for u in range(USERS)}
    if split == "test" and test_input == "all":
        known = {u: had + [i for v, i in made["valid"] if v == u] for u, had in known.items()}
        later = {u: {i for v, i in made["test"] if v == u} for u in range(USERS)}
    everything = set(range(ITEMS))
    candidates = {u: everything - later[u] - (set() if repeats == "all" else {*known[u]}) for u in known}
    counts = Counter(i for had in made["train"].values() for i in had)
    takers = Counter(i for had in made["train"].values() for i in {*had})
    trained = {u for u, had in made["train"].items() if had}
    total, before, bucket = sum(counts.values()), 0, {}
    for item in sorted(counts, key=lambda i: (-counts[i], i)):
        bucket[item] = ("head", "middle", "tail")[3 * before // total]
        before += counts[item]
    scores = {u: scores_of(u, known[u]) for u in {u for u, _ in made[split]}}
    full = [half_tied(scores[u], i, candidates[u]) for u, i in made[split]]
    found = {f"full_{m}@{K}": v for m, v in of_ranks(full).items()}
    if rivals:
        assert all({*drawn} <= candidates[u] - {i} and len({*drawn}) == len(drawn) for u, i, drawn in rivals)
        found |= {
            f"{m}@{K}": v
            for m, v in of_ranks([half_tied(scores[u], i, {*drawn}) for u, i, drawn in rivals]).items()
        }
    groups = {name: [bucket.get(i) == name for _, i in made[split]] for name in ("head", "middle", "tail")}
    warm = [u in trained and i in counts for u, i in made[split]]
    groups |= {} if all(warm) else {"warm": warm}
    for name, chosen in groups.items():
        if any(chosen):
            part = of_ranks([r for r, c in zip(full, chosen, strict=True) if c])
            found |= {f"full_{m}@{K}_{name}": part[m] for m in ("hr", "ndcg")}
    of_users, listed, novelty = [], set(), []
    for user, score in scores.items():
        own = {i for u, i in made[split] if u == user}
        free = candidates[user] - own
        best = sorted(free | own, key=lambda i: -score[i])[:K]
        listed |= {*best}
        novelty.append(np.mean([np.log2(len(trained) / max(1, takers[i])) for i in best]))
        places = [half_tied(score, i, free) + n for n, i in enumerate(sorted(own, key=lambda i: -score[i]))]
        hits = [(n, p) for n, p in enumerate(places) if p < K]
        ideal = sum(1 / np.log2(n + 2) for n in range(min(len(own), K)))
        of_users.append(
            (
                len(hits) / len(own),
                sum((n + 1) / (p + 1) for n, p in hits) / min(len(own), K),
                sum(1 / np.log2(p + 2) for _, p in hits) / ideal,
            )
        )
    if len({*made[split]}) > len(scores):
        means = np.mean(of_users, 0)
        found |= {f"full_{n}@{K}": m for n, m in zip(("recall", "map", "user_ndcg"), means, strict=True)}
    return found | {f"coverage@{K}": len(listed) / ITEMS, f"novelty@{K}": float(np.mean(novelty))}


def ease(train: dict[int, list[int]], penalty: float) -> np.ndarray:
    x = np.zeros((USERS, ITEMS))
    for user, had in train.items():
        x[user, had] = 1
    p = np.linalg.inv(x.T @ x + penalty * np.eye(ITEMS))
    weights = -p / np.diag(p)
    np.fill_diagonal(weights, 0)
    return weights.astype(np.float32).astype(np.float16).astype(np.float64)


def knn(train: dict[int, list[int]], shrinkage: float) -> np.ndarray:
    x = np.zeros((USERS, ITEMS))
    for user, had in train.items():
        x[user, had] = 1
    gram = x.T @ x
    norms = np.sqrt(np.diag(gram))
    weights = gram / (np.outer(norms, norms) + shrinkage)
    np.fill_diagonal(weights, 0)
    return weights.astype(np.float32).astype(np.float16).astype(np.float64)


def named(figure: str, by: str) -> str:
    way = "full_" if figure.startswith("full_") else ""
    return f"{way}{by}{figure.removeprefix(way)}"


@pytest.mark.parametrize(("split", "test_input", "negatives", "repeats"), CASES)
def test_every_figure_can_be_recomputed(
    split: str, test_input: Any, negatives: int, repeats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    folder, parts = written(tmp_path / "log", split)
    asked = {"test_input": test_input, "eval_negatives": negatives, "repeats": repeats, "vocab_size": 300}
    recipe = Recipe(task="recommender", data=str(folder))
    data = Interactions(recipe, InteractionOptions(split=split, **asked))  # type: ignore[arg-type]
    facts = prepare(data)
    task = Recommender(recipe, RecommenderOptions(text="off", dim=6, top_k=K))
    torch.manual_seed(0)
    net: Any = task.build_model(facts).double().eval()
    torch.nn.init.normal_(net.item_bias.weight)
    sources = {s: data.open(Path(facts.folder), s) for s in facts.samples if s != "train"}
    columns = {s: source.fetch(np.arange(len(source))) for s, source in sources.items()}
    names = read_names(facts.folder)
    assert (names["users"], names["items"]) == ([*map(str, range(USERS))], [*map(str, range(ITEMS))])
    if repeats == "once":
        parts = [without_repeats(part) for part in parts]
    held_users = {s: {*c["user"].tolist()} for s, c in columns.items()}  # who is drawn is the program's own
    made = split_rows(parts, split, held_users)
    for s, c in columns.items():
        assert sorted(zip(c["user"].tolist(), c["item"].tolist(), strict=True)) == sorted(made[s])
        assert ("rivals" in c) == bool(negatives)
    tensors = {s: {n: torch.from_numpy(c[n]) for n in c if n != "index"} for s, c in columns.items()}
    batches = [{n: t[start : start + 5] for n, t in tensors["test"].items()} for start in range(0, 999, 5)]
    batches = [batch for batch in batches if len(batch["user"])]
    valid = (lambda: [tensors["valid"]]) if "valid" in tensors else (lambda: [])
    with torch.no_grad():
        found = dict(
            task.final_metrics(
                net, tmp_path, facts, lambda s=None: valid() if s == "valid" else iter(batches)
            )
        )
        summed = [task.evaluate(net, batch, None) for batch in batches]  # type: ignore[arg-type]
    for name in summed[0]:
        total, weight = (sum(float(getattr(p[name], part)) for p in summed) for part in ("value", "weight"))
        found[name] = total / weight
    u, v = (t.detach().numpy() for t in net.all_vectors())
    bias = net.item_bias.weight[:, 0].detach().numpy()
    weights = {
        "ease_": ease(made["train"], found["ease_lambda"]),
        "knn_": knn(made["train"], found["knn_shrinkage"]),
    }
    counts = np.bincount([i for had in made["train"].values() for i in had], minlength=ITEMS).astype(float)
    scorers: dict[str, Any] = {
        "": lambda user, _: v @ u[user] + bias,
        "popularity_": lambda *_: counts,
        **{by: lambda _, had, w=w: w[sorted({*had})].sum(0) for by, w in weights.items()},
    }
    sampled = columns["test"].get("rivals")
    rows = [columns["test"][name].tolist() for name in ("user", "item")]
    rivals = [] if sampled is None else [*zip(*rows, sampled.tolist(), strict=True)]
    checked = set()
    for by, scores_of in scorers.items():
        for figure, value in oracle(made, "test", test_input, repeats, scores_of, rivals).items():
            checked.add(name := named(figure, by))
            assert found[name] == pytest.approx(value, abs=1e-6), name
    others = {"held_out_users", "best_on_validation", "ease_lambda", "knn_shrinkage", "cold_users"}
    left = found.keys() - checked - others - {"cold_items"}
    unchecked = ("recent", "als", "blend")  # the fits have tests of their own
    left = {n for n in left if not n.removeprefix("full_").startswith(unchecked)}
    assert all(name.endswith(("_ci95", "_on_validation")) for name in left), left
    taken = {i for had in made["train"].values() for i in had}
    assert found.get("cold_users", 0) == len({u for u, _ in made["test"] if not made["train"].get(u)})
    assert found.get("cold_items", 0) == len({i for _, i in made["test"]} - taken)
    assert Catalogue.read(facts.folder).counts.tolist() == counts.tolist()
