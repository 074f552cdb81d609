"""Tests of launch/local/words.py: flags from files below those that were typed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from isobatch.core.errors import UserError
from isobatch.engine.registry import TASKS
from isobatch.launch.commands.auto import auto
from isobatch.launch.local.arguments import Request, parse_request, parse_sweep, request_text, task_name
from isobatch.tests.integration.helpers import succeed

if TYPE_CHECKING:
    from pathlib import Path


def ask(*words: str) -> Request:
    return parse_request(words, "auto")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        """
        # a run of ours
        task: causal-lm
        num_epochs: [3]      # another tool's word
        lr: 1e-3
        bf16: true
        micro-batch: 4
        name: 007
        model:
        """.replace("\n        ", "\n")
    )
    return file


def test_a_file_holds_flags_as_they_would_be_typed(config: Path) -> None:
    typed = ["--epochs", "3", "--lr", "1e-3", "--bf16", "--micro-batch", "4", "--name", "007"]
    assert ask("--config", str(config)) == ask("--task", "causal-lm", *typed)
    assert task_name(["--config", str(config)]) == "causal-lm"


def test_what_is_typed_comes_before_the_file_in_any_words(config: Path) -> None:
    found = ask(
        "--config", str(config), "--max-epochs", "5", "--precision", "fp32", "--learning-rate", "2e-3"
    )
    assert found == ask(
        "--task", "causal-lm", "--epochs", "5", "--precision", "fp32", "--lr", "2e-3", "--micro-batch", "4",
        "--name", "007",
    )  # fmt: skip
    assert ask("--config", str(config), "--steps", "9").recipe.epochs is None


@pytest.mark.parametrize("task", [name for name in TASKS if name != "qat"])
def test_what_dump_config_prints_is_the_same_request(task: str, tmp_path: Path) -> None:
    words = ["--task", task, "--seed", "7", "--eval-every", "0.5ep", "--processes", "2", "--name", "a: b #c"]
    wanted = ask(*words)
    file = tmp_path / "dumped.yaml"
    file.write_text(request_text(wanted))
    found = ask("--config", str(file))
    assert (found.recipe, found.plan, found.run) == (wanted.recipe, wanted.plan, wanted.run)


@pytest.mark.parametrize("task", ["causal-lm", "recommender", "sequence-vae"])
def test_a_run_is_a_file_of_flags(task: str, tmp_path: Path) -> None:
    wanted = ask("--task", task, "--lr", "1.7e-4", "--steps", "12", "--fast").recipe
    (tmp_path / "recipe.json").write_text(json.dumps({**wanted.to_dict(), "hash": wanted.hash()}))
    assert ask("--like", str(tmp_path)).recipe.hash() == wanted.hash()
    assert ask("--config", str(tmp_path / "recipe.json")).recipe.hash() == wanted.hash()
    longer = ask("--like", str(tmp_path), "--epochs", "2").recipe
    assert (longer.steps, longer.epochs, longer.lr) == (None, (2.0,), 1.7e-4)


@pytest.mark.parametrize("source", ["--like", "--from", "--config", "dumped"])
@pytest.mark.parametrize("word", ["--preset=sequence", "--mode=fast", "--fast"])
def test_a_set_of_defaults_is_refused_where_a_whole_recipe_says_it_all(
    source: str, word: str, tmp_path: Path
) -> None:
    wanted = ask("--task", "recommender", "--preset", "ids").recipe
    (tmp_path / "recipe.json").write_text(json.dumps({**wanted.to_dict(), "hash": wanted.hash()}))
    (tmp_path / "dumped.yaml").write_text(request_text(ask("--task", "recommender", "--preset", "ids")))
    file = {"--config": "recipe.json", "dumped": "dumped.yaml"}.get(source, "")
    source, place = source.replace("dumped", "--config"), str(tmp_path / file)
    with pytest.raises(UserError, match="has a value for each, so"):
        ask(source, place, word)
    if source != "--from":
        assert ask(source, place, "--preset", "ids", "--mode", "full").recipe.hash() == wanted.hash()


def test_a_run_without_options_is_no_file_of_flags(tmp_path: Path) -> None:
    """Else what it names would count as typed."""
    (tmp_path / "recipe.json").write_text('{"task": "causal-lm", "data": "/somebody/elses.txt", "hash": ""}')
    with pytest.raises(UserError, match="would read places that this user has not named here: data"):
        ask("--like", str(tmp_path))


def test_a_received_folder_runs_no_code_by_another_form_of_its_recipe(tmp_path: Path) -> None:
    """Without `options` its file would be flags as if typed, and nobody asked about the code they name."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "recipe.json").write_text(json.dumps({"task": f"{tmp_path / 'own.py'}:Line"}))
    for source in ("--like", "--from"):
        with pytest.raises(UserError, match="code"):
            ask(source, str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_length_that_is_typed_replaces_all_that_a_run_had_of_it(tmp_path: Path) -> None:
    wanted = ask("--task", "recommender", "--preset", "ids").recipe
    assert wanted.least_steps == 1800
    (tmp_path / "recipe.json").write_text(json.dumps({**wanted.to_dict(), "hash": wanted.hash()}))
    for words in (("--steps", "1200"), ("--epochs", "2")):
        assert ask("--like", str(tmp_path), *words).recipe.least_steps == 0


def test_a_file_may_hold_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("task: causal-lm\nlr: [1e-3, 3e-3]\nseed: 0-1\nepochs: [2]\n")
    points = parse_sweep(["--config", str(tmp_path / "s.yaml")], "auto")
    assert [(r.recipe.lr, r.recipe.seed) for r, _ in points] == [(1e-3, 0), (1e-3, 1), (3e-3, 0), (3e-3, 1)]


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("learning_rte: 3", ("--task", "qat"), "has no such flag (did you mean --learning-rate?)"),
        ("lr: 1: 2", ("--task", "qat"), "cannot be read: mapping values are not allowed here"),
        ("a list", ("--task", "qat"), "holds no lines such as lr: 1e-3"),
        ("lr: {a: 1}", ("--task", "qat"), "lr: holds names of its own"),
        ("task: qta", (), "did you mean qat?"),
        ("lr: 1e-3", ("--task", "qat", "--like", "runs"), "--config and --like both say"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        ask("--config", str(tmp_path / "c.yaml"), *words)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"), [("lerning_rate: 3", "did you mean --learning-rate?"), ("bits: 9", "--bits 9")]
)
def test_a_chain_reads_a_file_of_flags(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"task: compress\nepochs: 1\n{text}\n")
    with pytest.raises(UserError) as refused:
        auto(["--config", str(tmp_path / "c.yaml"), "--num_epochs", "2"])
    assert said in str(refused.value)


def test_the_version_names_the_libraries(tmp_path: Path) -> None:
    said = succeed("--version", cwd=tmp_path).stdout
    assert said.startswith("isobatch ")
    assert "torch" in said


def test_dump_config_and_dry_run_train_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert auto(["--task", "causal-lm", "--dump-config"]) == 0
    assert "batch_size: 16 " in capsys.readouterr().out
    assert auto(["--task", "causal-lm", "--dry-run"]) == 0
    assert "memory     fits: " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
