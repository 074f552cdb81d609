"""Tests of engine/verification/audit.py: changed records of a run are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.loading.sampler import extend_chain
from isobatch.engine.registry import workload
from isobatch.engine.runs.metrics_log import SEAL, MetricsLog, seal_row
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.training.session import make_sampler
from isobatch.engine.verification.audit import recipe_problems, record_problems
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Callable

TASK = Path(__file__).parents[1] / "tasks" / "ragged.py"
STEPS = 9  # two epochs of 4 steps (93 samples in batches of 24), and one


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with the records of a training that never was."""
    chosen = workload(f"{TASK}:RaggedLM")
    recipe, _ = chosen.complete({"steps": STEPS})
    task, data = chosen.make(recipe)
    facts = prepare(data)
    made = RunFolder.create(tmp_path / "a run", recipe, facts, RunOptions())
    sampler = make_sampler(recipe, data.open(Path(facts.folder), "train"), task.cohort)
    journal = MetricsLog(made, writes=True, every=2, ledger=True)
    link = ""
    for step in range(STEPS):
        samples = sampler.batch(step)
        link = extend_chain(link, samples)
        row = {"phase": "train", "step": step + 1, "loss": 4.0 - 0.1 * step, "lr": 1e-3, "chain": link}
        journal.log_step(row, samples)
        if step % 4 == 3:
            journal.log_metrics({"phase": "train", "step": step + 1, "split": "valid", "loss": 3.9})
    journal.flush_skipped()
    checkpoint = made.checkpoints / "train-9"
    checkpoint.mkdir(parents=True)
    state = {"recipe_hash": recipe.hash(), "fingerprint": facts.fingerprint}
    state["progress"] = {"phase": "train", "step": 9}
    atomic_files.write_json(checkpoint / "state.json", state)
    return made


def found_in(run: RunFolder, problems: Callable[[RunFolder], list[str]] = record_problems) -> list[str]:
    """Problems of the files as they are now."""
    return problems(RunFolder(run.folder))


def change(path: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    rows = atomic_files.read_jsonl(path)
    edit(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reseal(rows: list[dict[str, Any]]) -> None:
    """As a forger would who knows the code."""
    before = ""
    for row in rows:
        before = row[SEAL] = seal_row(before, row)


def test_true_records_have_no_problems(run: RunFolder) -> None:
    assert [r["step"] for r in atomic_files.read_jsonl(run.metrics) if "split" not in r] == [1, 2, 4, 6, 8, 9]
    assert found_in(run) == []


def test_a_loss_made_better_is_found(run: RunFolder) -> None:
    change(run.metrics, lambda rows: rows[2].update(loss=1.0))
    assert found_in(run) == ["metrics.jsonl was changed at or before phase train, step 4"]


@pytest.mark.parametrize("place", [0, 3])
def test_a_row_left_out_is_found(run: RunFolder, place: int) -> None:
    change(run.metrics, lambda rows: rows.pop(place))
    assert "metrics.jsonl was changed at or before" in found_in(run)[0]


def test_rows_in_another_order_are_found(run: RunFolder) -> None:
    change(run.metrics, lambda rows: rows.insert(1, rows.pop(2)))
    assert "metrics.jsonl was changed at or before" in found_in(run)[0]


def test_other_samples_are_found_even_under_a_true_seal(run: RunFolder) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        rows[3]["chain"] = "0" * 16
        reseal(rows)

    change(run.metrics, edit)
    (problem,) = found_in(run)
    assert problem.startswith("phase train, step ")
    assert "the samples seen are not the recipe's" in problem


def test_the_ledger_is_compared_with_the_sampler(run: RunFolder) -> None:
    row = atomic_files.read_jsonl(run.samples)[4]
    other = (row["samples"][0] + 1) % 93

    def edit(rows: list[dict[str, Any]]) -> None:
        rows[4]["samples"][0] = other

    change(run.samples, edit)
    assert found_in(run)[0].startswith("samples.jsonl: phase train, step 5: not the recipe's samples [")
    change(run.samples, lambda rows: rows[4].update(samples=row["samples"][::-1]))
    assert found_in(run)[0].startswith("samples.jsonl: phase train, step 5: ")  # the order counts too


@pytest.mark.parametrize(("kept", "end"), [(STEPS - 1, 8), (3, 3), (0, 0)])
def test_a_ledger_without_its_end_is_found(run: RunFolder, kept: int, end: int) -> None:
    def cut(rows: list[dict[str, Any]]) -> None:
        del rows[kept:]

    change(run.samples, cut)
    assert found_in(run) == []  # a run that keeps no ledger may have the beginning of one
    atomic_files.write_json(run.folder / "run.json", {"ledger": True})
    wanted = f"samples.jsonl: phase train ends at step {end}, and in metrics.jsonl at 9"
    assert found_in(run) == [wanted]
    run.samples.unlink()
    assert found_in(run) == [wanted.replace(f"step {end},", "step 0,")]


def test_a_step_is_in_the_ledger_before_it_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(MetricsLog, "_append", lambda self, path, row: written.append(path.name))
    journal = MetricsLog(RunFolder(tmp_path), writes=True, ledger=True)
    journal.log_step({"phase": "train", "step": 1}, np.arange(3))
    assert written == ["samples.jsonl", "metrics.jsonl"]


def done(run: RunFolder, invariance: str = "exact") -> None:
    """The end of a run: final/ and its row, the plan and a summary."""
    run.final.mkdir()
    (run.final / "model.safetensors").write_bytes(b"weights")
    end = {
        "phase": "train",
        "step": STEPS,
        "final": atomic_files.folder_checksums(run.final),
        "invariance": invariance,
    }
    change(run.metrics, lambda rows: rows.append({**end, SEAL: seal_row(rows[-1][SEAL], end)}))
    valid = {"loss": 3.9}
    summary = {"status": "done", "steps": STEPS, "split": "valid", "metrics": valid}
    atomic_files.write_json(run.folder / "summary.json", {**summary, "metrics_by_split": {"valid": valid}})
    run.write_plan(plan())


def test_a_finished_run_has_no_problems(run: RunFolder) -> None:
    done(run)
    assert found_in(run) == []


@pytest.mark.parametrize("status", ["failed", "stopped", None])
def test_a_run_that_ended_is_done(run: RunFolder, status: str | None) -> None:
    done(run)
    if status is None:
        (run.folder / "summary.json").unlink()
    else:
        atomic_files.write_json(run.folder / "summary.json", {**(run.summary() or {}), "status": status})
    state = status or "unfinished"
    assert found_in(run) == [f"metrics.jsonl says that the run is done, and summary.json that it is {state}"]
    MetricsLog(run, writes=True).truncate_after(
        ["train"], "train", STEPS
    )  # resumed, it has not ended any more
    assert found_in(run) == []


def test_a_plan_made_looser_or_stricter_is_found(run: RunFolder) -> None:
    done(run, "noise")
    assert found_in(run) == ["plan.json says exact, and the run was trained as noise"]
    run.write_plan(plan(invariance="noise"))
    assert found_in(run) == []


def test_a_changed_recipe_is_found_first(run: RunFolder) -> None:
    path = run.folder / "recipe.json"
    recipe = atomic_files.read_json(path)
    atomic_files.write_json(path, {**recipe, "lr": 0.5})
    (problem,) = found_in(run, recipe_problems)
    assert problem.startswith("recipe.json was changed: its fields hash to ")
    assert recipe["hash"] in problem


def test_changed_data_is_found(run: RunFolder, tmp_path: Path) -> None:
    import shutil

    facts = atomic_files.read_json(run.folder / "facts.json")
    shutil.copytree(facts["folder"], tmp_path / "copy")
    atomic_files.write_json(run.folder / "facts.json", {**facts, "folder": str(tmp_path / "copy")})
    assert found_in(run) == []
    path = next((tmp_path / "copy" / "train").glob("tokens-values.npy"))
    values = np.load(path)
    values[100] ^= 1
    np.save(path, values)
    assert found_in(run)[0].startswith("the data is not what was trained on: ")


@pytest.mark.parametrize("field", ["samples", "lengths", "extra"])
def test_changed_facts_are_found(run: RunFolder, field: str) -> None:
    facts = atomic_files.read_json(run.folder / "facts.json")
    other = {"samples": {"train": 90, "valid": 17}, "lengths": [1] * 65, "extra": {"vocabulary": 3}}
    atomic_files.write_json(run.folder / "facts.json", {**facts, field: other[field]})
    (problem,) = found_in(run)
    assert problem.startswith(f"facts.json was changed: {field} differs from {facts['folder']}")


def test_facts_cut_short_are_named(run: RunFolder) -> None:
    atomic_files.write_json(run.folder / "facts.json", {"samples": {"train": 90}})
    with pytest.raises(UserError, match=r"facts\.json lacks fingerprint, folder, lengths"):
        found_in(run)


def test_a_checkpoint_of_another_recipe_is_found(run: RunFolder) -> None:
    path = run.checkpoints / "train-9" / "state.json"
    atomic_files.write_json(path, {**atomic_files.read_json(path), "recipe_hash": "0" * 12})
    assert found_in(run) == ["checkpoint train-9 belongs to another recipe or other data"]


def test_a_resumed_journal_goes_on_with_the_seal(run: RunFolder) -> None:
    rows = atomic_files.read_jsonl(run.metrics)
    journal = MetricsLog(run, writes=True)
    journal.truncate_after(["train"], "train", 6)
    for row in rows[len(atomic_files.read_jsonl(run.metrics)) :]:
        journal.log_metrics({k: v for k, v in row.items() if k != SEAL})
    assert atomic_files.read_jsonl(run.metrics) == rows
    change(run.samples, list.clear)
    assert found_in(run) == []


def test_only_one_rank_writes(tmp_path: Path) -> None:
    journal = MetricsLog(RunFolder(tmp_path), writes=False, ledger=True)
    journal.truncate_after(["train"], "train", 0)
    journal.log_step({"phase": "train", "step": 1}, np.arange(3))
    journal.log_metrics({"loss": 1.0})
    journal.log_decision({"decision": "stop"})
    assert list(tmp_path.iterdir()) == []
