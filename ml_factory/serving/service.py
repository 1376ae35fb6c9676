"""The service behind the routes: the bundles of several symbols, each with its feeds."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import ml_factory
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.inference.guard import GuardSettings
from ml_factory.serving.feed import STATE_NAME, Feed
from ml_factory.serving.schemas import FeedBars, OutcomeRequest, PredictRequest
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.service_metrics import ServiceMetrics
from ml_factory.serving.tables import to_columns
from ml_factory.storage.files import files


class _Market:
    """One symbol: its bundle, and its feeds by name. The thread that predicts holds `lock`.

    folder : of the feeds; those that it has are opened
    """

    def __init__(self, served: ServedBundle, folder: Path):
        self.served, self.folder, self.lock = served, folder, threading.Lock()
        names = files.names(folder) if files.is_folder(folder) else []
        stored = [name for name in names if files.is_file(folder / name / STATE_NAME)]
        self.feeds = {name: Feed(folder / name, served) for name in stored}


class Service:
    """Bundles that are served.

    paths : files of the bundles, one of each symbol
    state : folder of the feeds' state
    """

    def __init__(self, paths: Sequence[Path], state: Path, guard: GuardSettings):
        self.metrics = ServiceMetrics()
        self._markets: dict[str, _Market] = {}
        for path in paths:
            served = ServedBundle.load(path, guard)
            if served.symbol in self._markets:
                raise SettingsError(
                    f"Two bundles of {served.symbol}", where=path, got=f"a second bundle of {served.symbol}",
                    wanted="one bundle of each symbol", next_step="serve the other one by a second process",
                )  # fmt: skip
            self._markets[served.symbol] = _Market(served, state / served.symbol)

    def predict(self, request: PredictRequest) -> dict[str, Any]:
        """Return the answers of one request. Raises FactoryError."""
        market = self._find(request.symbol)
        with market.lock:
            reply = market.served.predict_bars(request.bars, request.last, _clock(request.live))
        self.metrics.observe_answers(market.served.symbol, reply["answers"])
        return reply

    def push(self, name: str, request: FeedBars) -> dict[str, Any]:
        """Return the reply to bars of a feed, as `Feed.push`. Raises FactoryError."""
        market = self._find(request.symbol)
        with market.lock:
            feed = market.feeds.get(name) or Feed(market.folder / name, market.served)
            reply = feed.push(to_columns(request.bars), _clock(request.live))
            market.feeds[name] = feed  # one whose first bars are refused is none
        self.metrics.observe_answers(market.served.symbol, reply["answers"][reply["repeated_answers"] :])
        return reply

    def add_outcome(self, name: str, request: OutcomeRequest) -> dict[str, Any]:
        """Give a feed's guard the outcome of an earlier answer. Raises FactoryError."""
        market = self._find(request.symbol)
        with market.lock:
            if name not in market.feeds:
                raise SettingsError("This feed has no bars", where="feed", got=name, wanted=", ".join(market.feeds),
                                    next_step="name the feed that gave the answer")  # fmt: skip
            known_at = pd.Timestamp(request.known_at).tz_convert("UTC").as_unit("ns")
            return market.feeds[name].add_outcome(known_at, request.label)

    def health(self) -> dict[str, Any]:
        """Return the fields of `schemas.Health`."""
        return {"status": "ok", "bundles": {symbol: market.served.id for symbol, market in self._markets.items()}}

    def info(self) -> dict[str, Any]:
        """Return the fields of `schemas.Info`."""
        bundles = {symbol: market.served.facts for symbol, market in self._markets.items()}
        return {"version": ml_factory.__version__, "bundles": bundles, "feeds": self._feeds()}

    def metrics_page(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return self.metrics.render(self.bundles(), self._feeds())

    def bundles(self) -> list[tuple[str, str, str]]:
        """Return (symbol, run, id) of the bundles."""
        return [(symbol, one.served.run_id, one.served.id) for symbol, one in self._markets.items()]

    def _feeds(self) -> list[dict[str, Any]]:
        """Return the status of every feed's guard."""
        found = []
        for symbol, market in self._markets.items():
            with market.lock:
                found += [{"symbol": symbol, "feed": name} | feed.status() for name, feed in market.feeds.items()]
        return found

    def _find(self, symbol: str | None) -> _Market:
        """Return the market of this symbol; None is the only one. Raises SettingsError."""
        names = ", ".join(self._markets)
        if symbol is None and len(self._markets) == 1:
            return next(iter(self._markets.values()))
        if symbol is None:
            raise SettingsError("Several symbols are served", where="symbol", got="none", wanted=f"one of {names}",
                                next_step="name the symbol of these bars")  # fmt: skip
        if symbol not in self._markets:
            raise SettingsError("No bundle of this symbol is served", where="symbol", got=symbol, wanted=names,
                                next_step=did_you_mean(symbol, self._markets))  # fmt: skip
        return self._markets[symbol]


def _clock(live: bool) -> pd.Timestamp | None:
    return pd.Timestamp.now(tz="UTC") if live else None
