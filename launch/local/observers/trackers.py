"""What a tracker gets of a run beside its steps: settings first, final figures and plots at the end."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.engine.training.step_metrics import tracked_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.runs.run_folder import RunFolder

PROJECT = "isobatch"
FINAL = "final"


def begin_tracking(run: RunFolder, world: Communicator) -> None:
    """Open the trackers with the run's recipe and plan as hyper-parameters; a resumed run goes on.

    Raises UserError.
    """
    name = run.folder.name
    identity = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]
    options = {
        "wandb": {"name": name, "id": identity, "resume": "allow"},
        "mlflow": {"run_name": name},
        "trackio": {"name": name, "resume": "allow"},
    }
    try:
        world.accelerator.init_trackers(PROJECT, config=_settings(run), init_kwargs=options)
    except Exception as error:  # each library has errors of its own: no server, no key, no database
        tracker = run.options().tracker
        raise UserError(f"--tracker {tracker}: cannot begin: {type(error).__name__}: {error}") from error


def _settings(run: RunFolder) -> dict[str, Any]:
    plan = run.plan.to_dict()
    plan.pop("reasons", None)
    return {
        **{name: _scalar(value) for name, value in run.recipe.values().items()},
        **{f"plan.{name}": _scalar(value) for name, value in plan.items()},
    }


def _scalar(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def end_tracking(run: RunFolder, world: Communicator, step: int, say: Callable[[str], None]) -> None:
    """Give the trackers the final metrics, as numbers and where they have one as a table, and the plots.

    `say` is told where that fails: the run is done without it.
    """
    metrics = tracked_values((run.summary() or {}).get("metrics", {}))
    files = sorted((run.folder / "plots").glob("*.png"))
    for tracker in world.accelerator.trackers:
        try:
            tracker.log({f"{FINAL}/{name}": value for name, value in metrics.items()}, step=step)
            _GIVERS[tracker.name](tracker, metrics, files, step)
        except Exception as error:
            say(f"--tracker {tracker.name}: the final figures did not arrive: {error}")


def _to_tensorboard(tracker: Any, _: Mapping[str, float], files: list[Path], step: int) -> None:
    from matplotlib.image import imread

    images = {file.stem: imread(file)[None, ..., :3] for file in files}
    tracker.log_images(images, step=step, dataformats="NHWC")


def _to_wandb(tracker: Any, metrics: Mapping[str, float], files: list[Path], step: int) -> None:
    tracker.log_images({file.stem: [str(file)] for file in files}, step=step)
    rows = [[name, value] for name, value in metrics.items()]
    tracker.log_table(FINAL, columns=["metric", "value"], data=rows, step=step)


def _to_mlflow(tracker: Any, _: Mapping[str, float], files: list[Path], __: int) -> None:
    for file in files:
        tracker.log_artifact(str(file), "plots")


def _to_trackio(tracker: Any, metrics: Mapping[str, float], files: list[Path], step: int) -> None:
    import pandas
    import trackio

    rows = pandas.DataFrame({"metric": list(metrics), "value": list(metrics.values())})
    images = {file.stem: trackio.Image(str(file)) for file in files}
    tracker.log({**images, FINAL: trackio.Table(dataframe=rows)}, step=step)


_GIVERS = {
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "trackio": _to_trackio,
}
