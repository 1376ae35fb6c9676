"""Bars that are sent again: acknowledged with their first answers, over snapshots, restarts and other bundles."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import BarsError
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving import service as service_module
from ml_factory.serving.feed import Feed
from ml_factory.serving.recent_answers import RECENT_BARS, RecentAnswers
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.service import Service
from ml_factory.serving.service_settings import ServiceLimits
from tests.serving.conftest import columns_of

HISTORY = 6000


@pytest.fixture(scope="module")
def booster(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "xgboost"), GuardSettings())


@pytest.fixture(scope="module")
def linear(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "linear"), GuardSettings())


def span(made, first: int, end: int) -> dict[str, list]:
    return columns_of(made.bars["DEMO"].iloc[first:end])


def filled_feed(folder, served: ServedBundle, made) -> Feed:
    feed = Feed(folder, served, GuardSettings())
    feed.push(served, span(made, 0, HISTORY), None)
    return feed


def test_feed_answers_each_recent_bar_again_after_snapshot_and_restart(booster, made, tmp_path):
    feed = filled_feed(tmp_path, booster, made)
    sizes, place, replies = (RECENT_BARS - 92, 1, 60, 1, 30), HISTORY, []
    for size in sizes:
        replies.append((place, place + size, feed.push(booster, span(made, place, place + size), None)["answers"]))
        place += size
    feed.close()
    again = Feed(tmp_path, booster, GuardSettings())
    last = again._log.last
    for first, end, answers in replies:
        reply = again.push(booster, span(made, first, end), None)
        assert reply["answers"] == answers and reply["repeated"] == end - first
        assert reply["repeated_answers"] == len(answers)
    assert len(replies[0][2]) > 100 and again._log.last == last
    found = []
    for first in range(HISTORY, place, 7):  # in messages of other sizes
        found += again.push(booster, span(made, first, min(first + 7, place)), None)["answers"]
    assert found == [one for _, _, answers in replies for one in answers]
    with pytest.raises(BarsError, match="Bars overlap"):
        again.push(booster, span(made, HISTORY - 1, HISTORY + 1), None)


def test_feed_answers_partly_repeated_message_with_stored_answers_before_new_ones(booster, made, tmp_path):
    feed, alone = (filled_feed(tmp_path / name, booster, made) for name in ("parts", "alone"))
    first = feed.push(booster, span(made, HISTORY, HISTORY + 40), None)["answers"]
    feed.close()
    again = Feed(tmp_path / "parts", booster, GuardSettings())
    reply = again.push(booster, span(made, HISTORY, HISTORY + 60), None)
    wanted = alone.push(booster, span(made, HISTORY, HISTORY + 60), None)["answers"]
    assert reply["answers"] == wanted and wanted[: len(first)] == first
    assert (reply["repeated"], reply["repeated_answers"]) == (40, len(first)) and len(wanted) > len(first) > 5


def test_feed_keeps_the_same_answer_of_each_bar_however_they_were_pushed(booster, made, tmp_path):
    whole, single = (filled_feed(tmp_path / name, booster, made) for name in ("whole", "single"))
    whole.push(booster, span(made, HISTORY, HISTORY + 200), None)
    for place in range(HISTORY, HISTORY + 200):
        one = span(made, place, place + 1)
        first = single.push(booster, one, None)["answers"]
        assert whole.push(booster, one, None)["answers"] == first


def test_feed_with_another_bundle_keeps_first_answers_and_names_their_bundle(booster, linear, made, tmp_path):
    feed = filled_feed(tmp_path, booster, made)
    first = feed.push(booster, span(made, HISTORY, HISTORY + 60), None)["answers"]
    feed.close()
    feed = Feed(tmp_path, booster, GuardSettings())
    feed.push(booster, span(made, HISTORY + 60, HISTORY + 80), None)  # and killed: no snapshot holds its answers
    again = Feed(tmp_path, linear, GuardSettings())
    reply = again.push(linear, span(made, HISTORY, HISTORY + 100), None)
    assert (reply["bundle"], reply["repeated"]) == (linear.id, 80)
    own = {"symbol": "DEMO", "run_id": booster.run_id, "bundle": booster.id}
    assert reply["answers"][: len(first)] == [own | one for one in first]
    wanted = linear.bundle.predict(made.bars["DEMO"].iloc[: HISTORY + 100], all_rows=True)
    rest = reply["answers"][len(first) :]
    assert len(rest) > 6 and all("bundle" not in one for one in rest)
    for one in rest:
        assert one["p_long"] == pytest.approx(wanted["p_long"].loc[pd.Timestamp(one["known_at"])], abs=1e-5)
    assert [one["known_at"] for one in reply["answers"]] == sorted({one["known_at"] for one in reply["answers"]})


def test_service_counts_only_the_new_answers_of_partly_repeated_message(monkeypatch, tmp_path):
    monkeypatch.setattr(service_module, "ServedMarkets", lambda *_: None)
    service = Service([], tmp_path, durable=False, limits=ServiceLimits(), guard=None)
    counted = []
    monkeypatch.setattr(service.metrics, "observe_answers", lambda _, answers: counted.extend(answers))
    named = {"symbol": "DEMO", "run_id": "r", "bundle": "b"}
    answers = [{"known_at": str(number), "guard": "ok"} for number in range(5)]
    service._noted(named | {"answers": answers, "repeated": 9, "repeated_answers": 3})
    service._noted(named | {"answers": answers, "repeated": 9, "repeated_answers": 5})
    assert counted == answers[3:] and list(service._last) == [named | one for one in answers[3:]]


def test_recent_answers_forget_the_oldest_bars_and_are_read_again_from_text():
    recent, keys = RecentAnswers(), [str(number) for number in range(RECENT_BARS + 10)]
    reply = {"symbol": "A", "run_id": "r", "bundle": "b", "answers": [{"known_at": "2026-01-01T00:00:00Z"}]}
    recent.remember(keys, reply, np.array([7]), np.arange(len(keys)))
    assert recent.count_repeated(keys) == 0 and recent.count_repeated(keys[10:]) == RECENT_BARS
    recent.remember(["new"], reply, np.array([7]), np.array([0]))
    again = RecentAnswers.from_text(recent.to_text())
    assert again.count_repeated(keys[10:]) == 0 and again.count_repeated([*keys[11:], "new"]) == RECENT_BARS
    assert again.answers(["new"], "b") == reply["answers"]
