"""The sequence VAE from data to verdict: collapse, remedy, resume, verify, worlds, commands."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import isobatch
from isobatch.core.errors import TrainingError
from isobatch.tests.integration.helpers import launch, rows, summary

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {"hidden": 32, "latent": 8, "batch_size": 16, "max_length": 16, "lr": 3e-3}
NOISY = {"word_dropout": 0.2, "dropout": 0.3, "layers": 2}
"""All the noise that there is."""


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Walks over 20 numbers from one of five starts: a decoder predicts them well without a latent vector."""
    folder = tmp_path_factory.mktemp("sequences")
    for split, count, seed in (("train", 800, 1), ("valid", 60, 2)):
        generator = np.random.default_rng(seed)
        lines = []
        for length in generator.integers(4, 15, count):
            walk = (4 * generator.integers(5) + np.cumsum(generator.integers(0, 3, length))) % 20
            lines.append(json.dumps({"tokens": walk.tolist()}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def train(data: Path, out: Path, recipe: dict[str, Any], **options: Any) -> isobatch.Run:
    made = isobatch.Recipe(task="sequence-vae", data=str(data), **{**SMALL, **recipe})
    return isobatch.train(made, out=out, quiet=True, **options)


def reports(run: isobatch.Run) -> list[dict[str, Any]]:
    return [row for row in run.history if "verdict" in row]


def test_a_plain_vae_collapses_and_the_monitor_says_so(sequences: Path, tmp_path: Path) -> None:
    run = train(sequences, tmp_path, {"epochs": 4})
    found = reports(run)
    assert (run.metrics["kl"] < 0.1, run.metrics["active_units"]) == (True, 0)
    assert found[-1]["verdict"] == "collapsed"
    assert "try --free-bits 2, --kl-schedule cyclical" in found[-1]["verdict_says"]
    decided = [d for d in rows(run.folder, "decisions.jsonl") if d["decision"] == "posterior"]
    assert decided[-1]["state"] == "collapsed"
    assert run.metrics["mutual_information"] < 0.05
    assert run.metrics["mutual_information_ceiling"] == pytest.approx(math.log(60))


@pytest.mark.parametrize("remedy", [{"free_bits": 3.0}, {"kl_schedule": "cyclical", "beta": 0.5}])
def test_with_a_remedy_it_stays_healthy(remedy: dict[str, Any], sequences: Path, tmp_path: Path) -> None:
    run = train(sequences, tmp_path, {"epochs": 4, **remedy})
    assert {row["verdict"] for row in reports(run)} <= {"starting", "healthy"}
    assert run.metrics["active_units"] > 0
    assert run.metrics["kl"] > 0.5


def test_a_remedy_is_switched_on_and_verified(sequences: Path, tmp_path: Path) -> None:
    """Steps after the remedy are redone from a checkpoint before it: they meet it again."""
    run = train(sequences, tmp_path, {"epochs": 6, "on_collapse": "remedy"}, save_every="10", keep=100)
    (decision,) = [d for d in rows(run.folder, "decisions.jsonl") if "remedy" in d]
    step = decision["step"]
    assert decision["free_bits"] == 2.0
    assert run.metrics["kl"] > 1.5
    assert run.metrics["active_units"] > 0
    for folder in (
        run.folder / "checkpoints"
    ).iterdir():  # `verify` begins at the newest that has steps after
        if int(folder.name.rpartition("-")[2]) > step - 10:
            shutil.rmtree(folder)
    assert isobatch.verify(run, steps=15)
    terms = [row["kl_term"] for row in run.history if "kl_term" in row]
    assert terms[step - 1] < 1.0
    assert all(term >= 2.0 - 1e-6 for term in terms[step:])


def test_a_collapse_may_end_the_run(sequences: Path, tmp_path: Path) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    more = ["--epochs", "4", "--on-collapse", "stop", "--name", "stopped"]
    done = launch("auto", "--task", "sequence-vae", "--data", str(sequences), *words, *more, cwd=tmp_path)
    assert done.returncode == TrainingError.exit_code == 3
    assert "isobatch: the posterior has collapsed (step " in done.stderr
    run = tmp_path / "runs" / "stopped"
    assert rows(run)[-1]["verdict"] == "collapsed"
    assert rows(run, "decisions.jsonl")[-1]["state"] == "collapsed"


@pytest.mark.parametrize("backbone", ["gru", "transformer"])
def test_any_world_and_micro_batch_learns_and_sees_the_same(
    backbone: str, sequences: Path, tmp_path: Path
) -> None:
    """Losses, and the monitor's figures, with the VAE's own noise and word dropout on."""
    recipe = {"steps": 60, "backbone": backbone, **NOISY}
    plans = [{"processes": 1}, {"processes": 1, "micro_batch": 3}, {"processes": 2}, {"processes": 3}]
    runs = [train(sequences, tmp_path / str(n), recipe, **plan) for n, plan in enumerate(plans)]
    first = [row for row in runs[0].history if "lr" in row]
    assert len(first) == 60
    for run in runs[1:]:
        assert run.metrics["loss"] == pytest.approx(runs[0].metrics["loss"], abs=1e-4)
        for ours, theirs in zip((r for r in run.history if "lr" in r), first, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
            assert ours["kl"] == pytest.approx(theirs["kl"], abs=1e-4)
        for ours, theirs in zip(reports(run), reports(runs[0]), strict=True):
            for name in ("window_kl", "window_nll", "mutual_information", "kl_per_dimension"):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-4)
            assert ours["active_units"] == theirs["active_units"]


def test_resume_is_exact_and_takes_the_window_along(sequences: Path, tmp_path: Path) -> None:
    recipe = {"steps": 150, "target_kl": 2.0, **NOISY}
    whole = train(sequences, tmp_path, recipe, save_every="50", keep=10)
    broken = tmp_path / "broken"
    shutil.copytree(whole.folder, broken)
    for name in ("checkpoints/vae-100", "checkpoints/vae-150", "final"):
        shutil.rmtree(broken / name)
    for name in ("summary.json", "exit.json"):
        (broken / name).unlink(missing_ok=True)
    done = launch("resume", str(broken), "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary(broken)["resumed_from"] == "vae-50"
    names = ("loss", "kl", "window_kl", "mutual_information", "shuffle_gap")
    one, other = (
        [[row.get(name) for name in names] for row in rows(folder) if "lr" in row]
        for folder in (whole.folder, broken)
    )
    assert one == other
    assert any(row[-1] for row in one)


def test_an_autoencoder_first_gives_its_encoder_to_a_new_decoder(sequences: Path, tmp_path: Path) -> None:
    run = train(sequences, tmp_path, {"epochs": 4, "pretrain": 0.5, "free_bits": 3.0})
    found = [row for row in run.history if "lr" in row]
    begun = [row["nll"] if row["phase"] == "vae" else row["loss"] for row in found]
    border = [row["phase"] for row in found].index("vae")
    assert begun[border - 1] < 0.7 * begun[0]
    assert begun[border] > 0.9 * begun[0]  # nothing that the decoder knew is left
    assert run.metrics["active_units"] > 0
    assert isobatch.verify(run)


def test_the_commands_of_a_latent_space(sequences: Path, tmp_path: Path) -> None:
    run = train(sequences, tmp_path, {"steps": 40, "free_bits": 3.0, "monitor": "fast"}).folder
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
    shown = launch("evaluate", str(run), "--iw-samples", "20", "--json", cwd=tmp_path)
    metrics = json.loads(shown.stdout)["valid"]
    assert metrics["iw_nll"] < metrics["loss"]  # the bound is above it
    plots = sorted(file.name for file in (run / "plots").iterdir())
    assert plots == ["training.png"]  # no report in 40 steps of the fast monitor
