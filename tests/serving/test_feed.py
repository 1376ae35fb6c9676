"""Feeds without a server: damaged files, full disks, restarts, another bundle."""

import itertools

import pandas as pd
import pytest

from ml_factory.errors import BarsError, CheckpointError, FileError
from ml_factory.inference.guard import GuardSettings
from ml_factory.inference.guarded_stream import GuardedStream
from ml_factory.serving.feed import Feed, kept_bars
from ml_factory.serving.served_bundle import ServedBundle
from tests.serving.conftest import columns_of

HISTORY = 6000


@pytest.fixture(scope="module")
def booster(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "xgboost"), GuardSettings())


@pytest.fixture(scope="module")
def linear(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "linear"), GuardSettings())


def test_feed_tells_how_many_bars_it_lacks_until_it_answers(booster, made, tmp_path):
    bars, feed = made.bars["DEMO"], Feed(tmp_path, booster)
    lacking, answered, base = [], [], booster.bundle.spec.features.base_minutes
    for begin, end in itertools.pairwise([0, 50, 4500, *range(4550, HISTORY, 50)]):
        reply = feed.push(columns_of(bars.iloc[begin:end]), None)
        lacking.append(reply["lacking_bars"])
        answered.append(len(reply["answers"]))
    first = next(number for number, count in enumerate(answered) if count)
    assert lacking[0] == booster.lacking_bars - 50 // base and not any(lacking[first:])
    assert all(one > 0 for one in lacking[:first]) and lacking == sorted(lacking, reverse=True)
    assert lacking[first - 1] <= 50 // base + 1
    assert Feed(tmp_path, booster)._stream.lacking_bars == 0


def test_outcome_that_is_not_remembered_says_why(booster, made, tmp_path):
    feed = Feed(tmp_path, booster)
    answers = feed.push(columns_of(made.bars["DEMO"].iloc[:HISTORY]), None)["answers"]
    last = pd.Timestamp(answers[-1]["known_at"])
    assert feed.add_outcome(last, 1)["reason"] == ""
    for moment in (last, last + pd.Timedelta("1min"), last - pd.Timedelta("2000D")):  # given, no answer's, long ago
        reply = feed.add_outcome(moment, 1)
        assert not reply["remembered"] and reply["bundle"] == booster.id
        assert reply["reason"].startswith(
            "no answer of this moment waits for an outcome: it has one, or another known_at"
        )


def test_feed_after_failed_write_continues_from_the_disk(booster, made, tmp_path, disk_full_beyond):
    bars = made.bars["DEMO"]
    feed, reference = Feed(tmp_path, booster), GuardedStream(booster.bundle)
    feed.push(columns_of(bars.iloc[:HISTORY]), None)
    reference.push(bars.iloc[:HISTORY])
    for place in range(HISTORY, HISTORY + 12):
        one = columns_of(bars.iloc[place : place + 1])
        if place % 5 == 0:
            with disk_full_beyond(20), pytest.raises(FileError):
                feed.push(one, None)
        with pytest.raises(BarsError):
            feed.push(columns_of(bars.iloc[place : place + 1].assign(high=0.5)), None)
        got, wanted = feed.push(one, None)["answers"], reference.push(bars.iloc[place : place + 1])
        assert [one["p_long"] for one in got] == wanted["p_long"].tolist()


def test_feed_continues_with_another_bundle_from_its_kept_bars(booster, linear, made, tmp_path):
    bars, feed = made.bars["DEMO"], Feed(tmp_path, booster)
    feed.push(columns_of(bars.iloc[:HISTORY]), None)
    reference, found = GuardedStream(linear.bundle), []
    reference.push(bars.iloc[:HISTORY])
    for place in range(HISTORY, HISTORY + 30):
        if place == HISTORY + 15:  # the process ends without a word, and starts with the other bundle
            feed = Feed(tmp_path, linear)
            again = feed.push(columns_of(bars.iloc[place - 1 : place]), None)
            assert again["repeated"] == 1
        reply = feed.push(columns_of(bars.iloc[place : place + 1]), None)
        wanted = reference.push(bars.iloc[place : place + 1])
        if place < HISTORY + 15:
            continue
        assert (reply["run_id"], reply["bundle"]) == (linear.run_id, linear.id)
        found += [(one["known_at"], one["p_long"]) for one in reply["answers"]]
        if len(wanted):
            assert found[-1] == (wanted.index[-1].isoformat(), pytest.approx(wanted["p_long"].iloc[-1], abs=1e-12))
    assert len(found) == 3
    assert kept_bars(linear.bundle) > 5 * linear.bundle.description["warmup_bars"]


def test_feed_keeps_outcomes_over_restarts(booster, made, tmp_path):
    bars = made.bars["DEMO"]
    feed = Feed(tmp_path, booster)
    answers = feed.push(columns_of(bars.iloc[:HISTORY]), None)["answers"]
    for answer in answers[-5:]:
        assert feed.add_outcome(pd.Timestamp(answer["known_at"]), -1)["remembered"]
    again = Feed(tmp_path, booster)
    assert again.status() == feed.status() and again.status()["outcomes"] == 5


def test_feed_with_damaged_state_names_its_file_and_begins_without_it(booster, made, tmp_path):
    bars, feed = made.bars["DEMO"], Feed(tmp_path, booster)
    feed.push(columns_of(bars.iloc[:HISTORY]), None)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for damaged in (content[:-10], b"", content.replace(b"ml_factory.feed/2", b"ml_factory.feed/9")):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"state of this feed is damaged.*Next: delete this file"):
            Feed(tmp_path, booster)
    path.unlink()
    assert Feed(tmp_path, booster).status()["last_bar_end"] is None


def test_feed_answers_stale_bars_again_as_they_were_answered_with_the_clock_of_then(booster, made, tmp_path):
    bars, feed = made.bars["DEMO"], Feed(tmp_path, booster)
    feed.push(columns_of(bars.iloc[:HISTORY]), None)
    late = bars["timestamp"].iloc[HISTORY] + pd.Timedelta(hours=3)
    stale = [feed.push(columns_of(bars.iloc[HISTORY + n : HISTORY + n + 1]), late) for n in range(6)]
    (answer,) = [one for reply in stale for one in reply["answers"]]
    assert answer["guard"] == "abstain" and answer["p_long"] is None and "the newest bar" in answer["reason"]
    again = Feed(tmp_path, booster)
    assert again.status() == feed.status()
    for number, reply in enumerate(stale):
        got = again.push(columns_of(bars.iloc[HISTORY + number : HISTORY + number + 1]), None)
        assert got["repeated"] == 1 and got["answers"] == reply["answers"]


def test_feed_of_mixed_columns_and_times_keeps_as_many_bars_as_another_guard_begins_with(booster, made, tmp_path):
    bars, feed = made.bars["DEMO"], Feed(tmp_path, booster)
    feed.push(columns_of(bars.iloc[:HISTORY]), None)
    for place in range(HISTORY, HISTORY + 3):
        one = columns_of(bars.iloc[place : place + 1])
        if place == HISTORY:
            one["time"] = one.pop("timestamp")
        elif place == HISTORY + 1:
            one["timestamp"] = [int(bars["timestamp"].iloc[place].timestamp())]
        feed.push(one, None)
    wanted = feed.status()["last_bar_end"]
    other = ServedBundle(made.load("DEMO", "xgboost"), GuardSettings(stale="refuse"))
    again = Feed(tmp_path, other)
    assert again.status()["last_bar_end"] == wanted and again._served.guard.stale == "refuse"
    for first in range(HISTORY + 3, len(bars), 1000):
        again.push(columns_of(bars.iloc[first : first + 1000]), None)
    kept = sum(len(next(iter(columns.values()))) for columns in again._bars)
    assert kept == min(kept_bars(other.bundle), len(bars))
