"""All feeds of the service, each by its name and symbol, below one folder."""

import asyncio
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feed import Feed
from ml_factory.serving.problems import OverloadError
from ml_factory.serving.served_market import ServedMarket
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.storage.files import files
from ml_factory.storage.workspace import check_symbol

FEED_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_log = logging.getLogger("ml_factory")


class _OpenFeed:
    """One feed that is open; its methods run in the thread of its symbol.

    jobs : of it that run or wait
    """

    def __init__(self, folder: Path, market: ServedMarket, guard: GuardSettings):
        self.folder, self.market, self.jobs = folder, market, 0
        self.feed: Feed | None = None
        self._guard = guard

    def run(self, job: Callable[[Feed], dict[str, Any]]) -> dict[str, Any]:
        if self.feed is None:
            self.feed = Feed(self.folder, self.market.served, self._guard)
        return job(self.feed)

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()


class Feeds:
    """Feeds that are opened when they are first used. Beyond the limit the one that was idle longest is closed; its
    state is on the disk, from where its next use takes it.

    folder : of their state
    limits : `feeds` are open at once, `stored_feeds` have a folder
    """

    def __init__(self, folder: Path, guard: GuardSettings, limits: ServiceLimits):
        self._folder, self._guard, self._limits = folder, guard, limits
        self._open: OrderedDict[tuple[str, str], _OpenFeed] = OrderedDict()  # the longest idle first
        self._opening = asyncio.Lock()
        self.connections: Counter[str] = Counter()  # by name of the feed, of which none is closed

    async def run(
        self, market: ServedMarket, name: str, job: Callable[[Feed], dict[str, Any]], absent: dict | None = None
    ) -> dict[str, Any]:
        """Return what the job returns for the feed of this name, in the thread of the symbol. Raises FactoryError.

        absent : returned for a feed that has no bars yet, which is then not opened
        """
        if not FEED_NAME.fullmatch(name):
            raise SettingsError("A feed cannot have this name", where="feed", got=name[:60],
                                wanted="up to 40 letters, digits, - and _")  # fmt: skip
        key = (check_symbol(market.served.symbol), name)
        if key not in self._open:
            if absent is not None and not files.is_folder(self._folder / key[0] / name):
                return absent
            async with self._opening:
                if key not in self._open:  # nor opened meanwhile
                    await self._make_capacity(key)
                    self._open[key] = _OpenFeed(self._folder / key[0] / name, market, self._guard)
        one = self._open[key]
        self._open.move_to_end(key)
        one.jobs += 1
        try:
            return await market.thread.run(one.run, job)
        finally:
            one.jobs -= 1

    async def guards(self) -> list[dict[str, Any]]:
        """Return the status of every open feed's guard."""
        found = []
        for (symbol, name), one in list(self._open.items()):
            with suppress(OverloadError):
                if one.feed is not None:
                    found.append({"symbol": symbol, "feed": name} | await one.market.thread.run(one.feed.status))
        return found

    async def close(self) -> list[str]:
        """Write the snapshots of all feeds; return the messages of those that could not be written."""
        failed = []
        for one in list(self._open.values()):
            try:
                await one.market.thread.finish(one.close)
            except FactoryError as error:  # the log has everything
                failed.append(str(error))
        return failed

    async def _make_capacity(self, key: tuple[str, str]) -> None:
        """Close the feed that was idle longest, where as many are open as may be. Raises OverloadError where none is
        idle, SettingsError where a new one would have a folder too many.
        """
        if not files.is_folder(self._folder.joinpath(*key)):
            symbols = [name for name in files.names(self._folder) if files.is_folder(self._folder / name)]
            stored = sum(len(files.names(self._folder / name)) for name in symbols)
            if stored >= self._limits.stored_feeds:
                raise SettingsError(
                    "The service stores no further feed", where="feed", got=f"{stored} feeds on its disk",
                    wanted=f"at most {self._limits.stored_feeds}",
                    next_step="go on with a feed that there is; who runs the service can delete folders of feeds while "
                    "it is stopped, or raise its limit stored_feeds",
                )  # fmt: skip
        while len(self._open) >= self._limits.feeds:
            idle = [one for one, held in self._open.items() if not held.jobs and not self.connections[one[1]]]
            if not idle:
                raise OverloadError("Too many feeds are open", seconds=60, where="feed",
                                    wanted=f"at most {self._limits.feeds} with a connection")  # fmt: skip
            held = self._open.pop(idle[0])  # a later use opens it again, in the same thread and thus after its end
            try:
                await held.market.thread.finish(held.close)
            except FactoryError as error:  # the log has everything
                _log.warning("%s", error)
