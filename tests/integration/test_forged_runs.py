"""Forged runs: each attack is found at the level of verify that docs/verify.md names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import isobatch
from isobatch.core import atomic_files
from isobatch.core.atomic_files import rows_in
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, recorded_digest
from isobatch.engine.checkpointing.digests import bytes_digest, folder_digests
from isobatch.engine.hooks.data_guard import DATA_WRITTEN
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.schedule import learning_rate, phase_schedules
from isobatch.engine.registry import workload
from isobatch.engine.runs.metrics_log import SEAL, first_seal
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.tests.forgery import edit_log, one_process
from isobatch.tests.integration.helpers import launch, succeed
from isobatch.tests.paths import ROOT
from isobatch.tests.unit.helpers import save_checkpoint

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
    save_checkpoint(folder, portable_state.rank_share(tensors, 0, 1), state, one_process())
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

    def judged(state: dict[str, Any]) -> None:
        state["hooks"]["evaluate"].update(best=best)

    for folder in sorted(run.checkpoints.glob("train-*")):
        step = int(folder.name.rpartition("-")[2])
        if step >= EPOCH:
            rewrite_checkpoint(run, folder.name, edit=judged)
    decisions = [{**row, **({"value": best} if "value" in row else {})} for row in rows_in(run.decisions)]
    run.decisions.write_text("".join(json.dumps(row) + "\n" for row in decisions))
    digest = bytes_digest(run.decisions)
    edit_log(run, edit)
    edit_log(run, lambda rows: [r.update(decisions=digest) for r in rows if "final" in r])


def unfinished_with_final(run: RunFolder) -> None:
    (run.final / "evil.py").write_text("print('hello')")
    edit_log(run, lambda rows: rows.__setitem__(slice(None), [row for row in rows if "final" not in row]))
    (run.folder / "summary.json").unlink()


def other_versions(run: RunFolder) -> None:
    """Say that the last weights are of another library, whose files would differ."""
    accept_final(run)
    rewrite_checkpoint(run, f"train-{STEPS}", edit=lambda state: state.update(versions={"torch": "1.0"}))


def better_card(run: RunFolder) -> None:
    card = run.final / "README.md"
    card.write_text(card.read_text() + "\nAccuracy on all benchmarks: 0.99\n")


def award(rows: Rows) -> None:
    next(row for row in rows if "split" in row).update(accuracy=0.99)


def key_twice(run: RunFolder) -> None:
    lines = run.metrics.read_text().splitlines()
    lines[1] = lines[1].replace("{", '{"loss": 0.001, ', 1)
    seal, lines = first_seal(run), [*lines]
    whole = hashlib.sha256(seal.encode())
    for number, line in enumerate(lines):
        row = json.loads(line)
        if SEAL in row:
            lines[number] = json.dumps({**row, SEAL: whole.hexdigest()[:32]})
            whole = hashlib.sha256(whole.hexdigest()[:32].encode())
        else:
            whole.update(f"{line}\n".encode())
    run.metrics.write_text("\n".join([*lines, ""]))


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
    succeed("resume", str(run.folder), "--trust", "--quiet", cwd=run.folder.parent)


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


Attack = Callable[[RunFolder], Any]


def log(edit: Callable[[Rows], Any]) -> Attack:
    return lambda run: edit_log(run, edit)


def without(keep: Callable[[dict[str, Any]], bool]) -> Attack:
    return log(lambda rows: rows.__setitem__(slice(None), [row for row in rows if keep(row)]))


def claims(**fields: Any) -> Attack:
    """Another recipe."""
    return lambda run: claim(run, dataclasses.replace(run.recipe, **fields))


def adds(name: str, content: bytes = b"print('hello')") -> Attack:
    """A file of final/, without a word in the log."""
    return lambda run: (run.final / name).write_bytes(content)


def then(*attacks: Attack) -> Attack:
    return lambda run: [attack(run) for attack in attacks]


def looser(invariance: str) -> Attack:
    def attack(run: RunFolder) -> None:
        run.write_plan(dataclasses.replace(run.plan, invariance=invariance))  # type: ignore[arg-type]
        edit_log(run, lambda rows: [row.update(invariance=invariance) for row in rows if "final" in row])
        edit_summary(run, invariance=invariance)

    return attack


def decides(sealed: bool, **row: Any) -> Attack:
    """An invented row of decisions.jsonl."""

    def attack(run: RunFolder) -> None:
        run.decisions.write_text(json.dumps({"phase": "train", **row}) + "\n")
        digest = bytes_digest(run.decisions)
        if sealed:
            edit_log(run, lambda rows: [r.update(decisions=digest) for r in rows if "final" in r])

    return attack


def invents(split: str, **metrics: float) -> Attack:
    """Metrics of the end, in summary and log."""

    def attack(run: RunFolder) -> None:
        known = (run.summary() or {})["metrics_by_split"]
        found = {**known.get(split, {}), **metrics}
        row = {"phase": "train", "step": STEPS, "split": split, **found}

        def edit(rows: Rows) -> None:
            own = [r for r in rows if r.get("split") == split]
            own[-1].update(metrics) if own else rows.insert(-2, row)

        edit_log(run, edit)
        more = {"metrics": found} if split in known else {}
        edit_summary(run, **more, metrics_by_split={**known, split: found})

    return attack


def is_step(row: dict[str, Any], steps: range) -> bool:
    return "chain" in row and row["step"] in steps


def of_rows(field: str, **more: Any) -> Attack:
    """More fields in all rows that have one."""
    return log(lambda rows: [row.update(more) for row in rows if field in row])


def split_without_a_row(run: RunFolder) -> None:
    edit_summary(run, metrics_by_split={**(run.summary() or {})["metrics_by_split"], "test": {}})


EVALUATION = {"phase": "train", "step": 6, "split": "valid", "loss": 0.1}
BEST = {"step": 8, "decision": "best checkpoint", "metric": "loss", "value": 1.0}
NAMED_CODE = json.dumps({"auto_map": {"AutoModel": "a/b--c.D"}}).encode()
HALVED = range(4, 27)
BY_LEVEL: dict[tuple[str, str], dict[str, Attack]] = {
    ("plain", "records"): {
        "invented split": invents("test", loss=0.1),
        "split without a row": split_without_a_row,
        "invented evaluation": log(
            lambda rows: rows.insert([r.get("step") for r in rows].index(7), EVALUATION)
        ),
        "field of no row": of_rows("checkpoint", award="gold"),
        "key twice": key_twice,
        "forged decision": decides(False, **BEST),
        "added code": adds("evil.py"),
        "forged summary": lambda run: edit_json(run.folder / "summary.json", parameters=7),
        "other patience": claims(patience=3),
        "unread field": claims(label_smoothing=0.1),
        "unfinished with final": unfinished_with_final,
        "unknown rows": log(lambda rows: rows.insert(3, {"phase": "train", "step": 3, "better": True})),
        "malformed row": log(lambda rows: rows[2].update(lr="fast")),
    },
    ("plain", "steps"): {
        "code of other versions": then(adds("evil.py"), other_versions),
        "pickle of other versions": then(adds("pytorch_model.bin", b"\x80\x04."), other_versions),
        "named code of other versions": then(adds("config.json", NAMED_CODE), other_versions),
        "template of other versions": then(adds("chat_template.jinja", b"{{ evil }}"), other_versions),
        "better card": then(better_card, accept_final),
        "invented metric while it trained": log(award),
        "nothing leads there": nothing_leads_there,
        "claims bf16": lambda run: claimed(run, precision="bf16"),
        "random final": random_final,
        "random final and checkpoint": random_final_and_checkpoint,
        "better loss": invents("valid", loss=1.0),
        "halved losses": log(lambda rows: [r.update(loss=r["loss"] / 2) for r in rows if is_step(r, HALVED)]),
        "deleted checkpoints": lambda run: shutil.rmtree(run.checkpoints),
        "forged change": decides(True, step=2, decision="prune", heads=3),
        "added code and log": then(adds("evil.py"), accept_final),
        "other learning rate": claims(lr=2e-3),
        "looser plan": looser("noise"),
        "invented metric": invents("valid", accuracy=0.99),
        "claims rounding": looser("rounding"),
    },
    ("plain", "full"): {"invented metric while it trained, in full": log(award)},
    ("plain", "trusted"): {"field of steps": of_rows("chain", accuracy=0.99)},
    ("plain", "refused"): {"older rules": lambda run: edit_json(run.folder / "recipe.json", rules=1)},
    ("other_seed", "records"): {"samples of another seed": claims(seed=0)},
    ("stopped_early", "records"): {
        # the last evaluation was the best, so that the weights of the end are the export
        "forged best": log(lambda rows: next(r for r in rows if "split" in r).update(loss=20.0))
    },
    ("stopped_early", "steps"): {"best replaced": best_replaced, "best value forged": best_value_forged},
}
"""(which run, the level that finds it) -> attack -> what it does."""
ATTACKS = {name: (attack, *to) for to, attacks in BY_LEVEL.items() for name, attack in attacks.items()}
NOT_PROVEN = ("deleted checkpoints", "unfinished with final", "template of other versions")
LEVELS = ["records", "steps", "full"]
QUICK = (
    *(
        "code of other versions",
        "template of other versions",
        "better card",
        "invented split",
        "random final",
    ),
    *("invented metric while it trained", "field of no row", "field of steps", "key twice", "older rules"),
    *("nothing leads there", "claims bf16", "halved losses", "deleted checkpoints", "forged best"),
    *("invented evaluation", "random final"),
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
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ATTACKS]
)
def test_a_forged_run_is_not_verified(honest: Fixtures, name: str, tmp_path: Path) -> None:
    attack, run, level = ATTACKS[name]
    forged = copy(getattr(honest, run), tmp_path)
    attack(forged)
    asked = level if level in LEVELS else "steps"
    done = launch("verify", str(forged.folder), "--level", asked, "--trust", cwd=tmp_path)
    verdict = f"\n{done.stdout}".splitlines()[-1]
    if level == "refused":
        assert done.returncode == 2
        assert "recipe.json has unknown fields: rules" in done.stderr
    elif level == "trusted":
        assert done.returncode == 0
        assert verdict.endswith("verified (exact); taken on trust: the rows' accuracy")
    else:  # not proven is not the same as wrong
        said = "not proven" if name in NOT_PROVEN else "NOT what its recipe says"
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
