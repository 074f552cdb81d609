"""Tests of `receipt` and `audit`: an honest receipt holds, and each forgery is found by what it touches."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import isobatch
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.recipe import Recipe
from isobatch.engine.forensics import receipt as receipts
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.registry import complete, workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.forensics.receipt import (
    AuditOptions,
    Finding,
    audit,
    audit_receipt,
    receipt,
)
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.launch.local.redo_steps import plan_to_redo
from isobatch.launch.local.run_setup import recipe_here
from isobatch.launch.local.verify_run import VerifyOptions, verify_run
from isobatch.tests.forgery import edit_log, reseal
from isobatch.tests.paths import ROOT
from isobatch.tests.tiny_models import save_gpt2, write_stories
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Callable

TASK = f"{ROOT}/tests/tasks/ragged.py:RaggedLM"
STEPS = 12
Content = dict[str, Any]


@dataclass
class Fixtures:
    """A run, its receipt outside of the run's folder, and another run of another seed."""

    run: Path
    other: Path
    file: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Fixtures:
    out = tmp_path_factory.mktemp("receipts")

    def train(name: str, seed: int) -> Path:
        recipe = isobatch.Recipe(task=TASK, steps=STEPS, seed=seed, eval_every=4)
        return isobatch.train(recipe, out=out, name=name, save_every=4, keep=99, quiet=True).folder

    run, other = train("mine", 0), train("other", 1)
    file = out / "receipt.json"
    assert receipt([str(run), "--out", str(file)]) == 0
    return Fixtures(run, other, file)


def audited(file: Path, **options: Any) -> Finding:
    with preserve_process_state():
        return audit_receipt(file, AuditOptions(**options))


def edited(made: Fixtures, folder: Path, edit: Callable[[Content], Any]) -> Path:
    content = json.loads(made.file.read_text())
    edit(content)
    file = folder / "receipt.json"
    file.write_text(json.dumps(content))
    return file


def test_an_honest_receipt_holds(made: Fixtures, capsys: pytest.CaptureFixture[str]) -> None:
    with_run = audited(made.file, run=str(made.run))
    assert with_run.problems == []
    assert f"{made.run} is the run" in with_run.checked
    assert any("final weights reproduced" in line for line in with_run.checked)
    alone = audited(made.file)
    assert alone.problems == []
    assert alone.checked[0] == "recipe and data, the samples of all 12 steps"
    assert "steps from the beginning made again: equal" in alone.checked[1]
    with preserve_process_state():
        assert audit([str(made.file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"]


TWO_LOSSES = f"""
import dataclasses
import importlib.util
spec = importlib.util.spec_from_file_location("ragged_of_two", {TASK.partition(":")[0]!r})
ragged = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ragged)


class Two(ragged.RaggedLM):
    def loss(self, model, batch, step):
        (loss,) = super().loss(model, batch, step).values()
        return {{"a": loss, "b": ragged.Loss(2 * loss.sum, loss.unit)}}

    def phases(self):
        return [dataclasses.replace(phase, rounds=True) for phase in super().phases()]

    def model_size(self, facts):
        return dataclasses.replace(super().model_size(facts), rounds=True)
"""


def test_what_a_run_that_rounds_says_of_itself_proves_no_loss(tmp_path: Path) -> None:
    """Its own measure of rounding may be forged with its losses, of which a receipt has the whole alone."""
    (tmp_path / "two.py").write_text(TWO_LOSSES)
    recipe = isobatch.Recipe(task=f"{tmp_path}/two.py:Two", steps=4)
    run = RunFolder(isobatch.train(recipe, out=tmp_path, name="two", quiet=True, processes=1).folder)
    cases = ((0, "holds"), (1e-3, "unproven"), (0.3, "problems"), (0.3, "unproven"))
    for number, (less_by, verdict) in enumerate(cases):
        told = r"\2" if number < 3 else "[1.0, 1.0]"
        forged = RunFolder(shutil.copytree(run.folder, tmp_path / f"{number}"))
        edit_log(forged, lambda rows: rows[0].update(loss=rows[0]["loss"] - less_by))  # noqa: B023
        for file in (forged.folder / name for name in ("plan.json", "summary.json", "metrics.jsonl")):
            file.write_text(re.sub(r'("rounding": )(\[[^]]*\])', rf"\1{told}", file.read_text()))
        reseal(forged)
        assert receipt([str(forged.folder), "--out", str(tmp_path / "receipt.json")]) == 0
        for options in ({}, {"run": str(forged.folder)})[: 1 + number // 3]:
            found = audited(tmp_path / "receipt.json", trust=True, **options)
            assert ("problems" if found.problems else "unproven" if found.unproven else "holds") == verdict


def put(path: str, value: Any) -> Callable[[Content], None]:
    """An edit that sets a value at a place such as steps/1/loss, or changes it by a function."""

    def forge(content: Content) -> None:
        *way, last = [int(part) if part.lstrip("-").isdecimal() else part for part in path.split("/")]
        place: Any = content
        for part in way:
            place = place[part]
        place[last] = value(place[last]) if callable(value) else value

    return forge


def less(value: float) -> Callable[[float], float]:
    return lambda old: old - value


def claims(**fields: Any) -> Callable[[Content], None]:
    """Another recipe, with a true hash."""

    def forge(content: Content) -> None:
        content["recipe"] |= fields
        content["recipe_hash"] = Recipe.from_dict(content["recipe"]).hash()

    return forge


def leaves_out(first: int, last: int) -> Callable[[Content], None]:
    row = {"decision": "leave out steps", "of": "train", "first": first, "last": last, "reason": "asked for"}
    return lambda content: content["left_out"].append(row)


def all_of(*edits: Callable[[Content], Any]) -> Callable[[Content], None]:
    return lambda content: [edit(content) for edit in edits] and None


FORGERIES: dict[str, tuple[Callable[[Content], Any], str]] = {
    "another loss": (put("steps/1/loss", less(0.1)), "step 2: loss"),
    "another rate": (claims(lr=0.3), "step 1: the learning rate is not the recipe's"),
    # samples and rates stay, and the second step's loss is another
    "another decay": (claims(weight_decay=300.0), "step 2: loss"),
    "another seed": (claims(seed=1), "step 1: the samples are not those of recipe and data"),
    "another hash": (put("recipe/lr", 0.3), "its recipe hashes to"),
    "fewer steps": (put("phases/train", 8), "it claims 8 steps, and the recipe has 12"),
    "endless steps": (put("phases/train", 10**15), f"it claims {10**15} steps, and the recipe has 12"),
    "other data": (put("facts/fingerprint", "0" * 16), "the data here is not the receipt's: fingerprint"),
    "other lengths": (put("facts/lengths/0", less(-1)), "the receipt's: lengths differs"),
    "the end left out": (leaves_out(12, 10**12), "step 12: it has figures of what is no step"),
    "all left out": (all_of(leaves_out(1, 12), put("steps", [])), "it leaves out every step"),
    "the first figures": (put("steps", lambda s: s[:3]), "step 4: it lacks the figures of this step"),
    "figures twice": (put("steps", lambda s: [s[0], *s]), "it has the figures of a step twice"),
    # of which a wrong loss would be within the tolerance
    "a looser class": (
        all_of(put("plan/invariance", "noise"), put("steps/1/loss", less(-0.05))),
        "plan.json says noise, and this recipe and precision are exact",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_found_without_the_run(name: str, made: Fixtures, tmp_path: Path) -> None:
    forge, found = FORGERIES[name]
    problems = audited(edited(made, tmp_path, forge), trust=True).problems
    assert any(found in problem for problem in problems), problems


def first_of(value: Any) -> Callable[[Content], Content]:
    return lambda old: {**old, next(iter(old)): value}


AGAINST_THE_RUN: dict[str, Callable[[Content], Any]] = {
    "steps": put("steps/8/loss", less(0.1)),
    "metrics": put("metrics/valid/loss", less(0.1)),
    "checkpoints": put("checkpoints", first_of("0" * 32)),
    "final": put("final", first_of("0" * 64)),
}


@pytest.mark.parametrize("part", AGAINST_THE_RUN)
def test_a_forgery_is_found_against_the_run(part: str, made: Fixtures, tmp_path: Path) -> None:
    problems = audited(edited(made, tmp_path, AGAINST_THE_RUN[part]), run=str(made.run)).problems
    assert problems == [f"{made.run} says otherwise: {part}"]


def test_another_run_is_not_taken_for_it(made: Fixtures) -> None:
    assert "is another run" in audited(made.file, run=str(made.other)).problems[0]


def test_a_run_that_was_changed_has_no_receipt(made: Fixtures, tmp_path: Path) -> None:
    run = shutil.copytree(made.run, tmp_path / "copy")
    (run / "final" / "model.safetensors").write_bytes(b"")
    with pytest.raises(TrainingError, match="is not what its recipe says"):
        receipt([str(run)])
    said = "missing, changed or added since the run wrote it: final/model.safetensors"
    assert any(said in p for p in audited(made.file, run=str(run)).problems)


def test_a_receipt_from_before_exports_were_named_holds(made: Fixtures, tmp_path: Path) -> None:
    file = edited(made, tmp_path, lambda content: content.pop("exports"))
    assert audited(file, run=str(made.run)).problems == []


PLACES = ("model", "tokenizer", "teacher", "pruned", "from")


@pytest.mark.parametrize("base", ["", "gone", "gone/final"])
@pytest.mark.parametrize("moved", PLACES)
def test_what_a_recipe_begins_with_is_read_where_it_lies(moved: str, base: str, tmp_path: Path) -> None:
    """In a folder under its name, or as --base itself; what is in its place stays, and a preset."""
    for folder in ("new/gone/final", "old/stays"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    for name in ("recipe.json", "facts.json"):
        (tmp_path / "new" / "gone" / name).write_text("{}")
    old = {name: f"{tmp_path}/old/{'gone' if name == moved else 'stays'}" for name in PLACES}
    old["model"] += "/final" if moved == "model" else ""
    options = {"teacher": old["teacher"], "pruned": old["pruned"], "bits": 4, "text_column": "a/b"}
    begun = {"run": old["from"], "checkpoint": "train-4", "digest": "0"}
    fields: dict[str, Any] = {"model": old["model"], "tokenizer": old["tokenizer"], "starts_from": begun}
    recipe = Recipe(task="qat", options=options, **fields)
    here = recipe_here(recipe, str(tmp_path / "new" / base))
    new = old | {moved: f"{tmp_path}/new/gone{'' if moved == 'from' else '/final'}"}
    assert here.options == options | {name: new[name] for name in ("teacher", "pruned")}
    found = here.model, here.tokenizer, here.starts_from
    assert found == (new["model"], new["tokenizer"], {**begun, "run": new["from"]})
    assert recipe_here(dataclasses.replace(recipe, model="tiny"), str(tmp_path / "new")).model == "tiny"


def test_one_model_does_not_stand_for_two(tmp_path: Path) -> None:
    recipe = Recipe(task="qat", model=f"{tmp_path}/a/final", options={"teacher": f"{tmp_path}/b"})
    (tmp_path / "new" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no b: give a folder that holds a, b by these names"):
        recipe_here(recipe, str(tmp_path / "new"))


@pytest.mark.parametrize(
    ("task", "gone"),
    [("classifier", "model"), ("causal-lm", "model"), ("pruning", "teacher"), ("causal-lm", "from")],
)
def test_what_is_gone_is_said_in_a_line_before_a_step_is_redone(task: str, gone: str, tmp_path: Path) -> None:
    recipe, _ = complete(task, {"steps": 2})
    facts, place = prepare(workload(task).make(recipe)[1]), str(tmp_path / "gone")
    changes: dict[str, Any] = {
        "model": {"model": place},
        "teacher": {"options": recipe.options | {"teacher": place}},
        "from": {"starts_from": {"run": place, "checkpoint": "train-4", "digest": "0"}},
    }
    recipe = dataclasses.replace(recipe, **changes[gone])
    run = RunFolder.create(tmp_path / "run", recipe, facts, RunOptions())
    run.plan = plan()
    with pytest.raises(UserError, match=f"{place}.*; where it has moved, --base PLACE of `verify`, `replay`"):
        plan_to_redo(run, 1)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, models and the run and receipt of an adapter that was trained on them."""
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "d" / "texts").mkdir(parents=True)
    write_stories(folder / "d" / "texts" / "train.txt")
    for seed, name in enumerate(("lm", "big")):
        save_gpt2(folder / "m" / name, 300, seed)
        (folder / "m" / name / "README.md").write_text("---\nlicense: mit\n---\n")
    with contextlib.chdir(folder):
        places = {"data": "d/texts", "model": "m/lm", "teacher": str(folder / "m" / "big")}
        sizes = {"steps": 2, "batch_size": 4, "max_length": 16}
        recipe = isobatch.Recipe(task="causal-lm", **places, **sizes, adapter="lora")
        isobatch.train(recipe, name="adapted", quiet=True)
        assert receipt(["runs/adapted", "--out", "receipt.json"]) == 0
    return folder


@pytest.mark.parametrize("moved", ["m/lm", "d/texts", "m/lm m/big d/texts"])
def test_a_receipt_holds_where_what_it_begins_with_has_moved(
    moved: str, adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its card, export, steps and metrics."""
    monkeypatch.chdir(adapted)
    for place in moved.split():
        shutil.move(place, tmp_path)
    try:
        data = str(tmp_path / "texts") if "texts" in moved else None
        options = {"run": "runs/adapted", "base": str(tmp_path), "data": data, "trust": True}
        assert audited(Path("receipt.json"), **options).problems == []
    finally:
        for place in moved.split():
            shutil.move(tmp_path / Path(place).name, place)


def test_verify_and_replay_take_what_has_moved(adapted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adapted)
    Path("m").rename("moved")
    try:
        with isobatch.replay("runs/adapted", 2, base="moved") as (_, batch, _):
            assert len(batch["index"]) == 4
        report = isobatch.verify("runs/adapted", base="moved")
        assert (report.problems, report.unproven) == ([], [])
    finally:
        Path("moved").rename("m")


def with_export(made: Fixtures, folder: Path) -> tuple[RunFolder, Path]:
    """A copy of the run with a form that was exported and chosen, and its receipt."""
    run = RunFolder(shutil.copytree(made.run, folder / "copy"))
    for place in ("exports/onnx", "chosen"):
        (run.folder / place).mkdir(parents=True)
        (run.folder / place / "config.json").write_text('{"threshold": 0.9}')
        run.record_export(run.folder / place)
    assert receipt([str(run.folder)]) == 0
    return run, run.folder / "receipt.json"


@pytest.mark.parametrize("place", ["exports/onnx", "chosen"])
def test_what_is_served_is_in_verify_and_in_the_receipt(place: str, made: Fixtures, tmp_path: Path) -> None:
    run, file = with_export(made, tmp_path)
    honest = audited(file)
    assert honest.problems == []
    assert not any(place in said for said in honest.unknown)
    served = run.folder / place
    (served / "config.json").write_text('{"threshold": 0.1}')
    report = verify_run(run, VerifyOptions(level="records"))
    assert report["problems"] == [f"missing, changed or added since the run wrote it: {place}/config.json"]
    run.record_export(served)  # who changes the record too is found by the receipt
    assert verify_run(run, VerifyOptions(level="records"))["problems"] == []
    assert audited(file).problems == [f"{run.folder} says otherwise: {place}"]
    served.with_name(f"{served.name}.json").unlink()
    assert audited(file).problems == [f"{run.folder} says otherwise: {place}"]
    trusted = verify_run(run, VerifyOptions(level="records"))["trusted"]
    assert f"{place}/, of which there is no record" in trusted
    shutil.rmtree(served)
    assert f"{place}/, which is not here" in audited(file).unknown


@pytest.mark.parametrize("chosen", ["exports/onnx", "final", "another stage"])
def test_a_receipt_says_where_the_chosen_model_is_another_stages(chosen: str, made: Fixtures) -> None:
    content = json.loads(made.file.read_text())
    content["exports"] = {"exports/onnx": {"model.onnx": "1" * 64, "config.json": "2" * 64}}
    known = {**content["exports"], "final": content["final"], "another stage": {"model.onnx": "3" * 64}}
    assert receipts.chosen_elsewhere(content) == ""
    content["exports"]["chosen"] = known[chosen]
    said = receipts.chosen_elsewhere(content)
    assert said.startswith("chosen/ is another stage's model") == (chosen == "another stage") == bool(said)
    content["exports"]["chosen"] = {"model.onnx": ["3"]}
    assert not receipts.has_form(content)


def new_key(folder: Path, name: str) -> Path:
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


def test_a_signature_says_who(made: Fixtures, tmp_path: Path) -> None:
    key, stranger = new_key(tmp_path, "key"), new_key(tmp_path, "stranger")
    signers = tmp_path / "signers"
    signers.write_text(f'ann@lab namespaces="isobatch" {key.with_suffix(".pub").read_text()}')
    file = tmp_path / "signed.json"
    assert receipt([str(made.run), "--out", str(file), "--sign", str(key)]) == 0
    assert "signed by ann@lab" in audited(file, signers=str(signers)).checked
    with pytest.raises(UserError, match="is a public key, and no line of allowed_signers: write a name"):
        audited(file, signers=str(key.with_suffix(".pub")))
    assert "--signers FILE" in audited(file).unknown[0]
    text = file.read_text()
    file.write_text(text.replace('"seed": 0', '"seed": 0 '))
    assert "the signature: " in audited(file, signers=str(signers)).problems[0]
    assert receipt([str(made.run), "--out", str(file), "--sign", str(stranger)]) == 0
    assert "its key is none of those in" in audited(file, signers=str(signers)).problems[0]
    assert "it is not signed" in audited(made.file, signers=str(signers)).problems[0]
    with pytest.raises(UserError, match=r"--sign .*nokey: "):
        receipt([str(made.run), "--out", str(tmp_path / "none.json"), "--sign", str(tmp_path / "nokey")])
    assert not (tmp_path / "none.json").exists()


MALFORMED: dict[str, Callable[[Content], Any]] = {
    "steps are no list": put("steps", {}),
    "a huge loss": put("steps/0/loss", 10**400),
    "no finite norm": put("steps/0/grad_norm", float("nan")),
    "a step as a bool": put("steps/0/step", True),
    "one more figure": lambda content: content["steps"][0].update(accuracy=1.0),
    "steps of no phase": put("steps/0/phase", "other"),
    "half a step": put("phases/train", 11.5),
    "a stretch from before": leaves_out(-5, 10**12),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_no_run_writes_is_no_receipt(name: str, made: Fixtures, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no receipt that this version knows"):
        audited(edited(made, tmp_path, MALFORMED[name]))


def test_steps_that_were_not_logged_are_no_gap(tmp_path: Path) -> None:
    recipe = isobatch.Recipe(task=TASK, steps=STEPS)
    run = isobatch.train(recipe, out=tmp_path, name="sparse", save_every=4, log_every=5, quiet=True).folder
    file = tmp_path / "receipt.json"
    assert receipt([str(run), "--out", str(file)]) == 0
    assert [row["step"] for row in json.loads(file.read_text())["steps"]] == [1, 5, 10, 12]
    found = audited(file, steps=5)
    assert found.problems == []
    assert "2 steps from the beginning" in found.checked[1] or "3 steps from" in found.checked[1]


@pytest.mark.parametrize("text", ["", "[]", '{"receipt": 1, "recipe": {"task": 3}}', "[" * 100_000])
def test_what_is_no_receipt_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    file.write_text(text)
    with pytest.raises(UserError, match="is no receipt that this version knows"):
        audit_receipt(file, AuditOptions())
    with pytest.raises(UserError, match="there is no such file; `isobatch receipt make RUN` writes one"):
        audit_receipt(tmp_path / "none.json", AuditOptions())


def test_a_long_run_has_a_small_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MOST_STEPS", 100)
    kept = [
        step for _, step in receipts.places_due({"phases": {"train": 1000}, "log_every": [], "left_out": []})
    ]
    assert len(kept) <= 100
    assert kept[:64] == list(range(1, 65))
    assert kept[-1] == 1000
