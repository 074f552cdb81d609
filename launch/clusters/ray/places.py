"""For how many workers a cluster has room."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SETTLE_SECONDS = 10.0
"""How long more places may take to come, where there are enough to begin."""
LOSS_SECONDS = 20.0
"""How long Ray may take to notice that a node is gone: until then it offers the places there."""
POLL_SECONDS = 0.5


class Places:
    """Each place is held by a placement group with the resources of one worker. One that waits is also what
    tells an autoscaler that another node is wanted.
    """

    def __init__(self, resources: Mapping[str, float], least: int, most: int) -> None:
        self._resources, self.least, self.most = dict(resources), least, most
        self._wanted: list[Any] = []
        self._settled = 0.0
        self._found = 0
        self._trusted = 0.0
        """When Ray knows again which nodes there are."""

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
        while not is_over() and (
            time.monotonic() < self._trusted or self.found() < self.least or not self.has_settled()
        ):
            time.sleep(POLL_SECONDS)
        found = self.found()
        self.release()
        return found

    def distrust(self) -> None:
        """A worker was lost, and perhaps its node: the next count waits until Ray knows."""
        self._trusted = time.monotonic() + LOSS_SECONDS

    def want(self, count: int) -> None:
        """Begin to look for room for so many workers."""
        import ray

        self.release()
        wanted = range(count) if self.is_elastic else ()
        self._hold([ray.util.placement_group([self._resources]) for _ in wanted])

    def _hold(self, wanted: list[Any]) -> None:
        self._wanted, self._found = wanted, 0
        self._settled = time.monotonic() + SETTLE_SECONDS

    def found(self) -> int:
        """How many of the wanted places are held now."""
        found = self._count_held()
        if found > self._found:
            self._settled = time.monotonic() + SETTLE_SECONDS
        self._found = found
        return found

    def _count_held(self) -> int:
        import ray

        states = [ray.util.placement_group_table(place).get("state") for place in self._wanted]
        return states.count("CREATED")

    def has_settled(self) -> bool:
        """Whether no more places are to be expected soon."""
        return self._found == len(self._wanted) or time.monotonic() > self._settled

    def release(self) -> None:
        """Give all places back."""
        import ray

        for place in self._wanted:
            ray.util.remove_placement_group(place)
        self._hold([])
