"""One thread for the predictions of a symbol, with a limited number of jobs that wait."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ml_factory.serving.problems import OverloadError


class PredictionThread:
    """A thread that runs jobs in order while the event loop answers others.

    limit : jobs that run or wait; further ones are refused with OverloadError
    """

    def __init__(self, name: str, limit: int):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._limit, self._jobs, self._guard = limit, 0, threading.Lock()

    async def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the job returns. A job that is cancelled before it began never runs; one that runs is ended."""
        with self._guard:
            if self._jobs >= self._limit:
                raise OverloadError("Too many predictions wait", wanted=f"at most {self._limit}")
            self._jobs += 1
        future = self._pool.submit(job, *arguments)
        future.add_done_callback(self._count)
        return await asyncio.wrap_future(future)

    async def finish(self, job: Callable[[], Any]) -> Any:
        """Return what the job returns. It runs after those before it, beyond the limit, also once cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._pool.submit(job)))

    @property
    def jobs(self) -> int:
        """Jobs that run or wait."""
        return self._jobs

    def close(self) -> None:
        """Wait for the jobs, and end the thread."""
        self._pool.shutdown()

    def _count(self, _: Future) -> None:
        with self._guard:
            self._jobs -= 1
