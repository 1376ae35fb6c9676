"""Feeds without a server: repeated bars, damaged files, full disks, restarts, another bundle."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import GuardedStream
from ml_factory.errors import BarsError, CheckpointError, FileError
from tests.contract.doors import (
    KNOWN_BARS,
    Feed,
    ServedBundle,
    kept_bars,
    read_state_file,
    to_table,
)
from tests.contract.service import columns_of

HISTORY = 6000


@pytest.fixture(scope="module")
def booster(made) -> ServedBundle:
    return ServedBundle(made.load("xgboost"))


@pytest.fixture(scope="module")
def linear(made) -> ServedBundle:
    return ServedBundle(made.load("linear"))


@pytest.fixture(scope="module")
def history(booster, made, tmp_path_factory):
    """A feed's folder with its history, only read, and a stream that was given the same."""
    folder, stream = tmp_path_factory.mktemp("history") / "feed", GuardedStream(booster.bundle)
    push(Feed(folder, booster), made.bars.iloc[:HISTORY])
    stream.push(made.bars.iloc[:HISTORY])
    return folder, stream.get_state()


@pytest.fixture
def filled(history, booster, made, tmp_path) -> tuple[Feed, pd.DataFrame]:
    """A feed in `tmp_path` with its history, and the bars after it."""
    shutil.copytree(history[0], tmp_path, dirs_exist_ok=True)
    return Feed(tmp_path, booster), made.bars.iloc[HISTORY:]


def push(feed: Feed, bars: pd.DataFrame, now: pd.Timestamp | None = None) -> dict:
    """The reply to bars as a client sends them."""
    return feed.push(feed.check(to_table(columns_of(bars))), now)


def test_feed_tells_how_many_bars_it_lacks_until_it_answers(booster, made, tmp_path):
    bars, feed = made.bars, Feed(tmp_path, booster)
    lacking, answered, base = [], [], booster.bundle.spec.features.base_minutes
    for begin, end in itertools.pairwise([0, 50, 4500, *range(4550, HISTORY, 50)]):
        reply = push(feed, bars.iloc[begin:end])
        lacking.append(reply["lacking_bars"])
        answered.append(len(reply["answers"]))
    first = next(number for number, count in enumerate(answered) if count)
    assert lacking[0] == booster.bundle.description["warmup_bars"] + 1 - 50 // base and not any(lacking[first:])
    assert all(one > 0 for one in lacking[:first]) and lacking == sorted(lacking, reverse=True)
    assert lacking[first - 1] <= 50 // base + 1


def test_feed_answers_each_recent_bar_again_after_restart_in_messages_of_any_size(booster, made, filled, tmp_path):
    feed, bars = filled
    whole, replies, place = push(Feed(tmp_path / "whole", booster), made.bars.iloc[: HISTORY + 1100]), [], 0
    for size in (100, KNOWN_BARS - 92, 1, 60, 1, 30):
        replies.append((place, place + size, push(feed, bars.iloc[place : place + size])["answers"]))
        place += size
    again, stored = Feed(tmp_path, booster), (tmp_path / "feed.state").read_bytes()
    for first, end, answers in replies[1:]:
        reply = push(again, bars.iloc[first:end])
        assert reply["answers"] == answers and reply["repeated"] == end - first
        assert reply["repeated_answers"] == len(answers)
    assert len(replies[1][2]) > 100 and (tmp_path / "feed.state").read_bytes() == stored
    found = [
        one
        for first in range(100, place, 7)
        for one in push(again, bars.iloc[first : min(first + 7, place)])["answers"]
    ]
    assert found == [one for _, _, answers in replies[1:] for one in answers]
    assert found == whole["answers"][-len(found) :]
    reply = push(again, bars.iloc[place - 20 : place + 60])
    assert reply["repeated"] == 20 and 0 < reply["repeated_answers"] < len(reply["answers"])
    for wrong in (made.bars.iloc[98:101], bars.iloc[place : place + 1].assign(high=lambda one: one["high"] + 1)):
        with pytest.raises(BarsError, match="Bars overlap"):
            push(again, wrong)


def test_feed_knows_bars_again_in_other_spellings(filled):
    feed, bars = filled
    first = push(feed, bars.iloc[:20])
    epochs = bars.iloc[:20].assign(timestamp=[int(one.timestamp()) for one in bars["timestamp"].iloc[:20]])
    for table in (bars.iloc[:20].rename(columns={"timestamp": "time"}).astype({"time": str}), epochs):
        again = feed.push(feed.check(to_table(table.to_dict("records"))), None)
        assert again["answers"] == first["answers"] and again["repeated"] == 20


def test_feed_after_failed_write_or_refused_bar_continues_from_the_disk(booster, history, filled, disk_full_beyond):
    feed, bars = filled
    reference = GuardedStream(booster.bundle)
    reference.load_state(history[1])
    for place in range(12):
        one = bars.iloc[place : place + 1]
        if place % 5 == 0:
            with disk_full_beyond(20), pytest.raises(FileError):
                push(feed, one)
        for wrong, named in ((one.assign(high=0.5), "high"), (one.assign(symbol="ES"), "bars of another symbol"),
                             (one.assign(contract="A", chain=-1.0), "price step of a roll")):  # fmt: skip
            with pytest.raises(BarsError, match=named):
                push(feed, wrong)
        got, wanted = push(feed, one.assign(symbol="DEMO"))["answers"], reference.push(one)
        assert [one["p_long"] for one in got] == wanted["p_long"].tolist()


def test_feed_with_another_bundle_continues_from_its_kept_bars_and_keeps_first_answers(
    booster, linear, made, filled, tmp_path
):
    feed, bars = filled
    first = push(feed, bars.iloc[:60])["answers"]
    again = Feed(tmp_path, linear)  # the process ended without a word
    reply = push(again, bars.iloc[:100])
    assert (reply["bundle"], reply["repeated"], reply["repeated_answers"]) == (linear.id, 60, len(first))
    own = {"symbol": "DEMO", "run_id": booster.run_id, "bundle": booster.id}
    assert reply["answers"][: len(first)] == [own | one for one in first]
    reference = GuardedStream(linear.bundle)
    reference.push(made.bars.iloc[: HISTORY + 60])
    wanted, rest = reference.push(bars.iloc[60:100])["p_long"], reply["answers"][len(first) :]
    assert [one["known_at"] for one in rest] == [moment.isoformat() for moment in wanted.index] and len(rest) > 3
    assert [one["p_long"] for one in rest] == pytest.approx(wanted.tolist(), abs=1e-12)
    assert all("bundle" not in one for one in rest) and Feed(tmp_path, linear).status() == again.status()
    assert kept_bars(linear.bundle) > 5 * linear.bundle.description["warmup_bars"]


def test_feed_with_a_bundle_that_reads_other_bars_is_refused_and_stays_as_it_was(made, linear, tmp_path):
    bundle = linear.bundle

    def of(**market: object) -> ServedBundle:
        spec = bundle.description["spec"]
        changed = {"spec": spec | {"market": spec["market"] | market}}
        return ServedBundle(replace(bundle, description=bundle.description | changed))

    bars = made.bars.head(100)
    for given, other, named in (
        (bars, of(bar_minutes=5), "got bars of 1 min, wanted bars of 5 min with volume"),
        (bars.drop(columns="volume"), linear, "got bars of 1 min without volume, wanted bars of 1 min with volume"),
    ):
        folder = tmp_path / str(len(given.columns))
        own = linear if "volume" in given else of(has_volume=False)
        push(Feed(folder, own), given)
        with pytest.raises(CheckpointError, match=named):
            Feed(folder, other)
        assert push(Feed(folder, own), given)["repeated"] == 100


def test_feed_keeps_outcomes_over_restarts_and_says_why_it_remembers_none(booster, filled, tmp_path):
    feed, bars = filled
    moments = [pd.Timestamp(one["known_at"]) for one in push(feed, bars.iloc[:40])["answers"]]
    for moment in moments[-5:]:
        assert feed.add_outcome(moment, -1) | {"reason": ""} == {
            "remembered": True, "reason": "", "run_id": booster.run_id, "bundle": booster.id
        }  # fmt: skip
    again = Feed(tmp_path, booster)
    assert again.status() == feed.status() and again.status()["outcomes"] == 5
    for moment in (moments[-1], moments[-1] + pd.Timedelta("1min"), moments[-1] - pd.Timedelta("2000D")):
        reply = again.add_outcome(moment, 1)  # given, no answer's, long ago
        assert not reply["remembered"] and reply["reason"].startswith("no answer of this moment waits for an outcome")


def test_feed_keeps_the_newest_bars_without_a_hole(booster, filled, made, tmp_path):
    feed, bars = filled
    for first in range(0, 2500, 500):
        push(feed, bars.iloc[first : first + 500])
    stored = read_state_file(next(tmp_path.iterdir()))
    kept = stored["bars"]["close"]
    assert len(kept) == kept_bars(booster.bundle) >= KNOWN_BARS
    np.testing.assert_array_equal(kept, made.bars["close"].iloc[HISTORY + 2500 - len(kept) : HISTORY + 2500])


def test_feed_with_damaged_state_names_its_file_and_begins_without_it(booster, filled, tmp_path):
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    damage = "stored state of this feed is damaged"
    for stored, named in (
        (content[:-10], damage), (b"", damage),
        (content.replace(b"ml_factory.feed/9", b"ml_factory.feed/0"), "of this version.*feed/0"),
    ):  # fmt: skip
        path.write_bytes(stored)
        with pytest.raises(CheckpointError, match=rf"{named}.*Next: delete this file"):
            Feed(tmp_path, booster)
    path.unlink()
    assert Feed(tmp_path, booster).status()["last_bar_end"] is None


def test_feed_answers_stale_bars_again_as_they_were_answered_with_the_clock_of_then(booster, filled, tmp_path):
    feed, bars = filled
    late = bars["timestamp"].iloc[0] + pd.Timedelta(hours=3)
    stale = [push(feed, bars.iloc[number : number + 1], late) for number in range(6)]
    (answer,) = [one for reply in stale for one in reply["answers"]]
    assert answer["guard"] == "abstain" and answer["p_long"] is None and "the newest bar" in answer["reason"]
    again = Feed(tmp_path, booster)
    assert again.status() == feed.status()
    for number, reply in enumerate(stale):
        assert push(again, bars.iloc[number : number + 1])["answers"] == reply["answers"]
