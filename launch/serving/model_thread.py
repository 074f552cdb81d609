"""The thread in which a served model computes, and the queue that makes batches of concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.models.protocols import Predictor

T = TypeVar("T")
WINDOW_SECONDS = 0.002
"""How long a batch waits for other requests, while there are several clients."""
SAMPLES_AT_A_TIME = 256
"""A batch takes no further request once it has so many samples."""


class ModelThread:
    """One thread: what is asked of it is done in the order of asking."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result, computed in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


@dataclass(frozen=True, slots=True)
class _Asked:
    samples: Sequence[Any]
    answers: asyncio.Future[list[dict[str, Any]]]


class BatchingQueue:
    """Answers what several requests ask together. While the model computes, the next batch gathers."""

    def __init__(self, predict: Predictor, thread: ModelThread) -> None:
        self._predict, self._thread = predict, thread
        self._waiting: list[_Asked] = []
        self._worker: asyncio.Task[None] | None = None
        self._last_requests = 1
        """Requests in the last batch."""

    async def ask(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """An answer for each sample. Raises what the model raises for these samples."""
        asked = _Asked(samples, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await asked.answers

    async def _work(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._last_requests:  # the clients of the last batch will ask again
                await asyncio.sleep(WINDOW_SECONDS)
            taken = self._take()
            self._last_requests = len(taken)
            await self._answer(taken)

    def _take(self) -> list[_Asked]:
        taken, samples = [], 0
        while self._waiting and samples < SAMPLES_AT_A_TIME:
            taken.append(self._waiting.pop(0))
            samples += len(taken[-1].samples)
        return taken

    async def _answer(self, taken: Sequence[_Asked]) -> None:
        try:
            found = await self._thread.run(self._predict, [s for asked in taken for s in asked.samples])
        except UserError as error:
            if len(taken) == 1:
                _fail(taken, error)
            for asked in taken if len(taken) > 1 else ():  # only whose sample is wrong shall hear of it
                await self._answer([asked])
        except Exception as error:
            _fail(taken, error)
        else:
            answers = iter(found)
            for asked in taken:
                own = [next(answers) for _ in asked.samples]
                if not asked.answers.done():  # a client that left has cancelled it
                    asked.answers.set_result(own)


def _fail(taken: Sequence[_Asked], error: Exception) -> None:
    for asked in taken:
        if not asked.answers.done():
            asked.answers.set_exception(error)
