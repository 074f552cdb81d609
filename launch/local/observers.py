"""What watches a run beside its own log: trackers and drawn figures."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.package import own_command
from isobatch.engine import consent
from isobatch.engine.training.step_metrics import tracked_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.runs.run_folder import RunFolder


PROJECT = "isobatch"
FINAL = "final"


def begin_tracking(run: RunFolder, world: Communicator) -> None:
    """Open the trackers with the run's recipe and plan as hyper-parameters; a resumed run goes on.

    Raises UserError.
    """
    name = run.folder.name
    planned = {f"plan.{name}": value for name, value in run.plan.to_dict().items() if name != "reasons"}
    settings = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in {**run.recipe.values(), **planned}.items()
    }
    identity = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]
    options = {
        "wandb": {"name": name, "id": identity, "resume": "allow"},
        "mlflow": {"run_name": name},
        "trackio": {"name": name, "resume": "allow"},
    }
    try:
        world.accelerator.init_trackers(PROJECT, config=settings, init_kwargs=options)
    except Exception as error:  # each library has errors of its own: no server, no key, no database
        tracker = run.options().tracker
        raise UserError(f"--tracker {tracker}: cannot begin: {type(error).__name__}: {error}") from error


def end_tracking(run: RunFolder, world: Communicator, step: int, say: Callable[[str], None]) -> None:
    """Give the trackers the final metrics.

    `say` is told where that fails: the run is done without it.
    """
    metrics = tracked_values((run.summary() or {}).get("metrics", {}))
    for tracker in world.accelerator.trackers:
        try:
            tracker.log({f"{FINAL}/{name}": value for name, value in metrics.items()}, step=step)
        except Exception as error:
            say(f"--tracker {tracker.name}: the final figures did not arrive: {error}")


LOWEST_PRIORITY = "19"


class Plotter:
    """Starts `isobatch report RUN --png`; at most one at a time. `draws`: whether this rank does."""

    def __init__(self, run: RunFolder, draws: bool) -> None:
        self.run, self.draws = run, draws
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Draw in the background, at the lowest priority, unless that is still going on."""
        if self.draws and (self._process is None or self._process.poll() is not None):
            words = ["nice", "-n", LOWEST_PRIORITY, *own_command("report", str(self.run.folder), "--png")]
            none, own = subprocess.DEVNULL, {**os.environ, **consent.environment()}
            self._process = subprocess.Popen(words, env=own, stdin=none, stdout=none, stderr=none)

    def finish(self) -> None:
        """Draw what there is at the end, and wait for it."""
        if self._process is not None:  # what it draws may be older
            self._process.wait()
        self.start()
        if self._process is not None:
            self._process.wait()
