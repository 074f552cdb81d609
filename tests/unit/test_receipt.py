"""Tests of `receipt` and `audit`: an honest receipt holds, and each forgery is found by what it touches."""

from __future__ import annotations

import json
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
from isobatch.launch.forensics.receipt import AuditOptions, Finding, audit, audit_receipt, receipt
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.tests.paths import ROOT

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


def test_in_the_runs_folder_it_is_held_against_the_run(made: Fixtures, tmp_path: Path) -> None:
    run = shutil.copytree(made.run, tmp_path / "copy")
    assert receipt([str(run)]) == 0
    assert audited(run / "receipt.json").problems == []


def other_loss(content: Content) -> None:
    content["steps"][1]["loss"] -= 0.1


def other_rate(content: Content) -> None:
    content["recipe"]["lr"] = 0.3
    content["recipe_hash"] = Recipe.from_dict(content["recipe"]).hash()


def other_decay(content: Content) -> None:
    """With a true hash: samples and rates stay, and the second step's loss is another."""
    content["recipe"]["weight_decay"] = 300.0
    content["recipe_hash"] = Recipe.from_dict(content["recipe"]).hash()


def other_seed(content: Content) -> None:
    content["recipe"]["seed"] = 1
    content["recipe_hash"] = Recipe.from_dict(content["recipe"]).hash()


def other_hash(content: Content) -> None:
    content["recipe"]["lr"] = 0.3


def other_chain(content: Content) -> None:
    content["steps"][7]["chain"] = "0" * 16


def fewer_samples(content: Content) -> None:
    content["steps"][7]["samples"] -= 1


def fewer_steps(content: Content) -> None:
    content["phases"]["train"] = 8


def more_steps(content: Content) -> None:
    content["phases"]["train"] = 20


def other_data(content: Content) -> None:
    content["facts"]["fingerprint"] = "0" * 16


def leaves_out(first: int, last: int) -> Callable[[Content], None]:
    def forge(content: Content) -> None:
        row = {
            "decision": "leave out steps",
            "of": "train",
            "first": first,
            "last": last,
            "reason": "asked for",
        }
        content["left_out"].append(row)

    return forge


def leaves_all_out(content: Content) -> None:
    leaves_out(1, 12)(content)
    content["steps"] = []


def no_figures(content: Content) -> None:
    content["steps"] = []


def last_figures_only(content: Content) -> None:
    del content["steps"][:-1]


def first_figures_only(content: Content) -> None:
    del content["steps"][3:]


def figures_twice(content: Content) -> None:
    content["steps"].insert(1, content["steps"][0])


def looser_class(content: Content) -> None:
    """Of which a wrong loss would be within the tolerance."""
    content["plan"]["invariance"] = "noise"
    content["steps"][1]["loss"] += 0.05


def other_lengths(content: Content) -> None:
    content["facts"]["lengths"][0] += 1


@pytest.mark.parametrize(
    ("forge", "found"),
    [
        (other_loss, "step 2: loss"),
        (other_rate, "step 1: the learning rate is not the recipe's"),
        (other_decay, "step 2: loss"),
        (other_seed, "step 1: the samples are not those of recipe and data"),
        (other_hash, "its recipe hashes to"),
        (other_chain, "step 8: the samples are not those"),
        (fewer_samples, "step 8: the samples are not those"),
        (fewer_steps, "it claims 8 steps, and the recipe has 12"),
        (more_steps, "it claims 20 steps, and the recipe has 12"),
        (other_data, "the data here is not the receipt's: fingerprint"),
        (other_lengths, "the data here is not the receipt's: lengths differs"),
        (leaves_out(5, 5), "step 5: it has figures of a step that has none"),
        (leaves_out(12, 10**12), "step 12: it has figures of a step that has none"),
        (leaves_all_out, "it leaves out every step"),
        (no_figures, "step 1: it lacks the figures of this step"),
        (last_figures_only, "step 1: it lacks the figures of this step"),
        (first_figures_only, "step 4: it lacks the figures of this step"),
        (figures_twice, "it has the figures of a step twice"),
        (looser_class, "plan.json says noise, and this recipe and precision are exact"),
    ],
)
def test_a_forgery_is_found_without_the_run(
    forge: Callable[[Content], None], found: str, made: Fixtures, tmp_path: Path
) -> None:
    problems = audited(edited(made, tmp_path, forge), trust=True).problems
    assert any(found in problem for problem in problems), problems


def later_loss(content: Content) -> None:
    content["steps"][8]["loss"] -= 0.1


def better_metric(content: Content) -> None:
    content["metrics"]["valid"]["loss"] -= 0.1


def other_checkpoint(content: Content) -> None:
    name = next(iter(content["checkpoints"]))
    content["checkpoints"][name] = "0" * 32


def other_export(content: Content) -> None:
    name = next(iter(content["final"]))
    content["final"][name] = "0" * 64


def other_seal(content: Content) -> None:
    content["seals"][-1][2] = "0" * 32


def looser_plan(content: Content) -> None:
    content["plan"]["invariance"] = "noise"


@pytest.mark.parametrize(
    ("forge", "part"),
    [
        (later_loss, "steps"),
        (better_metric, "metrics"),
        (other_checkpoint, "checkpoints"),
        (other_export, "final"),
        (other_seal, "seals"),
        (looser_plan, "plan"),
    ],
)
def test_a_forgery_is_found_against_the_run(
    forge: Callable[[Content], None], part: str, made: Fixtures, tmp_path: Path
) -> None:
    problems = audited(edited(made, tmp_path, forge), run=str(made.run)).problems
    assert problems == [f"{made.run} says otherwise: {part}"]


def test_another_run_is_not_taken_for_it(made: Fixtures) -> None:
    assert "is another run" in audited(made.file, run=str(made.other)).problems[0]


def test_a_run_that_was_changed_has_no_receipt(made: Fixtures, tmp_path: Path) -> None:
    run = shutil.copytree(made.run, tmp_path / "copy")
    (run / "final" / "model.safetensors").write_bytes(b"")
    with pytest.raises(TrainingError, match="is not what its recipe says"):
        receipt([str(run)])
    assert any("final/ is not what the run wrote" in p for p in audited(made.file, run=str(run)).problems)


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
    unnamed = audited(file)
    assert unnamed.checked[0].startswith("signed with the key SHA256:")
    assert "whose key that is" in unnamed.unknown[0]
    text = file.read_text()
    file.write_text(text.replace('"seed": 0', '"seed": 0 '))
    assert "the signature: " in audited(file, signers=str(signers)).problems[0]
    assert receipt([str(made.run), "--out", str(file), "--sign", str(stranger)]) == 0
    assert "its key is none of those in" in audited(file, signers=str(signers)).problems[0]
    assert "it is not signed" in audited(made.file, signers=str(signers)).problems[0]
    with pytest.raises(UserError, match=r"--sign .*nokey: "):
        receipt([str(made.run), "--out", str(file), "--sign", str(tmp_path / "nokey")])


def without_steps_as_a_list(content: Content) -> None:
    content["steps"] = {}


def a_huge_loss(content: Content) -> None:
    content["steps"][0]["loss"] = 10**400


def no_finite_norm(content: Content) -> None:
    content["steps"][0]["grad_norm"] = float("nan")


def step_as_a_float(content: Content) -> None:
    content["steps"][0]["step"] = 1.0


def step_as_a_bool(content: Content) -> None:
    content["steps"][0]["step"] = True


def one_more_part(content: Content) -> None:
    content["remark"] = "trust me"


def one_more_figure(content: Content) -> None:
    content["steps"][0]["accuracy"] = 1.0


def steps_of_no_phase(content: Content) -> None:
    content["steps"][0]["phase"] = "other"


def half_a_phase(content: Content) -> None:
    content["phases"]["train"] = 11.5


@pytest.mark.parametrize(
    "malform",
    [
        *(without_steps_as_a_list, a_huge_loss, no_finite_norm, step_as_a_float, step_as_a_bool),
        *(one_more_part, one_more_figure, steps_of_no_phase, half_a_phase, leaves_out(-5, 10**12)),
        leaves_out(7, 5),
    ],
)
def test_what_no_run_writes_is_no_receipt(
    malform: Callable[[Content], None], made: Fixtures, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is no receipt that this version knows"):
        audited(edited(made, tmp_path, malform))


def test_no_more_steps_are_made_again_than_there_are(made: Fixtures) -> None:
    assert audited(made.file, steps=99_999).checked[1].startswith("12 steps from the beginning made again")


def test_steps_that_were_left_out_and_not_logged_are_no_gap(tmp_path: Path) -> None:
    recipe = isobatch.Recipe(task=TASK, steps=STEPS)
    run = isobatch.train(recipe, out=tmp_path, name="sparse", save_every=4, log_every=5, quiet=True).folder
    file = tmp_path / "receipt.json"
    assert receipt([str(run), "--out", str(file)]) == 0
    assert [row["step"] for row in json.loads(file.read_text())["steps"]] == [1, 5, 10, 12]
    found = audited(file, steps=5)
    assert found.problems == []
    assert "2 steps from the beginning" in found.checked[1] or "3 steps from" in found.checked[1]


def test_a_bad_key_leaves_no_receipt_behind(made: Fixtures, tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    with pytest.raises(UserError, match="nokey: "):
        receipt([str(made.run), "--out", str(file), "--sign", str(tmp_path / "nokey")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"receipt": 1}', '{"receipt": 1, "recipe": {"task": 3}}'])
def test_what_is_no_receipt_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"is no JSON|is no receipt that this version knows"):
        audit_receipt(file, AuditOptions())
    with pytest.raises(UserError, match="there is no such file; `isobatch receipt make RUN` writes one"):
        audit_receipt(tmp_path / "none.json", AuditOptions())


def test_a_long_run_has_a_small_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MOST_STEPS", 100)
    kept = [step for _, step in receipts._thinned([("train", n) for n in range(1, 1001)])]  # noqa: SLF001
    assert len(kept) <= 100
    assert kept[:64] == list(range(1, 65))
    assert kept[-1] == 1000
