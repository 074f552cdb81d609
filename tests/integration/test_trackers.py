"""--tracker: settings, figures over the steps of all phases, final metrics and plots arrive there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.engine.hooks.log import Tracker
from isobatch.tests.integration.helpers import ROOT, succeed

LINE = f"{ROOT}/tests/tasks/failing.py:Line"


def test_tensorboard_gets_settings_figures_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["--task", LINE, "--steps", "6", "--eval-every", "3", "--tracker", "tensorboard", "--name", "one"]
    succeed("auto", *words, cwd=tmp_path)
    log = tmp_path / "runs" / "one" / "isobatch"
    found = EventAccumulator(str(log))
    found.Reload()
    scalars = set(found.Tags()["scalars"])
    assert {"loss", "lr", "valid/loss", "final/loss"} <= scalars
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in found.Scalars("valid/loss")] == [3, 6]
    (settings,) = log.glob("*/hparams.yml")
    assert "batch_size: 8" in settings.read_text()
    assert "plan.strategy: single" in settings.read_text()


def test_training_goes_on_where_a_tracker_fails() -> None:
    said: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no server")

    world: Any = SimpleNamespace(accelerator=SimpleNamespace(log=fail))
    figures: Any = SimpleNamespace(row={"loss": 1.0}, steps=1)
    tracker = Tracker(world, "mlflow", said.append)
    for _ in range(2):
        tracker.on_figures(figures)
    assert said == ["--tracker mlflow gets nothing more: ConnectionError: no server"]
