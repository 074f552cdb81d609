"""A recommender as a user trains it: two phases, any number of processes, lists for users."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pyarrow import parquet

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.export import export
from isobatch.launch.predicting.predict import predict
from isobatch.launch.predicting.recommend import recommend
from isobatch.launch.serving.command import ServeOptions, make_app
from isobatch.models.recommendation.recommendations import open_recommendations
from isobatch.tests.integration.helpers import figure, furthest, launch, predictions, rows, succeed, summary
from isobatch.tests.integration.test_bad_input import complaint

if TYPE_CHECKING:
    from pathlib import Path

SHORT = ["auto", "--task", "recommender", "--epochs", "1,0.3", "--save-every", "5", "--keep", "9", "--quiet"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of both phases, runs/one, and a bare table of purchases."""
    folder = tmp_path_factory.mktemp("recommender")
    bought = [f"{user},{(user * 7 + n * n) % 30}" for user in range(40) for n in range(6)]
    (folder / "log.csv").write_text("\n".join(["user,item", *bought]))
    succeed(*SHORT, "--name", "one", "--processes", "1", "--ledger", cwd=folder)
    return folder


def test_both_phases_run_and_say_how_they_were_measured(home: Path) -> None:
    found = summary(home / "runs" / "one")["metrics"]
    assert found["protocol"] == (
        "leave-one-out, all items that a user had not of 400 items, 34 taken by nobody"
    )
    assert not any(name.startswith(("hr", "popularity_hr", "ease_ndcg")) for name in found)
    figures = "full_hr full_ndcg full_mrr full_popularity_hr full_knn_ndcg coverage ease_coverage"
    for name in (f"{kind}@10" for kind in figures.split()):
        assert 0 < found[name] < 1, name
    assert found["full_hr@10"] > 1.2 * found["full_popularity_hr@10"]
    assert {r["phase"] for r in rows(home / "runs" / "one")} == {"frozen", "lora"}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_more_processes_learn_the_same(processes: int, home: Path) -> None:
    name = f"of{processes}"
    succeed(*SHORT, "--name", name, "--processes", str(processes), "--again", cwd=home)
    one, many = home / "runs" / "one", home / "runs" / name
    assert furthest(figure(one), figure(many)) < 1e-4
    assert summary(one)["metrics"]["full_hr@10"] == pytest.approx(
        summary(many)["metrics"]["full_hr@10"], abs=0.005
    )
    succeed("verify", str(many), cwd=home)


@pytest.mark.parametrize(
    "flags",
    [
        ["--cohort", "32"],
        pytest.param(["--loss", "bce"], marks=pytest.mark.slow),
        pytest.param(["--sparse-tables", "--clip", "1"], marks=pytest.mark.slow),
    ],
    ids=lambda f: f[0],
)
def test_choices_that_could_depend_on_the_world_do_not(flags: list[str], home: Path) -> None:
    name = flags[0].strip("-")
    for processes in ("1", "2"):
        words = ["auto", "--task", "recommender", *flags, "--data", "log.csv", "--steps", "12", "--quiet"]
        where = ["--processes", processes, "--name", f"{name}{processes}", "--again", "--save-every", "6"]
        succeed(*words, *where, cwd=home)
    one, two = (home / "runs" / f"{name}{n}" for n in (1, 2))
    assert furthest(figure(one), figure(two)) < 1e-5
    succeed("verify", str(two), cwd=home)


def test_stopped_in_the_second_phase_it_goes_on_where_it_was(home: Path) -> None:
    run = home / "runs" / "again"
    shutil.copytree(home / "runs" / "one", run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "final")
    for checkpoint in sorted((run / "checkpoints").glob("lora-*"))[1:]:
        shutil.rmtree(checkpoint)
    succeed("resume", str(run), "--quiet", cwd=home)
    assert figure(run) == figure(home / "runs" / "one")


@pytest.mark.parametrize(
    ("head", "loss"), [("mlp", "bce"), pytest.param("neumf", "sampled-softmax", marks=pytest.mark.slow)]
)
def test_other_heads_and_losses_learn(head: str, loss: str, home: Path) -> None:
    name = f"{head}-{loss}"
    flags = ["--head", head, "--loss", loss, "--text", "off", "--epochs", "8", "--name", name, "--quiet"]
    succeed("auto", "--task", "recommender", *flags, cwd=home)
    found = summary(home / "runs" / name)["metrics"]
    assert found["full_hr@10"] > found["full_popularity_hr@10"]
    listed = succeed("recommend", f"runs/{name}", "--user", "0", "--top", "3", cwd=home)
    assert len(listed.stdout.splitlines()) == 3


def test_the_second_phase_begins_with_a_run(home: Path) -> None:
    flags = ["--text", "lora", "--epochs", "0.2", "--quiet", "--name"]
    succeed("auto", "--from", "runs/one", *flags, "second", cwd=home)
    first = figure(home / "runs" / "second")[0]
    trained = figure(home / "runs" / "one")
    assert abs(first - trained[-1]) < 0.3 < trained[0] - first
    other = launch("auto", "--from", "runs/one", *flags, "other", "--dim", "8", cwd=home)
    assert "keep the flags that make the model" in complaint(other)


def test_a_bare_table_is_enough(home: Path) -> None:
    flags = ["--data=log.csv", "--epochs=1", "--batch-size=32", "--eval-every=2", "--name=bare"]
    done = succeed("auto", "--task", "recommender", *flags, cwd=home)
    assert "items have no text" in done.stderr
    assert "the last in the file" in done.stderr
    assert (home / "runs/bare/log.txt").read_text().count("valid after step") > 1
    assert done.stderr.count("valid after step") < 4, "one every few seconds, and the last"
    metrics = summary(home / "runs" / "bare")["metrics"]
    assert 0 <= metrics["full_hr@10"] <= 1
    assert 0 <= metrics["full_popularity_hr@10"] <= 1


def test_shards_are_refused(home: Path) -> None:
    flags = ["--strategy", "zero2", "--processes", "2"]
    said = complaint(launch("auto", "--task", "recommender", *flags, cwd=home))
    assert "computes parts of its encoder by themselves" in said


def test_lists_for_a_user(home: Path) -> None:
    done = succeed("recommend", "runs/one", "--user", "7", "--top", "4", "--json", cwd=home)
    found = json.loads(done.stdout)
    scores = [item["score"] for item in found["items"]]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)


def test_lists_need_numpy_only(home: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from recommendations import Recommendations, open_recommendations\n"
        "print(Recommendations('.').top('7', 2), open_recommendations('.', by='ease').top('7', 2))"
    )
    final = home / "runs" / "one" / "final"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=final, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") >= 4


def test_every_way_to_a_list_gives_the_same_one_by_ease(home: Path) -> None:
    done = succeed("recommend", "runs/one", "--out", "ease.csv", "--by", "ease", "--top", "3", cwd=home)
    assert "ranked by ease" in done.stderr
    rows = list(csv.DictReader((home / "ease.csv").open()))
    listed = [row["item"] for row in rows if row["user"] == "7"]
    assert [
        e["item"] for e in open_recommendations(home / "runs/one/final", "ease").recommend("7", 3)
    ] == listed
    (asked,) = predictions(home, "runs/one", "7", "--by", "ease", "--top", "3")
    assert asked["items"] == listed
    (by_model,) = predictions(home, "runs/one", "7", "--by", "model", "--top", "3")
    assert by_model["items"] != listed
    from starlette.testclient import TestClient

    app = make_app(str(home / "runs" / "one"), ServeOptions(by="ease", top=3))
    answer = TestClient(app).post("/predict", json={"texts": ["7"]}).json()
    assert answer["predictions"][0]["items"] == listed
    done = launch("recommend", "runs/one", "--user", "7", "--by", "knn", "--json", cwd=home)
    assert json.loads(done.stdout)["by"] == "knn"


def test_evaluate_measures_the_baselines_that_are_kept(home: Path) -> None:
    done = succeed("evaluate", "runs/one", "--split", "test", "--json", cwd=home)
    again, trained = json.loads(done.stdout)["test"], summary(home / "runs" / "one")["metrics"]
    names = ("full_ease_ndcg@10", "full_knn_hr@10", "full_ease_ndcg@10_difference_ci95", "ease_coverage@10")
    for name in names:
        assert again[name] == pytest.approx(trained[name], abs=1e-6), name


def test_lists_for_all_users_are_those_of_each(home: Path) -> None:
    succeed("recommend", "runs/one", "--out", "lists.parquet", "--top", "4", cwd=home)
    rows = parquet.read_table(home / "lists.parquet").to_pylist()
    users = list(dict.fromkeys(row["user"] for row in rows))
    assert len(rows) == 4 * len(users)
    chosen = users[::97]
    for user, found in zip(chosen, predictions(home, "runs/one", *chosen, "--top", "4"), strict=True):
        own = [row for row in rows if row["user"] == user]
        assert [row["rank"] for row in own] == [1, 2, 3, 4]
        assert [row["score"] for row in own] == pytest.approx(found["scores"], abs=1e-5)
        assert [row["item"] for row in own] == found["items"]


@pytest.mark.parametrize("by", ["model", "als"])
def test_products_of_exported_vectors_rank_as_the_lists(by: str, home: Path) -> None:
    index = pytest.importorskip("usearch.index")
    run, kind = home / "runs" / "one", "vectors" if by == "model" else "vectors-als"
    assert export([str(run), "--to", kind]) == 0
    folder, lists = run / "exports" / kind, open_recommendations(run / "final", by)
    users, items = (parquet.read_table(folder / f"{name}.parquet") for name in ("users", "items"))
    assert [*map(str, users["id"])] == lists.users
    u, v = (np.stack(table["vector"].to_numpy()) for table in (users, items))
    lists.restrict(with_seen=True)
    wanted, scores = lists.lists(range(len(u)), 10)
    np.testing.assert_allclose(np.take_along_axis(u @ v.T, wanted, 1), scores, rtol=1e-4, atol=1e-4)
    found = index.Index.restore(str(folder / "items.usearch"))
    found.expansion_search = 512
    for exact in (True, False):
        listed = np.sort(np.take_along_axis(u @ v.T, found.search(u, 10, exact=exact).keys.astype(int), 1))
        equal = np.isclose(listed, np.sort(scores), rtol=1e-4, atol=1e-4)  # equal scores in any order
        assert equal.mean() >= (1 if exact else 0.95)  # a graph of neighbours does not reach every item


def test_lists_for_a_user_who_was_not_there(home: Path) -> None:
    done = launch("recommend", "runs/one", "--items", "3,5,8", "--top", "4", "--json", cwd=home)
    found = json.loads(done.stdout)
    assert found["taken"] == ["3", "5", "8"]
    items = [entry["item"] for entry in found["items"]]
    assert len(items) == 4
    assert not {"3", "5", "8"} & set(items)
    (home / "baskets.jsonl").write_text('{"items": [3, 5, 8]}\n')
    (asked,) = predictions(home, "runs/one", "--file", "baskets.jsonl", "--top", "4")
    assert asked["items"] == items


def test_lists_of_several_users(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert recommend(["runs/one", "--user", "7,9", "--top", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["users"]
    assert [(one["user"], len(one["items"])) for one in found] == [("7", 3), ("9", 3)]
    assert recommend(["runs/one", "--user", "7,9", "--top", "3", "--out", "two.parquet"]) == 0
    two = parquet.read_table(home / "two.parquet").to_pylist()
    assert [row["item"] for row in two] == [entry["item"] for one in found for entry in one["items"]]
    assert predict(["runs/one", "7", "9", "--top", "3", "--out", "same.parquet"]) == 0
    same = parquet.read_table(home / "same.parquet").to_pylist()
    assert [item for row in same for item in row["items"]] == [row["item"] for row in two]


def test_training_on_everything_fits_the_baselines_to_everything(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    draw = np.random.default_rng(0)
    pairs = {*zip(draw.integers(60, size=400).tolist(), draw.integers(48, size=400).tolist(), strict=True)}
    (tmp_path / "log.csv").write_text("\n".join(["user,item", *(f"u{u},i{i}" for u, i in sorted(pairs))]))
    flags = ["--data", "log.csv", "--text", "off", "--epochs", "1", "--split", "none", "--name", "live"]
    done = succeed("auto", "--task", "recommender", *flags, cwd=tmp_path)
    assert "choose by a run with a split" in done.stderr
    kept = load_file(tmp_path / "runs" / "live" / "final" / "baselines.safetensors")
    assert kept["popularity"].sum() == len(pairs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs one of --user"),
        (["--user", "7", "--items", "9"], "needs one of --user ID, .*, not both"),
        (["--items", "3; 5"], r"item 3; 5: .*did you mean 3,5\?"),
        (["--user", "7|9"], r"user 7\|9: .*did you mean 7,9\?"),
        (["--user", "nobody"], "user nobody: is not in the training data"),
        (["--similar-to", "3", "--with-seen"], "--with-seen: is about users"),
        (["--similar-to", "nothing"], "item nothing: is not in the training data"),
        (["--items", "3x"], "item 3x: is not in"),
    ],
)
def test_what_lists_cannot_be_had_of_is_one_line(
    words: list[str], said: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(UserError, match=said) as caught:
        recommend(["runs/one", *words])
    assert "\n" not in str(caught.value)


def test_a_run_goes_on_with_users_and_items_that_came_and_without_those_that_went(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    def write(name: str, users: range, items: range, shift: int, *last: str) -> None:
        pairs = {(u, i) for u in users for n in range(9) if (i := (u * 7 + n * n) % 34) in items}
        lines = [f"u{u},i{i}" for u, i in sorted(pairs, key=lambda pair: (sum(pair) * shift % 41, pair))]
        (tmp_path / name).write_text("\n".join(["user,item", *lines, *last]))

    write("old.csv", range(40), range(30), 1)
    write("new.csv", range(4, 48), range(3, 34), 7, "u4,i99")  # i99 is held out
    flags = ["--text=off", "--dim=8", "--batch-size=32", "--quiet"]
    succeed("auto", "--task=recommender", "--data=old.csv", "--epochs=2", "--name=old", *flags, cwd=tmp_path)
    still = ["--from=runs/old", "--data=new.csv", "--steps=0"]
    came = succeed("auto", *still, "--name=new", "--no-quiet", cwd=tmp_path)
    assert "36 users carried over, 8 new, 4 gone; 27 items carried over, 5 new, 3 gone" in came.stderr
    held = {}
    for run in ("old", "new"):
        final = tmp_path / "runs" / run / "final"
        names, arrays = json.loads((final / "names.json").read_text()), load_file(final / "model.safetensors")
        for what in ("users", "items"):
            held[run, what] = dict(zip(names[what], arrays[what], strict=True))
        counts = dict(zip(names["items"], names["counts"], strict=True))
        held[run, "bias"] = dict(zip(names["items"], arrays["bias"], strict=True))
    came = [(w, n) for w in ("users", "items", "bias") for n in held["new", w].keys() - held["old", w].keys()]
    assert {bool(counts[name]) for what, name in came if what == "items"} == {True, False}
    for what, new in came:
        before, after = held["old", what], held["new", what]
        assert not before.keys() >= after.keys()
        for name in before.keys() & after.keys():
            np.testing.assert_allclose(after[name], before[name], atol=1e-6)
        trained = [row for row in before.values() if np.any(row)]
        started = np.mean(trained, 0) if counts.get(new, 1) else np.zeros_like(after[new])
        np.testing.assert_allclose(after[new], started, atol=1e-5)
    moments = {}
    for run in ("old", "new"):
        folder = RunFolder(tmp_path / "runs" / run)
        saved = SavedCheckpoint(folder.checkpoints / folder.exported_weights()["checkpoint"])
        names = json.loads((tmp_path / "runs" / run / "final" / "names.json").read_text())["users"]
        rows_of_users = saved.read("moment/exp_avg_sq/user_ids.weight").numpy()
        moments[run] = dict(zip(names, rows_of_users, strict=True))
        moments[run]["step"] = saved.read("moment/step/user_ids.weight").numpy()
    assert moments["old"]["step"] > 0
    for name, row in moments["new"].items():
        assert np.array_equal(row, moments["old"].get(name, np.zeros(8))), name
    for dry in ([], ["--dry-run"]):
        refused = launch("auto", *still, "--dim=4", "--name=other", *dry, cwd=tmp_path)
        assert "keep the flags that make the model" in complaint(refused)
    strangers = re.sub(r"([ui])(\d)", r"\1x\2", (tmp_path / "old.csv").read_text())
    (tmp_path / "strange.csv").write_text(strangers)
    strange = launch("auto", "--from=runs/old", "--data=strange.csv", "--name=other", cwd=tmp_path)
    assert "0 items carried over, 30 new, 30 gone" in complaint(strange)
    assert "interactions are not in the data: give data with the ids of that run" in complaint(strange)
    write("day.csv", range(4, 9), range(30), 1)
    day = launch("auto", "--from=runs/old", "--data=day.csv", "--name=other", cwd=tmp_path)
    assert "5 users carried over, 0 new, 35 gone" in complaint(day)
    assert "give all interactions, not a part of them, or --like" in complaint(day)
    shutil.rmtree(tmp_path / "runs" / "old" / "final")
    assert "final/ back" in complaint(launch("auto", *still, "--name=gone", cwd=tmp_path))
