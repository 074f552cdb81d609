"""Tests of engine/verification/audit.py: changed records of a run are found."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from isobatch.core import atomic_files
from isobatch.core.atomic_files import rows_in
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, recorded_digest
from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.schedule import learning_rate, phase_schedules
from isobatch.engine.registry import workload
from isobatch.engine.runs import metrics_log
from isobatch.engine.runs.ledger import LedgerStep, append_step, read_ledger
from isobatch.engine.runs.metrics_log import SEAL, MetricsLog
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.train.figures import extend_chain
from isobatch.engine.verification.audit import audit_records, recipe_problems
from isobatch.engine.verification.log_audit import LogRecord, WrongRecordError
from isobatch.engine.verification.run_order import RunOrder
from isobatch.launch.local.verify_run import (
    LEAST_LEADING,
    MOST_LEADING,
    VerifyOptions,
    _leading_steps,
    verify_run,
)
from isobatch.tests.forgery import edit_log, one_process
from isobatch.tests.unit.helpers import plan, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

TASK = Path(__file__).parents[1] / "tasks" / "ragged.py"
STEPS = 9  # two epochs of 4 steps (93 samples in batches of 24), and one


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with the records of a training that never was."""
    chosen = workload(f"{TASK}:RaggedLM")
    recipe, _ = chosen.complete({"steps": STEPS, "warmup": "0"})
    task, data = chosen.make(recipe)
    facts = prepare(data)
    made = RunFolder.create(tmp_path / "a run", recipe, facts, RunOptions())
    sampler = make_sampler(recipe, data.open(Path(facts.folder), "train"), task.cohort)
    (schedule,) = phase_schedules(recipe, task.phases(), sampler.steps_per_epoch)
    journal = MetricsLog(made, writes=True, every=2, ledger=True)
    journal.begin(["train"])
    link, seen = "", 0
    for step in range(STEPS):
        samples = sampler.batch(step)
        link, seen = extend_chain(link, samples), seen + len(samples)
        rate = learning_rate(recipe, schedule.lr, step, STEPS, schedule.steps_per_epoch)
        row = {"phase": "train", "step": step + 1, "loss": 4.0 - 0.1 * step, "lr": rate, "chain": link}
        row["grad_norm"] = 1.0
        journal.log_step({**row, "samples": seen, "tokens": 7 * seen}, samples)
        if step % 4 == 3:
            journal.log_metrics({"phase": "train", "step": step + 1, "split": "valid", "loss": 3.9})
    journal.flush_skipped()
    logs = journal.seal("train", STEPS)
    judge = dataclasses.asdict(EarlyStopping("min", best=3.9, best_step=4, waited=1))
    progress = {"phase": "train", "step": STEPS, "chain": link, "samples": seen}
    state = {"recipe_hash": recipe.hash(), "fingerprint": facts.fingerprint, "progress": progress}
    save(made, {**state, "logs": logs, "hooks": {"evaluate": judge}})
    digest = recorded_digest(made.checkpoints / "train-9")
    journal.log_metrics({"phase": "train", "step": STEPS, "checkpoint": "train-9", "digest": digest})
    journal.seal("train", STEPS)
    return made


def save(run: RunFolder, state: dict[str, Any]) -> None:
    """A checkpoint of one weight."""
    share = portable_state.rank_share({"weight/a": torch.ones(3)}, 0, 1)
    save_checkpoint(run.checkpoints / "train-9", share, state, one_process())


def found_in(run: RunFolder) -> list[str]:
    """Problems of the files as they are now."""
    return audit_records(RunFolder(run.folder))[0]


def test_true_records_have_no_problems(run: RunFolder) -> None:
    assert [r["step"] for r in rows_in(run.metrics) if "chain" in r] == [1, 2, 4, 6, 8, 9]
    assert found_in(run) == []


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda rows: rows.pop(2), "lacks phase train, step 4"),
        (lambda rows: rows.pop(3), "lacks the evaluation after phase train, step 4"),
        (lambda rows: rows.insert(2, rows[1]), "step 2: it stands after step 2"),
        (lambda rows: rows[1].update(lr=1.0), "step 2: lr is 1.0, and by the recipe "),
        (lambda rows: rows[1].update(samples=1), "step 2: samples is 1, and by the recipe 48"),
        (lambda rows: rows[1].update(loss=math.nan), "step 2: the loss or the gradient norm"),
        (lambda rows: rows[1].update(chain="0" * 16), "step 2: the samples seen are not"),
        (lambda rows: rows[0].update(phase="other"), "phase other, step 1: this phase is not the recipe's"),
    ],
)
def test_what_does_not_follow_from_the_recipe_is_found_even_under_true_seals(
    run: RunFolder, edit: Callable[[list[Any]], Any], problem: str
) -> None:
    edit_log(run, edit)
    (found,) = found_in(run)
    assert found.startswith("metrics.jsonl")
    assert problem in found


def test_a_phase_that_another_follows_has_its_last_evaluation(run: RunFolder) -> None:
    run.recipe = dataclasses.replace(run.recipe, patience=3)
    order = RunOrder.of(run.recipe, run.facts)
    phases = [dataclasses.replace(order.schedules[0], name=n, early_stopping=True) for n in ("train", "next")]
    *before, last = (row for row in rows_in(run.metrics) if "chain" in row)
    following = {**before[0], "phase": "next", "samples": last["samples"] + before[0]["samples"]}
    edit_log(run, lambda rows: rows.append(following))
    with pytest.raises(WrongRecordError, match="lacks the evaluation after phase train, step 9"):
        LogRecord(run, dataclasses.replace(order, schedules=phases))


def test_lost_rows_are_named_and_nothing_else(run: RunFolder) -> None:
    """Behind them the log is not read: whether it has an end is not known."""
    done(run)
    lost = {"phase": "train", "step": 2, "lost": "rows up to step 2 of train were lost or changed"}
    edit_log(run, lambda rows: rows.insert(1, lost))
    report = verify_run(RunFolder(run.folder), VerifyOptions(level="records"))
    assert (report["problems"], report["unproven"]) == ([f"metrics.jsonl: {lost['lost']}"], [])


def test_a_line_that_is_no_row_is_found(run: RunFolder) -> None:
    with run.metrics.open("a") as stream:
        stream.write("no row\n")
    assert found_in(run) == ["metrics.jsonl holds lines that no run wrote"]


def test_the_ledger_is_compared_with_the_sampler(run: RunFolder) -> None:
    steps = list(read_ledger(run))
    steps[4].samples[0] = (steps[4].samples[0] + 1) % 93
    write_ledger(run, steps)
    assert found_in(run)[0].startswith("the ledger: phase train, step 5: not the recipe's samples [")
    steps[4].samples[0] = (steps[4].samples[0] - 1) % 93
    steps[4].samples[:] = steps[4].samples[::-1].copy()
    write_ledger(run, steps)
    assert found_in(run)[0].startswith("the ledger: phase train, step 5: ")  # the order counts too


def test_a_ledger_without_its_end_is_found(run: RunFolder) -> None:
    write_ledger(run, list(read_ledger(run))[:-1])
    assert found_in(run) == ["the ledger lacks steps of phase train between 1 and 9"]
    edit_log(run, lambda rows: rows[0].update(ledger=False))
    assert found_in(run) == []  # a run that keeps no ledger may have the beginning of one


def test_a_ledger_begun_by_a_resumed_run_is_whole(run: RunFolder) -> None:
    write_ledger(run, list(read_ledger(run))[4:])

    def edit(rows: list[dict[str, Any]]) -> None:
        rows[0]["ledger"] = False
        rows[4] |= {"log_every": 2, "ledger": True}

    edit_log(run, edit)
    assert found_in(run) == []


def write_ledger(run: RunFolder, steps: list[LedgerStep]) -> None:
    run.samples.unlink()
    for one in steps:
        append_step(run.samples, one.phase, one.step, one.samples)


def test_a_step_is_in_the_ledger_before_it_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(metrics_log, "_append", lambda path, _: written.append(path.name) or b"")
    monkeypatch.setattr(metrics_log, "append_step", lambda path, *_: written.append(path.name))
    journal = MetricsLog(RunFolder(tmp_path), writes=True, ledger=True)
    journal.log_step({"phase": "train", "step": 1}, np.arange(3))
    assert written == ["samples.bin", "metrics.jsonl"]


def done(run: RunFolder, invariance: str = "exact") -> None:
    """The end of a run: final/ and its row, the plan and a summary."""
    run.final.mkdir()
    save_file({"w": torch.ones(2)}, run.final / "model.safetensors")
    valid, made = {"loss": 3.9}, plan(invariance=invariance)
    samples = next(r["samples"] for r in reversed(list(rows_in(run.metrics))) if "samples" in r)
    summary = {"status": "done", "steps": STEPS, "split": "valid", "metrics": valid, "samples_seen": samples}
    summary |= {"metrics_by_split": {"valid": valid}, "invariance": invariance}
    end = {"phase": "train", "step": STEPS, "final": folder_digests(run.final), "invariance": invariance}
    seal = {"phase": "train", "step": STEPS, SEAL: ""}
    end |= {"exported": "train-9", "summary": summary, "data": {}, "decisions": "", "rounding": None}
    measured = {"phase": "train", "step": STEPS, "split": "valid", **valid}
    edit_log(run, lambda rows: rows.extend([measured, end, seal]))
    atomic_files.write_json(run.folder / "summary.json", summary)
    run.write_plan(made)


def test_a_finished_run_has_no_problems(run: RunFolder) -> None:
    done(run)
    assert found_in(run) == []


@pytest.mark.parametrize("status", ["failed", None])
def test_a_run_that_ended_is_done(run: RunFolder, status: str | None) -> None:
    done(run)
    if status is None:
        (run.folder / "summary.json").unlink()
    else:
        atomic_files.write_json(run.folder / "summary.json", {**(run.summary() or {}), "status": status})
    state = status or "unfinished"
    assert found_in(run) == [f"metrics.jsonl says that the run is done, and summary.json {state}"]
    logs = SavedCheckpoint(run.checkpoints / "train-9").state["logs"]
    MetricsLog(run, writes=True).resume(logs, ["train"], "train", STEPS)  # it has not ended any more
    assert found_in(run) == []


def test_tensors_count_and_not_their_files_layout(run: RunFolder) -> None:
    done(run)
    save_file({"w": torch.ones(2)}, run.final / "model.safetensors", metadata={"b": "1", "a": "2"})
    assert found_in(run) == []


def test_a_changed_recipe_is_found_first(run: RunFolder) -> None:
    path = run.folder / "recipe.json"
    recipe = atomic_files.read_json(path)
    atomic_files.write_json(path, {**recipe, "lr": 0.5})
    (problem,) = recipe_problems(RunFolder(run.folder))
    assert problem.startswith("recipe.json was changed: its fields hash to ")
    assert recipe["hash"] in problem


def test_a_task_file_that_is_not_here_leaves_the_run_unproven(run: RunFolder, tmp_path: Path) -> None:
    recipe = dataclasses.replace(run.recipe, task="./gone.py:Mine", options={"code": "1"})
    sent = RunFolder.create(tmp_path / "sent", recipe, run.facts, RunOptions())
    report = verify_run(sent, VerifyOptions())
    assert (report["verified"], report["problems"]) == (False, [])
    assert [said.partition(": ")[2][:16] for said in report["unproven"]] == ["there is no file"]


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


def test_changed_facts_are_found(run: RunFolder) -> None:
    facts = atomic_files.read_json(run.folder / "facts.json")
    atomic_files.write_json(run.folder / "facts.json", {**facts, "lengths": [1] * 65})
    (problem,) = found_in(run)
    assert problem.startswith(f"facts.json was changed: lengths differs from {facts['folder']}")


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda state: state["progress"].update(chain="0" * 16), "has seen other samples than metrics.jsonl"),
        (
            lambda state: state["hooks"]["evaluate"].update(best=1.0),
            "judged other evaluations than metrics.jsonl has",
        ),
        (lambda state: state.update(world_size=9), "is not what the run wrote"),
    ],
)
def test_a_checkpoint_with_another_past_is_found(
    run: RunFolder, edit: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    state = atomic_files.read_json(run.checkpoints / "train-9" / "state.json")
    edit(state)
    save(run, state)
    if problem != "is not what the run wrote":
        digest = recorded_digest(run.checkpoints / "train-9")
        edit_log(run, lambda rows: [r.update(digest=digest) for r in rows if "digest" in r])
    (found,) = found_in(run)
    assert found.startswith(f"checkpoint train-9 {problem}")


def test_a_resumed_journal_goes_on_with_the_seal(run: RunFolder) -> None:
    before = run.metrics.read_bytes()
    logs = SavedCheckpoint(run.checkpoints / "train-9").state["logs"]
    journal = MetricsLog(run, writes=True)
    journal.resume(logs, ["train"], "train", STEPS)
    assert run.metrics.read_bytes() == before[: logs["metrics"]]
    digest = recorded_digest(run.checkpoints / "train-9")
    journal.log_metrics({"phase": "train", "step": STEPS, "checkpoint": "train-9", "digest": digest})
    journal.seal("train", STEPS)
    assert run.metrics.read_bytes() == before
    assert found_in(run) == []


def test_a_journal_says_what_is_lost(run: RunFolder) -> None:
    logs = SavedCheckpoint(run.checkpoints / "train-9").state["logs"]
    run.samples.write_bytes(run.samples.read_bytes()[:-1])
    edit_log(run, lambda rows: rows.pop(1), sealed=False)  # the last seal stays
    said = MetricsLog(run, writes=True).resume(logs, ["train"], "train", STEPS)
    assert said.startswith("samples.bin: it was cut, and begins anew; metrics.jsonl: rows up to step 9 of")


def test_only_one_rank_writes(tmp_path: Path) -> None:
    journal = MetricsLog(RunFolder(tmp_path), writes=False, ledger=True)
    journal.resume(None, ["train"], "train", 0)
    journal.log_step({"phase": "train", "step": 1}, np.arange(3))
    journal.log_metrics({"loss": 1.0})
    journal.log_decision({"decision": "stop"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("seconds", "steps"), [(1e-3, MOST_LEADING), (0.25, 40), (60.0, LEAST_LEADING)])
def test_a_busy_machine_redoes_at_least_some_steps_of_the_way(seconds: float, steps: int) -> None:
    """Its predicted time of a step is long: a forged loss between two checkpoints is found all the same."""
    assert _leading_steps(plan(invariance="exact"), plan(predicted_step_seconds=seconds)) == steps
