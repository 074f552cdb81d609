"""Tests of sweeps: which texts are lists, which runs they make, and what these came to."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, flags_of
from isobatch.core.recipe import Recipe
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.auto import auto
from isobatch.launch.local.arguments import parse_sweep
from isobatch.launch.local.options import AutoOptions
from isobatch.launch.local.words import combinations, drawn, label, values_of
from isobatch.launch.report.records import draw_figure
from isobatch.launch.report.sweeps import cells_of, drawing, legend, read, write_tables
from isobatch.launch.report.tables import with_error
from isobatch.launch.sweeps.sweep import Trained, edges, judge, summary

RECIPE = flags_of(Recipe)
LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("lr", "1e-3,3e-3", ["1e-3", "3e-3"]),
        ("lr", "1e-3,,3e-3", ["1e-3,,3e-3"]),
        ("lr", "1e-3,1e-3", ["1e-3"]),
        ("lr", "0,9", ["0", "9"]),
        ("dropout", "0,9", ["0,9"]),
        ("seed", "0,9", ["0", "9"]),
        ("seed", "5,0-2,1", ["5", "0", "1", "2"]),
        ("seed", "2-0", ["2-0"]),
        ("seed", "0..2", ["0", "1", "2"]),
        ("seed", f"0-{10**30}", [f"0-{10**30}"]),
        ("warmup", "10%,20%", ["10%", "20%"]),
        ("group_by_length", "on,off", ["on", "off"]),
        ("epochs", "2,3", ["2,3"]),
        ("data", "a,b", ["a,b"]),
        ("seed", BareValue("True"), ["True"]),
    ],
)
def test_what_is_a_list_of_values(name: str, text: str, values: list[str]) -> None:
    assert values_of(RECIPE[name], text) == values


def test_every_combination_once() -> None:
    found = combinations({"task": "t", "lr": "1,2", "seed": "0-1"}, RECIPE)
    assert [flags for flags, _ in found] == [
        {"task": "t", "lr": lr, "seed": seed} for lr in "12" for seed in "01"
    ]
    assert {swept for _, swept in found} == {("lr", "seed")}
    assert combinations({"task": "a,b", "out": "x,y"}, RECIPE)[0][1] == ()
    with pytest.raises(UserError, match="1,000 runs at most"):
        combinations({"seed": "0-99", "batch_size": "1-99"}, RECIPE)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"lr": 1e-3, "seed": 4}, "lr0.001-seed4"),
        ({"seed": 4, "batch_size": 8}, "batch-size8-seed4"),
        ({"lr": 2.0, "warmup": "10%"}, "lr2-warmup10_"),
        ({"schedule": "cosine", "dropout": None}, "dropoutNone-schedulecosine"),
    ],
)
def test_a_run_is_called_after_what_was_swept(values: dict[str, Any], name: str) -> None:
    assert label(Recipe(task="t", **values), values) == name
    assert label(Recipe(task="t", **values), reversed(list(values))) == name


def test_words_become_requests() -> None:
    words = ["--task", LINE, "--learning-rate", "1e-3,0.003", "--seed", "0-1", "--epochs", "2"]
    found = [(request.recipe, swept) for request, swept in parse_sweep(words, "auto")]
    assert [(recipe.lr, recipe.seed) for recipe, _ in found] == [
        (lr, seed) for lr in (1e-3, 3e-3) for seed in (0, 1)
    ]
    assert label(*found[3]) == "lr0.003-seed1"
    assert len({recipe.hash() for recipe, _ in found}) == 4
    for flag, says in (("--lr", "is not a number"), ("--processes", "is not an integer")):
        with pytest.raises(UserError, match=f"{flag} 1,x.*{says}|{flag} x: {says}"):
            parse_sweep(["--task", LINE, flag, "1,x"], "auto")


def trained(code: int = 0, loss: float = 1.0, **values: Any) -> Trained:
    """A run whose loss on the test split is the better, the worse it is on the validation split."""
    name = "-".join(map(str, values.values()))
    splits = {"valid": {"accuracy": 1 - loss, "loss": loss, "note": "text"}, "test": {"loss": 1 - loss}}
    metrics: dict[str, Any] = splits if code == 0 else {}
    run = RunFolder(Path(name))
    return Trained(title="", request=cast("Any", None), values=values, run=run, code=code, metrics=metrics)


def test_the_best_is_by_the_tasks_own_metric_and_direction() -> None:
    runs = [trained(loss=0.5, lr=1), trained(loss=0.2, lr=2), trained(code=3, lr=3)]
    assert summary(runs, "loss", "min")["best"]["values"] == {"lr": 2}
    assert summary(runs, "loss", "max")["best"]["values"] == {"lr": 1}
    assert summary(runs, "none", "max")["best"] is None
    found = summary(runs, "accuracy", "max")
    assert cells_of(found) == [
        ["best", "lr", "valid accuracy", "n", "failed", "run"],
        ["", "1", "0.5", "1", "", "1"],
        ["*", "2", "0.8", "1", "", "2"],
        ["", "3", "", "0", "1", "3"],
    ]
    assert legend(found) == ["best: by valid accuracy (higher is better)"]
    assert legend(summary(runs, "loss", "min"))[-1] == "test, of the best alone: 0.8"


def test_what_the_test_split_says_of_settings_that_were_not_chosen_is_nowhere() -> None:
    runs = [trained(loss=loss, lr=lr, seed=seed) for lr, loss in ((1, 0.5), (2, 0.25)) for seed in (0, 1)]
    found = summary(runs, "loss", "min")
    assert found["split"] == "valid"
    assert [row["metrics"]["loss"] for row in found["rows"]] == [0.5, 0.25]
    assert found["best"]["test"] == {"metrics": {"loss": 0.75}, "deviations": {"loss": 0.0}}
    assert not any("test" in row for row in found["rows"])
    unseen = [dataclasses.replace(run, metrics={"test": {"loss": 0.1}}) for run in runs]
    found = summary(unseen, "loss", "min")
    assert found["best"] is None, "there is no validation split to choose by"
    assert legend(found) == ["best: none, as no run has a loss of the valid split to choose by"]
    assert "0.1" not in str(cells_of(found))


def test_recommenders_are_compared_by_the_figure_that_ranks_all_items() -> None:
    ((request, _),) = parse_sweep(["--task", "recommender", "--top-k", "5"], "auto")
    task, _ = request.workload.make(request.recipe)
    assert task.monitor == ("full_ndcg@5", "max")


def test_seeds_are_a_mean() -> None:
    one = summary([trained(loss=0.5, seed=0), trained(loss=0.3, seed=1)], "loss", "min")
    assert one["rows"][0]["metrics"]["loss"] == pytest.approx(0.4)
    assert legend(one)[0] == "test: 0.60 +- 0.14"
    both = summary([trained(loss=0.5, lr=1, seed=0), trained(loss=0.3, lr=1, seed=1)], "loss", "min")
    (row,) = both["rows"]
    assert row["metrics"]["loss"] == pytest.approx(0.4)
    assert row["deviations"]["loss"] == pytest.approx(0.1 * 2**0.5)
    assert cells_of(both)[1] == ["0.40", "0.14", "2", "1-0"], "one setting is the best of nothing"
    assert legend(both)[-1] == "deviation: the sample standard deviation (n - 1) of n seeds around their mean"


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (2.12099, 0.0178826, ["2.121", "0.018"]),
        (0.9, 0.0996, ["0.90", "0.10"]),
        (38.5629, 1.0663, ["38.6", "1.1"]),
        (1234.5, 123.4, ["1234", "123"]),
        (0.4, 0.0, ["0.4", "0"]),
        (0.123456789, "", ["0.123457", ""]),
        (math.nan, math.nan, ["nan", "nan"]),
    ],
)
def test_digits_follow_the_deviation(mean: float, deviation: Any, text: list[str]) -> None:
    assert with_error(mean, deviation) == text


def test_a_sweep_is_shown_by_another_metric_than_chose_the_best(tmp_path: Path) -> None:
    found = summary([trained(loss=loss, lr=lr) for lr, loss in ((1, 0.5), (2, 0.25))], "loss", "min")
    (tmp_path / "sweep.json").write_text(json.dumps(found))
    shown = read(tmp_path, "accuracy")
    assert cells_of(shown)[0] == ["best", "lr", "valid accuracy", "n", "run"]
    assert cells_of(shown)[2] == ["*", "2", "0.75", "1", "2"]
    assert legend(shown) == ["best: by valid loss (lower is better)"]
    assert cells_of(read(tmp_path)) == cells_of(found)
    with pytest.raises(UserError, match=r"--metric f1: .* has accuracy, loss$"):
        read(tmp_path, "f1")


def test_the_test_split_compares_all_settings_where_it_is_asked_for_and_chooses_none(tmp_path: Path) -> None:
    losses = {1: (0.5, 0.25), 2: (0.25, 0.25)}
    runs = [trained(loss=v, lr=lr, seed=seed) for lr, seeds in losses.items() for seed, v in enumerate(seeds)]
    found = summary(runs, "loss", "min")
    (tmp_path / "sweep-s").mkdir()
    (tmp_path / "sweep-s" / "sweep.json").write_text(json.dumps(found))
    for run in runs:
        place = RunFolder(tmp_path / str(run.run and run.run.folder))
        place.folder.mkdir()
        place.write_summary({"status": "done", "metrics": {}, "metrics_by_split": run.metrics})
    shown = read(tmp_path / "sweep-s", "test_loss")
    assert cells_of(shown) == [
        ["best", "lr", "test loss", "deviation", "n", "run"],
        ["", "1", "0.62", "0.18", "2", "1-0"],
        ["*", "2", "0.75", "0", "2", "2-0"],
    ]
    assert legend(shown)[0] == "best: by valid loss (lower is better)"
    assert not any("of the best alone" in line for line in legend(shown))
    with pytest.raises(UserError, match=r"--metric test_los: .* has test_loss \(did you mean test_loss\?\)$"):
        read(tmp_path / "sweep-s", "test_los")
    for run in runs:
        RunFolder(tmp_path / str(run.run and run.run.folder)).write_summary({"status": "done"})
    with pytest.raises(UserError, match=r"--metric test_loss: .* has no test split: --data FOLDER with"):
        read(tmp_path / "sweep-s", "test_loss")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("runs/sweep-s", r"is a sweep: give one of its runs, as runs/s-lr2 \(`report runs/sweep-s`"),
        ("sweep-s", r"is a sweep: give one of its runs, as runs/s-lr2 \(`report runs/sweep-s`"),
        ("runs/sweep-t", r"did you mean runs/sweep-s\?"),
    ],
)
def test_where_a_run_is_wanted_a_sweep_is_answered_with_its_best(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"values": {"lr": 2}, "runs": ["elsewhere/s-lr2"]}
    Path("runs/sweep-s").mkdir(parents=True)
    Path("runs/sweep-s/sweep.json").write_text(json.dumps({"rows": [row], "best": row}))
    with pytest.raises(UserError, match=said):
        RunFolder.open(place)


def test_the_tables_are_the_printed_one_for_a_program_and_for_a_text(tmp_path: Path) -> None:
    runs = [trained(loss=loss, lr=lr, seed=seed) for lr, loss in ((1, 0.5), (2, 0.25)) for seed in (0, 1)]
    runs.append(dataclasses.replace(trained(lr=3), metrics={"valid": {"a_b%": 2.0}}, stopped=4))
    runs[0].metrics["valid"] = {"a_b%": 0.3}
    runs[1].metrics["valid"] = {"a_b%": 0.5}
    found = summary(runs, "a_b%", "min") | {"rungs": [], "steps": 9, "steps_saved": 5}
    assert found["best"]["values"] == {"lr": 1}, "what was stopped is never the best"
    write_tables(found, tmp_path / "sweep")
    with (tmp_path / "sweep.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [list(row.values()) for row in rows] == [
        ["*", "1", "0.40", "0.14", "2", "", "1-0"],
        ["", "2", "", "", "2", "", "2-0"],
        ["", "3", "2", "", "1", "4", "3"],
    ]
    marked = (tmp_path / "sweep.md").read_text().splitlines()
    assert marked[0] == "| best | lr | valid a_b% | deviation | n | stopped at step |"
    assert marked[1] == "|---|---|---|---|---|---|"
    assert marked[2] == r"| \* | 1 | 0.40 | 0.14 | 2 |  |"
    tex = (tmp_path / "sweep.tex").read_text().splitlines()
    begin = tex.index(r"\begin{tabular}{lrrrr}")
    assert tex[begin + 1] == r"\toprule"
    assert tex[begin + 2] == r"best & lr & valid a\_b\% & n & stopped at step \\"
    assert tex[begin + 4] == r"* & 1 & 0.40 $\pm$ 0.14 & 2 &  \\"
    assert tex[-4:-2] == [r" & 2 &  & 2 &  \\", r" & 3 & 2 & 1 & 4 \\"]
    assert all(line.startswith("%") for line in tex[:begin])


@pytest.mark.parametrize(
    ("values", "best", "said"),
    [
        ([1e-3, 1e-2], 1e-2, "lr 0.01 is the largest tried: go on with --lr 0.01..0.1 --trials 4"),
        ([1e-3, 3e-3], 1e-3, "lr 0.001 is the smallest tried: go on with --lr 0.0005..0.001 --trials 4"),
        ([1e-4, 1e-3, 1e-2], 1e-3, None),
        ([1e-3], 1e-3, None),
        ([0.0, 1e-3], 0.0, None),
    ],
)
def test_a_best_value_at_the_edge_of_what_was_tried_is_named(
    values: list[float], best: float, said: str | None
) -> None:
    found = summary([trained(loss=abs(lr - best), lr=lr) for lr in values], "loss", "min")
    assert list(edges(found, RECIPE)) == ([said] if said else [])


def test_no_value_is_advised_that_the_flag_does_not_take() -> None:
    runs = [trained(loss=1 - share, train_fraction=share) for share in (0.5, 1.0)]
    assert list(edges(summary(runs, "loss", "min"), RECIPE)) == []
    runs = [trained(loss=size, batch_size=size, schedule="cosine") for size in (1, 4)]
    assert list(edges(summary(runs, "loss", "min"), RECIPE)) == [], "there is no batch of 0"


def test_rows_are_sorted_by_their_numbers_and_a_best_of_one_seed_says_so() -> None:
    runs = [trained(loss=lr, lr=lr, seed=seed) for lr, seed in ((3, 0), (2, 0), (3, 1), (1, 0))]
    found = summary(runs, "loss", "min")
    assert [row["values"]["lr"] for row in found["rows"]] == [1, 2, 3]
    assert [len(row["runs"]) for row in found["rows"]] == [1, 1, 2]
    assert any(line.startswith("the best is a single run") for line in legend(found))
    assert not any("single run" in line for line in legend(summary(runs, "loss", "max")))
    words = [trained(schedule=name, lr=lr) for name in ("wsd", "cosine") for lr in (2, 1)]
    order = [[*row["values"].values()] for row in summary(words, "loss", "min")["rows"]]
    assert order == [["cosine", 1], ["cosine", 2], ["wsd", 1], ["wsd", 2]]


def test_halving_that_stopped_nothing_says_why() -> None:
    found = summary([trained(loss=lr, lr=lr) for lr in (1, 2)], "loss", "min")
    assert any("evaluate at their end alone" in line for line in legend(found | {"rungs": [{}]}))
    assert not any("evaluate at their end" in line for line in legend(found))


def test_the_same_words_draw_the_same_values() -> None:
    flags = {"lr": "1e-4..1e-2", "batch_size": "4..7", "dropout": "0..0.5", "data": "a..b", "seed": "3,4"}
    found = drawn(flags, RECIPE, 400)
    assert found[:9] == drawn({**flags, "seed": "3"}, RECIPE, 9), "more trials begin with those of fewer"
    assert found[:9] != drawn({**flags, "seed": "4"}, RECIPE, 9)
    assert found[0].keys() == {"lr", "batch_size", "dropout"}
    logs = [math.log10(float(one["lr"])) for one in found]
    assert -4 <= min(logs) < -3.9
    assert -2.1 < max(logs) <= -2
    assert sum(logs) / len(logs) == pytest.approx(-3, abs=0.1)  # of the logarithm: 4 deviations of the mean
    assert {int(one["batch_size"]) for one in found} == {4, 5, 6, 7}
    assert sum(float(one["dropout"]) for one in found) / len(found) == pytest.approx(0.25, abs=0.03)
    assert drawn({"lr": "1e-3,1e-2"}, RECIPE, 0) == [{}]
    points = parse_sweep(
        ["--task", LINE, "--lr", "1e-4..1e-2", "--trials", "3", "--seed", "0-1"], "auto", AutoOptions
    )
    assert len(points) == 6
    assert {swept for _, swept in points} == {("lr", "seed")}


@pytest.mark.parametrize(
    "words", ["--lr 1e-4..1e-2", "--trials 3", "--lr 1,2 --trials 3", "--data a..b --trials 3"]
)
def test_a_range_and_the_times_to_draw_go_together(words: str) -> None:
    with pytest.raises(UserError, match="go together"):
        auto(["--task", LINE, *words.split()])


@pytest.mark.parametrize(("direction", "kept"), [("min", [1, 2]), ("max", [4, 3])])
def test_the_better_half_goes_on_by_the_mean_of_its_seeds(
    tmp_path: Path, direction: str, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.launch.sweeps.sweep._monitor", lambda _: ("loss", direction))
    runs = []
    for lr, curves in {1: "25 37", 2: "19 59", 3: "78 78", 4: "98 86", 5: "x1 18"}.items():
        for seed, curve in enumerate(curves.split()):
            run = RunFolder(tmp_path / f"{lr}-{seed}")
            run.folder.mkdir()
            found = zip((5, 10), curve, strict=True)
            losses = [(step, float(loss) if loss != "x" else None) for step, loss in found]
            rows = [{"phase": "train", "step": step, "split": "valid", "loss": loss} for step, loss in losses]
            run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
            run.write_summary({"planned_steps": 10, "status": "stopped"})
            one = trained(lr=lr, seed=seed)
            runs.append(dataclasses.replace(one, run=run, metrics={}))
    scores, going = judge(runs, 0.5, 3)
    assert [one.values["lr"] for one in going] == [lr for lr in kept for _ in "01"]
    assert scores['{"lr": 1}'] == 2.5
    assert [one.stopped for one in runs if one in going] == [0] * 4
    assert {one.stopped for one in runs if one not in going} == {5}


def test_the_picture_has_a_panel_for_each_field_that_was_searched_among_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        trained(loss=lr + seed, lr=lr, order=order, epochs=1, seed=seed)
        for lr, order in ((0.1, "a"), (9, "b"))
        for seed in (0, 1)
    ]
    stopped = trained(lr=3, order="a", epochs=1, seed=0)
    runs.append(dataclasses.replace(stopped, metrics={"valid": {"loss": 2.0}}, stopped=4))
    for run in (runs[0], runs[1]):
        run.run = RunFolder(tmp_path / "runs" / f"{run.values['seed']}")
        run.run.folder.mkdir(parents=True)
        losses = [(step, run.values["seed"] + 1 / step) for step in (5, 10)]
        rows = [{"phase": "train", "step": step, "split": "valid", "loss": loss} for step, loss in losses]
        run.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = summary(runs, "loss", "min")
    steps, flag = draw_figure(drawing(found, tmp_path / "runs" / "sweep-s")).axes
    assert (steps.get_xlabel(), flag.get_xlabel(), flag.get_xscale()) == ("step", "lr", "log")
    (line,) = steps.lines
    assert line.get_ydata().tolist() == pytest.approx([0.5 + 1 / 5, 0.5 + 1 / 10]), "the mean of both seeds"
    (band,) = steps.collections
    high = band.get_paths()[0].vertices[:, 1].max()
    assert high == pytest.approx(0.7 + 0.5**0.5)
    containers: list[Any] = flag.containers
    bars = {float(bar[0].get_xdata()[0]): bar.has_yerr for bar in containers}
    assert bars == {0.1: True, 9: True, 3: False}


@pytest.mark.parametrize("words", ["--dry-run", "--dump-config"])
def test_flags_about_one_run_are_refused(words: str) -> None:
    with pytest.raises(UserError, match="about one run"):
        auto(["--task", LINE, "--lr", "1e-3,1e-2", *words.split()])
