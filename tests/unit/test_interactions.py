"""Tests of data/interactions: every file format, numbering, splits, and ranking against unseen items."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.data.interactions import log
from isobatch.data.interactions.dataset import InteractionOptions, Interactions
from isobatch.engine.loading.prepare import prepare
from isobatch.models.recommendation import catalogue
from isobatch.models.recommendation.catalogue import Catalogue
from isobatch.models.recommendation.recommendations import VECTORS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.core.facts import Facts


def asked(
    path: Path | str, tokenizer: str | None = None, form: str | None = None, **options: Any
) -> Interactions:
    recipe = Recipe(task="recommender", data=str(path), tokenizer=tokenizer, format=form)
    return Interactions(recipe, InteractionOptions(**{"vocab_size": 300, "eval_negatives": 2, **options}))


def made(path: Path | str, **options: Any) -> tuple[Facts, dict[str, dict[str, np.ndarray]]]:
    data = asked(path, **options)
    data.check()
    facts = prepare(data)
    sources = {split: data.open(Path(facts.folder), split) for split in facts.samples}
    return facts, {split: s.fetch(np.arange(len(s))) for split, s in sources.items()}


def ids(facts: Facts, rows: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """(user, item) as written."""
    names = catalogue.read_names(facts.folder)
    return [(names["users"][u], names["items"][i]) for u, i in zip(rows["user"], rows["item"], strict=True)]


def words(facts: Facts, which: str) -> list[str]:
    """The text of each user or item, through its tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(facts.folder) / "tokenizer.json"))
    known = Catalogue.read(facts.folder)
    numbers = known.user_text if which == "users" else known.item_text
    found = np.split(known.tokens, known.offsets[1:-1])
    return ["" if n < 0 else tokenizer.decode(found[n].tolist()) for n in numbers]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))


def ml_1m(folder: Path) -> Path:
    folder.mkdir()
    (folder / "ratings.dat").write_text(
        "1::10::5::100\n1::20::3::300\n1::30::4::200\n2::20::1::5\n2::10::5::6\n1::10::4::150\n"
    )
    (folder / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    titles = "10::Toy Story (1995)::Animation|Comedy\n20::Matrix, The (1999)::Action\n"
    titles += "30::Am\xe9lie (2001)::Comedy\n40::Heat (1995)::Action\n"
    (folder / "movies.dat").write_bytes(titles.encode("latin-1"))
    return folder


def ml_100k(folder: Path) -> Path:
    folder.mkdir()
    (folder / "u.data").write_text("196\t242\t3\t881250949\n196\t302\t3\t891717742\n22\t242\t1\t878887116\n")
    (folder / "u.user").write_text("196|49|M|writer|55105\n22|25|F|technician|40206\n")
    (folder / "u.genre").write_text("unknown|0\nAction|1\nComedy|2\n\n")
    rows = (
        "242|Kolya (1996)|24-Jan-1997||http://x|0|0|1\n302|Rosi\xe8re, La (1997)|1-Jan-1997||http://x|0|1|1\n"
        "303|Heat (1995)|1-Jan-1995||http://x|0|1|0\n"
    )
    (folder / "u.item").write_bytes(rows.encode("latin-1"))
    return folder


def ncf(folder: Path) -> Path:
    folder.mkdir()
    (folder / "x.train.rating").write_text("0\t0\t5\t1\n0\t1\t5\t2\n1\t0\t5\t1\n1\t3\t4\t2\n")
    (folder / "x.test.rating").write_text("0\t2\t5\t3\n1\t2\t5\t3\n")
    (folder / "x.test.negative").write_text("(0,2)\t3\t4\n(1,2)\t1\t4\n")
    return folder


def tables(folder: Path, kind: str = "csv") -> Path:
    folder.mkdir()
    log = {
        "user": ["ann", "ann", "ann", "bob", "bob"],
        "item": ["x", "y", "z", "y", "z"],
        "time": [3, 1, 2, 1, 2],
    }
    items = {
        "item": ["x", "y", "z", "never"],
        "title": ["X ray", "Yacht", "Zoo", "Never"],
        "genre": ["war|sea", "sea", "", "sea"],
    }
    users = {"user": ["ann", "bob"], "town": ["Ayr", "Bath"], "age": ["30", "40"]}
    for name, columns in (("interactions", log), ("items", items), ("users", users)):
        if kind == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as parquet

            parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
        else:
            between = "," if kind == "csv" else "\t"
            rows = [list(columns), *zip(*columns.values(), strict=True)]
            (folder / f"{name}.{kind}").write_text("".join(between.join(map(str, r)) + "\n" for r in rows))
    return folder


def test_what_measures_a_run_has_one_digest_however_training_cuts_it(tmp_path: Path) -> None:
    """Another for another split, catalogue, input, candidates or negatives."""
    file = tmp_path / "log.csv"
    rows = (f"{n % 5},{7 * n % 11},{n}" for n in range(40))
    file.write_text("\n".join(["user,item,time", *rows]) + "\n")
    same = [{}, {"samples": "sequences"}, {"vocab_size": 310}]
    other: list[dict[str, Any]] = [{"split": "last"}, {"without_items": "3"}, {"test_input": "train"}]
    other += [{"eval_negatives": 0}, {"repeats": "all"}]
    found = [made(file, **changes)[0].extra["held_out"] for changes in (*same, *other)]
    assert len({*found[: len(same)]}) == 1
    assert len({*found}) == 1 + len(other)


def test_movielens_1m(tmp_path: Path) -> None:
    facts, splits = made(ml_1m(tmp_path / "m"))
    assert ids(facts, splits["test"]) == [("1", "20"), ("2", "10")]
    assert ids(facts, splits["valid"]) == [("1", "30")]
    assert ids(facts, splits["train"]) == [("2", "20"), ("1", "10")]
    assert words(facts, "users") == ["female, under 18, K-12 student", "male, 56 or older, self-employed"]
    assert words(facts, "items") == [
        "Toy Story (1995). Animation, Comedy",
        "The Matrix (1999). Action",
        "Am\xe9lie (2001). Comedy",
        "Heat (1995). Action",
    ]
    assert "1 repeated interactions count once, each at its last time" in facts.extra["notes"]
    assert facts.extra["protocol"] == "leave-one-out, 2 negatives"


def test_movielens_100k(tmp_path: Path) -> None:
    facts, splits = made(ml_100k(tmp_path / "m"))
    assert ids(facts, splits["test"]) == [("196", "302")]
    assert words(facts, "users") == ["female, 25 years old, technician", "male, 49 years old, writer"]
    assert words(facts, "items")[:2] == ["Kolya (1996). Comedy", "La Rosi\xe8re (1997). Action, Comedy"]


def test_the_ncf_protocol(tmp_path: Path) -> None:
    facts, splits = made(ncf(tmp_path / "x"))
    assert ids(facts, splits["test"]) == [("0", "2"), ("1", "2")]
    assert splits["test"]["rivals"].tolist() == [[3, 4], [1, 4]]
    assert ids(facts, splits["valid"]) in ([("0", "0")], [("0", "1")])
    assert facts.extra["items"] == 5  # the negatives' items are in the catalogue
    assert facts.extra["protocol"] == "given, 2 negatives of the data"


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_tables(kind: str, tmp_path: Path) -> None:
    facts, splits = made(tables(tmp_path / "t", kind))
    assert ids(facts, splits["test"]) == [("ann", "x"), ("bob", "z")]
    assert ids(facts, splits["valid"]) == [("ann", "z")]
    assert words(facts, "users") == ["Ayr. 30", "Bath. 40"]
    assert words(facts, "items") == ["Never. sea", "X ray. war, sea", "Yacht. sea", "Zoo"]
    assert catalogue.read_names(facts.folder)["titles"] == ["Never", "X ray", "Yacht", "Zoo"]


def test_numbers_of_items_such_as_price_and_stock_are_no_texts(tmp_path: Path) -> None:
    log = ["Kundennummer;Artikelnummer", *(f"{user};{item}" for user in "ab" for item in (7, 8))]
    found = []
    for stock in ("25", "ausverkauft", ""):
        (folder := tmp_path / f"s{len(found)}").mkdir()
        rows = [f"7;Stehlampe;{stock};Lampen;1.180,30;3", "8;Pfanne;0;Kueche;17,47;2", "9;1984;1;Buch;9,-;"]
        columns = "Artikelnummer;Bezeichnung;Bestand;Warengruppe;VK-Preis;Regal"
        (folder / "artikel.csv").write_text("\n".join([columns, *rows]))
        (folder / "bestellungen.csv").write_text("\n".join(log))
        facts, _ = made(folder)
        found.append(words(facts, "items"))
        read = (
            "read Artikelnummer as item, Bezeichnung, Warengruppe as text; not read: Bestand, VK-Preis, Regal"
        )
        assert f"artikel.csv: {read}" in facts.extra["notes"]
    assert found == [["Stehlampe. Lampen", "Pfanne. Kueche", "1984. Buch"]] * 3


def test_given_splits_and_time(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    for split, rows in (("train", "1,a\n1,b\n2,a\n2,d\n"), ("valid", "2,b\n"), ("test", "1,c\n")):
        (tmp_path / "given" / f"{split}.csv").write_text("user,item\n" + rows)
    facts, splits = made(tmp_path / "given")
    assert {s: ids(facts, r) for s, r in splits.items()} == {
        "train": [("1", "a"), ("1", "b"), ("2", "a"), ("2", "d")],
        "valid": [("2", "b")],
        "test": [("1", "c")],
    }
    (tmp_path / "all.csv").write_text("user,item,time\n" + "".join(f"{n % 3},{n},{-n}\n" for n in range(20)))
    facts, splits = made(tmp_path / "all.csv", split="time")
    assert [i for _, i in ids(facts, splits["test"])] == ["1", "0"]
    assert len(splits["train"]["user"]) == 16


TIED = "ann,x,1 ann,y,9 ann,w,9 ann,z,9 bob,x,1 bob,y,1 bob,z,2 cid,y,1 cid,x,2 dan,v,1"


@pytest.mark.parametrize("way", [1, -1], ids=["written", "reversed"])
def test_ties_of_time_are_broken_by_item(way: int, tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("\n".join(["user,item,time", *TIED.split()[::way]]) + "\n")
    facts, splits = made(file)
    test, valid = (dict(ids(facts, splits[split])) for split in ("test", "valid"))
    assert (test["bob"], test["cid"]) == ("z", "x")  # told by their times
    assert (test["ann"], valid["ann"], valid["bob"]) == ("z", "y", "y")


def test_items_that_nobody_took_are_counted_in_the_protocol_and_can_be_left_out(tmp_path: Path) -> None:
    facts, _ = made(tables(tmp_path / "t"))
    assert facts.extra["items"] == 4
    assert facts.extra["untaken"] == 1
    assert any(n.startswith("1 of 4 items have no interaction") for n in facts.extra["notes"])
    with (tmp_path / "t" / "interactions.csv").open("a") as stream:
        stream.write("cid,w,1\n")
    facts, splits = made(tmp_path / "t", catalogue="taken")
    assert facts.extra["items"] == 4
    assert facts.extra["untaken"] == 0
    assert splits["test"]["rivals"].max() < 4


def test_negatives_are_unseen_different_and_seeded() -> None:
    draw = np.random.default_rng(0)
    user, item = draw.integers(50, size=2000), draw.integers(40, size=2000)
    seen = np.unique(log.pair_keys(user, item, 40))
    rows = np.arange(50)
    negatives = log.draw_eval_negatives(rows, seen, 40, 8)
    assert np.array_equal(negatives, log.draw_eval_negatives(rows, seen, 40, 8))
    for u in rows:
        there = negatives[u][negatives[u] >= 0]
        assert len(set(there)) == len(there)
        assert not set(there) & set(seen[seen // 40 == u] % 40)
        unseen = 40 - int((seen // 40 == u).sum())
        assert len(there) == min(8, unseen)


def test_the_demo_is_the_same_everywhere_and_its_words_tell_of_tastes() -> None:
    facts, splits = made("demo")
    pairs = np.stack([splits["train"]["user"], splits["train"]["item"]]).astype(np.int32)
    assert zlib.crc32(pairs.tobytes()) == 773680649
    assert facts.samples == {"train": 11181, "valid": 600, "test": 600}
    assert not splits["test"]["rivals"].min() < 0
    assert "rivals" not in made("demo", eval_negatives=0)[1]["test"]


LOG = "interactions.csv"
ALL_TAKEN = "user,item\n" + "".join(f"{user},{item}\n" for user in "ab" for item in "xyz")
ONE_EACH = "user,item\n1,2\n2,3\n"
REFUSED: list[tuple[Callable[[Path], Path], str, str, dict[str, Any], str]] = [
    (ml_1m, "ratings.dat", "1::10::5::100\n1::20::3\n1::30::4::200\n", {}, "ratings.dat line 2: "),
    (ml_1m, "ratings.dat", "1::10::5::1\n1::20::3::4\nx::30::4::2\n", {}, "ratings.dat line 3: .*'x'"),
    (tables, "", "", {"item_column": "itm"}, "--item-column itm: .*has no such column .*did you mean item"),
    (tables, "interactions.csv", "user,item\n\n,3\n", {}, "interactions.csv: 1 of 1 rows have no user"),
    (tables, "interactions.csv", ALL_TAKEN, {"catalogue": "taken"}, "took all 3 items.*--split none"),
    (ncf, "x.test.negative", "(0,2)\t3\t4\n(5,2)\t1\t4\n", {}, "its rows are not those of the test file"),
    (tables, "interactions.csv", "user,item\n1,2\n1,3\n", {"split": "time"}, "--split time: .* no times"),
    (ncf, "", "", {"split": "time"}, "--split time: .* is split already"),
    (tables, "", "", {"split": "given"}, "has no train file: name them train, valid and test"),
    (tables, LOG, ONE_EACH, {"split": "none", "samples": "sequences"}, "two items .*--preset classics"),
    (tables, LOG, ONE_EACH, {}, "leave-one-out: nothing .* no user has enough interactions"),
    (tables, LOG, "user,item\n1,2\n1,3\n2,4\n2,5\n", {"split": "users"}, "--split users: nothing"),
    (tables, LOG, "user,item,time\n1,2,7\n1,3,7\n2,3,7\n", {"split": "time"}, "all are at one time"),
    (
        tables,
        LOG,
        "user,item,time\n1,2,soon\n1,3,late\n",
        {},
        "time holds 'soon': give numbers, or dates",
    ),
    (tables, LOG, "user,item,rating\n1,2,-1\n1,3,-2\n", {}, "--min-rating 0: all 2 ratings are below"),
    (tables, "", "", {"eval_negatives": -1}, "--eval-negatives -1: must be 0"),
]


@pytest.mark.parametrize(("make", "file", "content", "options", "message"), REFUSED)
def test_what_cannot_be_read_is_said_in_a_line(
    make: Callable[[Path], Path],
    file: str,
    content: str,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "d")
    if file:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        made(folder, **options)
    assert "\n" not in str(caught.value)


def test_a_row_whose_id_is_no_number_is_left_out(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"user": [1.0, 2.0], "item": pa.array([1.0, float("nan")])}
    (tables(tmp_path / "d") / "interactions.csv").unlink()
    parquet.write_table(pa.table(columns), tmp_path / "d" / "interactions.parquet")
    facts, _ = made(tmp_path / "d", split="none")
    assert "interactions.parquet: 1 of 2 rows have no item: left out" in facts.extra["notes"]


def test_too_few_unseen_items_are_all_ranked_against(tmp_path: Path) -> None:
    facts, splits = made(tables(tmp_path / "t"), eval_negatives=50)
    assert (splits["test"]["rivals"] >= 0).sum(1).tolist() == [1, 2]
    assert any("fewer than 50 unseen items" in note for note in facts.extra["notes"])


def test_a_fault_behind_the_first_megabyte_is_named_by_its_line(tmp_path: Path) -> None:
    lines = ["300,7,0", *(f"{n % 300},{n % 7},{n}" for n in range(1, 120_000))]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,timestamp", *lines, "1,6,0.5"]))
    facts, _ = made(tmp_path / "log.csv")
    assert sum(facts.samples.values()) == 2101
    (tmp_path / "log.csv").write_text("\n".join(["user,item,timestamp", *lines, "1,6,"]))
    with pytest.raises(UserError, match=r"log.csv row 120001: has no time"):
        made(tmp_path / "log.csv")


def test_no_time_is_on_both_sides_of_a_cut_and_some_users_are_always_held_out(tmp_path: Path) -> None:
    days = [n // 7 for n in range(70)]  # the cuts fall on days 8 and 9, of 56 and 63 interactions before
    for shift in range(4):
        rows = [f"{n % 9},{n % 11},{day}" for n, day in enumerate(days[shift:])]
        (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *rows]))
        _, splits = made(tmp_path / "log.csv", split="time", repeats="all")
        sizes = [len(splits[name]["user"]) for name in ("train", "valid", "test")]
        assert sizes[1:] == [7, 7]
    lines = ["user,item", *(f"u{n},i{item + n}" for n in range(5) for item in range(1 + 2 * (n < 3)))]
    (tmp_path / "few.csv").write_text("\n".join(lines))
    _, splits = made(tmp_path / "few.csv", split="users")
    assert [len(splits[name]["user"]) for name in ("train", "valid", "test")] == [5, 1, 1]


WAYS = {"leave-one-out": {"valid": -2, "test": -1}, "last": {"test": -1}}
"""Split -> which of a user's interactions each part holds out."""


@pytest.mark.parametrize("test_input", ["all", "train"])
@pytest.mark.parametrize("split", [*WAYS, "time", "users"])
def test_the_input_is_all_that_a_user_had_before(split: str, test_input: str, tmp_path: Path) -> None:
    draw, (users, items, rows) = np.random.default_rng(5), (40, 30, 400)
    pairs = draw.permutation(users * items)[:rows]
    written = list(zip(pairs // items + 100, pairs % items + 500, draw.permutation(rows), strict=True))
    lines = [f"{u},{i},{t}" for u, i, t in written]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,timestamp", *lines]))
    facts, splits = made(tmp_path / "log.csv", split=split, test_input=test_input)
    by_user: dict[str, list[str]] = {}
    for u, i, _ in sorted(written, key=lambda row: row[2]):
        by_user.setdefault(str(u), []).append(str(i))
    known, names = Catalogue.read(facts.folder), catalogue.read_names(facts.folder)
    for number, name in enumerate(names["users"]):
        history = known.history[known.starts[number] : known.starts[number + 1]]
        assert [names["items"][i] for i in history] == by_user[name]
    assert np.bincount(splits["train"]["user"], minlength=users).tolist() == known.trained.tolist()
    pairs_of = {name: ids(facts, rows) for name, rows in splits.items()}
    for name in pairs_of.keys() - {"train"}:
        for (user, item), inputs in zip(pairs_of[name], splits[name]["inputs"], strict=True):
            own = by_user[user]
            taken = {split: sum(u == user for u, _ in pairs) for split, pairs in pairs_of.items()}
            all_known = name == "test" and test_input == "all"
            if split == "users":
                assert taken["train"] == 0
                assert (item, inputs) == (own[-1], len(own) - 1)
            else:
                assert inputs == taken["train"] + (taken.get("valid", 0) if all_known else 0)
                assert own.index(item) >= inputs
            if split in WAYS:
                assert item == own[WAYS[split][name]]


@pytest.mark.parametrize("now", ["leave-one-out", "last", "time", "users"])
@pytest.mark.parametrize("before", ["leave-one-out", "last", "time", "users", "none"])
def test_a_run_that_goes_on_says_how_many_held_out_rows_it_knows(
    before: str, now: str, tmp_path: Path
) -> None:
    draw, (users, items) = np.random.default_rng(6), (40, 30)
    pairs = draw.permutation(users * items)[:300]
    rows = [f"u{pair // items},i{pair % items},{n},5" for n, pair in enumerate(pairs)]
    for name, taken in (("old.csv", rows[:240]), ("new.csv", rows)):
        (tmp_path / name).write_text("\n".join(["user,item,time,rating", *taken]))
    (first, old), (second, new) = (
        made(tmp_path / "old.csv", split=before),
        made(tmp_path / "new.csv", split=now),
    )
    trained, names = set(ids(first, old["train"])), catalogue.read_names(first.folder)
    place = {side: {name: n for n, name in enumerate(names[side])} for side in ("users", "items")}
    pair_of = {tuple(row.split(",")[:2]) for row in rows[:240]}
    keys = {
        name: np.array(sorted(place["users"][u] * len(names["items"]) + place["items"][i] for u, i in some))
        for name, some in {"had": pair_of, "held_out": pair_of - trained}.items()
    }
    (tmp_path / "names.json").write_text(json.dumps(names))
    save_file({name: array.astype(np.int64) for name, array in keys.items()}, tmp_path / VECTORS_FILE)
    if before != "users":
        (tmp_path / "few.csv").write_text("\n".join(["user,item,time,rating", *rows[60:240]]))
        less = made(tmp_path / "few.csv")[0].folder
        assert "60 of its 240 interactions are" in catalogue.kept_rows(tmp_path, less, ["item"], False)[1]
        (tmp_path / "cut.csv").write_text("\n".join(["user,item,time,rating", *rows[130:240]]))
        cut = made(tmp_path / "cut.csv")[0].folder
        for texts in (False, True):
            with pytest.raises(UserError, match=r"130 of its 240 .* not a part of them, or --like"):
                catalogue.kept_rows(tmp_path, cut, ["item"], texts)
    held_out = {tuple(row.split(",")[:2]) for row in rows} - set(ids(second, new["train"]))
    line = catalogue.trained_before(tmp_path, second.folder)
    said = re.search(r"trained on (\d+) of the (\d+)", line)
    expected = (len(held_out & trained), len(held_out)) if held_out & trained else None
    assert (said and tuple(map(int, said.groups()))) == expected
    assert (before == now != "users") <= (said is None)


@pytest.mark.parametrize("side", ["user", "item"])
def test_ids_that_an_earlier_run_has_with_zeros_are_not_new_ones(side: str, tmp_path: Path) -> None:
    rows = [(f"{u:05d}", f"{(u + 3 * n) % 17:04d}", n) for u in range(6) for n in range(5)]
    lost = [(int(u), i, n) if side == "user" else (u, int(i), n) for u, i, n in rows]
    found = []
    for name, some in (("old.csv", rows), ("new.csv", lost)):
        (tmp_path / name).write_text("\n".join(["user,item,time", *(f"{u},{i},{n}" for u, i, n in some)]))
        found.append(made(tmp_path / name)[0])
    (tmp_path / "names.json").write_text(json.dumps(catalogue.read_names(found[0].folder)))
    there = {"user": "00000 for 0", "item": "0000 for 0"}[side]
    with pytest.raises(UserError, match=f"{side}s are written otherwise there, as {there}: write them alike"):
        catalogue.kept_rows(tmp_path, found[1].folder, ("user", "item"), False)
    assert "0 new, 0 gone" in catalogue.kept_rows(tmp_path, found[0].folder, ("user", "item"), False)[1]


def test_a_file_is_rated_and_known_as_the_data_of_the_run(tmp_path: Path) -> None:
    rows = [f"u{u},i{(u + 3 * n) % 17},{n},5" for u in range(6) for n in range(5)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time,rating", *rows]))
    facts, splits = made(tmp_path / "log.csv", min_rating=4.0, eval_negatives=0)
    names = catalogue.read_names(facts.folder)
    held_out = [f"{u},{i},9,5" for u, i in ids(facts, splits["valid"])]
    new = [f"u1,{next(i for i in names['items'] if f'u1,{i},' not in ' '.join(rows))},9,5", "u2,i0,9,1"]
    (tmp_path / "more.csv").write_text("\n".join(["user,item,time,rating", *held_out, *new]))
    data = asked(tmp_path / "more.csv", min_rating=4.0, eval_negatives=0)
    assert data.prepare_test(tmp_path / "found", facts) == {}
    source = data.open(tmp_path / "found", "test")
    found = source.fetch(np.arange(len(source)))
    assert found["inputs"].tolist() == [3] * 7  # of five rows two are held out; the row rated 1 is none
    (tmp_path / "more.csv").write_text("\n".join(["user,item", new[0].rsplit(",", 2)[0]]))
    data.prepare_test(tmp_path / "again", facts)
    assert data.open(tmp_path / "again", "test").fetch(np.arange(1))["inputs"].tolist() == [5]
    known = [f"{u},{i}" for u, i in ids(facts, splits["train"])]
    (tmp_path / "more.csv").write_text("\n".join(["user,item", *known[:3], "u2,i0"]))
    (note,) = data.prepare_test(tmp_path / "trained", facts)["notes"]
    assert note.startswith("3 of its 4 interactions were trained on")


@pytest.mark.parametrize(("split", "users"), [("leave-one-out", 20), ("last", 20), ("users", 4), ("time", 0)])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_who_is_held_out_among_ties_is_said_and_no_recent_window_is_thin(
    split: str, users: int, at_once: int, tmp_path: Path
) -> None:
    rows = [f"u{u},i{(u + 7 * n) % 50},{n // at_once}" for u in range(20) for n in range(30)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *rows]))
    facts, splits = made(tmp_path / "log.csv", split=split, eval_negatives=0)
    said = [note for note in facts.extra["notes"] if "are tied" in note]
    assert len(said) == (users > 0 and at_once > 1)
    assert all(note.startswith(f"of {users} of {users} held-out users") for note in said)
    train = len(splits["train"]["user"])
    sizes = Catalogue.read(facts.folder).recent.sum(1).tolist()
    assert sizes == [round(train * share) for share in (1 / 4, 1 / 16, 1 / 64) if train * share >= 100]
    assert len(sizes) == 1
