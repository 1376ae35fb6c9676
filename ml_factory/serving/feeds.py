"""All feeds of the service, each by its name and symbol, below one folder."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feed import Feed
from ml_factory.serving.problems import OverloadError
from ml_factory.serving.served_market import ServedMarket
from ml_factory.storage.workspace import check_symbol

FEED_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


class Feeds:
    """Feeds that are opened when they are first used, in the thread of their symbol.

    folder : of their state
    largest : feeds that are open at once
    """

    def __init__(self, folder: Path, guard: GuardSettings, largest: int):
        self._folder, self._guard, self._largest = folder, guard, largest
        self._open: dict[tuple[str, str], Feed] = {}

    async def run(self, market: ServedMarket, name: str, job: Callable[[Feed], dict[str, Any]]) -> dict[str, Any]:
        """Return what the job returns for the feed of this name, in the thread of the symbol. Raises FactoryError."""
        return await market.thread.run(lambda: job(self._feed(market, name)))

    async def guards(self, markets: dict[str, ServedMarket]) -> list[dict[str, Any]]:
        """Return the status of every open feed's guard."""
        found = []
        for (symbol, name), feed in list(self._open.items()):
            with suppress(OverloadError):
                found.append({"symbol": symbol, "feed": name} | await markets[symbol].thread.run(feed.status))
        return found

    async def close(self, markets: dict[str, ServedMarket]) -> list[str]:
        """Write the snapshots of all feeds; return the messages of those that could not be written."""
        failed = []
        for (symbol, _), feed in self._open.items():
            try:
                await markets[symbol].thread.run(feed.close)
            except FactoryError as error:  # the log has everything
                failed.append(str(error))
        return failed

    def _feed(self, market: ServedMarket, name: str) -> Feed:
        symbol = check_symbol(market.served.symbol)
        if (symbol, name) not in self._open:
            if not FEED_NAME.fullmatch(name):
                raise SettingsError("A feed cannot have this name", where="feed", got=name[:60],
                                    wanted="up to 40 letters, digits, - and _")  # fmt: skip
            if len(self._open) >= self._largest:
                raise OverloadError("Too many feeds are open", seconds=60, wanted=f"at most {self._largest}")
            self._open[symbol, name] = Feed(self._folder / symbol / name, market.served, self._guard)
        return self._open[symbol, name]
