"""The thread in which a served model computes, and the queue that makes batches of concurrent requests."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from isobatch.models.protocols import Predictor

    Asked = tuple[Sequence[Any], asyncio.Future[list[dict[str, Any]]]]
    """Samples, and where their answers go."""

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


class BatchingQueue:
    """Answers what several requests ask together. While the model computes, the next batch gathers."""

    def __init__(self, predict: Predictor) -> None:
        self._predict, self._thread = predict, ModelThread()
        self._waiting: list[Asked] = []
        self._worker: asyncio.Task[None] | None = None
        self._last_requests = 1
        """Requests in the last batch."""

    async def ask(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """An answer for each sample. Raises what the model raises for these samples."""
        answers = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, answers))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        found: list[dict[str, Any]] = await answers
        return found

    async def _work(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._last_requests:  # the clients of the last batch will ask again
                await asyncio.sleep(WINDOW_SECONDS)
            taken: list[Asked] = []
            while self._waiting and sum(len(samples) for samples, _ in taken) < SAMPLES_AT_A_TIME:
                taken.append(self._waiting.pop(0))
            self._last_requests = len(taken)
            await self._answer(taken)

    async def _answer(self, taken: Sequence[Asked]) -> None:
        error: Exception | None = None
        found: list[dict[str, Any]] = []
        try:
            found = await self._thread.run(self._predict, [s for samples, _ in taken for s in samples])
        except Exception as raised:
            error = raised
        if isinstance(error, UserError) and len(taken) > 1:  # only whose sample is wrong shall hear of it
            for asked in taken:
                await self._answer([asked])
        rest = iter(found)
        for samples, answers in taken:
            own = [next(rest) for _ in samples] if error is None else []
            if answers.done():  # a client that left has cancelled it, or it is answered above
                continue
            if error is None:
                answers.set_result(own)
            else:
                answers.set_exception(error)
