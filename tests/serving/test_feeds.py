"""Feeds of the service: opened by bars, closed when idle, and back from the disk with their state."""

import asyncio
from types import SimpleNamespace

import pandas as pd
import pytest

from ml_factory.errors import BarsError, FactoryError, SettingsError
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feed import empty_position
from ml_factory.serving.feeds import Feeds
from ml_factory.serving.prediction_thread import PredictionThread
from ml_factory.serving.problems import OverloadError
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.stream_messages import StreamMessages
from tests.serving.conftest import columns_of


@pytest.fixture
def market(made):
    thread = PredictionThread("test", 10)
    yield SimpleNamespace(served=ServedBundle(made.load("MES", "linear"), GuardSettings()), thread=thread)
    thread.close()


def pushed(market, columns):
    return lambda feed: feed.push(market.served, columns, None)


def test_idle_feed_is_closed_for_another_and_continues_from_the_disk(market, made, tmp_path):
    bars = [columns_of(made.bars["MES"].iloc[first : first + 20]) for first in (0, 20)]

    async def run() -> None:
        feeds = Feeds(tmp_path, GuardSettings(), ServiceLimits(feeds=2))
        for name in ("a", "b", "c", "d"):
            assert (await feeds.run(market, name, pushed(market, bars[0])))["repeated"] == 0
        assert [one["feed"] for one in await feeds.guards()] == ["c", "d"]
        assert (tmp_path / "MES" / "a" / "snapshot.state").is_file()
        feeds.connections["c"] = 1
        assert (await feeds.run(market, "a", pushed(market, bars[0])))["repeated"] == 20
        assert (await feeds.run(market, "a", pushed(market, bars[1])))["repeated"] == 0
        assert [one["feed"] for one in await feeds.guards()] == ["c", "a"]  # c has a connection
        feeds.connections["a"] = 1
        with pytest.raises(OverloadError, match="Too many feeds are open"):
            await feeds.run(market, "b", pushed(market, bars[1]))
        assert await feeds.close() == []

    asyncio.run(run())


def test_feed_opens_and_gets_a_folder_with_its_first_bar(market, made, tmp_path):
    async def run() -> None:
        feeds = Feeds(tmp_path, GuardSettings(), ServiceLimits(feeds=1))
        messages = StreamMessages(SimpleNamespace(by_symbol={"MES": market}), feeds, ServiceLimits())
        for name in ("a", "b", "c"):
            hello = await messages.hello(name, True)
            assert hello["positions"] == [empty_position(market.served)]
        with pytest.raises(SettingsError, match="A feed cannot have this name"):
            await messages.hello("..", True)
        with pytest.raises(BarsError):
            await feeds.run(market, "a", pushed(market, {"close": ["x"]}))
        assert list(tmp_path.iterdir()) == []
        first = columns_of(made.bars["MES"].iloc[:3])
        await feeds.run(market, "b", pushed(market, first))
        assert [path.name for path in (tmp_path / "MES").iterdir()] == ["b"]
        hello = await messages.hello("b", True)
        assert hello["positions"][0]["next"] == (made.bars["MES"]["timestamp"][2] + pd.Timedelta("1min")).isoformat()
        assert await feeds.close() == []

    asyncio.run(run())


def test_folders_of_feeds_are_limited_with_a_message_that_says_what_to_do(market, made, tmp_path):
    first = columns_of(made.bars["MES"].iloc[:3])

    async def run() -> None:
        feeds = Feeds(tmp_path, GuardSettings(), ServiceLimits(stored_feeds=2, feeds=1))
        for name in ("a", "b", "a"):
            await feeds.run(market, name, pushed(market, first))
        with pytest.raises(SettingsError, match=r"no further feed.*got 2 feeds on its disk, wanted at most 2"):
            await feeds.run(market, "c", pushed(market, first))
        assert await feeds.close() == []

    asyncio.run(run())


def test_feed_whose_snapshot_cannot_be_written_is_closed_all_the_same(market, made, tmp_path, monkeypatch):
    first, second = (columns_of(made.bars["MES"].iloc[place : place + 3]) for place in (0, 3))

    async def run() -> None:
        feeds = Feeds(tmp_path, GuardSettings(), ServiceLimits(feeds=1))
        await feeds.run(market, "a", pushed(market, first))
        log = feeds._open["MES", "a"].feed._log

        def fail(_) -> None:
            raise FactoryError("the disk is full")

        monkeypatch.setattr(feeds._open["MES", "a"].feed, "_write_snapshot", fail)
        await feeds.run(market, "b", pushed(market, first))
        assert log._descriptor is None
        assert (await feeds.run(market, "a", pushed(market, first)))["repeated"] == 3
        assert (await feeds.run(market, "a", pushed(market, second)))["repeated"] == 0
        assert await feeds.close() == []

    asyncio.run(run())
