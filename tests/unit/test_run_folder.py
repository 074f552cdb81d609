"""Tests of engine/runs/run_folder.py and core/atomic_files.py: whole files or none, after a kill too."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.engine.runs.run_folder import (
    RunFolder,
    Verdict,
    finished_run,
    finished_runs,
    free_folder,
    list_runs,
    run_name,
    runs_named,
)
from isobatch.engine.runs.run_options import RunOptions

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = Recipe(task="t", epochs=(2.0,))
FACTS = Facts(fingerprint="0", folder="", samples={"train": 9}, lengths=(1, 2, 3), extra={"vocabulary": 5})


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_write_that_is_cut_short_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    atomic_files.write_text(path, "old")

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            atomic_files.write_text(path, "new " * 10_000)
    assert path.read_text() == "old"
    atomic_files.write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.json"]


def test_content_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda d: (order.append("sync"), sync(d))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b))[1])
    atomic_files.write_text(tmp_path / "a", "x")
    assert order == ["sync", "replace"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*gone/a.json: No such file or directory; choose"):
        atomic_files.write_json(tmp_path / "gone" / "a.json", {})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "there is no file"),
        ("{", "cannot be read as JSON"),
        ("[1]", "holds no JSON object"),
        (b"\xff", "JSON"),
    ],
)
def test_an_unreadable_file_is_named(content: str | bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=problem) as refused:
        atomic_files.read_json(path)
    assert str(path) in str(refused.value)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ROWS = st.lists(st.dictionaries(TEXT, TEXT | st.floats(allow_nan=False) | st.integers()), max_size=5)


@given(ROWS, st.integers(1, 40))
def test_a_log_cut_short_anywhere_loses_its_last_line_only(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    lines = ["".join([json.dumps(row, ensure_ascii=False), "\n"]).encode() for row in rows]
    path.write_bytes(b"".join(lines))
    assert list(atomic_files.rows_in(path)) == rows
    if rows:
        last = lines[-1][: -min(cut, len(lines[-1]))]  # perhaps within a character of several bytes
        path.write_bytes(b"".join(lines[:-1]) + last)
        whole = rows if last == lines[-1][:-1] else rows[:-1]
        assert list(atomic_files.rows_in(path)) == whole


def test_ends_of_lines_within_text_are_text(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u2029c\x85d\x0be"}, {"step": 2}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    assert list(atomic_files.rows_in(path)) == rows


def log(path: Path, *steps: tuple[str, int], **more: Any) -> None:
    rows = [{"phase": phase, "step": step, **more} for phase, step in steps]
    atomic_files.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_going_back_drops_what_will_be_written_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    log(run.metrics, ("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 2), ("b", 3), ("c", 1))
    atomic_files.write_text(
        run.decisions, json.dumps({"decision": "without a place"}) + '\n{"phase": "b", "st'
    )
    for path in (run.metrics, run.decisions):
        run.keep_until(path, ["a", "b", "c"], "b", 2)
    kept = [(r["phase"], r["step"]) for r in list(atomic_files.rows_in(run.metrics))]
    assert kept == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 2)]
    assert run.decisions.read_text() == '{"decision": "without a place"}\n'  # the cut line is gone too


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(UserError, match="exists and is not a run; choose"):
        RunFolder.create(tmp_path / "mine", RECIPE, FACTS, RunOptions())
    assert names(tmp_path) == ["mine"]
    (tmp_path / "empty").mkdir()
    made = RunFolder.create(tmp_path / "empty", RECIPE, FACTS, RunOptions(keep=3))
    assert (made.recipe, made.facts, made.options()) == (RECIPE, FACTS, RunOptions(keep=3))
    assert made.recorded_hash == RECIPE.hash()
    assert names(tmp_path) == ["empty", "mine"]
    assert free_folder(tmp_path, "mine") == tmp_path / "mine-2"
    assert free_folder(tmp_path, "new") == tmp_path / "new"


def test_a_run_is_known_by_its_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run: it has no recipe.json"):
        RunFolder.open(tmp_path)
    for name in ("b", "a"):
        RunFolder.create(tmp_path / name, RECIPE, FACTS, RunOptions())
        os.utime(tmp_path / name / "recipe.json", (len(name), ord(name)))
    assert [r.folder.name for r in list_runs(tmp_path)] == ["a", "b"]  # by age
    assert RunFolder.open(tmp_path / "a").status() == "unfinished"
    assert list(list_runs(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(
    ("states", "newest_done"),
    [
        (("done", "done", "done"), "qat"),
        (("done", "done", "failed"), "pruning"),
        (("done", "stopped", ""), "classifier"),
        (("failed", "", ""), "qat"),  # which says how it stands
    ],
)
def test_a_chains_name_is_its_newest_stage_and_for_a_model_the_newest_that_is_done(
    states: tuple[str, ...], newest_done: str, tmp_path: Path
) -> None:
    for age, (task, state) in enumerate(zip(("classifier", "pruning", "qat"), states, strict=True)):
        run = RunFolder.create(tmp_path / f"post-{task}", Recipe(task=task), FACTS, RunOptions())
        os.utime(run.folder / "recipe.json", (age, age))
        if state:
            run.write_summary({"status": state})
    assert runs_named(tmp_path / "post")[-1].name == "post-qat"
    assert finished_run(tmp_path / "post").name == f"post-{newest_done}"
    stages = [one.name.removeprefix("post-") for one in finished_runs(tmp_path / "post")]
    assert stages == (["classifier", "pruning", "qat"][: states.count("done")] or ["qat"])
    assert finished_run(tmp_path / "post-qat").name == "post-qat", "a run's own name is this run"


def test_a_run_has_a_name_that_any_file_system_takes() -> None:
    recipe = Recipe(task="/home/me/my tasks/mine.py:MyTask")
    assert run_name(recipe) == f"mine-py-MyTask-{recipe.hash()}"


def test_an_exit_is_answered_to_its_own_launch_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    assert run.read_exit("mine") is None
    monkeypatch.setenv("ISOBATCH_NONCE", "mine")
    run.write_exit(Verdict(3, "a reason"))
    assert run.read_exit("mine") == Verdict(3, "a reason")
    assert run.read_exit("another") is None


@pytest.mark.parametrize("where", ["checkpoints", "final", "checkpoints/train-3", "metrics.jsonl"])
def test_a_run_that_links_elsewhere_is_refused(where: str, tmp_path: Path) -> None:
    """Old checkpoints and leftovers are removed in a run: never through a link."""
    run = RunFolder.create(tmp_path / "run", RECIPE, FACTS, RunOptions())
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    link = run.folder / where
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(home)
    with pytest.raises(UserError, match=f"{where} is a link to .*home: a run's files lie in its own folder"):
        RunFolder.open(run.folder)
    assert (home / ".ssh").is_dir()


def test_a_link_within_a_run_is_its_own(tmp_path: Path) -> None:
    """As wandb makes one to its latest run."""
    run = RunFolder.create(tmp_path / "run", RECIPE, FACTS, RunOptions())
    (run.folder / "wandb" / "run-1").mkdir(parents=True)
    (run.folder / "wandb" / "latest-run").symlink_to("run-1")
    assert RunFolder.open(run.folder).recipe == RECIPE


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_can_be_read_by_whom_the_umask_allows(umask: int, mode: int, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    before = os.umask(umask)
    try:
        atomic_files.share_as_umask_allows(tmp_path)
        assert os.umask(umask) == umask  # it is as it was
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("place", ["final", "exports/onnx", "chosen"])
@pytest.mark.parametrize("only_later", [False, True])
def test_what_was_changed_of_a_model_since_it_was_written(
    only_later: bool, place: str, tmp_path: Path
) -> None:
    run, folder = RunFolder(tmp_path), tmp_path / place
    (folder / "part").mkdir(parents=True)
    assert run.changed_export(only_later) == [], "nothing says what was written"
    for name in ("a.json", "part/b.json", "c.json"):
        (folder / name).write_text("{}")
    record = run.metrics
    if folder == run.final:
        atomic_files.append_row(record, {"phase": "train", "step": 7, "final": folder_digests(folder)})
    else:
        assert run.exports() == {place: None}
        run.record_export(folder)
        record = folder.with_name(f"{folder.name}.json")
        assert run.exports() == {place: folder_digests(folder)}
    log = record.stat()
    os.utime(record, ns=(log.st_atime_ns, log.st_mtime_ns + 50_000_000))
    assert run.changed_export(only_later) == []
    time.sleep(0.06)  # beyond what a file system's clock parts
    (folder / "part" / "b.json").write_text("[]")
    (folder / "evil.py").touch()
    (folder / "c.json").unlink()
    (folder / "a.json").write_text("{}")  # written again as it was
    assert run.changed_export(only_later) == [f"{place}/{n}" for n in ("c.json", "evil.py", "part/b.json")]
