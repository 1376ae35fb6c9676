"""Bars that are sent again: acknowledged with their first answers, over restarts and other bundles."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import BarsError
from ml_factory.inference.guard import GuardSettings
from ml_factory.serving.feed import Feed
from ml_factory.serving.recent_answers import RECENT_BARS, RecentAnswers
from ml_factory.serving.served_bundle import ServedBundle
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
    feed = Feed(folder, served)
    feed.push(span(made, 0, HISTORY), None)
    return feed


def test_feed_answers_each_recent_bar_again_after_restart(booster, made, tmp_path):
    feed = filled_feed(tmp_path, booster, made)
    sizes, place, replies = (RECENT_BARS - 92, 1, 60, 1, 30), HISTORY, []
    for size in sizes:
        replies.append((place, place + size, feed.push(span(made, place, place + size), None)["answers"]))
        place += size
    again = Feed(tmp_path, booster)
    stored = (tmp_path / "feed.state").read_bytes()
    for first, end, answers in replies:
        reply = again.push(span(made, first, end), None)
        assert reply["answers"] == answers and reply["repeated"] == end - first
        assert reply["repeated_answers"] == len(answers)
    assert len(replies[0][2]) > 100 and (tmp_path / "feed.state").read_bytes() == stored
    found = []
    for first in range(HISTORY, place, 7):  # in messages of other sizes
        found += again.push(span(made, first, min(first + 7, place)), None)["answers"]
    assert found == [one for _, _, answers in replies for one in answers]
    with pytest.raises(BarsError, match="Bars overlap"):
        again.push(span(made, HISTORY - 1, HISTORY + 1), None)


def test_feed_answers_partly_repeated_message_with_stored_answers_before_new_ones(booster, made, tmp_path):
    feed, alone = (filled_feed(tmp_path / name, booster, made) for name in ("parts", "alone"))
    first = feed.push(span(made, HISTORY, HISTORY + 40), None)["answers"]
    again = Feed(tmp_path / "parts", booster)
    reply = again.push(span(made, HISTORY, HISTORY + 60), None)
    wanted = alone.push(span(made, HISTORY, HISTORY + 60), None)["answers"]
    assert reply["answers"] == wanted and wanted[: len(first)] == first
    assert (reply["repeated"], reply["repeated_answers"]) == (40, len(first)) and len(wanted) > len(first) > 5


def test_feed_keeps_the_same_answer_of_each_bar_however_they_were_pushed(booster, made, tmp_path):
    whole, single = (filled_feed(tmp_path / name, booster, made) for name in ("whole", "single"))
    whole.push(span(made, HISTORY, HISTORY + 200), None)
    for place in range(HISTORY, HISTORY + 200):
        one = span(made, place, place + 1)
        first = single.push(one, None)["answers"]
        assert whole.push(one, None)["answers"] == first


def test_feed_with_another_bundle_keeps_first_answers_and_names_their_bundle(booster, linear, made, tmp_path):
    feed = filled_feed(tmp_path, booster, made)
    first = feed.push(span(made, HISTORY, HISTORY + 60), None)["answers"]
    first += Feed(tmp_path, booster).push(span(made, HISTORY + 60, HISTORY + 80), None)["answers"]
    again = Feed(tmp_path, linear)
    reply = again.push(span(made, HISTORY, HISTORY + 100), None)
    assert (reply["bundle"], reply["repeated"]) == (linear.id, 80)
    own = {"symbol": "DEMO", "run_id": booster.run_id, "bundle": booster.id}
    assert reply["answers"][: len(first)] == [own | one for one in first]
    wanted = linear.bundle.predict(made.bars["DEMO"].iloc[: HISTORY + 100], all_rows=True)
    rest = reply["answers"][len(first) :]
    assert len(rest) > 3 and all("bundle" not in one for one in rest)
    for one in rest:
        assert one["p_long"] == pytest.approx(wanted["p_long"].loc[pd.Timestamp(one["known_at"])], abs=1e-5)
    assert [one["known_at"] for one in reply["answers"]] == sorted({one["known_at"] for one in reply["answers"]})


def test_recent_answers_forget_the_oldest_bars_and_are_read_again_from_text():
    recent, keys = RecentAnswers(), [str(number) for number in range(RECENT_BARS + 10)]
    reply = {"symbol": "A", "run_id": "r", "bundle": "b", "answers": [{"known_at": "2026-01-01T00:00:00Z"}]}
    recent.remember(keys, reply, np.array([7]), np.arange(len(keys)))
    assert recent.count_repeated(keys) == 0 and recent.count_repeated(keys[10:]) == RECENT_BARS
    recent.remember(["new"], reply, np.array([7]), np.array([0]))
    again = RecentAnswers.from_text(recent.to_text())
    assert again.count_repeated(keys[10:]) == 0 and again.count_repeated([*keys[11:], "new"]) == RECENT_BARS
    assert again.answers(["new"], "b") == reply["answers"]
