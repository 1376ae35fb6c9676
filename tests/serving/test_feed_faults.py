"""Faults of clients, clocks and disks at a feed: refused in one line, after which the feed continues as before."""

import asyncio
import json
from collections import Counter

import pandas as pd
import pytest
from pydantic import ValidationError

from ml_factory.errors import BarsError
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving import feed_log as feed_log_module
from ml_factory.serving.feed import Feed
from ml_factory.serving.feed_log import FeedLog
from ml_factory.serving.rate_limits import RateLimits
from ml_factory.serving.schemas import PredictRequest
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.served_market import ServedMarket
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.stream_endpoint import answer_stream
from tests.serving.conftest import columns_of

HISTORY = 6000
NOW = pd.Timestamp("2026-06-01", tz="UTC")


@pytest.fixture(scope="module")
def booster(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "xgboost"), GuardSettings())


def filled_feed(folder, served: ServedBundle, made) -> Feed:
    feed = Feed(folder, served, GuardSettings())
    feed.push(served, columns_of(made.bars["DEMO"].iloc[:HISTORY]), None)
    return feed


@pytest.mark.parametrize(
    "body",
    [
        {"bars": {"a": [[]] * 20_000}}, {"bars": [{"a": []}] * 20_000},
        {"rows": {"columns": [[]] * 4000, "values": [[[]] * 100] * 200}},
        {"rows": {"columns": ["a"], "values": [[1]], "known_at": [[]] * 20_000, "segment": [[]] * 20_000}},
    ],
)  # fmt: skip
def test_predict_request_of_many_wrong_cells_collects_few_errors(body):
    with pytest.raises(ValidationError) as caught:
        PredictRequest.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 50


def test_bars_beyond_the_limit_are_refused_before_they_wait(booster, tmp_path):
    market = ServedMarket(tmp_path, booster, ServiceLimits(bars=3))
    market.thread.close()  # a job would be refused
    for bars in ([{"close": 1.0}] * 4, {"close": [1.0] * 4}):
        with pytest.raises(BarsError, match="Too many bars at once"):
            asyncio.run(market.predict(PredictRequest(bars=bars)))


def test_feed_refuses_empty_columns_and_goes_on(booster, made, tmp_path):
    feed = filled_feed(tmp_path, booster, made)
    for columns in ({"close": []}, {}):
        with pytest.raises(BarsError, match="There are no bars"):
            feed.push(booster, columns, None)
    assert feed.push(booster, columns_of(made.bars["DEMO"].iloc[HISTORY : HISTORY + 1]), None)["repeated"] == 0
    with pytest.raises(ValidationError):
        PredictRequest.model_validate({"bars": {"close": []}})


def test_bars_that_name_another_symbol_or_impossible_rolls_are_refused_and_the_feed_goes_on(booster, made, tmp_path):
    feed, bars = filled_feed(tmp_path, booster, made), made.bars["DEMO"]
    one = columns_of(bars.iloc[HISTORY : HISTORY + 1])
    for more, named in (
        ({"symbol": ["ES"]}, "bars of another symbol"), ({" Symbol": [7]}, "bars of another symbol"),
        *(({"contract": ["A"], "chain": [chain]}, "price step of a roll") for chain in (0, -1, None, "x", 1e999)),
    ):  # fmt: skip
        with pytest.raises(BarsError, match=named):
            feed.push(booster, one | more, None)
    with pytest.raises(BarsError, match="bars of another symbol"):
        booster.predict_bars(one | {"symbol": ["ES"]}, 1, None)
    assert feed.push(booster, one | {"symbol": ["DEMO"]}, None)["repeated"] == 0


class OneMessageSocket:
    """A connection that sends one message and leaves."""

    def __init__(self):
        self.sent: list[dict] = []
        self._received = [{"type": "websocket.receive", "text": "{}"}, {"type": "websocket.disconnect"}]
        self.scope = {}

    async def accept(self) -> None:
        pass

    async def send_text(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def receive(self) -> dict:
        return self._received.pop(0)


class FailingService:
    """A service whose answers fail unexpectedly."""

    def __init__(self):
        self.connections, self.limits = Counter(), ServiceLimits()
        self.stopping, self.messages_under_way, self.rates = False, 0, RateLimits(1.0, 5)

    async def hello(self, feed: str) -> dict:
        return {"type": "hello"}

    async def answer_message(self, feed: str, text: str) -> dict:
        raise IndexError("of a fault in the service")


def test_answer_stream_whose_message_fails_unexpectedly_sends_problem_and_goes_on(caplog):
    socket = OneMessageSocket()
    asyncio.run(answer_stream(socket, FailingService(), "default"))
    hello, problem = socket.sent
    assert (hello["type"], problem["type"], problem["status"]) == ("hello", "problem", 500)
    assert "of a fault in the service" in caplog.text and "IndexError" not in problem["message"]


@pytest.mark.parametrize(("until", "now"), [("2199-01-01", NOW), ("2098-01-01", NOW), ("2199-01-01", "2199-01-02")])
def test_feed_after_refused_advance_answers_next_bars(booster, made, tmp_path, until, now):
    """With a clock of 2199 the moment is not refused as one of the future, but as one outside the calendar."""
    feed, bars = filled_feed(tmp_path, booster, made), made.bars["DEMO"]
    with pytest.raises(BarsError, match=r"in the future|outside the calendar"):
        feed.advance(booster, pd.Timestamp(until, tz="UTC"), pd.Timestamp(now).tz_localize(None).tz_localize("UTC"))
    reply = feed.push(booster, columns_of(bars.iloc[HISTORY : HISTORY + 10]), None)
    assert len(reply["answers"]) == 2


def test_feed_logs_no_advance_without_answers(booster, made, tmp_path):
    feed, bars = filled_feed(tmp_path, booster, made), made.bars["DEMO"]
    moment = bars["timestamp"].iloc[HISTORY - 1] + pd.Timedelta(minutes=1)
    feed.advance(booster, moment, NOW)
    last = feed._log.last
    for _ in range(50):
        assert feed.advance(booster, moment, NOW)["answers"] == []
    assert feed._log.last == last
    place = HISTORY
    while not feed.push(booster, columns_of(bars.iloc[place : place + 1]), None)["answers"]:
        place += 1
    feed.push(booster, columns_of(bars.iloc[place + 1 : place + 3]), None)
    last = feed._log.last
    answers = feed.advance(booster, bars["timestamp"].iloc[place + 2] + pd.Timedelta(minutes=6), NOW)["answers"]
    assert answers and feed._log.last == last + 1
    assert Feed(tmp_path, booster, GuardSettings()).status() == feed.status()


def test_feed_log_flushes_torn_end_after_cutting_it_off(tmp_path, monkeypatch):
    log = FeedLog(tmp_path)
    for number in range(3):
        log.append("bars", 1, {"columns": {"close": [number]}})
    log.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    kept = len(b"".join(whole.splitlines(keepends=True)[:2]))
    flushed = []
    monkeypatch.setattr(feed_log_module, "flush_to_disk", lambda _: flushed.append(path.stat().st_size))
    monkeypatch.setattr(feed_log_module, "flush_folder", flushed.append)
    assert FeedLog(tmp_path).last == 2 and flushed == [kept, tmp_path]


def test_feed_of_mixed_columns_and_times_continues_with_other_guard_and_shows_failed_warm_up(
    booster, made, tmp_path, monkeypatch
):
    feed, bars = filled_feed(tmp_path, booster, made), made.bars["DEMO"]
    for place in range(HISTORY, HISTORY + 3):
        one = columns_of(bars.iloc[place : place + 1])
        if place == HISTORY:
            one["time"] = one.pop("timestamp")
        elif place == HISTORY + 1:
            one["timestamp"] = [int(bars["timestamp"].iloc[place].timestamp())]
        feed.push(booster, one, None)
    wanted = feed.position(booster)["next"]
    other = ServedBundle(made.load("DEMO", "xgboost"), GuardSettings())
    with monkeypatch.context() as patch:
        patch.setattr(feed, "_warm_up", lambda log: (_ for _ in ()).throw(BarsError("the warm-up fails")))
        with pytest.raises(BarsError, match="the warm-up fails"):
            feed.position(other)
    assert feed._log is None
    assert feed.position(other)["next"] == wanted
    again = Feed(tmp_path, booster, GuardSettings(stale="refuse"))
    assert again.position(booster)["next"] == wanted
    feed.close()
