"""Tests of lists: for new users, where little is known of items, where some are left out, of unknown rows."""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.testclient import TestClient

from isobatch.core.errors import UserError
from isobatch.launch.predicting import recommend
from isobatch.launch.predicting.predict import Answerer
from isobatch.launch.predicting.recommend import (
    ListOptions,
    RecommendOptions,
    answer,
    answer_users,
    restrict,
)
from isobatch.launch.predicting.tables import ListRequest, UserReader
from isobatch.launch.serving.app import prediction_app
from isobatch.models.recommendation import recommendations
from isobatch.models.recommendation.recommendations import (
    BASELINES,
    SHRINKAGE,
    RecommendationError,
    Recommendations,
    open_recommendations,
)
from isobatch.tests.unit.test_recommender import recommender

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


USERS, ITEMS, DIM = 40, 30, 6


def write_model(
    folder: Path, head: str = "dot", counts: dict[int, int] | None = None, described: tuple[int, ...] = ()
) -> Recommendations:
    """A trained recommender: two groups of users, and of items that they like; `counts` where not 50."""
    draws = np.random.default_rng(0)
    sides = np.where(np.arange(USERS) % 2, 1.0, -1.0)[:, None]
    users = draws.normal(size=(USERS, DIM)) * 0.3
    items = draws.normal(size=(ITEMS, DIM)) * 0.3
    users[:, :1] += sides
    items[:, :1] += np.where(np.arange(ITEMS) < ITEMS // 2, 2.0, -2.0)[:, None]
    arrays = {"users": users, "items": items, "bias": draws.normal(size=ITEMS)}
    vectors = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    save_file({**vectors, "had": np.arange(3)}, folder / "model.safetensors")
    titles = [f"Book {n}" for n in range(ITEMS)]
    titles[4:6] = "Bug's Life, A", "Life"
    names = {"users": [f"u{n}" for n in range(USERS)], "items": [f"i{n}" for n in range(ITEMS)]}
    known = {
        "counts": [(counts or {}).get(n, 50) for n in range(ITEMS)],
        "described": [int(n in described) for n in range(ITEMS)],
    }
    (folder / "names.json").write_text(json.dumps({**names, "titles": titles, **known}))
    (folder / "config.json").write_text(json.dumps({"head": head}))
    return Recommendations(folder)


open_lists = recommender().open_lists
MANY = 800


def write_twins(folder: Path, by: str, *blend: str, many: int = MANY) -> Recommendations:
    """So many items, each of the first half with the vector and weights of the one so far behind it."""
    write_model(folder)
    draws, names, half = np.random.default_rng(2), [f"i{n}" for n in range(many)], many // 2
    arrays = {
        "users": draws.normal(size=(USERS, DIM)),
        "items": np.tile(draws.normal(size=(half, DIM)), (2, 1)),
    }
    arrays |= {"bias": np.tile(draws.integers(3, size=half), 2), "mlp_layers.0.weight": np.eye(12, DIM * 2)}
    arrays |= {"mlp_layers.0.bias": np.ones(12), "mlp_layers.2.weight": draws.normal(size=(1, 12))}
    arrays |= {"mlp_layers.2.bias": np.ones(1), "product.weight": np.ones((1, DIM // 2))}
    if by == "neumf":
        arrays["mlp_layers.0.weight"] = draws.normal(size=(12, DIM))
    had = {"had": np.unique(draws.integers(USERS * many, size=300))}
    as_float = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    save_file({**as_float, **had}, folder / "model.safetensors")
    known = {"counts": [1] * many, "described": [0] * many, "users": [f"u{n}" for n in range(USERS)]}
    (folder / "names.json").write_text(json.dumps({**known, "items": names, "titles": names}))
    (folder / "config.json").write_text(json.dumps({"head": by if by in ("mlp", "neumf") else "dot"}))
    kept = {"popularity": np.tile(draws.integers(9, size=half), 2)}
    for name in ("knn", "ease"):
        targets = [np.concatenate([t, t + half]) for t in draws.integers(half, size=(many, 4))]
        weights = [np.tile(w, 2) for w in draws.integers(1, 9, size=(many, 4))]
        kept |= {f"{name}.starts": np.arange(0, 8 * many + 1, 8), f"{name}.targets": np.concatenate(targets)}
        kept[f"{name}.values"] = np.concatenate(weights).astype(np.float16)
    kept |= {"recent.counts": kept["popularity"] + 1, "als.items": as_float["items"]}
    kept |= {"als.settings": np.array([0.1, 0.1], np.float32)}
    kept |= {f"blend.{name}": np.array([0.5], np.float32) for name in blend}
    save_file(kept, folder / "baselines.safetensors")
    return open_recommendations(folder, by if by in BASELINES else "model")


@pytest.mark.parametrize(
    ("by", "blend"),
    [
        *((by, ()) for by in ("dot", "mlp", "neumf", *BASELINES) if by != "blend"),
        *(
            ("blend", pair)
            for pair in itertools.combinations(("model", *BASELINES), 2)
            if "blend" not in pair
        ),
    ],
)
def test_a_list_is_the_same_however_it_is_asked_for_and_of_equal_items_the_first_is_first(
    by: str, blend: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, top = write_twins(tmp_path, by, *blend), 6
    # Blocks of seven users, by a matrix of weights, and a rest, whose weights are added one by one.
    for name, value in {"BLOCK": 7 * MANY, "FEW": 7, "DENSE": MANY**2}.items():
        monkeypatch.setattr(recommendations, name, value)
    found, scores = lists.lists(range(USERS), top)
    for user in range(USERS):
        had = {int(key) - user * MANY for key in lists.arrays["had"] if key // MANY == user}
        listed = found[user].tolist()
        assert names(lists.recommend(f"u{user}", top)) == [f"i{n}" for n in listed]
        both = lists.lists([3, user], top)
        assert (listed, scores[user].tolist()) == (both[0][1].tolist(), both[1][1].tolist())
        rank = [(-score, n) for score, n in zip(scores[user].tolist(), listed, strict=True)]
        assert rank == sorted(rank)
        left = np.delete(lists.scores(user), [*had])
        assert scores[user] == pytest.approx(-np.sort(-left)[:top], rel=1e-4, abs=1e-5)
        for n in {*listed} - had:  # the first of two equal ones, where it was not had
            assert n < 400 or n - 400 in {*listed} | had


@pytest.mark.parametrize("by", ["dot", "mlp", "neumf", *BASELINES])
def test_a_short_list_begins_as_a_long_one(by: str, tmp_path: Path) -> None:
    """Of catalogues of more and fewer items than are compared in groups, which leave a rest."""
    for many in (130, 146, 156, 158, MANY):
        lists = write_twins(tmp_path, by, "ease", "model", many=many)
        whole, scores = lists.lists(range(USERS), many)
        for top in range(1, 13):
            found = lists.lists(range(USERS), top)
            assert (found[0] == whole[:, :top]).all(), (many, top)
            assert (found[1] == scores[:, :top]).all(), (many, top)


def test_guests_have_the_lists_of_what_they_took_and_quantities_weigh_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = write_model(tmp_path)

    def asked(name: str, text: str) -> list[dict[str, Any]]:
        (tmp_path / name).write_text(text)
        answer(lists, RecommendOptions(guests=str(tmp_path / name), top=4, json=True), [])
        return json.loads(capsys.readouterr().out)["users"]

    one, two = asked("a.csv", "customer_id,sku\ng,i1\ng,Book 2\nh,i20\nh,new\n")
    assert (one["user"], one["items"]) == ("g", lists.for_items(["i1", "i2"], 4))
    assert two["items"] == lists.for_items(["i20"], 4)
    same = asked("b.jsonl", '{"items": ["i1", "i2"]}\n{"user": "h", "items": ["i20"]}\n')
    assert [each["items"] for each in same] == [one["items"], two["items"]]
    equal, _ = asked("c.csv", "user,item,quantity\ng,i1,3\ng,i2,3\nh,i20,1\n")
    assert equal["items"] == one["items"]
    same, _ = asked("q.csv", "user,item,Qty\ng,i1,9\ng,i20,1\nh,i20,1\n")
    assert same == asked("r.csv", "user,item,quantity\ng,i1,9\ng,i20,1\nh,i20,1\n")[0]
    assert same["items"] != lists.for_items(["i1", "i20"], 4)
    weights = np.array([9.0, 1.0])
    more, even = (lists.new_user(np.array([1, 20]), w) @ lists.arrays["items"][1] for w in (weights, None))
    assert more > even
    with pytest.raises(UserError, match=r"d.csv line 2: quantity many: is not a number: leave the row out"):
        asked("d.csv", "user,item,quantity\ng,i1,many\n")
    for columns in ("Gast,item", "user,thing", "u,i"):
        with pytest.raises(UserError, match=r"has no column .*a user and an item .*--user-column and"):
            asked("e.csv", f"{columns}\ng,i1\n")
    (tmp_path / "basket.csv").write_text("item_id\ni1\nnew\ni2\n")
    assert answer(lists, RecommendOptions(items=str(tmp_path / "basket.csv"), top=4, json=True), []) == 0
    assert json.loads(capsys.readouterr().out)["items"] == one["items"]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("none.csv", "user,item\ng,i3\ng,i1\ng,i3\n", {"g": ["i1", "i3"]}),
        ("numbers.csv", "user,item,time\ng,i3,100\nh,i1,7\ng,i1,20\ng,i2,\n", {"g": ["i2", "i1", "i3"]}),
        ("dates.csv", "user,item,date\ng,i3,2026-02-01\ng,i1,2025-12-31\n", {"g": ["i1", "i3"]}),
        ("dotted.csv", "user,item,date\ng,i3,1.2.2026\ng,i1,31.12.2025\n", {"g": ["i1", "i3"]}),
        (
            "later.jsonl",
            '{"items": ["i1"]}\n{"user": "g", "item": "i3"}\n',
            {"1": ["i1"], "g": ["i3"]},
        ),
        ("first.jsonl", '{"user": "g", "item": "i3"}\n{"items": ["i1"]}\n', {"2": ["i1"], "g": ["i3"]}),
    ],
)
def test_what_guests_took_is_in_time(
    name: str, text: str, found: dict[str, list[str]], tmp_path: Path
) -> None:
    """Each row has columns of its own; an item that repeats counts where it is last."""
    (tmp_path / name).write_text(text)
    guests = recommend._read_guests(write_model(tmp_path), str(tmp_path / name), (None,) * 4, [])  # noqa: SLF001
    assert {user: [*items] for user, items in guests.items() if user != "h"} == found


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        (
            "user,order_id,item\n,7,i1\n,7,i2\n,8,i3\n",
            {"7": {"i1": 1, "i2": 1}, "8": {"i3": 1}},
            ["3 of 3 rows"],
        ),
        (
            "Belegnr;item\n7;i1\n8;i3\n",
            {"7": {"i1": 1}, "8": {"i3": 1}},
            ["2 of 2 rows have no user: their Bel"],
        ),
        (
            "user,order_id,item\ng,6,i1\n,7,i2\n",
            {"g": {"i1": 1}, "7": {"i2": 1}},
            ["1 of 2 rows have no user"],
        ),
        ("user,item\ng,i1\n,i2\n", None, []),
        (
            "user,item,Menge\ng,i1,2\ng,i2,3\ng,i1,-2\ng,i2,1-\n",
            {"g": {"i2": 2}},
            ["2 of 4 rows are returns (M"],
        ),
        (
            "user,item,Menge\ng,i1,-4\nh,i1,1\n",
            {"g": {}, "h": {"i1": 1}},
            ["1 of 2 rows are", "1 of 2 users"],
        ),
    ],
    ids=["orders", "no user", "some", "no order", "returns", "all returned"],
)
def test_rows_of_guests_are_read_as_those_of_training(
    text: str, found: dict[str, dict[str, float]] | None, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "g.csv").write_text(text)
    read, remarks = partial(recommend._read_guests, write_model(tmp_path), str(tmp_path / "g.csv")), []  # noqa: SLF001
    if found is None:
        with pytest.raises(UserError, match=r"line 3: has no user: --user-column"):
            read((None,) * 4, remarks)
        return
    assert read((None,) * 4, remarks) == found
    assert [
        line.removeprefix("--guests: ")[: len(one)] for line, one in zip(remarks, said, strict=True)
    ] == said


def test_guests_of_whom_nothing_is_known_get_what_most_users_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = write_model(tmp_path)
    guests = [{"items": ["i1"]}, {"items": []}, {"items": ["new"]}, {"items": ["i2"]}]
    (file := tmp_path / "g.jsonl").write_text("\n".join(map(json.dumps, guests)))
    for out in (None, str(tmp_path / "lists.csv")):
        answer(lists, RecommendOptions(guests=str(file), out=out), [])
        said = capsys.readouterr().err
        assert "2 of 4 users have no item that training knows: the list is what most users took" in said
    answer(lists, RecommendOptions(guests=str(file), json=True), [])
    answers = json.loads(capsys.readouterr().out)["users"]
    assert ["fallback" in one for one in answers] == [False, True, True, False]
    assert answers[1]["items"] == answers[2]["items"] == lists.popular(10)
    answer(write_model(tmp_path, counts={3: 0}), RecommendOptions(items="i3", json=True), [])
    assert "fallback" in json.loads(capsys.readouterr().out)


def test_columns_of_a_table_say_what_is_offered(tmp_path: Path) -> None:
    write_model(tmp_path)
    table = tmp_path / "products.csv"
    table.write_text("item_id,stock,price,category\ni4,3,5.5,wine\ni5,0,2,tea\ni6,,1,tea\ni7,9,30,\n")
    for flags, left in {
        ("stock > 0", None): {"i4", "i7"},
        ("stock > 0 and price <= 20", None): {"i4"},
        ("category == 'tea' or price == 30", None): {"i5", "i6", "i7"},
        (None, "wine, tea"): {"i7"},
        ("price < 9", "tea"): {"i4"},
        ("price < 9 or stock == 9", "tea"): {"i4", "i7"},
    }.items():
        lists = open_lists(tmp_path)
        choose(lists, only=str(table), where=flags[0], without_category=flags[1])
        assert set(names(lists.recommend("u1", 99))) == left, flags
    for where, said in {
        "stokc > 0": r"--where stokc > 0: 'stokc' is undefined \(did you mean stock\?\): write columns",
        "category > 0": "a cell holds text where a number is asked for: write columns",
        "stock = 0 AND price < 9": 'write it as --where "stock == 0 and price < 9"',
        "stock >": "--where stock >: breaks off, or lacks a sign between two words: write columns",
        "stock 0": "--where stock 0: breaks off, or lacks a sign between two words: write columns",
        "1 // 0": "zero",
    }.items():
        with pytest.raises(UserError, match=said):
            choose(lists, only=str(table), where=where)
    for where, ours in {
        "price = 3": "price == 3",
        "price < 29,90": "price < 29.90",
        "(price <= 29,90 OR stock => 1)": "(price <= 29.90 or stock >= 1)",
        "price <> 5,5 && NOT stock": "price != 5.5 and not stock",
        "category IN ('a,1 = 2') || price=9": "category in ('a,1 = 2') or price==9",
    }.items():
        with pytest.raises(UserError, match=re.escape(f'--where {where}: write it as --where "{ours}"')):
            choose(lists, only=str(table), where=where)
    choose(lists, only=str(table), where="price in (2,30) and category != 'a = 1,5'")
    assert set(names(lists.recommend("u1", 99))) == {"i5", "i7"}
    for category, said in {
        "Wine": r"Wine: no row of .* \(did you mean wine\?\)",
        "tea,beer": "beer: .*; there is: wine, tea",
    }.items():
        with pytest.raises(UserError, match=f"--without-category {said}"):
            choose(lists, only=str(table), without_category=category)
    with pytest.raises(UserError, match="are about a table: name it"):
        choose(lists, only="i4", without_category="wine")


def test_german_tables_say_what_is_offered(tmp_path: Path) -> None:
    write_model(tmp_path)
    rows = ["i4;3;29,90 €;Wein", "i5;0;1.200,00 €;Tee", "i6;;7,- €;Tee"]
    header = "Artikelnummer;Bestand;Preis;Warengruppe"
    (table := tmp_path / "artikel.csv").write_text("\n".join([header, *rows]))
    for where, out, left in (
        ("Preis < 30", None, "i4 i6"),
        ("Bestand == 0", None, "i5"),
        ("bestand > 0 and PREIS < 30", None, "i4"),
        (None, "Tee", "i4"),
    ):
        lists = open_lists(tmp_path)
        choose(lists, only=str(table), where=where, without_category=out)
        assert set(names(lists.recommend("u1", 99))) == set(left.split())


def choose(lists: Recommendations, **flags: Any) -> list[str]:
    return restrict(lists, ListOptions(**flags), None)


def names(entries: Sequence[dict[str, Any]]) -> list[str]:
    return [entry["item"] for entry in entries]


def test_items_that_nobody_took_are_like_nothing_unless_they_have_a_text(tmp_path: Path) -> None:
    model = write_model(tmp_path, counts={3: 0, 7: 0}, described=(7,))
    with pytest.raises(RecommendationError, match=r"item i3: nobody took it in training, .*train again"):
        model.similar("i3", 5)
    assert len(model.similar("i7", ITEMS)) == ITEMS - 2
    assert "i3" not in names(model.similar("i0", ITEMS))
    assert "i7" in names(model.similar("i0", ITEMS))


@pytest.mark.parametrize("blend", [("ease", "knn"), ("ease", "model")])
def test_of_an_item_that_only_the_model_knows_by_its_text_the_model_answers(
    blend: tuple[str, str], tmp_path: Path
) -> None:
    write_twins(tmp_path, "ease", *blend)
    told = json.loads((tmp_path / "names.json").read_text())
    told["counts"][3], told["described"][3] = 0, 1
    (tmp_path / "names.json").write_text(json.dumps(told))
    model, ease, blended = (open_recommendations(tmp_path, by) for by in ("model", "ease", "blend"))
    for lists in (ease, blended) if "model" not in blend else (ease,):
        for ask in (
            lambda lists=lists: lists.similar("i3", 5),
            lambda lists=lists: lists.for_items(["i3"], 5),
        ):
            with pytest.raises(RecommendationError, match=r"the model alone knows.*--by model"):
                ask()
        assert lists.remarks(["i3"])[0].endswith("--by model")
    if "model" in blend:
        assert blended.similar("i3", 5) == model.similar("i3", 5)


def test_an_item_that_was_seldom_taken_counts_for_less(tmp_path: Path) -> None:
    scores = {e["item"]: e["score"] for e in write_model(tmp_path, counts={1: 10**9, 2: 1}).similar("i0", 99)}
    v = Recommendations(tmp_path).arrays["items"]
    cosines = v @ v[0] / np.linalg.norm(v, axis=1) / np.linalg.norm(v[0])
    assert scores["i1"] == pytest.approx(cosines[1], abs=1e-5)
    assert scores["i2"] == pytest.approx(cosines[2] / (1 + SHRINKAGE), abs=1e-5)


def test_what_tells_nothing_of_a_new_user_is_said_and_changes_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path, counts={3: 0, 4: 1})
    assert model.for_items(["i0", "i3"], ITEMS) == [
        entry for entry in model.for_items(["i0"], ITEMS) if entry["item"] != "i3"
    ]
    (nothing,) = model.remarks(["i3", "i0", "i4"])
    assert nothing.startswith("item i3: nobody took it in training")
    with pytest.raises(RecommendationError, match="item i3"):
        model.for_items(["i3"], 5)


def test_items_can_be_left_out_or_be_the_only_ones(tmp_path: Path) -> None:
    write_model(tmp_path)
    lists = open_lists(tmp_path)
    (tmp_path / "sold.csv").write_text("item_id,stock\ni4,0\ni5,0\ngone,0\n")
    said = choose(lists, without=str(tmp_path / "sold.csv"))
    assert said == ["--only, --without: 1 items are not in the training data: gone"]
    missing = {f"i{n}" for n in range(ITEMS)} - set(names(lists.recommend("u0", 99)))
    assert missing == {"i0", "i1", "i2", "i4", "i5"}
    lists = open_lists(tmp_path)
    choose(lists, only="i0,i9,Bug's Life, A", without="i9", with_seen=True)
    assert set(names(lists.recommend("u0", 99))) == {"i0", "i4"}, "i0 was had, and --with-seen keeps it"
    assert set(names(lists.for_items(["i0"], 99))) == {"i0", "i4"}
    with pytest.raises(UserError, match="there is no such file"):
        choose(lists, only="gone.csv")


def answerer(folder: Path) -> Answerer:
    lists = open_lists(folder)
    return Answerer(partial(answer_users, lists, 2), UserReader(lists=lists))


KNOWN: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "a user": ({"user": "u1"}, "u1", []),
    "a basket": ({"items": ["i1", "Book 2"]}, ["i1", "i2"], []),
    "a basket in a text": ({"items": "i1, Bug's Life, A"}, ["i1", "i4"], []),
    "some of a basket": ({"items": ["new", "i1", "newer"]}, ["i1"], ["new", "newer"]),
}
"""A row, the user or the items that it names, and what of it training does not know."""
NOT_KNOWN = {
    "a user": ({"user": "nobody"}, "user nobody: is not in the training data"),
    "a basket": ({"items": ["new"]}, "item new: is not in the training data"),
    "nothing taken": ({"items": []}, "neither a user nor an item is given"),
    "a title of two items": ({"items": ["i1", "Chasing Amy"]}, "Chasing Amy: 2 items have this title"),
}


@pytest.mark.parametrize("strange", NOT_KNOWN)
@pytest.mark.parametrize("known", KNOWN)
def test_a_request_of_which_nothing_is_known_has_the_popular_list(
    known: str, strange: str, tmp_path: Path
) -> None:
    write_model(tmp_path, counts={9: 90, 7: 80, 8: 70})
    told = json.loads((tmp_path / "names.json").read_text())
    told["titles"][6] = told["titles"][20] = "Chasing Amy"
    (tmp_path / "names.json").write_text(json.dumps(told))
    lists, (row, why) = open_lists(tmp_path), NOT_KNOWN[strange]
    client = TestClient(prediction_app("shop", answerer(tmp_path)))
    there, asked, unknown = KNOWN[known]
    body = {"rows": [row, there, row], "top": 3, "without": ["Book 7", "gone"]}
    first, own, last = client.post("/predict", json=body).json()["predictions"]
    assert first["items"] == ["i9", "i8", "i0"], "what most took, less i7"
    assert (first["items"], first["scores"]) == (last["items"], last["scores"])
    assert why in first["fallback"]
    assert own["unknown"] == [*unknown, "gone"]
    assert "fallback" not in own
    (alone,) = client.post("/predict", json=body | {"rows": [there]}).json()["predictions"]
    assert alone == own
    wanted = lists.recommend(asked, 9) if isinstance(asked, str) else lists.for_items(asked, 9)
    assert own["items"] == [entry["item"] for entry in wanted if entry["item"] != "i7"][:3]
    given = client.post("/predict", json=body | {"rows": [row]})
    assert (given.status_code, given.json()["predictions"]) == (200, [first])
    assert not re.search(r"\bu\d", first["fallback"]), "ids of users are no client's business"


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a user": ({"user": "u0"}, "own"),
    "a user, an empty basket": ({"user": "u0", "items": []}, "own"),
    "a user, no basket": ({"user": "u0", "items": None}, "own"),
    "a user, a blank basket": ({"user": "u0", "items": " "}, "own"),
    "a user, a strange basket": ({"user": "u0", "items": ["new"]}, "own"),
    "both": ({"user": "u0", "items": ["i20"]}, "both"),
    "both, by column": ({"customer_id": "u0", "items": "i20"}, "both"),
    "a basket": ({"items": ["i20"]}, "basket"),
    "a blank user, a basket": ({"user": " ", "items": ["i20", None]}, "basket"),
    "no user, a basket": ({"user": None, "items": ["i20"]}, "basket"),
    "a stranger, a basket": ({"user": "nobody", "items": ["i20"]}, "basket"),
    "a stranger": ({"user": "nobody"}, "popular"),
    "an empty user": ({"user": ""}, "popular"),
    "a null": ({"user": None}, "popular"),
    "a gap in a table": ({"user": float("nan")}, "popular"),
    "neither": ({"user": "", "items": []}, "popular"),
    "a strange basket": ({"items": ["new"]}, "popular"),
}
"""A row -> of what its list is made."""


@pytest.mark.parametrize("by", ["dot", "mlp", "sequence", "knn", "ease", "als", "blend"])
def test_every_kind_of_row_has_a_list_that_says_what_did_not_count(by: str, tmp_path: Path) -> None:
    lists = write_twins(tmp_path, by, "ease", "als") if by != "sequence" else write_model(tmp_path)
    lists.attention_heads = int(by == "sequence")  # what such a network knows of a new user is made elsewhere
    lists._last_state = lambda taken: lists.arrays["items"][taken].mean(0)  # type: ignore[method-assign]  # noqa: SLF001
    reader, own = UserReader(lists=lists), names(lists.recommend("u0", 5))
    found = {}
    for name, (row, _) in ROWS.items():
        (found[name],) = answer_users(lists, 5, [reader.from_row(row, "row 1")])
    takes_new, mixes = by != "mlp", by not in ("mlp", "sequence")
    had = [lists.items[n] for n in lists._had_by(np.array([0]))[1]]  # noqa: SLF001
    made = {"own": own, "popular": names(lists.popular(5))}
    made["basket"] = names(lists.for_items(["i20"], 5)) if takes_new else made["popular"]
    made["both"] = names(lists.for_items([*had, "i20"], 5)) if mixes else [i for i in own if i != "i20"]
    for name, (_, of) in ROWS.items():
        listed = found[name]["items"]
        assert listed[: len(made[of])] == made[of][: len(listed)], name
        assert ("unused" in found[name]) == (of == "both" and not mixes), name
        is_fallback = of == "popular" or (of == "basket" and not takes_new)
        assert ("fallback" in found[name]) == is_fallback, name
    for row, said in {
        "has no column user_id": {"x": 1},
        "holds dict, not a list": {"items": {"a": 1}},
    }.items():
        with pytest.raises(UserError, match=row):
            reader.from_row(said, "row 1")


def test_a_number_that_lost_its_zeros_is_asked_about(tmp_path: Path) -> None:
    write_model(tmp_path)
    told = json.loads((tmp_path / "names.json").read_text())
    told["items"][7] = "010644"
    (tmp_path / "names.json").write_text(json.dumps(told))
    lists, client = open_lists(tmp_path), TestClient(prediction_app("shop", answerer(tmp_path)))
    rows = [{"user": "u1"}, {"items": ["i1", 10644]}]
    for found in client.post("/predict", json={"rows": rows, "without": [10644]}).json()["predictions"]:
        assert {*found["unknown"]} == {"10644"}
        assert found["did_you_mean"] == {"10644": "010644"}
    assert "10644 (did you mean 010644?)" in choose(lists, without="10644")[0]
    with pytest.raises(UserError, match=r"did you mean 010644\?"):
        lists.for_items(["10644"], 3)
    told["users"][7] = "0010386"
    (tmp_path / "names.json").write_text(json.dumps(told))
    lists = open_lists(tmp_path)
    for name in ("10386", "10386.0", "00010386", " 0010386", "0010386.00 "):
        with pytest.raises(UserError, match=r"is not in the training data \(did you mean 0010386\?\)"):
            lists.recommend(name, 3)
        (found,) = answer_users(lists, 3, [UserReader(lists=lists).from_row({"user": name}, "row")])
        assert found["did_you_mean"] == {name: "0010386"}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("10111", "K010111"),
        ("k010111", "K010111"),
        ("010111 ", "K010111"),
        ("K10111", "K010111"),
        ("k0010111", "K010111"),
        ("C010111", ""),
        ("9999", ""),
        ("x", ""),
        ("", ""),
    ],
)
def test_a_customer_number_is_found_without_its_letters_or_zeros_where_one_has_it(
    asked: str, meant: str, tmp_path: Path
) -> None:
    write_model(tmp_path)
    told = json.loads((tmp_path / "names.json").read_text())
    told["users"][:5] = "K010111", "K007", "G7", "x1", "y"
    (tmp_path / "names.json").write_text(json.dumps(told))
    lists = open_lists(tmp_path)
    assert lists.meant(asked, True) == meant
    hint = f"did you mean {meant}?" if meant else "ids such as"
    with pytest.raises(UserError, match=re.escape(hint)):
        lists.recommend(asked, 3)
    (found,) = answer_users(lists, 3, [ListRequest(asked)])
    assert found.get("did_you_mean") == ({asked: meant} if meant else None)


def test_what_most_took_fills_a_restricted_list_of_which_little_is_told(tmp_path: Path) -> None:
    write_twins(tmp_path, "knn")
    told = json.loads((tmp_path / "names.json").read_text())
    told["counts"] = [1 + n % 7 for n in range(MANY)]
    (tmp_path / "names.json").write_text(json.dumps(told))
    lists = open_lists(tmp_path, "knn")
    choose(lists, only=",".join(f"i{n}" for n in range(100)))
    for user in range(USERS):
        listed = lists.recommend(f"u{user}", 20)
        counts = [lists.counts[int(one["item"][1:])] for one in listed if one["score"] == 0]
        assert counts == sorted(counts, reverse=True)
        assert len(counts) > 1


@pytest.mark.parametrize(
    ("asked", "known", "meant"),
    [
        ("7", ["007", "8"], "007"),
        ("007", ["7"], "7"),
        ("7.0", ["07"], "07"),
        (" a ", ["a"], "a"),
        ("a", ["0a", "aa"], ""),
        ("0", ["00"], "00"),
        ("7", ["7"], ""),
        ("7", ["70"], ""),
        ("", ["0"], ""),
    ],
)
def test_an_id_that_differs_by_how_it_is_written_is_found(asked: str, known: list[str], meant: str) -> None:
    assert recommendations.written_otherwise(asked, known) == meant


def test_what_a_client_may_ask_of_lists(tmp_path: Path) -> None:
    write_model(tmp_path)
    client, lists = TestClient(prediction_app("shop", answerer(tmp_path))), open_lists(tmp_path)

    def asked(**body: Any) -> Any:
        return client.post("/predict", json=body).json()

    assert asked(texts=["u1", "u2"])["predictions"] == [
        {f"{n}s": [entry[n] for entry in lists.recommend(user, 2)] for n in ("item", "title", "score")}
        for user in ("u1", "u2")
    ]
    (five,) = asked(items=["i1"], top=5)["predictions"]
    assert five["items"] == names(lists.for_items(["i1"], 5))
    for nobody in ("", None, "nobody"):
        (found,) = asked(user=nobody)["predictions"]
        assert found["items"] == names(lists.popular(2))
        assert (
            found
            == asked(rows=[{"user": nobody}])["predictions"][0]
            == asked(texts=[nobody])["predictions"][0]
        )
    wrong: dict[str, tuple[dict[str, Any], ...]] = {
        "top: must be a whole number from 1 to 1,000": (
            {"top": 0},
            {"top": 1001},
            {"top": True},
            {"top": "3"},
        ),
        "without: must be a list": ({"without": "i1"}, {"without": ["i"] * 1025}),
        "did you mean top?": ({"topp": 3},),
        "there is no such field; there are texts, rows, user, items, top, without": ({"zz": 3},),
    }
    for why, wishes in wrong.items():
        for wish in wishes:
            assert why in asked(texts=["u1"], **wish)["error"]["message"]


def test_unknown_rows_have_the_popular_list_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, counts={3: 0})
    guests = [{"items": ["i0", "new"]}, {"items": ["i3"]}, {"user": "nobody"}, {"user": "u1"}]
    file = tmp_path / "guests.jsonl"
    file.write_text("".join(json.dumps(guest) + "\n" for guest in guests))
    reading = answerer(tmp_path)
    (rows,) = reading.answer_file(str(file))
    popular = [entry["item"] for entry in open_lists(tmp_path).popular(2)]
    assert [len(row["scores"]) for row in rows] == [2, 2, 2, 2]
    assert [rows[n]["items"] for n in (1, 2)] == [popular, popular]
    left_out, unknown = capsys.readouterr().err.splitlines()
    assert unknown.startswith("2 rows with what most users took; the first: item i3: nobody took it")
    assert left_out == "2 rows with unknown items, left out; the first: ['new']"


def test_a_shared_title_stands_for_all_that_have_it_and_is_asked_about_where_one_is_meant(
    tmp_path: Path,
) -> None:
    write_model(tmp_path)
    known = json.loads((tmp_path / "names.json").read_text())
    known["titles"][6] = known["titles"][20] = "Chasing Amy"
    (tmp_path / "names.json").write_text(json.dumps(known))
    lists = open_lists(tmp_path)
    choose(lists, without="Chasing Amy")
    assert not {"i6", "i20"} & {*names(lists.recommend("u3", 99))}
    choose(lists, only="Chasing Amy")
    for ask in (lambda: lists.similar("Chasing Amy", 5), lambda: lists.for_items(["i1", "Chasing Amy"], 5)):
        with pytest.raises(UserError, match=r"item Chasing Amy: 2 items have this title: give .*\(i6, i20\)"):
            ask()


def test_an_item_counts_once_and_decimal_ids_are_those_of_training(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert model.for_items(["i1", "i1", "Book 1"], 5) == model.for_items(["i1"], 5)
    known = json.loads((tmp_path / "names.json").read_text())
    known |= {"users": [str(n) for n in range(40)], "items": [str(n) for n in range(ITEMS)]}
    (tmp_path / "names.json").write_text(json.dumps(known))
    lists = open_lists(tmp_path)
    assert lists.recommend("7.0", 5) == lists.recommend("7", 5)
    assert lists.for_items(["3.0"], 5) == lists.for_items(["3"], 5)
    (tmp_path / "sold.csv").write_text("item_id\n4.0\n5.00\n")
    choose(lists, without=str(tmp_path / "sold.csv"))
    assert not {"4", "5"} & {*names(lists.recommend("7", 99))}
    asked = UserReader(lists=lists).from_row({"user": 7.0}, "row 1")
    assert lists.recommend(str(asked.user), 5) == lists.recommend("7", 5)


@pytest.mark.parametrize(
    ("only", "without"), [("i4", "i4"), ("", None), ("none.csv", None)], ids=["both", "empty", "no rows"]
)
def test_no_item_left_to_offer_is_refused(only: str, without: str | None, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "none.csv").write_text("item_id\n")
    path = str(tmp_path / only) if only.endswith(".csv") else only
    with pytest.raises(UserError, match=r"no item is left to offer|--only .*none.csv: holds no rows"):
        choose(open_lists(tmp_path), only=path, without=without)


def test_empty_lists_are_refused_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)  # u0 had i0, i1 and i2; the others nothing
    lists = open_lists(tmp_path)
    choose(lists, only="i0,i1")
    out = tmp_path / "lists.csv"
    for asked in ({"user": "u0"}, {"user": "u0", "out": str(out)}, {"user": "u0,u0", "out": str(out)}):
        with pytest.raises(UserError, match=r"nothing is left to offer: .*--with-seen"):
            answer(lists, RecommendOptions(**asked), [])
    assert [f.name for f in tmp_path.iterdir() if "lists" in f.name] == []
    assert answer(lists, RecommendOptions(out=str(out)), []) == 0
    assert len(out.read_text().splitlines()) == 1 + 2 * 39
    assert "1 of 40 lists are empty: what users had is left out" in capsys.readouterr().err


def log_posterior(model: Recommendations, u: np.ndarray, taken: list[int]) -> float:
    """By the definition: log softmax of each item taken, and the normal density of the users' vectors."""
    v, b, users = (model.arrays[name].astype(np.float64) for name in ("items", "bias", "users"))
    scores = v @ u + b
    chosen = sum(scores[n] - np.log(np.exp(scores).sum()) for n in taken)
    covariance = np.cov(users.T, ddof=0)
    off = u - users.mean(0)
    return float(chosen - off @ np.linalg.solve(covariance, off) / 2)


@pytest.mark.parametrize("taken", [[0], [1, 2, 20], list(range(12)), [29] * 3])
def test_no_vector_is_likelier(tmp_path: Path, taken: list[int]) -> None:
    model = write_model(tmp_path)
    found = model.new_user(np.array(taken))
    best = log_posterior(model, found, taken)
    assert best > log_posterior(model, model.arrays["users"].mean(0), taken)
    draws = np.random.default_rng(1)
    for size in (0.3, 0.1, 0.03):
        for _ in range(50):
            assert log_posterior(model, found + size * draws.normal(size=DIM), taken) < best


def test_who_took_items_of_a_group_is_given_more_of_it(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    model.arrays["bias"][:] = 0
    found = [entry["item"] for entry in model.for_items(["i0", "i1", "Book 2"], 10)]
    assert all(int(item[1:]) < ITEMS // 2 for item in found)
    assert not {"i0", "i1", "i2"} & set(found)


def test_a_title_may_hold_commas(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert model.split_items("i1,Bug's Life, A, Life") == ["i1", "Bug's Life, A", "Life"]
    assert model.split_items("i1, nothing,i2") == ["i1", "nothing", "i2"]


def test_what_cannot_be_answered_is_said(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    with pytest.raises(RecommendationError, match=r"item Bok 7: is not .* \(did you mean Book 7\?\)"):
        model.for_items(["i1", "Bok 7"], 3)
    with pytest.raises(UserError, match="item x: is not in the training data"):
        recommender().open_lists(tmp_path).for_items(["x"], 3)
    with pytest.raises(RecommendationError, match="needs --head dot; this model has --head mlp"):
        write_model(tmp_path, "mlp").for_items(["i1"], 3)
