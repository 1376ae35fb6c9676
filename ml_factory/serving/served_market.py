"""The symbols that are served: each with its bundle, which may be replaced, and the thread that predicts with it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feature_row_batches import FeatureRowBatches
from ml_factory.serving.prediction_thread import PredictionThread
from ml_factory.serving.schemas import PredictRequest
from ml_factory.serving.served_bundle import ServedBundle, rows_to_table
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.tables import check_bar_count


class ServedMarket:
    """One symbol. A job of its thread reads `served` once, so that each answer is of one bundle.

    path : file of the bundle, read again when the service reloads
    """

    def __init__(self, path: Path, served: ServedBundle, limits: ServiceLimits):
        self.path, self.served, self._limits = path, served, limits
        self.thread = PredictionThread(f"predict-{served.symbol}", limits.waiting_jobs)
        self.batches = FeatureRowBatches(self.thread, limits.batch_rows, limits.waiting_jobs)

    async def predict(self, request: PredictRequest) -> dict[str, Any]:
        """Return the answers of one request. Raises FactoryError."""
        if request.rows is not None:
            return await self.batches.predict(self, rows_to_table(request.rows, self._limits.rows))
        if request.bars is not None:
            check_bar_count(request.bars, self._limits.bars)  # before it waits
        now = pd.Timestamp.now(tz="UTC") if request.live else None
        return await self.thread.run(self._predict_bars, request.bars, request.last, now)

    def _predict_bars(self, bars: Any, last: int, now: pd.Timestamp | None) -> dict[str, Any]:
        return self.served.predict_bars(bars, last, now)


class ServedMarkets:
    """All symbols of the service, by name."""

    def __init__(self, paths: Sequence[Path], limits: ServiceLimits, guard: GuardSettings):
        self.by_symbol: dict[str, ServedMarket] = {}
        for path in paths:
            served = ServedBundle.load(path, guard)
            if served.symbol in self.by_symbol:
                raise SettingsError(
                    f"Two bundles of {served.symbol}", where=path, got=self.by_symbol[served.symbol].path,
                    wanted="one bundle of each symbol", next_step="serve the other one by a second process",
                )  # fmt: skip
            self.by_symbol[served.symbol] = ServedMarket(path, served, limits)

    def find(self, symbol: str | None) -> ServedMarket:
        """Return the market of this symbol; None is the only one. Raises SettingsError."""
        names = ", ".join(self.by_symbol)
        if symbol is None and len(self.by_symbol) == 1:
            return next(iter(self.by_symbol.values()))
        if symbol is None:
            raise SettingsError("Several symbols are served", where="symbol", got="none", wanted=f"one of {names}",
                                next_step="name the symbol of these bars")  # fmt: skip
        if symbol not in self.by_symbol:
            raise SettingsError("No bundle of this symbol is served", where="symbol", got=symbol, wanted=names,
                                next_step=did_you_mean(symbol, self.by_symbol))  # fmt: skip
        return self.by_symbol[symbol]

    async def reload(self) -> dict[str, dict[str, Any]]:
        """Read the files of all bundles again, and replace the bundles between two jobs.

        Returns symbol -> `before`, `after` (ids) and `changed`. Raises as `Bundle.load`, and SettingsError for a bundle
        of another symbol, or of bars of another format; nothing is then replaced.
        """
        loaded = {}
        for symbol, market in self.by_symbol.items():
            served = await asyncio.to_thread(ServedBundle.load, market.path, market.served.guard)
            _check_successor(market, served)
            loaded[symbol] = served
        changes = {}
        for symbol, served in loaded.items():
            market, before = self.by_symbol[symbol], self.by_symbol[symbol].served
            if served.id != before.id:
                market.served = served
            changes[symbol] = {"before": before.id, "after": served.id, "changed": served.id != before.id}
        return changes

    async def close(self) -> None:
        """Wait for the jobs, and end the threads."""
        for market in self.by_symbol.values():
            await asyncio.to_thread(market.thread.close)


def _check_successor(market: ServedMarket, served: ServedBundle) -> None:
    """Raise SettingsError for a bundle that cannot go on with the bars of the one before."""
    for name, got, wanted in (
        ("symbol", served.symbol, market.served.symbol),
        ("format of raw bars", served.bundle.spec.stream_bars, market.served.bundle.spec.stream_bars),
    ):
        if got != wanted:
            raise SettingsError(
                f"The new bundle has another {name}", where=market.path, got=got, wanted=wanted,
                next_step="serve it by a process of its own",
            )  # fmt: skip
