"""The recorder: where a training step's time goes, by marks at the borders of its parts.

Every process has one, in its communicator, and it is off until `start`. A mark is a reading of the clock. On
a GPU it is an event in the stream: nothing waits for the device, and the parts are those of its timeline.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from isobatch.core.measures import now

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    import torch

PARTS = ("data wait", "host", "forward", "backward", "optimizer", "communication")
"""Parts of a step. `host` lies between the others: binding noise, logging, the task's `after_step`."""
OUTERMOST = "host"
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
Item = TypeVar("Item")


class Recorder:
    """Times the parts of the steps of one process. Parts nest: an inner one's time is not the outer one's."""

    def __init__(self) -> None:
        self.active = False
        self.annotate = False
        """Whether parts are named in torch.profiler's trace as well."""
        self._running: list[str] = []
        self._marks: list[tuple[str, Any]] = []
        """(part that begins, clock)."""
        self._ends: list[int] = []
        """Of each step: the number of the mark at which it ended."""
        self._device: torch.device | None = None

    def start(self, device: torch.device) -> None:
        """Forget what was recorded, and begin the first step now."""
        self.active, self._device = True, device
        self._running, self._marks, self._ends = [OUTERMOST], [], []
        self._mark(OUTERMOST)

    def stop(self) -> None:
        """Record nothing more; `steps` still has what was recorded."""
        self.active = False

    def part(self, name: str) -> AbstractContextManager[None]:
        """Context of a part of the step; nothing where the recorder is off."""
        return self._part(name) if self.active else _NOTHING

    def end_step(self) -> None:
        """The step ends and the next one begins."""
        if self.active:
            self._mark(OUTERMOST)
            self._ends.append(len(self._marks) - 1)

    def waiting_for_data(self, steps: Iterable[Item]) -> Iterator[Item]:
        """The same steps; what it takes to get one is `data wait`."""
        iterator = iter(steps)
        while True:
            with self.part("data wait"):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def steps(self) -> list[dict[str, float]]:
        """Part -> seconds, of each step that ended. Waits for the device once."""
        if self._device is not None and self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        found, begin = [], 0
        for end in self._ends:
            seconds = dict.fromkeys(PARTS, 0.0)
            for number in range(begin, end):
                name, clock = self._marks[number]
                seconds[name] += _seconds_between(clock, self._marks[number + 1][1])
            found.append(seconds)
            begin = end
        return found

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self._mark(name)
        self._running.append(name)
        try:
            with self._annotation(name):
                yield
        finally:
            self._running.pop()
            self._mark(self._running[-1])

    def _annotation(self, name: str) -> AbstractContextManager[Any]:
        if not self.annotate:
            return _NOTHING
        import torch

        return torch.profiler.record_function(name)

    def _mark(self, name: str) -> None:
        if self._device is None or self._device.type != "cuda":
            self._marks.append((name, now()))
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((name, event))


def _seconds_between(begin: Any, end: Any) -> float:
    """Of two marks: seconds of the clock, or of the stream between two events."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3
