"""The sequence VAE from data to verdict: collapse, remedy, resume, verify, worlds, commands."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import isobatch
from isobatch.core.errors import TrainingError
from isobatch.tests.integration.helpers import launch, predictions, resumed_from, rows, succeed, summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL: dict[str, Any] = {"hidden": 32, "latent": 8, "batch_size": 16, "max_length": 16, "lr": 3e-3}
NOISY = {"word_dropout": 0.2, "dropout": 0.3, "layers": 2}
"""All the noise that there is."""


def write_splits(folder: Path, draw: Callable[[np.random.Generator, int], np.ndarray]) -> Path:
    """800 training and 60 validation sequences of 4 to 14 numbers below 20: `draw(generator, length)`."""
    for split, count, seed in (("train", 800, 1), ("valid", 60, 2)):
        generator = np.random.default_rng(seed)
        found = [draw(generator, length).tolist() for length in generator.integers(4, 15, count)]
        lines = [json.dumps({"tokens": tokens}) for tokens in found]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Walks from one of five starts, of which a latent vector can tell something."""
    return write_splits(
        tmp_path_factory.mktemp("walks"),
        lambda generator, length: (
            (4 * generator.integers(5) + np.cumsum(generator.integers(0, 3, length))) % 20
        ),
    )


@pytest.fixture(scope="module")
def unrelated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers that have nothing to do with each other: a latent vector is not worth its cost."""
    return write_splits(
        tmp_path_factory.mktemp("unrelated"), lambda generator, length: generator.integers(0, 20, length)
    )


def train(data: Path, out: Path, recipe: dict[str, Any], **options: Any) -> isobatch.Run:
    out.mkdir(exist_ok=True)
    values = {"task": "sequence-vae", "data": data, "out": out, "name": "run", **SMALL, **recipe, **options}
    succeed("auto", *(f"--{k.replace('_', '-')}={v}" for k, v in values.items()), "--quiet", cwd=out)
    return isobatch.load(out / "run")


def reports(run: isobatch.Run) -> list[dict[str, Any]]:
    return [row for row in run.history if "verdict" in row]


def test_a_plain_vae_collapses_and_the_monitor_says_so(unrelated: Path, tmp_path: Path) -> None:
    run = train(unrelated, tmp_path, {"epochs": 4})
    found = reports(run)
    assert (run.metrics["kl"] < 0.1, run.metrics["active_units"]) == (True, 0)
    assert run.metrics["collapsed"] is True
    assert found[-1]["verdict"] == "collapsed"
    assert "try --free-bits 2, --kl-schedule cyclical" in found[-1]["verdict_says"]
    decided = [d for d in rows(run.folder, "decisions.jsonl") if d["decision"] == "posterior"]
    assert decided[-1]["state"] == "collapsed"
    assert run.metrics["mutual_information"] < 0.05
    assert run.metrics["mutual_information_ceiling"] == pytest.approx(math.log(60))


@pytest.mark.slow
def test_a_remedy_is_switched_on_and_verified(unrelated: Path, tmp_path: Path) -> None:
    """Steps after the remedy are redone from a checkpoint before it: they meet it again."""
    run = train(unrelated, tmp_path, {"epochs": 5, "on_collapse": "remedy"}, save_every="25", keep=100)
    (decision,) = [d for d in rows(run.folder, "decisions.jsonl") if "remedy" in d]
    step = decision["step"]
    assert decision["free_bits"] == 2.0
    assert run.metrics["kl"] > 5 * decision["kl"]
    found = isobatch.verify(run, steps=25)  # from every checkpoint as far as the next
    assert found, found.problems + found.unproven
    terms = [row["kl_term"] for row in run.history if "kl_term" in row]
    assert terms[step - 1] < 1.0
    assert all(term >= 2.0 - 1e-6 for term in terms[step:])


def test_a_collapse_may_end_the_run(unrelated: Path, tmp_path: Path) -> None:
    values = {**SMALL, "data": unrelated, "epochs": 4, "on_collapse": "stop", "name": "stopped"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    done = launch("auto", "--task", "sequence-vae", *words, cwd=tmp_path)
    assert done.returncode == TrainingError.exit_code == 3
    assert "isobatch: the posterior has collapsed (step " in done.stderr
    run = tmp_path / "runs" / "stopped"
    assert rows(run)[-1]["verdict"] == "collapsed"
    assert rows(run, "decisions.jsonl")[-1]["state"] == "collapsed"


@pytest.mark.parametrize(
    ("backbone", "plans"),
    [
        ("gru", [{"micro_batch": 3, "processes": 2}]),
        pytest.param("transformer", [{"micro_batch": 3}], marks=pytest.mark.slow),
        pytest.param("gru", [{"micro_batch": 3}, {"processes": 3}], marks=pytest.mark.slow),
        pytest.param("transformer", [{"processes": 2}, {"processes": 3}], marks=pytest.mark.slow),
    ],
)
def test_any_world_and_micro_batch_learns_and_sees_the_same(
    backbone: str, plans: list[dict[str, Any]], sequences: Path, tmp_path: Path
) -> None:
    """Losses, and the monitor's figures, with the VAE's own noise and word dropout on."""
    recipe = {"steps": 40, "backbone": backbone, **NOISY}
    alone, *others = (
        train(sequences, tmp_path / str(number), recipe, **plan) for number, plan in enumerate([{}, *plans])
    )
    first = [row for row in alone.history if "lr" in row]
    assert len(first) == 40
    for run in others:
        assert run.metrics["loss"] == pytest.approx(alone.metrics["loss"], abs=1e-4)
        for ours, theirs in zip((r for r in run.history if "lr" in r), first, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
            assert ours["kl"] == pytest.approx(theirs["kl"], abs=1e-4)
        for ours, theirs in zip(reports(run), reports(alone), strict=True):
            for name in ("window_kl", "window_reconstruction", "mutual_information", "kl_per_dimension"):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-4)
            assert ours["active_units"] == theirs["active_units"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_sharded_transformer_compares_alike(strategy: str, sequences: Path, tmp_path: Path) -> None:
    recipe = {"steps": 100, "backbone": "transformer"}
    alone = train(sequences, tmp_path / "alone", recipe)
    sharded = train(sequences, tmp_path / "sharded", recipe, processes=2, strategy=strategy)
    ours, theirs = reports(sharded)[-1], reports(alone)[-1]
    for name in ("window_kl", "mutual_information"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-4)


def test_resume_is_exact_and_takes_the_window_along(sequences: Path, tmp_path: Path) -> None:
    recipe = {"steps": 100, **NOISY}
    whole = train(sequences, tmp_path, recipe, save_every="30", keep=10)
    broken = resumed_from(whole.folder, 30)
    assert summary(broken)["resumed_from"] == "vae-30"
    names = ("loss", "kl", "window_kl", "mutual_information")
    one, other = (
        [[row.get(name) for name in names] for row in rows(folder) if "lr" in row]
        for folder in (whole.folder, broken)
    )
    assert one == other
    assert any(row[-1] for row in one)


def test_the_commands_of_a_latent_space(sequences: Path, tmp_path: Path) -> None:
    recipe = {"steps": 60, "free_bits": 3.0, "monitor": "fast"}
    run = train(sequences, tmp_path, recipe, save_every="48", keep=10).folder
    assert isobatch.verify(run)  # redoes steps that the monitor begins to watch
    shown = launch("reconstruct", str(run), "4 5 7 8", "--tokens", "6", "--json", cwd=tmp_path)
    found = json.loads(shown.stdout)
    assert found["text"] == "4 5 7 8"
    assert all(0 <= int(word) < 20 for word in found["reconstruction"].split())
    shown = launch("interpolate", str(run), "4 5 7", "12 13 15", "--count", "4", cwd=tmp_path)
    assert len(shown.stdout.splitlines()) == 4
    first, again, other = (
        launch("sample", str(run), "--seed", seed, cwd=tmp_path).stdout for seed in ("1", "1", "2")
    )
    assert first == again != other
    shown = launch("reconstruct", str(run), "4 99", cwd=tmp_path)
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    texts = ["4 5 7 8", "4", "12 13 15 15 16 17"]
    codes = predictions(tmp_path, str(run), *texts)
    for text, code in zip(texts, codes, strict=True):
        assert len(code["latent"]) == SMALL["latent"]
        assert predictions(tmp_path, str(run), text)[0]["latent"] == pytest.approx(code["latent"], abs=1e-5)
    plots = sorted(file.name for file in (run / "plots").iterdir())
    assert plots == ["posterior-over-the-steps.png", "training.png"]
