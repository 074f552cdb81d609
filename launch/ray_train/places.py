"""For how many workers a cluster has room."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SETTLE_SECONDS = 10.0
"""How long more places may take to come, where there are enough to begin."""
POLL_SECONDS = 0.5
ANSWER_SECONDS = 0.05
"""How long Ray is asked whether it holds a place."""


class Places:
    """Each place is held by a placement group with the resources of one worker. One that waits is also what
    tells an autoscaler that another node is wanted.
    """

    def __init__(self, resources: Mapping[str, float], least: int, most: int) -> None:
        self._resources, self.least, self.most = dict(resources), least, most
        self._wanted: list[Any] = []
        self._settled = 0.0
        self._found = 0

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    def count(self, is_over: Callable[[], bool]) -> int:
        """The workers to start: all, or those that there is room for after some seconds, at least the least.

        Waits until there is room for these, or `is_over()`.
        """
        if not self.is_elastic:
            return self.most  # Ray itself waits until it has room
        self.want(self.most)
        while not is_over() and not (self.found() >= self.least and self.has_settled()):
            time.sleep(POLL_SECONDS)
        found = self.found()
        self.release()
        return found

    def want(self, count: int) -> None:
        """Begin to look for room for so many workers."""
        import ray

        self.release()
        if self.is_elastic:
            self._wanted = [ray.util.placement_group([self._resources]) for _ in range(count)]
        self._settled, self._found = time.monotonic() + SETTLE_SECONDS, 0

    def found(self) -> int:
        """How many of the wanted places are held now."""
        found = sum(place.wait(ANSWER_SECONDS) for place in self._wanted)
        if found > self._found:
            self._settled = time.monotonic() + SETTLE_SECONDS
        self._found = found
        return found

    def has_settled(self) -> bool:
        """Whether no more places are to be expected soon."""
        return self._found == len(self._wanted) or time.monotonic() > self._settled

    def release(self) -> None:
        """Give all places back."""
        import ray

        for place in self._wanted:
            ray.util.remove_placement_group(place)
        self._wanted = []
