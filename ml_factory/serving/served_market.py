"""The symbols that are served: each with its bundle, which may be replaced, and the thread that predicts with it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.serving.feature_row_batches import FeatureRowBatches
from ml_factory.serving.prediction_thread import PredictionThread
from ml_factory.serving.schemas import PredictRequest
from ml_factory.serving.served_bundle import ServedBundle, rows_to_table
from ml_factory.serving.service_settings import ServiceLimits


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
        now = pd.Timestamp.now(tz="UTC") if request.live else None
        return await self.thread.run(self._predict_bars, request.bars, request.last, now)

    def _predict_bars(self, bars: Any, last: int, now: pd.Timestamp | None) -> dict[str, Any]:
        return self.served.predict_bars(bars, self._limits.bars, last, now)


class ServedMarkets:
    """All symbols of the service, by name."""

    def __init__(self, paths: Sequence[Path], limits: ServiceLimits):
        self.by_symbol: dict[str, ServedMarket] = {}
        for path in paths:
            served = ServedBundle.load(path)
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

    async def close(self) -> None:
        """Wait for the jobs, and end the threads."""
        for market in self.by_symbol.values():
            await asyncio.to_thread(market.thread.close)
