"""The report page: what it says of a run, also of one that trains or is damaged, and how it looks."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.report.page import collect, report, write_report
from isobatch.launch.report.records import draw_figure, drawings_of, later_evaluations, training_panels
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run on a GPU that was ended after 60 steps: its loader is too slow."""
    recipe, _ = workload("causal-lm").complete({"steps": [100]})
    facts = Facts(fingerprint="f", folder="", samples={"train": 100}, lengths=(8, 16))
    made = RunFolder.create(tmp_path / "a run", recipe, facts, RunOptions())
    memory = {"predicted_peak_memory_bytes": 20 * 10**9, "device_memory_bytes": 80 * 2**30}
    made.write_plan(plan(device="cuda", **memory))
    with made.metrics.open("w") as stream:
        for step in range(1, 61):
            row = {"phase": "train", "step": step, "loss": 3 - step / 50, "lr": 1e-3, "step_seconds": 0.2}
            row |= {"data_seconds": 0.05, "samples_per_second": 160.0, "memory_bytes": 10**10 + step}
            stream.write(json.dumps({**row, "gpu_utilisation": 70.0, "power_watts": 300.0}) + "\n")
    remark = "<script>document.title = 'gone'</script> " + "y" * 400
    (made.folder / "summary.json").write_text(json.dumps({"remark": remark}))
    return made


def records(run: RunFolder, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = write_report(collect([run]), folder).to_dict()["runs"][0]
    return found


def test_figures_stand_beside_their_targets(run: RunFolder, tmp_path: Path) -> None:
    found = records(run, tmp_path)
    rows = {name: (value, verdict) for name, value, _, verdict in found["use"]}
    assert rows["GPU use"] == ("70 %", "missed")
    assert rows["memory"] == ("12 % of 85.90 GB", "met")  # 10 of 80 x 1.0737 GB
    assert rows["data wait"] == ("25.0 %", "missed")
    assert rows["power"] == ("300 W", "")
    assert rows["memory per process"] == ("10.00 GB", "+100 %")
    assert found["state"] == "unfinished"


def test_plots_go_where_they_are_wanted(run: RunFolder, tmp_path: Path) -> None:
    before = sorted(run.folder.iterdir())
    assert report(["--png", str(run.folder), "--to", str(tmp_path / "new" / "figures")]) == 0
    assert (tmp_path / "new" / "figures" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(run.folder.iterdir()) == before
    assert report(["--png", str(run.folder), str(run.folder), "--to", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both" / "a run" / "training.png").is_file(), "several have a folder each"


@pytest.mark.parametrize("to", ["a.pdf", "b.HTML", "c.md", "d.json"])
def test_a_report_is_a_folder_and_no_file(to: str, run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give a folder: a browser prints the report\.html in it as PDF"):
        report([str(run.folder), "--to", str(tmp_path / to)])
    assert not (tmp_path / to).exists()


def test_later_evaluations_stand_side_by_side_the_newest_first(run: RunFolder) -> None:
    """Also those of a received run, which may say anything."""
    figures = {"samples": 50, "accuracy": 0.9, "accuracy within (95 %)": "0.79 to 0.96", "confusion": [[1]]}
    for number in range(8):
        run.keep_evaluation({"data": f"{number}.csv", "metrics": {**figures, "accuracy": number / 10}})
    run.keep_evaluation({"data": "last.csv", "form": "chosen/m.onnx", "metrics": figures | {"class a": "x"}})
    run.keep_evaluation({"data": None, "metrics": ["none"]})
    run.keep_evaluation({"lm_eval": "t", "metrics": {"arc": {"acc": 0.5}}})
    head, *rows = later_evaluations(run)
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
    for cell, name in zip(head[1:], ("arc", "last.csv, chosen/m.onnx", *"7654"), strict=True):
        assert re.fullmatch(rf"{re.escape(name)}(\.csv)?, {when}", cell)
    assert ["accuracy", "", "0.9", "0.7", "0.6", "0.5", "0.4"] in rows
    assert {name for name, *_ in rows} == {"acc", "samples", "accuracy", "accuracy within (95 %)", "class a"}


@pytest.mark.parametrize(
    ("file", "content"),
    [("plan.json", None), ("summary.json", "[]"), ("metrics.jsonl", '{"step": '), ("facts.json", None)],
)
def test_a_damaged_run_is_shown_with_what_there_is(
    run: RunFolder, file: str, content: str | None, tmp_path: Path
) -> None:
    path = run.folder / file
    path.unlink() if content is None and path.exists() else path.write_text(content or "")
    found = records(RunFolder.open(run.folder), tmp_path)
    page = (tmp_path / "report.html").read_text()
    noted = file in ("plan.json", "summary.json")
    assert any(file in note for note in found["notes"]) == noted
    assert bool(found["use"]) == (file != "metrics.jsonl")
    assert ("No step is logged yet" in page) == (file == "metrics.jsonl")


def test_damaged_rows_are_counted(run: RunFolder, tmp_path: Path) -> None:
    with run.metrics.open("a") as log:
        log.write('nonsense\n{"step": \n{"not": "ended"')
    notes = records(RunFolder.open(run.folder), tmp_path)["notes"]
    assert notes == ["damaged rows of metrics.jsonl that are left out: 2"]


MEASURE = """
const frame = document.querySelector("iframe"), page = frame.contentDocument, view = frame.contentWindow;
const boxes = [...page.querySelectorAll("table, figure, pre, svg")].map(e => e.getBoundingClientRect());
document.body.innerHTML = "<pre>" + JSON.stringify({
  title: page.title, fetched: view.performance.getEntriesByType("resource").length,
  scroll: page.documentElement.scrollWidth, width: view.innerWidth,
  right: Math.max(...boxes.map(b => b.right)), left: Math.min(...boxes.map(b => b.left)),
  clipped: [...page.querySelectorAll("table, td, th")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
  tables: page.querySelectorAll("table").length,
  curves: [...page.querySelectorAll("svg path[clip-path]")].filter(e => e.getBBox().width > 50).length,
}) + "</pre>";
"""
"""Replaces the page by what it measured of the page in its frame."""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_nothing_is_cut_missing_or_fetched(run: RunFolder, width: int, tmp_path: Path) -> None:
    write_report(collect([run]), tmp_path)
    page = html.escape((tmp_path / "report.html").read_text())
    frame = f'<iframe style="width: {width}px; height: 9000px; border: 0" srcdoc="{page}"></iframe>'
    (tmp_path / "test.html").write_text(
        f'<meta charset="utf-8"><body>{frame}<script>onload = () => {{{MEASURE}}}</script>'
    )
    words = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    words += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "test.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(html.unescape(re.findall("<pre>(.*?)</pre>", done.stdout, re.S)[-1]))
    assert (found["title"], found["fetched"]) == ("Report", 0)
    assert found["scroll"] <= found["width"] == width
    assert found["right"] <= width
    assert found["left"] >= 0
    assert found["clipped"] == 0
    assert found["tables"] >= 1
    assert found["curves"] >= 2
    assert "CONSOLE" not in done.stderr


def test_no_curve_runs_back(run: RunFolder, tmp_path: Path) -> None:
    """The best checkpoint's weights are measured at the end, at an earlier step."""
    evaluations = [("valid", 20, 2.7), ("valid", 40, 2.5), ("valid", 60, 2.6), ("test", 40, 2.8)]
    with run.metrics.open("a") as stream:
        for split, step, loss in [*evaluations, evaluations[1]]:
            stream.write(json.dumps({"phase": "train", "step": step, "split": split, "loss": loss}) + "\n")
    found = records(run, tmp_path)
    assert found["evaluations"] == {"step": [20, 40, 60], "loss": [2.7, 2.5, 2.6]}
    (drawing,) = drawings_of([found], [None])
    axes = draw_figure(drawing).axes[0]
    assert all(list(line.get_xdata()) == sorted(line.get_xdata()) for line in axes.lines)


def test_a_recommender_shows_its_held_out_curve(tmp_path: Path) -> None:
    recipe, _ = workload("recommender").complete({"steps": [100], "text": "off"})
    facts = Facts(fingerprint="f", folder="", samples={"train": 100}, lengths=(1, 1))
    made = RunFolder.create(tmp_path / "shop", recipe, facts, RunOptions())
    rates = {"samples_per_second": 160.0, "tokens_per_second": 160.0, "padding": 0.0, "lr": 1e-3}
    with made.metrics.open("w") as stream:
        for step in (10, 20, 30):
            held_out = {"split": "valid", "full_ndcg@10": step / 100}
            for row in ({"loss": 1.0, **rates}, held_out):
                stream.write(json.dumps({"phase": "ids", "step": step, **row}) + "\n")
    found = records(made, tmp_path)
    assert found["evaluations"]["full_ndcg@10"] == [0.1, 0.2, 0.3]
    assert list(training_panels([found])) == ["loss", "full ndcg@10"]
    summary = {"remark": "EASE is better: `isobatch recommend runs/shop --by ease`", "status": "done"}
    (made.folder / "summary.json").write_text(json.dumps(summary))
    records(made, tmp_path)
    assert "<code>isobatch recommend runs/shop --by ease</code>" in (tmp_path / "report.html").read_text()


def test_runs_lie_over_each_other(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(
        tmp_path / "other",
        workload("causal-lm").complete({"steps": [100], "seed": 7})[0],
        Facts(fingerprint="f", folder="", samples={"train": 100}, lengths=(8, 16)),
        RunOptions(),
    )
    shutil.copy(run.metrics, other.metrics)
    write_report(collect([run, RunFolder.open(other.folder)]), tmp_path / "to")
    page = (tmp_path / "to" / "report.html").read_text()
    assert page.count(">a run: training, smoothed<") == page.count(">other: training, smoothed<") == 1
