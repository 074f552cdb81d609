"""The recorder: where a training step's time goes, by marks at the borders of its parts.

Every process has one, in its communicator, and it is off until `start`. A mark is a reading of the clock. On
a GPU it is an event in the stream: nothing waits for the device, and the parts are those of its timeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from isobatch.core.measures import now

PARTS = ("data wait", "host", "forward", "backward", "optimizer", "communication")
"""Parts of a step. `host` lies between the others: binding noise, logging, the task's `after_step`."""
OUTERMOST = "host"


class Recorder:
    """Times the parts of the steps of one process. Parts nest: an inner one's time is not the outer one's."""

    def __init__(self) -> None:
        self.part: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """`part(name)` is the context of a part of the step; it does nothing while the recorder is off."""
        self._annotate = False
        self._running: list[str] = []
        self._marks: list[tuple[str, Any]] = []
        """(part that begins, clock)."""
        self._device: torch.device | None = None

    def start(self, device: torch.device, annotate: bool = False) -> None:
        """Forget what was recorded, and begin now. `annotate`: name the parts in torch.profiler's trace."""
        self.part, self._annotate, self._device = self._part, annotate, device
        self._running, self._marks = [OUTERMOST], []
        self._mark()

    def stop(self) -> dict[str, float]:
        """Record nothing more: part -> seconds since the start. Waits for the device once."""
        self._mark()
        self.part = contextlib.nullcontext
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        seconds = dict.fromkeys(PARTS, 0.0)
        for (name, begin), (_, end) in pairwise(self._marks):
            seconds[name] += begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
        return seconds

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self._running.append(name)
        self._mark()
        annotation = torch.profiler.record_function(name) if self._annotate else contextlib.nullcontext()
        try:
            with annotation:
                yield
        finally:
            self._running.pop()
            self._mark()

    def _mark(self) -> None:
        clock: Any = now()
        if self._on_gpu:
            clock = torch.cuda.Event(enable_timing=True)
            clock.record(torch.cuda.current_stream(self._device))
        self._marks.append((self._running[-1], clock))

    @property
    def _on_gpu(self) -> bool:
        return self._device is not None and self._device.type == "cuda"
