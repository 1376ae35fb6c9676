"""The service behind the routes: bundles, and what is known of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_factory
from ml_factory.serving.schemas import PredictRequest
from ml_factory.serving.served_market import ServedMarkets
from ml_factory.serving.service_settings import ServiceLimits


class Service:
    """Bundles that are served.

    paths : files of the bundles, one of each symbol
    """

    def __init__(self, paths: Sequence[Path], limits: ServiceLimits):
        self.limits, self.markets = limits, ServedMarkets(paths, limits)
        self.ready = False

    async def start(self) -> None:
        """Accept requests."""
        self.ready = True

    async def stop(self) -> None:
        """Finish what is under way."""
        self.ready = False
        await self.markets.close()

    async def predict(self, request: PredictRequest) -> dict[str, Any]:
        """Return the answers of one request. Raises FactoryError."""
        return await self.markets.find(request.symbol).predict(request)

    def health(self) -> dict[str, Any]:
        """Return the fields of `schemas.Health`."""
        bundles = {symbol: market.served.id for symbol, market in self.markets.by_symbol.items()}
        return {"status": "ok" if self.ready else "stopping", "ready": self.ready, "bundles": bundles}

    def info(self) -> dict[str, Any]:
        """Return the fields of `schemas.Info`, without the limits."""
        bundles = {symbol: market.served.facts for symbol, market in self.markets.by_symbol.items()}
        return {"version": ml_factory.__version__, "bundles": bundles, "state": None}

    def observe_request(self, scope: dict[str, Any], status: int, seconds: float) -> None:
        """Count an answered request."""
