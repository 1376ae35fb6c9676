"""Feeds and their log without a server: torn and damaged files, full disks, segments, another bundle."""

import itertools
import json
import shutil
import zlib
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import BarsError, CheckpointError, FactoryError, FileError
from ml_factory.inference.guard.guarded_stream import GuardedStream
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving import feed as feed_module
from ml_factory.serving import feed_log as feed_log_module
from ml_factory.serving.feed import Feed, kept_bars
from ml_factory.serving.feed_log import FeedLog
from ml_factory.serving.served_bundle import ServedBundle
from tests.fuzz.damage import damaged_value
from tests.fuzz.kinds import damaged_state
from tests.serving.conftest import columns_of

HISTORY = 6000


@pytest.fixture(scope="module")
def booster(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "xgboost"), GuardSettings())


@pytest.fixture(scope="module")
def linear(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "linear"), GuardSettings())


def filled_log(folder, count: int = 5) -> FeedLog:
    log = FeedLog(folder)
    for number in range(count):
        log.append("bars", 2, {"columns": {"close": [number, 0.1 + number]}})
    return log


def test_feed_log_reads_records_back_and_cuts_off_torn_end(tmp_path):
    filled_log(tmp_path).close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for cut in (1, 5, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        log = FeedLog(tmp_path)
        assert [record["n"] for record in log.read()] == [1, 2, 3, 4] and log.last == 4
        assert log.append("bars", 2, {"columns": {"close": [4, 4.1]}}) == 5
        log.close()
        again = FeedLog(tmp_path)
        assert [record["columns"]["close"][1] for record in again.read(after=3)] == [3.1, 4.1]
        max(tmp_path.iterdir()).unlink()  # the segment of the fifth record


def test_feed_log_with_damage_before_its_end_or_absent_records_is_refused(tmp_path):
    filled_log(tmp_path).close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    damaged = (whole.replace(b"1.1", b"1.2"), b"".join(lines[:2] + lines[3:]), whole + b"more", lines[0][3:] + whole)
    for content in damaged[:2] + damaged[3:]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"log of this feed (is damaged|lacks records).*Next: delete"):
            FeedLog(tmp_path)
    path.write_bytes(damaged[2])  # torn within its first record after the fifth
    assert FeedLog(tmp_path).last == 5


def test_feed_log_on_full_disk_appends_nothing_and_goes_on_later(tmp_path, disk_full_beyond):
    log = filled_log(tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with disk_full_beyond(len(before) + 20), pytest.raises(FileError, match="No space left"):
        log.append("bars", 1, {"columns": {"close": [9.0]}})
    assert path.read_bytes() == before and log.append("bars", 1, {"columns": {"close": [9.0]}}) == 6
    log.close()
    assert FeedLog(tmp_path).last == 6


def test_feed_log_keeps_segments_of_wanted_bars_and_deletes_older(tmp_path):
    log = filled_log(tmp_path)
    for _ in range(6):
        log.start_segment(keep_bars=20)
        for _ in range(4):
            log.append("bars", 2, {"columns": {}})
    log.close()
    kept = FeedLog(tmp_path)
    numbers = [record["n"] for record in kept.read()]
    assert numbers == list(range(numbers[0], 30)) and 20 <= 2 * len(numbers) < 36


def log_with_segments(folder, bars: list[int]) -> FeedLog:
    """A log with a segment of two records for each number, of so many bars each; a last one is open."""
    log = FeedLog(folder)
    for number in bars:
        log.close()  # the next record begins a segment
        for _ in range(2):
            log.append("bars" if number else "outcome", number, {"columns": {}})
    return log


def test_feed_log_deletes_segments_without_bars_and_counts_their_records(tmp_path):
    log = log_with_segments(tmp_path, [3, 0, 0, 2, 0])
    log.start_segment(keep_bars=10**9)
    assert [path.name[4:] for path in sorted(tmp_path.iterdir())] == [
        "000000000001-000000000007.jsonl", "000000000007-000000000011.jsonl"
    ]  # fmt: skip
    for opened in (log, FeedLog(tmp_path)):
        assert opened.last == 10 and [record["n"] for record in opened.read()] == [1, 2, 7, 8]
        assert [record["n"] for record in opened.read(after=7)] == [8]
    again = FeedLog(tmp_path)
    assert again.append("outcome", 0, {}) == 11
    again.start_segment(keep_bars=10**9)  # a second deletion after the same segment
    assert FeedLog(tmp_path).last == 11
    again.append("bars", 5, {"columns": {}})
    again.start_segment(keep_bars=5)
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log-000000000012.jsonl"] and FeedLog(tmp_path).last == 12


def test_feed_log_killed_while_it_deletes_segments_is_read_all_the_same(tmp_path, monkeypatch):
    log = log_with_segments(tmp_path, [3, 0, 0, 2])
    log.append("bars", 1, {"columns": {}})
    with monkeypatch.context() as patch:
        patch.setattr(feed_log_module.files, "remove", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            log.start_segment(keep_bars=10**9)
    assert len(list(tmp_path.iterdir())) == 4
    again = FeedLog(tmp_path)
    assert again.last == 9 and [record["n"] for record in again.read()] == [1, 2, 7, 8, 9]
    assert len(list(tmp_path.iterdir())) == 2
    min(tmp_path.iterdir()).rename(tmp_path / "log-000000000001.jsonl")  # without the name that counts them
    with pytest.raises(CheckpointError, match="lacks records"):
        FeedLog(tmp_path)


def test_feed_keeps_log_of_outcomes_small_over_many_snapshots(booster, made, tmp_path, monkeypatch):
    monkeypatch.setattr(feed_module, "RECORDS_BETWEEN_SNAPSHOTS", 2)
    monkeypatch.setattr(feed_module, "RECORDS_OF_SEGMENT", 2)
    feed = Feed(tmp_path, booster, GuardSettings())
    answers = feed.push(booster, columns_of(made.bars["DEMO"].iloc[:HISTORY]), None)["answers"]
    for answer in answers[-20:]:
        assert feed.add_outcome(booster, pd.Timestamp(answer["known_at"]), -1)["remembered"]
    assert len(list(tmp_path.glob("log-*"))) <= 3
    status = feed.status()
    feed._log.close()  # killed
    assert Feed(tmp_path, booster, GuardSettings()).status() == status and status["outcomes"] == 20


def test_feed_tells_how_many_bars_it_lacks_until_it_answers(booster, made, tmp_path):
    bars, feed = made.bars["DEMO"], Feed(tmp_path, booster, GuardSettings())
    lacking, answered, base = [], [], booster.bundle.spec.features.base_minutes
    for begin, end in itertools.pairwise([0, 50, 4500, *range(4550, HISTORY, 50)]):
        reply = feed.push(booster, columns_of(bars.iloc[begin:end]), None)
        lacking.append(reply["lacking_bars"])
        answered.append(len(reply["answers"]))
    first = next(number for number, count in enumerate(answered) if count)
    assert lacking[0] == booster.lacking_bars - 50 // base and not any(lacking[first:])
    assert all(one > 0 for one in lacking[:first]) and lacking == sorted(lacking, reverse=True)
    assert lacking[first - 1] <= 50 // base + 1
    feed.close()
    assert Feed(tmp_path, booster, GuardSettings())._stream.lacking_bars == 0


def test_outcome_that_is_not_remembered_says_why(booster, made, tmp_path):
    feed = Feed(tmp_path, booster, GuardSettings())
    answers = feed.push(booster, columns_of(made.bars["DEMO"].iloc[:HISTORY]), None)["answers"]
    last = pd.Timestamp(answers[-1]["known_at"])
    assert feed.add_outcome(booster, last, 1)["reason"] == ""
    for moment in (last, last + pd.Timedelta("1min"), last - pd.Timedelta("2000D")):  # given, no answer's, long ago
        reply = feed.add_outcome(booster, moment, 1)
        assert not reply["remembered"] and reply["bundle"] == booster.id
        assert reply["reason"].startswith(
            "no answer of this moment waits for an outcome: it has one, or another known_at"
        )


def test_feed_after_failed_append_continues_from_the_log(booster, made, tmp_path, disk_full_beyond, monkeypatch):
    monkeypatch.setattr(feed_module, "RECORDS_BETWEEN_SNAPSHOTS", 3)
    bars = made.bars["DEMO"]
    feed, reference = Feed(tmp_path, booster, GuardSettings()), GuardedStream(booster.bundle)
    feed.push(booster, columns_of(bars.iloc[:HISTORY]), None)
    reference.push(bars.iloc[:HISTORY])
    for place in range(HISTORY, HISTORY + 12):
        one = columns_of(bars.iloc[place : place + 1])
        if place % 5 == 0:
            with disk_full_beyond(20), pytest.raises(FileError):
                feed.push(booster, one, None)
        with pytest.raises(BarsError):
            feed.push(booster, columns_of(bars.iloc[place : place + 1].assign(high=0.5)), None)
        got, wanted = feed.push(booster, one, None)["answers"], reference.push(bars.iloc[place : place + 1])
        assert [one["p_long"] for one in got] == wanted["p_long"].tolist()


def test_feed_continues_with_another_bundle_from_its_kept_bars(booster, linear, made, tmp_path):
    bars, feed = made.bars["DEMO"], Feed(tmp_path, booster, GuardSettings())
    feed.push(booster, columns_of(bars.iloc[:HISTORY]), None)
    reference, found = GuardedStream(linear.bundle), []
    reference.push(bars.iloc[:HISTORY])
    for place in range(HISTORY, HISTORY + 30):
        if place == HISTORY + 15:  # the process ends without a word, and starts with the other bundle
            feed = Feed(tmp_path, linear, GuardSettings())
            again = feed.push(linear, columns_of(bars.iloc[place - 1 : place]), None)
            assert again["repeated"] == 1
        reply = feed.push(linear, columns_of(bars.iloc[place : place + 1]), None)
        assert (reply["run_id"], reply["bundle"]) == (linear.run_id, linear.id)
        found += [(one["known_at"], one["p_long"]) for one in reply["answers"]]
        wanted = reference.push(bars.iloc[place : place + 1])
        if len(wanted):
            assert found[-1] == (wanted.index[-1].isoformat(), pytest.approx(wanted["p_long"].iloc[-1], abs=1e-12))
    assert len(found) == 6
    assert kept_bars(linear.bundle) > 5 * linear.bundle.description["warmup_bars"]


def test_feed_with_damaged_snapshot_names_it_and_starts_from_log_without_it(booster, made, tmp_path):
    bars = made.bars["DEMO"]
    feed = Feed(tmp_path, booster, GuardSettings())
    feed.push(booster, columns_of(bars.iloc[:HISTORY]), None)
    feed.close()
    path = tmp_path / "snapshot.state"
    content = path.read_bytes()
    for damaged in (content[:-10], b"", content.replace(b"ml_factory.feed/1", b"ml_factory.feed/9")):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"snapshot.*Next: delete this file"):
            Feed(tmp_path, booster, GuardSettings())
    path.unlink()
    again = Feed(tmp_path, booster, GuardSettings())
    one = columns_of(bars.iloc[HISTORY : HISTORY + 5])
    path.write_bytes(content)
    reply = again.push(booster, one, None)
    repeated = {"repeated": 5, "repeated_answers": len(reply["answers"])}
    assert reply["answers"] and Feed(tmp_path, booster, GuardSettings()).push(booster, one, None) == reply | repeated


def test_feed_replays_records_with_the_clock_of_then(booster, made, tmp_path):
    bars = made.bars["DEMO"]
    feed = Feed(tmp_path, booster, GuardSettings())
    feed.push(booster, columns_of(bars.iloc[:HISTORY]), None)
    late = bars["timestamp"].iloc[HISTORY] + pd.Timedelta(hours=3)
    stale = [feed.push(booster, columns_of(bars.iloc[HISTORY + n : HISTORY + n + 1]), late) for n in range(6)]
    (answer,) = [one for reply in stale for one in reply["answers"]]
    assert answer["guard"] == "abstain" and answer["p_long"] is None and "the newest bar" in answer["reason"]
    again = Feed(tmp_path, booster, GuardSettings())
    for number, reply in enumerate(stale):
        one = columns_of(bars.iloc[HISTORY + number : HISTORY + number + 1])
        repeated = {"repeated": 1, "repeated_answers": len(reply["answers"])}
        assert again.push(booster, one, None) == reply | repeated
    assert json.dumps(again.status()) == json.dumps(feed.status())


def test_feed_keeps_outcomes_over_restarts(booster, made, tmp_path):
    bars = made.bars["DEMO"]
    feed = Feed(tmp_path, booster, GuardSettings())
    answers = feed.push(booster, columns_of(bars.iloc[:HISTORY]), None)["answers"]
    feed.close()
    for answer in answers[-5:]:
        assert feed.add_outcome(booster, pd.Timestamp(answer["known_at"]), -1)["remembered"]
    again = Feed(tmp_path, booster, GuardSettings())
    assert again.status() == feed.status() and again.status()["outcomes"] == 5


def test_feed_with_damaged_values_under_right_checksums_is_refused_or_read(booster, made, tmp_path):
    bars, generator = made.bars["DEMO"], np.random.default_rng(0)
    feed = Feed(tmp_path / "whole", booster, GuardSettings())
    feed.push(booster, columns_of(bars.iloc[:50]), None)
    feed.close()
    for number in range(50, 56):
        feed.push(booster, columns_of(bars.iloc[number : number + 1]), pd.Timestamp("2024-02-01", tz="UTC"))
    refused = 0
    for number in range(120):
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        snapshot = tmp_path / "damaged" / "snapshot.state"
        if number % 2:
            snapshot.write_bytes(damaged_state(snapshot.read_bytes(), generator))
        else:
            path = max((tmp_path / "damaged").glob("log-*"))
            lines = path.read_bytes().splitlines()
            record = damaged_value(json.loads(lines[number % len(lines)][9:]), generator)
            with suppress(ValueError):  # not finite: the log has no such record
                text = json.dumps(record, allow_nan=False).encode()
                lines[number % len(lines)] = b"%08x %s" % (zlib.crc32(text), text)
            path.write_bytes(b"\n".join(lines) + b"\n")
        try:
            Feed(tmp_path / "damaged", booster, GuardSettings()).close()
        except FactoryError:
            refused += 1
        shutil.rmtree(tmp_path / "damaged")
    assert refused > 30
