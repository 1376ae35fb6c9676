"""The service behind the routes: predictions, streams, outcomes, hot swap, and what is shown of them."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

import ml_factory
from ml_factory.errors import FactoryError
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feed import not_remembered
from ml_factory.serving.feeds import Feeds
from ml_factory.serving.problems import OverloadError
from ml_factory.serving.rate_limits import RateLimits
from ml_factory.serving.schemas import OutcomeRequest, PredictRequest
from ml_factory.serving.served_market import ServedMarkets
from ml_factory.serving.service_metrics import ServiceMetrics
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.stream_messages import StreamMessages

SHOWN_ANSWERS = 50
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
        self.limits, self.metrics = limits, ServiceMetrics()
        self.rates = RateLimits(limits.requests_per_second, limits.burst)
        self.ready = False
        self.stopping, self.messages_under_way = False, 0
        self._markets = ServedMarkets(paths, limits, guard)
        self._state = str(state) if durable else None
        self._feeds = Feeds(state, guard, limits)
        self.connections = self._feeds.connections
        self._messages = StreamMessages(self._markets, self._feeds, limits)
        self._last: deque[dict[str, Any]] = deque(maxlen=SHOWN_ANSWERS)
        self._reloads = asyncio.Lock()

    async def start(self) -> None:
        """Accept requests."""
        self.ready = True

    async def stop(self) -> None:
        """Finish what is under way, and write the snapshots of the feeds."""
        self.ready = False
        for message in await self._feeds.close():
            _log.warning("%s", message)
        await self._markets.close()

    async def predict(self, request: PredictRequest) -> dict[str, Any]:
        """Return the answers of one request. Raises FactoryError."""
        return self._noted(await self._markets.find(request.symbol).predict(request))

    async def hello(self, feed: str) -> dict[str, Any]:
        """Return the first message of a stream."""
        return await self._messages.hello(feed, self._state is not None)

    async def answer_message(self, feed: str, text: str) -> dict[str, Any]:
        """Return the reply to a message of a stream."""
        return self._noted(await self._messages.reply(feed, text))

    async def add_outcome(self, request: OutcomeRequest) -> dict[str, Any]:
        """Give a feed's guard the outcome of an earlier answer. Raises FactoryError."""
        market = self._markets.find(request.symbol)
        known_at = pd.Timestamp(request.known_at).tz_convert("UTC").as_unit("ns")
        return await self._feeds.run(
            market, request.feed, lambda feed: feed.add_outcome(market.served, known_at, request.label),
            not_remembered(market.served, "this feed has no bars: name the feed of the stream that gave the answer"),
        )  # fmt: skip

    async def reload(self) -> dict[str, dict[str, Any]]:
        """Read the bundles' files again, and replace the bundles; as `ServedMarkets.reload`."""
        if self._reloads.locked():
            raise OverloadError("The bundles are being reloaded")
        return await self.reload_in_turn()

    async def reload_in_turn(self) -> dict[str, dict[str, Any]]:
        """Reload the bundles once the reloads before have ended."""
        async with self._reloads:
            try:
                changes = await self._markets.reload()
            except FactoryError as error:
                self.metrics.observe_reload("refused")
                _log.warning("The bundles stay as they are: %s", error)
                raise
        for symbol, one in changes.items():
            _log.warning(
                "reloaded %s: bundle %s, before %s%s", symbol, one["after"], one["before"],
                "" if one["changed"] else " (unchanged)",
            )  # fmt: skip
        self.metrics.observe_reload("changed" if any(one["changed"] for one in changes.values()) else "unchanged")
        return changes

    def health(self) -> dict[str, Any]:
        """Return the fields of `schemas.Health`."""
        bundles = {symbol: bundle for symbol, _, bundle in self.bundles()}
        return {"status": "ok" if self.ready else "stopping", "ready": self.ready, "bundles": bundles}

    def info(self) -> dict[str, Any]:
        """Return the fields of `schemas.Info`, without the limits."""
        bundles = {symbol: market.served.facts for symbol, market in self._markets.by_symbol.items()}
        return {"version": ml_factory.__version__, "bundles": bundles, "state": self._state}

    async def status(self) -> dict[str, Any]:
        """Return the fields of `schemas.Status`."""
        names = ("symbol", "run_id", "bundle")
        return {
            "streams": self.connections.total(), "answers": list(self._last)[::-1],
            "bundles": [dict(zip(names, one, strict=True)) for one in self.bundles()],
            "guards": await self._feeds.guards(),
        }  # fmt: skip

    async def metrics_page(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        jobs = {symbol: market.thread.jobs for symbol, market in self._markets.by_symbol.items()}
        guards = await self._feeds.guards()
        return self.metrics.render(jobs, self.connections.total(), self.bundles(), guards)

    def bundles(self) -> list[tuple[str, str, str]]:
        """Return (symbol, run, id) of the bundles that answer now."""
        return [(symbol, one.served.run_id, one.served.id) for symbol, one in self._markets.by_symbol.items()]

    def _noted(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Count the answers of a reply and keep them for the page; those that are repeated were counted before."""
        answers: Sequence[Mapping] = reply.get("answers", ())[reply.get("repeated_answers", 0) :]
        if answers:
            self.metrics.observe_answers(reply["symbol"], answers)
            names = {name: reply[name] for name in ("symbol", "run_id", "bundle")}
            self._last.extend(names | dict(answer) for answer in answers[-SHOWN_ANSWERS:])
        return reply


async def reload_on_signal(service: Service) -> None:
    """Reload the bundles, after a reload that is under way; what is wrong with them is in the log."""
    with suppress(FactoryError):
        await service.reload_in_turn()
