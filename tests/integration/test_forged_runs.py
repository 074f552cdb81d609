"""Forged runs: each attack is found at the level of verify that docs/verify.md names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import isobatch
from isobatch.core import atomic_files
from isobatch.core.atomic_files import rows_in
from isobatch.engine.checkpointing import portable_state, writer
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, recorded_digest
from isobatch.engine.checkpointing.digests import bytes_digest, folder_digests
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.schedule import learning_rate, phase_schedules
from isobatch.engine.registry import workload
from isobatch.engine.runs.metrics_log import SEAL, first_seal
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.training.run_context import DATA_WRITTEN
from isobatch.tests.forgery import one_process, reseal
from isobatch.tests.integration.helpers import launch
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable


TASK = f"{ROOT}/tests/tasks/ragged.py:RaggedLM"
STEPS = 30
EPOCH = 4
Rows = list[dict[str, Any]]


@dataclass
class Fixtures:
    """Runs that attacks edit copies of."""

    plain: Path
    stopped_early: Path
    other_seed: Path


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Fixtures:
    out = tmp_path_factory.mktemp("honest")

    def train(name: str, **values: Any) -> Path:
        recipe = isobatch.Recipe(task=TASK, **{"steps": STEPS, "eval_every": EPOCH, **values})
        return isobatch.train(recipe, out=out, name=name, save_every=5, quiet=True).folder

    early = train("early", patience=2, min_delta=9.0)  # the first evaluation stays the best
    return Fixtures(train("plain"), early, train("seed", seed=1))


def copy(run: Path, folder: Path) -> RunFolder:
    return RunFolder(shutil.copytree(run, folder / "forged"))


def edit_log(run: RunFolder, edit: Callable[[Rows], Any]) -> None:
    """Edit the rows of the log and seal them again."""
    rows = list(rows_in(run.metrics))
    edit(rows)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reseal(run)


def edit_json(path: Path, **values: Any) -> None:
    atomic_files.write_json(path, {**atomic_files.read_json(path), **values})


def edit_summary(run: RunFolder, **values: Any) -> None:
    """Edit the summary, in the log as well."""
    edit_json(run.folder / "summary.json", **values)
    edit_log(run, lambda rows: [row["summary"].update(values) for row in rows if "summary" in row])


def accept_final(run: RunFolder) -> None:
    """Log the digests of final/ as it is."""
    digests = folder_digests(run.final)
    edit_log(run, lambda rows: [row.update(final=digests) for row in rows if "final" in row])


def rewrite_checkpoint(
    run: RunFolder,
    name: str,
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, t: t,
    edit: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> None:
    """Write a checkpoint anew with other tensors and another state, and log its digest."""
    folder = run.checkpoints / name
    saved = SavedCheckpoint(folder)
    tensors = {key: change(key, saved.read(key)).contiguous() for key in saved.entries}
    state = json.loads(json.dumps(saved.state))
    edit(state)
    writer.save(folder, portable_state.rank_share(tensors, 0, 1), state, one_process())
    digest = recorded_digest(folder)
    edit_log(run, lambda rows: [r.update(digest=digest) for r in rows if r.get("checkpoint") == name])


def shuffled(tensor: torch.Tensor) -> torch.Tensor:
    """Other weights of the same shape and size."""
    flat = tensor.reshape(-1)
    return flat[torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(5))].reshape(
        tensor.shape
    )


def random_final(run: RunFolder) -> None:
    path = run.final / "model.safetensors"
    save_file({name: shuffled(value) for name, value in load_file(path).items()}, path)
    accept_final(run)


def random_final_and_checkpoint(run: RunFolder) -> None:
    random_final(run)
    weights = load_file(run.final / "model.safetensors")
    weights |= (
        {"lm_head.weight": weights["transformer.wte.weight"]} if "lm_head.weight" not in weights else {}
    )

    def change(key: str, value: torch.Tensor) -> torch.Tensor:
        return weights.get(key.removeprefix("weight/"), value) if key.startswith("weight/") else value

    rewrite_checkpoint(run, f"train-{STEPS}", change)


def better_loss(run: RunFolder) -> None:
    metrics = {**(run.summary() or {})["metrics"], "loss": 1.0}

    def edit(rows: Rows) -> None:
        last = next(row for row in reversed(rows) if "split" in row)
        last.update(metrics)

    edit_log(run, edit)
    edit_summary(run, metrics=metrics, metrics_by_split={"valid": metrics})


def halved_losses(run: RunFolder) -> None:
    def edit(rows: Rows) -> None:
        for row in (r for r in rows if "chain" in r and 4 <= r["step"] <= 26):
            row["loss"] /= 2

    edit_log(run, edit)


def deleted_rows(run: RunFolder) -> None:
    edit_log(run, lambda rows: rows.__setitem__(slice(None), [r for r in rows if not 13 <= r["step"] <= 15]))


def deleted_checkpoints(run: RunFolder) -> None:
    shutil.rmtree(run.checkpoints)


def flipped_byte(run: RunFolder) -> None:
    path = run.checkpoints / f"train-{STEPS}" / "node-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)
    sums = {"bytes": len(content), "crc32": atomic_files.crc32(path), "sha256": bytes_digest(path)}
    edit_json(path.with_name("checksums.json"), parts=[sums])


def flipped_weight_and_log(run: RunFolder) -> None:
    def change(key: str, value: torch.Tensor) -> torch.Tensor:
        return (
            value + 0.5 * (torch.arange(value.numel()).reshape(value.shape) == 0) if "wte" in key else value
        )

    rewrite_checkpoint(run, f"train-{STEPS}", change)


def forged_decision(run: RunFolder) -> None:
    row = {"phase": "train", "step": 8, "decision": "best checkpoint", "metric": "loss", "value": 1.0}
    run.decisions.write_text(json.dumps(row) + "\n")


def forged_change(run: RunFolder) -> None:
    row = {"phase": "train", "step": 2, "decision": "prune", "heads": 3}
    run.decisions.write_text(json.dumps(row) + "\n")
    digest = bytes_digest(run.decisions)
    edit_log(run, lambda rows: [r.update(decisions=digest) for r in rows if "final" in r])


def added_code(run: RunFolder) -> None:
    (run.final / "evil.py").write_text("print('hello')")


def added_code_and_log(run: RunFolder) -> None:
    added_code(run)
    accept_final(run)


def forged_summary(run: RunFolder) -> None:
    edit_json(run.folder / "summary.json", parameters=7)


def other_patience(run: RunFolder) -> None:
    claim(run, dataclasses.replace(run.recipe, patience=3))


def unread_field(run: RunFolder) -> None:
    claim(run, dataclasses.replace(run.recipe, label_smoothing=0.1))


def claim(run: RunFolder, recipe: Any) -> None:
    """Say that the run was trained by another recipe, everywhere."""
    recipe_file = {**recipe.to_dict(), "hash": recipe.hash()}
    atomic_files.write_json(run.folder / "recipe.json", recipe_file)
    fresh = RunFolder(run.folder)
    for folder in sorted(run.checkpoints.glob("train-*")):
        rewrite_checkpoint(fresh, folder.name, edit=lambda state: state.update(recipe_hash=recipe.hash()))
    task, data = workload(recipe.task).make(recipe)
    sampler = make_sampler(recipe, data.open(Path(fresh.facts.folder), "train"), task.cohort)
    (schedule,) = phase_schedules(recipe, task.phases(), sampler.steps_per_epoch)

    def edit(rows: Rows) -> None:
        for row in (r for r in rows if "chain" in r):
            where = row["step"] - 1, schedule.steps, schedule.steps_per_epoch
            row["lr"] = learning_rate(recipe, schedule.lr, *where)

    edit_log(fresh, edit)


def other_learning_rate(run: RunFolder) -> None:
    claim(run, dataclasses.replace(run.recipe, lr=2e-3))


def other_dropout(run: RunFolder) -> None:
    claim(run, dataclasses.replace(run.recipe, dropout=0.12))


def swapped_checkpoints(run: RunFolder) -> None:
    one, two = run.checkpoints / f"train-{STEPS}", run.checkpoints / f"train-{STEPS - 3}"
    for path, target in ((one, run.checkpoints / "x-0"), (two, one), (run.checkpoints / "x-0", two)):
        path.rename(target)


def looser_plan(run: RunFolder) -> None:
    run.write_plan(dataclasses.replace(run.plan, invariance="noise"))
    edit_log(run, lambda rows: [row.update(invariance="noise") for row in rows if "final" in row])
    edit_summary(run, invariance="noise")


def shorter_training(run: RunFolder) -> None:
    def edit(rows: Rows) -> None:
        rows[:] = [r for r in rows if not ("chain" in r and r["step"] > 20)]

    edit_log(run, edit)
    edit_summary(run, steps=20)


def samples_of_another_seed(run: RunFolder) -> None:
    claim(run, dataclasses.replace(run.recipe, seed=0))


def forged_best(run: RunFolder) -> None:
    """Say that the last evaluation was the best, so that the weights of the end are the export."""

    def edit(rows: Rows) -> None:
        next(row for row in rows if row.get("split") == "valid").update(loss=20.0)

    edit_log(run, edit)


def best_replaced(run: RunFolder) -> None:
    """Another model in the best checkpoint and in final/; the end of training stays true."""
    random_final(run)
    weights = load_file(run.final / "model.safetensors")

    def change(key: str, value: torch.Tensor) -> torch.Tensor:
        return weights.get(key.removeprefix("weight/"), value) if key.startswith("weight/") else value

    rewrite_checkpoint(run, f"train-{EPOCH}", change)


def best_value_forged(run: RunFolder) -> None:
    best = 1.0

    def edit(rows: Rows) -> None:
        next(row for row in rows if row.get("split") == "valid").update(loss=best)

    for folder in sorted(run.checkpoints.glob("train-*")):
        step = int(folder.name.rpartition("-")[2])
        if step >= EPOCH:
            rewrite_checkpoint(run, folder.name, edit=lambda state: state["judge"].update(best=best))
    decisions = [{**row, **({"value": best} if "value" in row else {})} for row in rows_in(run.decisions)]
    run.decisions.write_text("".join(json.dumps(row) + "\n" for row in decisions))
    digest = bytes_digest(run.decisions)
    edit_log(run, edit)
    edit_log(run, lambda rows: [r.update(decisions=digest) for r in rows if "final" in r])


def perturbed_end(run: RunFolder) -> None:
    """All weights moved by as much as Adam may move them."""

    def change(key: str, value: torch.Tensor) -> torch.Tensor:
        return value + 1e-4 if key.startswith("weight/") else value

    rewrite_checkpoint(run, f"train-{STEPS}", change)
    path = run.final / "model.safetensors"
    save_file({name: value + 1e-4 for name, value in load_file(path).items()}, path)
    accept_final(run)


def invented_metric(run: RunFolder) -> None:
    def edit(rows: Rows) -> None:
        next(row for row in reversed(rows) if "split" in row).update(accuracy=0.99)

    edit_log(run, edit)
    metrics = {**(run.summary() or {})["metrics"], "accuracy": 0.99}
    edit_summary(run, metrics=metrics, metrics_by_split={"valid": metrics})


def unfinished_with_final(run: RunFolder) -> None:
    (run.final / "evil.py").write_text("print('hello')")
    edit_log(run, lambda rows: rows.__setitem__(slice(None), [row for row in rows if "final" not in row]))
    (run.folder / "summary.json").unlink()


def rows_without_rates(run: RunFolder) -> None:
    edit_log(run, lambda rows: [row.pop("lr", None) for row in rows])


def unknown_rows(run: RunFolder) -> None:
    edit_log(run, lambda rows: rows.insert(3, {"phase": "train", "step": 3, "better": True}))


def malformed_row(run: RunFolder) -> None:
    edit_log(run, lambda rows: rows[2].update(lr="fast"))


def claims_rounding(run: RunFolder) -> None:
    run.write_plan(dataclasses.replace(run.plan, invariance="rounding"))
    edit_log(run, lambda rows: [row.update(invariance="rounding") for row in rows if "final" in row])
    edit_summary(run, invariance="rounding")


def shuffled_final_of_best(run: RunFolder) -> None:
    random_final(run)


def other_versions(run: RunFolder) -> None:
    """Say that the last weights are of another library, whose files would differ."""
    accept_final(run)
    rewrite_checkpoint(run, f"train-{STEPS}", edit=lambda state: state.update(versions={"torch": "1.0"}))


def code_of_other_versions(run: RunFolder) -> None:
    added_code(run)
    other_versions(run)


def pickle_of_other_versions(run: RunFolder) -> None:
    (run.final / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    other_versions(run)


def named_code_of_other_versions(run: RunFolder) -> None:
    atomic_files.write_json(run.final / "config.json", {"auto_map": {"AutoModel": "a/b--c.D"}})
    other_versions(run)


def template_of_other_versions(run: RunFolder) -> None:
    (run.final / "chat_template.jinja").write_text("{{ evil }}")
    other_versions(run)


def better_card(run: RunFolder) -> None:
    card = run.final / "README.md"
    card.write_text(card.read_text() + "\nAccuracy on all benchmarks: 0.99\n")
    accept_final(run)


def invented_split(run: RunFolder) -> None:
    metrics = (run.summary() or {})["metrics_by_split"]
    row = {"phase": "train", "step": STEPS, "split": "test", "loss": 0.1}
    edit_log(run, lambda rows: rows.insert(-2, row))
    edit_summary(run, metrics_by_split={**metrics, "test": {"loss": 0.1}})


def split_without_a_row(run: RunFolder) -> None:
    edit_summary(run, metrics_by_split={**(run.summary() or {})["metrics_by_split"], "test": {}})


def invented_metric_while_it_trained(run: RunFolder) -> None:
    edit_log(run, lambda rows: next(r for r in rows if "split" in r).update(accuracy=0.99))


def invented_evaluation(run: RunFolder) -> None:
    row = {"phase": "train", "step": 6, "split": "valid", "loss": 0.1}
    edit_log(run, lambda rows: rows.insert([r.get("step") for r in rows].index(7), row))


def field_of_no_row(run: RunFolder) -> None:
    edit_log(run, lambda rows: [r.update(award="gold") for r in rows if "checkpoint" in r])


def field_of_steps(run: RunFolder) -> None:
    edit_log(run, lambda rows: [r.update(accuracy=0.99) for r in rows if "chain" in r])


def key_twice(run: RunFolder) -> None:
    lines = run.metrics.read_text().splitlines()
    lines[1] = lines[1].replace("{", '{"loss": 0.001, ', 1)
    seal, lines = first_seal(run.recipe.hash(), run.facts.fingerprint), [*lines]
    whole = hashlib.sha256(seal.encode())
    for number, line in enumerate(lines):
        row = json.loads(line)
        if SEAL in row:
            lines[number] = json.dumps({**row, SEAL: whole.hexdigest()[:32]})
            whole = hashlib.sha256(whole.hexdigest()[:32].encode())
        else:
            whole.update(f"{line}\n".encode())
    run.metrics.write_text("\n".join([*lines, ""]))


def older_rules(run: RunFolder) -> None:
    edit_json(run.folder / "recipe.json", rules=1)


def nothing_leads_there(run: RunFolder) -> None:
    """Other weights three steps before the end, and an end that was really trained from them."""
    start = f"train-{STEPS - 3}"
    rewrite_checkpoint(run, start, lambda key, t: t + 1e-2 if key.startswith("weight/") else t)
    for folder in run.checkpoints.glob("train-*"):
        if folder.name != start:
            shutil.rmtree(folder)
    shutil.rmtree(run.final)
    (run.folder / "summary.json").unlink()
    logs = mended_logs(run, start)
    rewrite_checkpoint(run, start, edit=lambda state: state.update(logs=logs))
    done = launch("resume", str(run.folder), "--trust", "--quiet", cwd=run.folder.parent)
    assert done.returncode == 0, done.stderr


def mended_logs(run: RunFolder, name: str) -> dict[str, Any]:
    """What a checkpoint says of the log where it was saved."""
    size, said = 0, SavedCheckpoint(run.checkpoints / name).state["logs"]
    step = int(name.rpartition("-")[2])
    for line in run.metrics.read_bytes().splitlines(keepends=True):
        row = json.loads(line)
        if row.keys() == {"phase", "step", SEAL} and row["step"] == step:
            return {**said, SEAL: row[SEAL], "metrics": size}
        size += len(line)
    raise AssertionError(name)


def claimed(run: RunFolder, **arithmetic: Any) -> None:
    """A loss that is a little better, in a run that says its arithmetic were coarse."""
    run.write_plan(dataclasses.replace(run.plan, invariance="precision", **arithmetic))

    def edit(rows: Rows) -> None:
        rows[1]["loss"] -= 1e-2
        next(row for row in rows if "final" in row)["invariance"] = "precision"

    edit_log(run, edit)
    edit_summary(run, invariance="precision", precision=run.plan.precision)


def claims_compiling(run: RunFolder) -> None:
    claimed(run, compile="on")


def claims_bf16(run: RunFolder) -> None:
    claimed(run, precision="bf16")


ATTACKS: list[tuple[Any, str, str]] = [
    (code_of_other_versions, "plain", "steps"),
    (pickle_of_other_versions, "plain", "steps"),
    (named_code_of_other_versions, "plain", "steps"),
    (template_of_other_versions, "plain", "steps"),
    (better_card, "plain", "steps"),
    (better_card, "plain", "full"),
    (invented_split, "plain", "records"),
    (split_without_a_row, "plain", "records"),
    (invented_metric_while_it_trained, "plain", "steps"),
    (invented_metric_while_it_trained, "plain", "full"),
    (invented_evaluation, "plain", "records"),
    (field_of_no_row, "plain", "records"),
    (field_of_steps, "plain", "trusted"),
    (key_twice, "plain", "records"),
    (older_rules, "plain", "refused"),
    (nothing_leads_there, "plain", "steps"),
    (claims_compiling, "plain", "steps"),
    (claims_bf16, "plain", "steps"),
    (random_final, "plain", "steps"),
    (random_final_and_checkpoint, "plain", "steps"),
    (better_loss, "plain", "steps"),
    (halved_losses, "plain", "steps"),
    (deleted_rows, "plain", "records"),
    (deleted_checkpoints, "plain", "steps"),
    (flipped_byte, "plain", "records"),
    (flipped_weight_and_log, "plain", "steps"),
    (forged_decision, "plain", "records"),
    (forged_change, "plain", "steps"),
    (added_code, "plain", "records"),
    (added_code_and_log, "plain", "steps"),
    (forged_summary, "plain", "records"),
    (other_patience, "plain", "records"),
    (unread_field, "plain", "records"),
    (other_learning_rate, "plain", "steps"),
    (other_dropout, "plain", "steps"),
    (swapped_checkpoints, "plain", "records"),
    (looser_plan, "plain", "steps"),
    (shorter_training, "plain", "records"),
    (samples_of_another_seed, "other_seed", "records"),
    (forged_best, "stopped_early", "records"),
    (best_replaced, "stopped_early", "steps"),
    (best_value_forged, "stopped_early", "steps"),
    (perturbed_end, "plain", "steps"),
    (invented_metric, "plain", "steps"),
    (unfinished_with_final, "plain", "records"),
    (rows_without_rates, "plain", "records"),
    (unknown_rows, "plain", "records"),
    (malformed_row, "plain", "records"),
    (claims_rounding, "plain", "steps"),
    (shuffled_final_of_best, "stopped_early", "steps"),
]
NOT_PROVEN = (deleted_checkpoints, unfinished_with_final, template_of_other_versions)
LEVELS = ["records", "steps", "full"]
QUICK = (
    *(code_of_other_versions, template_of_other_versions, better_card, invented_split, invented_evaluation),
    *(invented_metric_while_it_trained, field_of_no_row, field_of_steps, key_twice, older_rules),
    *(nothing_leads_there, claims_bf16, random_final, halved_losses, deleted_checkpoints, forged_best),
)
"""One of each kind; the others are for `make soak`."""


@pytest.mark.parametrize("name", ["plain", "stopped_early", "other_seed"])
@pytest.mark.parametrize("level", LEVELS)
def test_honest_runs_are_verified(honest: Fixtures, name: str, level: str) -> None:
    found = isobatch.verify(getattr(honest, name), level=level)
    assert found, found.problems + found.unproven
    if level == "steps":
        assert "samples of all" in found.coverage
        assert "held-out metrics recomputed" in found.coverage
    if level == "full" or (level, name) == ("steps", "plain"):
        assert "final weights reproduced bit for bit" in found.coverage


@pytest.mark.parametrize(
    ("attack", "name", "level"),
    [
        pytest.param(
            *a,
            marks=() if a[0] in QUICK and a[2] != "full" else pytest.mark.slow,
            id=f"{a[0].__name__}-{a[2]}",
        )
        for a in ATTACKS
    ],
)
def test_a_forged_run_is_not_verified(
    honest: Fixtures, attack: Callable[[RunFolder], None], name: str, level: str, tmp_path: Path
) -> None:
    forged = copy(getattr(honest, name), tmp_path)
    attack(forged)
    asked = level if level in LEVELS else "steps"
    done = launch("verify", str(forged.folder), "--level", asked, "--trust", cwd=tmp_path)
    verdict = f"\n{done.stdout}".splitlines()[-1]
    if level == "refused":
        assert done.returncode == 2
        assert done.stderr.endswith("made it; train it again\n")
    elif level == "trusted":
        assert done.returncode == 0
        assert verdict.endswith("verified (exact); taken on trust: the rows' accuracy")
    else:  # not proven is not the same as wrong
        said = "not proven" if attack in NOT_PROVEN else "NOT what its recipe says"
        assert (done.returncode, verdict.partition(": ")[2]) == (3, said), done.stdout + done.stderr


@pytest.mark.parametrize("level", ["steps", pytest.param("full", marks=pytest.mark.slow)])
def test_a_loss_on_the_way_to_the_last_checkpoints_is_found(
    level: str, honest: Fixtures, tmp_path: Path
) -> None:
    forged = copy(honest.plain, tmp_path)

    def edit(rows: Rows) -> None:
        next(row for row in rows if "chain" in row and row["step"] == 18)["loss"] -= 0.3

    edit_log(forged, edit)
    found = isobatch.verify(forged.folder, level=level)
    assert len(found.problems) == 1
    assert found.problems[0].startswith("phase train, step 18: loss ")


def test_data_that_was_written_to_while_it_trained_is_not_proven(honest: Fixtures, tmp_path: Path) -> None:
    run = copy(honest.plain, tmp_path)
    row = {"decision": DATA_WRITTEN, "file": "train/tokens.npy", "at_phase": "train", "at_step": 9}
    run.decisions.write_text(json.dumps(row) + "\n")
    digest = bytes_digest(run.decisions)
    edit_log(run, lambda rows: [r.update(decisions=digest) for r in rows if "final" in r])
    found = isobatch.verify(run.folder, level="records")
    assert (bool(found), found.problems) == (False, [])
    assert found.unproven == ["the prepared data was written to while it was trained on: train/tokens.npy"]
    run.decisions.unlink()
    problems = isobatch.verify(run.folder, level="records").problems
    assert problems == ["decisions.jsonl is not what the run wrote"]


def test_runs_of_one_recipe_have_the_same_digests(honest: Fixtures, tmp_path: Path) -> None:
    recipe = isobatch.load(honest.plain).recipe
    again = isobatch.train(recipe, out=tmp_path, name="again", save_every=5, quiet=True)
    assert folder_digests(again.folder / "final") == folder_digests(honest.plain / "final")
    mode = (again.folder / "final" / "model.safetensors").stat().st_mode & 0o777
    assert mode == (again.folder / "summary.json").stat().st_mode & 0o777
