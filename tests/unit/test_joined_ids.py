"""Tests of ids that tables write in two ways, of what is held out and ranked, and of what is said of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from isobatch.models.recommendation import ranking
from isobatch.models.recommendation.catalogue import Catalogue, read_names
from isobatch.models.recommendation.network import RecommenderNet
from isobatch.tests.unit.test_interactions import ids, made

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from isobatch.core.facts import Facts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))


def write(file: Path, columns: dict[str, Sequence[Any]]) -> None:
    if file.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({n: list(values) for n, values in columns.items()}), file)
    else:
        rows = zip(*columns.values(), strict=True)
        file.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")


def shop(folder: Path, taken: str, described: str, user: Any, item: Any, described_item: Any) -> Facts:
    """Twelve items in order and three users, whose ids the two tables write as the three functions do."""
    rows = [(n % 3, 7 * n % 11, n) for n in range(30)]
    columns = {"user": [user(r[0]) for r in rows], "item": [item(r[1]) for r in rows]}
    write(folder / f"interactions.{taken}", {**columns, "time": [r[2] for r in rows]})
    titles = [f"book {n}" for n in range(12)]
    write(folder / f"items.{described}", {"item": [described_item(n) for n in range(12)], "title": titles})
    return made(folder)[0]


WAYS = {
    "csv and csv": ("csv", "csv", float, float, int),
    "parquet and csv": ("parquet", "csv", float, float, int),
    "csv and parquet": ("csv", "parquet", int, int, float),
    "text and parquet": ("parquet", "parquet", str, str, float),
}


@pytest.mark.parametrize("way", WAYS)
def test_whole_decimal_numbers_are_the_integers_of_the_other_table(way: str, tmp_path: Path) -> None:
    facts = shop(tmp_path, *WAYS[way])
    names = read_names(facts.folder)
    assert names["users"] == ["0", "1", "2"]
    assert names["items"] == [str(n) for n in range(12)]
    assert names["titles"] == [f"book {n}" for n in range(12)]


def test_ids_with_digits_behind_their_point_stay(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", {"user": [1.0, 1.5, 1.0, 2.0], "item": ["1.0", "1", "2.10", "2.1"]})
    names = read_names(made(tmp_path / "log.csv", split="none")[0].folder)
    assert names["users"] == ["1.0", "1.5", "2.0"]
    assert names["items"] == ["1", "1.0", "2.1", "2.10"]


def test_several_rows_of_one_item_are_counted(tmp_path: Path) -> None:
    facts = shop(tmp_path, "csv", "csv", int, int, lambda n: n % 9)
    assert "items.csv: 3 of its ids have several rows (0, 1, 2): the last is read" in facts.extra["notes"]
    assert read_names(facts.folder)["titles"][:4] == ["book 9", "book 10", "book 11", "book 3"]


def test_ratings_that_do_not_count_are_counted(tmp_path: Path) -> None:
    rows = {"user": [n // 6 for n in range(24)], "item": [n % 7 for n in range(24)]}
    write(tmp_path / "log.csv", {**rows, "rating": [-1 if n % 4 == 0 else 1 for n in range(24)]})
    facts, splits = made(tmp_path / "log.csv")
    assert sum(len(part["user"]) for part in splits.values()) == 18
    assert "6 of 24 interactions are rated below --min-rating 0: left out" in facts.extra["notes"]


@pytest.mark.parametrize("out", ["", "ship", "ship, fee,gone", "3"])
def test_items_that_are_no_products_are_named_and_left_out(out: str, tmp_path: Path) -> None:
    """The table has 0 to 9 and `fee`; orders have `ship` and `odd` too."""
    rows = [(n % 8, n % 10) for n in range(40)] + [
        (n % 8, ("ship", "ship", "fee", "odd")[n % 4]) for n in range(16)
    ]
    write(tmp_path / "orders.csv", {"user": [u for u, _ in rows], "item": [i for _, i in rows]})
    write(tmp_path / "items.csv", {"item": [*range(10), "fee"], "title": [f"book {n}" for n in range(11)]})
    facts, splits = made(tmp_path, without_items=out or None)
    left, said = {name.strip() for name in out.split(",")}, "\n".join(facts.extra["notes"])
    assert set(read_names(facts.folder)["items"]) == {*map(str, range(10)), "ship", "fee", "odd"} - left
    kept = {(str(u), str(i)) for u, i in rows if str(i) not in left}
    assert {pair for part in splits.values() for pair in ids(facts, part)} == kept
    whole = sum(str(i) not in left for _, i in rows)
    named = f"ship (8 of {whole} rows), " * ("ship" not in left) + f"odd (4 of {whole} rows)"
    first = "odd" if "ship" in left else "ship"
    assert (
        f"not in the table of items: {named}: what is no product, --without-items {first} leaves out" in said
    )
    assert ("--without-items leaves out fee (4 rows), gone (0 rows), ship (8 rows)" in said) == (
        "fee" in left
    )


def test_a_user_who_took_everything_is_not_ranked_against_nobody(tmp_path: Path) -> None:
    taken = [("all", n) for n in range(6)] + [("some", n) for n in range(4)]
    write(tmp_path / "log.csv", {"user": [u for u, _ in taken], "item": [i for _, i in taken]})
    facts, splits = made(tmp_path / "log.csv")
    assert ids(facts, splits["test"]) == [("some", "3")]
    assert ids(facts, splits["valid"]) == [("some", "2")]
    said = "test: 1 of 2 held-out interactions are of users who took all items: left out, as none is left to"
    assert any(note.startswith(said) for note in facts.extra["notes"])


def test_full_ranking_of_a_split_by_time_leaves_out_all_that_a_user_had(tmp_path: Path) -> None:
    """Popularity's figures, by an own split and an own ranking: of users with many held-out rows."""
    draw = np.random.default_rng(3)
    pairs = draw.permutation(40 * 60)[:900]
    user, item = pairs // 60, pairs % 60 * (pairs % 60) // 60
    _, first = np.unique(user * 60 + item, return_index=True)
    user, item = user[first], item[first]
    time = draw.permutation(len(user))
    write(tmp_path / "log.csv", {"user": user, "item": item, "time": time})
    facts, splits = made(tmp_path / "log.csv", split="time", eval_negatives=5)
    net = RecommenderNet(Catalogue.read(facts.folder), 4, (4,), "dot", None)
    order = np.argsort(time)
    ends = round(0.8 * len(user)), round(0.9 * len(user))
    counts = np.bincount(item[order[: ends[0]]], minlength=60)
    for split, rows in (("valid", order[ends[0] : ends[1]]), ("test", order[ends[1] :])):
        hits = ndcg = 0.0
        for row in rows:
            others = np.setdiff1d(item, item[user == user[row]])
            rank = (counts[others] > counts[item[row]]).sum() + (
                counts[others] == counts[item[row]]
            ).sum() / 2
            hits += rank < 10
            ndcg += 1 / np.log2(rank + 2) if rank < 10 else 0.0
        batch = {name: torch.from_numpy(np.array(values)) for name, values in splits[split].items()}
        found = ranking.metric_parts(net, batch, 10)
        assert float(found["full_popularity_hr@10"].value) == hits
        assert float(found["full_popularity_ndcg@10"].value) == pytest.approx(ndcg, rel=1e-6)
        assert found["full_popularity_hr@10"].weight == len(rows)
