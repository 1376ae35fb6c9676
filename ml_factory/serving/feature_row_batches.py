"""Feature rows of concurrent requests in one call of the model: those that arrive while the thread is busy."""

import asyncio
from typing import Any

from ml_factory.errors import FactoryError
from ml_factory.serving.prediction_thread import PredictionThread
from ml_factory.serving.problems import OverloadError
from ml_factory.serving.served_bundle import FeatureTable, ServedBundle


class FeatureRowBatches:
    """Requests of feature rows of one symbol, predicted together in the thread of that symbol.

    batch_rows : most rows of one call
    limit : requests that wait; further ones are refused with OverloadError
    """

    def __init__(self, thread: PredictionThread, batch_rows: int, limit: int):
        self._thread, self._batch_rows, self._limit = thread, batch_rows, limit
        self._waiting: list[tuple[FeatureTable, asyncio.Future]] = []
        self._task: asyncio.Task | None = None
        self.calls, self.requests = 0, 0

    async def predict(self, holder: Any, table: FeatureTable) -> dict[str, Any]:
        """Return the answers for these rows. Raises the error of this request alone.

        holder : its attribute `served` is the bundle when the call begins
        """
        if len(self._waiting) >= self._limit:
            raise OverloadError("Too many predictions wait", wanted=f"at most {self._limit}")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((table, future))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._predict_waiting(holder))
        return await future

    async def _predict_waiting(self, holder: Any) -> None:
        while self._waiting:
            taken = self._take()
            if not taken:
                continue
            self.calls, self.requests = self.calls + 1, self.requests + len(taken)
            try:
                found = await self._thread.run(_predict, holder, [table for table, _ in taken])
            except Exception as error:  # noqa: BLE001 - every request that waits must get its answer
                found = [error] * len(taken)
            for (_, future), one in zip(taken, found, strict=True):
                if not future.done():
                    future.set_exception(one) if isinstance(one, Exception) else future.set_result(one)

    def _take(self) -> list[tuple[FeatureTable, asyncio.Future]]:
        """Return the next requests of at most `batch_rows` rows, or one; without those whose client left."""
        taken, rows = [], 0
        while self._waiting:
            table, future = self._waiting[0]
            if taken and rows + len(table.features) > self._batch_rows:
                break
            self._waiting.pop(0)
            if not future.done():
                taken.append((table, future))
                rows += len(table.features)
        return taken


def _predict(holder: Any, tables: list[FeatureTable]) -> list[dict[str, Any] | FactoryError]:
    served: ServedBundle = holder.served
    return served.predict_rows(tables)
