"""What this engine is compared with: a bare PyTorch loop and transformers' Trainer, and their clock."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ON_GPU = torch.cuda.is_available()


class StepClock:
    """When training began and each step ended, by the clock and in seconds of processor time."""

    def __init__(self, *waits: int) -> None:
        """`waits`: numbers of the steps at whose end a GPU is waited for; others only queue work."""
        self.waits = waits
        self.start()

    def start(self) -> None:
        self.ends, self.processor, self.watts = [time.perf_counter()], [time.process_time()], list[float]()

    def step_ended(self) -> None:
        if ON_GPU and len(self.ends) in self.waits:
            torch.cuda.synchronize()
        with contextlib.suppress(Exception):  # no GPU, or one whose driver does not say
            self.watts.append(torch.cuda.power_draw() / 1e3)
        self.ends.append(time.perf_counter())
        self.processor.append(time.process_time())

    def seconds(self) -> list[float]:
        """Of each step."""
        return [float(took) for took in np.diff(self.ends)]


def bare_loop(
    model: Any,
    optimizer: Any,
    steps: Iterable[Iterable[Any]],
    loss_of: Callable[[Any], torch.Tensor],
    clock: StepClock,
) -> list[float]:
    """Train on the micro-batches of each step, with one clip and one update; the loss of every step.

    `loss_of` gives a micro-batch's share of the step's loss.
    """
    losses = []
    clock.start()
    for batches in steps:
        shares = []
        for batch in batches:
            share = loss_of(batch)
            share.backward()
            shares.append(share.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(torch.stack(shares).sum())
        clock.step_ended()
    return [float(loss) for loss in losses]


def trainer_loop(
    model: Any,
    rows: Any,
    clock: StepClock,
    settings: dict[str, Any],
    order: Sequence[int] | None = None,
    kinds: tuple[Any, Any] | None = None,
    **more: Any,
) -> list[float]:
    """Train by Trainer, with its defaults but for `settings`; the loss of every step.

    `order`: row numbers, in place of Trainer's own order. `kinds`: a class made from Trainer and that of its
    settings. `more` goes to Trainer.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    base, settings_of = kinds or (Trainer, TrainingArguments)
    losses: list[Any] = []
    shares: list[Any] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            losses.append(torch.stack(shares).sum())
            shares.clear()
            clock.step_ended()

    class Watched(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *arguments: Any, **named: Any) -> Any:
            return super()._get_train_sampler(*arguments, **named) if order is None else order

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss: Any = super().compute_loss(*arguments, **named)
            shares.append(loss.detach())
            return loss

    common = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": not ON_GPU}
    arguments = settings_of(**{**common, **settings})
    Watched(model, arguments, train_dataset=rows, callbacks=[Watch()], **more).train()
    return [float(loss) for loss in losses]
