"""The service behind the routes: bundles, and what is known of them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_factory
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feeds import Feeds
from ml_factory.serving.schemas import PredictRequest
from ml_factory.serving.served_market import ServedMarkets
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.stream_messages import StreamMessages

_log = logging.getLogger("ml_factory")


class Service:
    """Bundles that are served.

    paths : files of the bundles, one of each symbol
    state : folder of the feeds' state
    durable : the folder is there after a restart
    """

    def __init__(
        self, paths: Sequence[Path], state: Path, *, durable: bool, limits: ServiceLimits, guard: GuardSettings
    ):  # fmt: skip
        self.limits, self.markets = limits, ServedMarkets(paths, limits)
        self.ready, self.connections = False, 0
        self._state = str(state) if durable else None
        self._feeds = Feeds(state, guard, limits.feeds)
        self._messages = StreamMessages(self.markets, self._feeds, limits.bars)

    async def start(self) -> None:
        """Accept requests."""
        self.ready = True

    async def stop(self) -> None:
        """Finish what is under way."""
        self.ready = False
        for message in await self._feeds.close(self.markets.by_symbol):
            _log.warning("%s", message)
        await self.markets.close()

    async def predict(self, request: PredictRequest) -> dict[str, Any]:
        """Return the answers of one request. Raises FactoryError."""
        return await self.markets.find(request.symbol).predict(request)

    async def hello(self, feed: str) -> dict[str, Any]:
        """Return the first message of a stream."""
        return await self._messages.hello(feed, self._state is not None)

    async def answer_message(self, feed: str, text: str) -> dict[str, Any]:
        """Return the reply to a message of a stream."""
        return await self._messages.reply(feed, text)

    def health(self) -> dict[str, Any]:
        """Return the fields of `schemas.Health`."""
        bundles = {symbol: market.served.id for symbol, market in self.markets.by_symbol.items()}
        return {"status": "ok" if self.ready else "stopping", "ready": self.ready, "bundles": bundles}

    def info(self) -> dict[str, Any]:
        """Return the fields of `schemas.Info`, without the limits."""
        bundles = {symbol: market.served.facts for symbol, market in self.markets.by_symbol.items()}
        return {"version": ml_factory.__version__, "bundles": bundles, "state": self._state}

    def observe_request(self, scope: dict[str, Any], status: int, seconds: float) -> None:
        """Count an answered request."""
