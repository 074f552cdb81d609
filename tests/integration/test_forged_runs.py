"""Forged runs: each attack is found at the level of verify that docs/verify.md names."""

from __future__ import annotations

import dataclasses
import json
import re
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
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.training.run_context import DATA_WRITTEN
from isobatch.tests.forgery import one_process, reseal
from isobatch.tests.integration.helpers import launch
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.launch.api.functions import Verification

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


def of_other_versions(run: RunFolder) -> None:
    """Say that other versions of the libraries wrote it."""
    rewrite_checkpoint(run, f"train-{STEPS}", edit=lambda state: state.update(versions={"torch": "9.9"}))


def added(name: str, content: str, versions: bool) -> Callable[[RunFolder], None]:
    """A file more, or another one, in final/, and the log to match."""

    def attack(run: RunFolder) -> None:
        (run.final / name).write_text(content)
        accept_final(run)
        if versions:
            of_other_versions(run)

    attack.__name__ = f"{name} {content[:9]} added{', other versions' * versions}"
    return attack


def other_card(run: RunFolder) -> None:
    path = run.final / "README.md"
    path.write_text(path.read_text() + "\nIts accuracy is 99 %.\n")
    accept_final(run)


def invented_split(run: RunFolder) -> None:
    summary = run.summary() or {}

    def edit(rows: Rows) -> None:
        last = max(n for n, row in enumerate(rows) if "split" in row)
        rows.insert(last + 1, {**rows[last], "split": "test", "loss": 0.5})

    edit_log(run, edit)
    measured = {**summary["metrics_by_split"], "test": {**summary["metrics"], "loss": 0.5}}
    edit_summary(run, metrics_by_split=measured)


def evaluation_of_no_step(run: RunFolder) -> None:
    def edit(rows: Rows) -> None:
        place = next(n for n, row in enumerate(rows) if row["step"] == 6)
        rows.insert(place + 1, {"phase": "train", "step": 6, "split": "valid", "loss": 0.5})

    edit_log(run, edit)


def key_twice(run: RunFolder) -> None:
    path = run.folder / "summary.json"
    path.write_text(path.read_text().replace("{", '{"loss": 0.5, "loss": 4.5,', 1))


def claims_bf16(run: RunFolder) -> None:
    run.write_plan(dataclasses.replace(run.plan, precision="bf16", invariance="precision"))
    edit_log(run, lambda rows: [row.update(invariance="precision") for row in rows if "final" in row])
    edit_summary(run, invariance="precision", precision="bf16")


def claims_compiled_kernels(run: RunFolder) -> None:
    """To be allowed 2e-2: the logged losses are a little lower than they were."""
    run.write_plan(dataclasses.replace(run.plan, compile="on", invariance="precision"))

    def edit(rows: Rows) -> None:
        for row in rows:
            row.update(invariance="precision") if "final" in row else None
            row.update(loss=row["loss"] - 1e-3) if "chain" in row and row["step"] > 12 else None

    edit_log(run, edit)
    edit_summary(run, invariance="precision")


def shuffled_final_of_best(run: RunFolder) -> None:
    random_final(run)


FILES = [
    ("modeling.py", "print('hello')"),
    ("weights.pkl", "no weights"),
    ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
    ("chat_template.jinja", "{{ messages }}"),
    ("config.json", '{"auto_map": {"AutoModel": "modeling.RaggedLM"}}'),
    ("config.json", '{"eos_token_id": 7}'),
]
"""Name and content of files in final/ that no export has."""
EXCUSED_ATTACKS = {
    added(name, content, versions=True).__name__
    for name, content in FILES
    if name.endswith((".json", ".jinja")) and "auto_map" not in content
}
"""What another version of a library may have written: it is not proven, and not wrong."""
ATTACKS: list[tuple[Any, str, str]] = [
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
    *((added(*FILE, versions), "plain", "steps") for FILE in FILES for versions in (False, True)),
    (other_card, "plain", "steps"),
    (invented_split, "plain", "records"),
    (evaluation_of_no_step, "plain", "records"),
    (key_twice, "plain", "records"),
    (claims_bf16, "plain", "steps"),
    (claims_compiled_kernels, "plain", "steps"),
    (shuffled_final_of_best, "stopped_early", "steps"),
]
LEVELS = ["records", "steps", "full"]


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


@pytest.mark.parametrize(("attack", "name", "level"), ATTACKS, ids=lambda x: getattr(x, "__name__", x))
def test_a_forged_run_is_not_verified(
    honest: Fixtures, attack: Callable[[RunFolder], None], name: str, level: str, tmp_path: Path
) -> None:
    forged = copy(getattr(honest, name), tmp_path)
    attack(forged)
    found: Verification | None = None
    for checked in LEVELS[: LEVELS.index(level) + 1]:
        if attack is key_twice:
            with pytest.raises(isobatch.UserError, match=r"summary.json.*it has the key 'loss' twice"):
                isobatch.verify(forged.folder, level=checked)
            return
        found = isobatch.verify(forged.folder, level=checked, trust=True)
        assert bool(found) == (checked != level), (checked, found.problems, found.unproven)
    assert found is not None
    unproven = attack in (deleted_checkpoints, unfinished_with_final) or attack.__name__ in EXCUSED_ATTACKS
    assert (found.problems == []) == unproven  # not proven is not the same as wrong


@pytest.mark.slow
def test_a_forgery_of_unkept_steps_is_found_by_a_full_replay(honest: Fixtures, tmp_path: Path) -> None:
    """The limit of the default level: no checkpoint is kept near these steps."""
    forged = copy(honest.plain, tmp_path)

    def edit(rows: Rows) -> None:
        next(row for row in rows if "chain" in row and row["step"] == 18)["loss"] -= 0.3

    edit_log(forged, edit)
    assert isobatch.verify(forged.folder)
    found = isobatch.verify(forged.folder, level="full")
    assert len(found.problems) == 1
    assert found.problems[0].startswith("phase train, step 18: loss ")


def test_a_witness_finds_what_was_sealed_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = isobatch.Recipe(task=TASK, steps=9)
    seen, told = tmp_path / "seen", tmp_path / "told"
    run = isobatch.train(recipe, out=tmp_path, name="one", witness=str(seen), quiet=True).folder
    isobatch.train(recipe, out=tmp_path, name="two", again=True, witness=f"|cat >> {told}", quiet=True)
    assert len(seen.read_text().splitlines()) == len(told.read_text().splitlines()) >= 3
    assert "witness" not in json.loads(
        (run / "run.json").read_text()
    )  # who receives the run is not to write there
    found = isobatch.verify(run, level="records", witness=str(seen))
    assert found
    assert "the witness saw the same" in found.coverage
    edit_log(RunFolder(run), lambda rows: rows[1].update(loss=1.0))
    assert isobatch.verify(run, level="records")
    changed = isobatch.verify(run, level="records", witness=str(seen))
    assert "metrics.jsonl is not what the witness saw at or before" in changed.problems[0]
    capfd.readouterr()
    again = {"name": "three", "again": True, "witness": str(tmp_path / "none" / "file")}
    isobatch.train(recipe, out=tmp_path, **again)
    assert capfd.readouterr().err.count("the witness misses a line, and training goes on") == 1


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


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (
            lambda log: log.write_text(log.read_text().replace("u3,i4,", "u3,i0,")),
            3,
            "holds other data",
        ),
        (Path.unlink, 0, r"on trust: that the prepared data is made of .*log\.csv, which is not here"),
        (lambda _: None, 0, r"verified \(exact\)$"),
    ],
    ids=["other", "gone", "same"],
)
def test_prepared_data_is_made_of_what_the_recipe_names(
    change: Callable[[Path], Any], code: int, says: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    rows = [f"u{user},i{(user * 5 + step) % 11},{step}\n" for user in range(20) for step in range(6)]
    log.write_text("user,item,time\n" + "".join(rows))
    words = ["--task", "recommender", "--preset", "ids", "--epochs", "1", "--least-steps", "0"]
    trained = launch("auto", *words, "--data", str(log), "--name", "r", "--quiet", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    change(log)
    done = launch("verify", "runs/r", cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert re.search(says, done.stdout.strip()), done.stdout
