"""Faults of clients at a feed: refused in one line, after which the feed continues as before."""

import json

import pytest
from pydantic import ValidationError

from ml_factory.errors import BarsError
from ml_factory.inference.guard import GuardSettings
from ml_factory.serving.feed import Feed
from ml_factory.serving.schemas import PredictRequest
from ml_factory.serving.served_bundle import ServedBundle
from tests.serving.conftest import columns_of

HISTORY = 6000


@pytest.fixture(scope="module")
def booster(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "xgboost"), GuardSettings())


def filled_feed(folder, served: ServedBundle, made) -> Feed:
    feed = Feed(folder, served)
    feed.push(columns_of(made.bars["DEMO"].iloc[:HISTORY]), None)
    return feed


@pytest.mark.parametrize(
    "body",
    [
        {"bars": {"a": [[]] * 20_000}}, {"bars": [{"a": []}] * 20_000},
    ],
)  # fmt: skip
def test_predict_request_of_many_wrong_cells_collects_few_errors(body):
    with pytest.raises(ValidationError) as caught:
        PredictRequest.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 50


def test_feed_refuses_empty_columns_and_goes_on(booster, made, tmp_path):
    feed = filled_feed(tmp_path, booster, made)
    for columns in ({"close": []}, {}):
        with pytest.raises(BarsError, match="There are no bars"):
            feed.push(columns, None)
    assert feed.push(columns_of(made.bars["DEMO"].iloc[HISTORY : HISTORY + 1]), None)["repeated"] == 0
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
            feed.push(one | more, None)
    with pytest.raises(BarsError, match="bars of another symbol"):
        booster.predict_bars(one | {"symbol": ["ES"]}, 1, None)
    assert feed.push(one | {"symbol": ["DEMO"]}, None)["repeated"] == 0
