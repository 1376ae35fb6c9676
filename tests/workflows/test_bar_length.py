"""A file of 5-minute bars through prepare, audit, training and prediction, against the minutes it was made of."""

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import BarsError, SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.settings import DataSpec
from ml_factory.storage.workspace import Workspace
from tests.small_data import SMALL_DATA

MINUTES = synthetic_bars(days=12, seed=4, start="2024-02-28")  # clocks change in the weekend after 8 March
FIVE = MINUTES.resample("5min").agg({"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"})
FIVE = FIVE.dropna(subset=["close"])


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[int, Workspace]:
    """The same market prepared from its 5-minute bars and from its minutes."""
    made = {minutes: Workspace(tmp_path_factory.mktemp(f"bars-{minutes}")) for minutes in (5, 1)}
    for minutes, bars in ((5, FIVE), (1, MINUTES)):
        path = made[minutes].root / "file.parquet"
        bars.reset_index().to_parquet(path, index=False)
        pipeline.prepare(made[minutes], "MES", (5, 20), data=path, settings=SMALL_DATA)
    return made


@pytest.mark.soak
def test_prepare_five_minute_bars_features_equal_features_of_minute_bars(places):
    store = DatasetStore.current(places[5].processed("MES"))
    assert places[5].raw_bars("MES").name == "MES_5m.parquet" and store.facts["market"]["bar_minutes"] == 5
    assert store.facts["settings"]["bars"]["minutes"] == 5 and store.facts["raw"]["rows"] == len(FIVE)
    own, wanted = (pipeline.load_features(place, "MES") for place in (places[5], places[1]))
    pd.testing.assert_frame_equal(own, wanted, check_exact=True)
    again = pipeline.prepare(places[5], "MES", (5, 20), settings=SMALL_DATA)
    assert again.reused and again.fingerprint == store.fingerprint


def test_train_predict_evaluate_on_five_minute_bars_check_bar_length(places, tmp_path):
    trained = pipeline.train(places[5], "MES", 5, "linear", mirror="off")
    assert np.isfinite(trained.metrics["log_loss"]).all()
    own = pipeline.predict(places[5], "MES", 5, "linear").frame
    newer, late = tmp_path / "more.csv", FIVE.set_axis((FIVE.index + pd.Timedelta(minutes=5)).rename("timestamp"))
    late.reset_index().to_csv(newer, index=False)
    printed = pipeline.predict(places[5], "MES", 5, "linear", data=newer, bars=RawBarSpec(stamp="end")).frame
    pd.testing.assert_frame_equal(printed, own)
    assert own.index[-1] == FIVE.index[-1] + pd.Timedelta(minutes=5)
    with pytest.raises(BarsError, match="off the 5-minute grid"):
        pipeline.predict(places[5], "MES", 5, "linear", data=places[1].raw_bars("MES"))
    with pytest.raises(SettingsError, match=r"The model reads bars of another length.*wanted 5 min"):
        pipeline.predict(places[5], "MES", 5, "linear", data=newer, bars=RawBarSpec(minutes=1))
    report = pipeline.evaluate(places[5], "MES", 5).report_path.read_text()
    assert f"{len(FIVE):,} bars of 5 min" in report and "inside one 5-minute bar" in report


# ---- the proof -------------------------------------------------------------------------------------------------------


# ---- what is asked, and how ------------------------------------------------------------------------------------------


def test_prepare_with_other_bar_length_raises_and_keeps_prepared_data(places, tmp_path):
    place, path = Workspace(tmp_path / "w"), tmp_path / "MES_5m.csv"
    FIVE.reset_index().to_csv(path, index=False)
    with pytest.raises(BarsError, match=r"5 minutes apart, not 1.*--minutes 5"):
        pipeline.prepare(place, "MES", (5,), data=path, bar_minutes=1)
    assert not list(place.raw.iterdir())
    with pytest.raises(SettingsError, match=r"one length.*got bars of 1 min"):
        pipeline.prepare(places[5], "MES", (5,), bar_minutes=1)
    with pytest.raises(SettingsError, match=r"one length.*got bars of 5 min, wanted 1 min"):
        pipeline.prepare(places[1], "MES", (5,), data=path, bar_minutes=5)
    with pytest.raises(SettingsError, match=r"A frame cannot be made of these bars.*got 12"):
        pipeline.prepare(places[5], "MES", (5,), settings=DataSpec(features=FeatureSpec(frames=(12,))))
    kept = DatasetStore.current(places[5].processed("MES"))
    assert kept.facts["settings"]["features"]["frames"] == [60]  # what was prepared before stays


def test_cli_prepare_minutes_option_sets_and_checks_bar_length(call, tmp_path):
    path, place = tmp_path / "MES_5m.csv", ("--workspace", tmp_path / "w", "--symbol", "MES", "--horizon", 5)
    FIVE.reset_index().to_csv(path, index=False)
    code, _, err = call("prepare", *place, "--data", path, "--minutes", 1)
    assert code == 1 and "--minutes 5" in err
    code, _, err = call("prepare", *place, "--data", path, "--minutes", 7)
    assert code == 2 and "Bars of this length are not read" in err
    assert call("prepare", *place, "--data", path, "--minutes", 5)[0] == 0
    assert Workspace(tmp_path / "w").raw_bars("MES").name == "MES_5m.parquet"
    assert "--minutes" in call("suite", "--help")[1]


def test_prepare_minute_rows_with_inferred_tick_is_certified(tmp_path):
    """The first 20 sessions, whose facts are inferred, hold more rows than the quick proof fits on."""
    minutes = pd.date_range("2024-01-01", periods=40_000, freq="min", tz="UTC", name="timestamp")
    walk = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 2e-4, 40_000)))
    close = pd.Series(np.round(walk, 2), minutes)
    opens = close.shift(1).fillna(close.iloc[0])
    high, low = np.maximum(opens, close), np.minimum(opens, close)
    frame = pd.DataFrame({"open": opens, "high": high + 0.02, "low": low - 0.02, "close": close, "volume": 5.0})
    frame.reset_index().to_parquet(tmp_path / "bars.parquet")
    spec = FeatureSpec(base_minutes=1, frames=(15,), families=("momentum",))
    settings = DataSpec(features=spec, calendar="24h")
    made = pipeline.prepare(Workspace(tmp_path / "w"), "ODD", (20,), data=tmp_path / "bars.parquet", settings=settings)
    assert "FAILED" not in made.proof
