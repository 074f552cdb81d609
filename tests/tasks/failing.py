"""Tasks that fail, hang or run out of memory at a known place, and the plain task they derive from."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.base import Columns, Data
from isobatch.models.base import Batch, Loss, Phase, StepContext, Task


class Points(Data):
    def read(self) -> Mapping[str, Columns]:
        x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        return {"train": {"x": x, "y": x.sum(1, keepdims=True)}, "valid": {"x": x[:8], "y": x[:8, :1]}}


class Line(Task):
    """A linear fit, with nothing wrong."""

    data = Points
    defaults = {"batch_size": 8, "steps": [40], "lr": 1e-2}

    def build_model(self, facts: Any) -> Any:
        from torch import nn

        return nn.Linear(4, 1)

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        return {"loss": Loss((model(batch["x"]) - batch["y"]).square().sum(), "sample")}


class Slow(Line):
    """A step takes a twentieth of a second."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        time.sleep(0.05)
        return super().loss(model, batch, step)


class SlowUntilRequeued(Slow):
    """However fast the machine, a time limit passes before the end."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < 1:
            time.sleep(0.2)
        return super().loss(model, batch, step)


class OneRankFails(Line):
    """Rank 1 alone meets an error with a name."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number == 3 and os.environ.get("RANK") == "1":
            raise UserError("rank 1 has had enough")
        return super().loss(model, batch, step)


class ExportFails(Line):
    """Rank 0 alone cannot export."""

    def export(self, model: Any, folder: Path, facts: Any) -> None:
        raise UserError("nothing to export to")


def starve(nbytes: int) -> None:
    """Rank 1, or the only process, may have this much more than it has."""
    import psutil

    if os.environ.get("RANK", "1") == "1":
        limit = psutil.Process().memory_info().vms + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def take(rows: int) -> None:
    """200 MB for every sample."""
    import torch

    torch.empty(rows, 200_000_000, dtype=torch.uint8)


class Hungry(Line):
    """Rank 1 may have 0.76 gigabytes more than when it built its model: less than four samples take."""

    defaults = {**Line.defaults, "steps": [12]}

    def build_model(self, facts: Any) -> Any:
        if "RANK" in os.environ:  # not in the command, whose limit all ranks would inherit
            starve(76 * 10**7)
        return super().build_model(facts)

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        take(len(batch["x"]))
        return super().loss(model, batch, step)


class HungryLater(Line):
    """From its sixth step on, which no rehearsal shows; half a gigabyte is left then."""

    defaults = Hungry.defaults
    starved = False

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number >= 5:
            if not self.starved:
                starve(5 * 10**8)
            self.starved = True
            take(len(batch["x"]))
        return super().loss(model, batch, step)


held: list[Any] = []


class Greedy(Slow):
    """Takes 300 MB for every sample of the largest micro-batch."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number and len(batch["x"]) > len(held):
            held[:] = [np.ones(300_000_000, dtype=np.uint8) for _ in batch["x"]]
        return super().loss(model, batch, step)


class Insatiable(Slow):
    """Takes two gigabytes, whatever the micro-batch."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number and not held:
            held[:] = [np.ones(2_500_000_000, dtype=np.uint8)]
        return super().loss(model, batch, step)


class SlowHungry(Slow):
    """A step takes a twentieth of a second, and 20 MB for every sample."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        import torch

        torch.empty(len(batch["x"]), 20_000_000, dtype=torch.uint8)
        return super().loss(model, batch, step)


class HangsOnce(Slow):
    """Rank 1 stops moving in its fifth step, in the first attempt only."""

    defaults = {**Line.defaults, "steps": [30]}

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number == 4 and os.environ.get("RANK") == "1" and not Path("hung").exists():
            Path("hung").touch()
            while True:
                time.sleep(1)
        return super().loss(model, batch, step)


class DiesOnce(Line):
    """Rank 1 is killed in its fifth step, in the first attempt only, while rank 0 is blocked for ever.

    As in a collective of NCCL: no signal is handled there, other threads run.
    """

    defaults = {**Line.defaults, "steps": [12]}

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number == 4 and not Path("died").exists():
            if os.environ.get("RANK") == "1":
                time.sleep(1)  # the other rank is blocked by now
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            lock = ctypes.create_string_buffer(64)  # a pthread_mutex_t, which is not recursive
            while True:
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        return super().loss(model, batch, step)


class BuildsOnce(Line):
    """Leaves a file for every rank that built the model with its values."""

    def build_model(self, facts: Any) -> Any:
        model = super().build_model(facts)
        if model.weight.device.type != "meta":
            Path(f"built-{os.environ.get('RANK', 'nowhere')}").touch()
        return model


class Unused(Line):
    """A parameter that no loss touches."""

    def build_model(self, facts: Any) -> Any:
        from torch import nn

        model = nn.Linear(4, 1)
        model.idle = nn.Parameter(nn.init.zeros_(model.weight.detach().clone()))
        return model


class Thaws(Line):
    """Two phases: what the first left frozen trains in the second."""

    defaults = {**Line.defaults, "steps": [10, 10], "lr": 1e-2}

    def phases(self) -> list[Phase]:
        return [Phase(name="cold"), Phase(name="warm")]

    def build_model(self, facts: Any) -> Any:
        from torch import nn

        return nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 1))

    def begin_phase(self, model: Any, phase: str, first: Any) -> None:
        model[0].requires_grad_(phase == "warm")


class Answers(Line):
    """It predicts, and its data reads no new rows."""

    def predict(self, model: Any, batch: Batch) -> Mapping[str, Any]:
        return {"y": model(batch["x"])[:, 0]}
