"""Prepared data to look at: each view against the bars or the stored rows themselves."""

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.io import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import LookAheadError, NotPreparedError, SettingsError
from ml_factory.features import custom
from ml_factory.features.build import FeatureSpec
from ml_factory.features.custom import feature
from ml_factory.settings import DataSpec
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.prove import stored_data_settings

BARS = synthetic_bars(days=12, seed=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("views"))
    import_bars(BARS.drop(BARS.index[3000:3007]).reset_index(), made, "MES")
    few = FeatureSpec(frames=(15, 60), families=("momentum", "volume", "calendar"))
    pipeline.prepare(made, "MES", (10,), settings=DataSpec(features=few))
    return made


def test_gap_table_lists_each_gap_by_bar_after_gap(place):
    gaps = pipeline.gap_table(place, "MES")
    start = pd.read_parquet(place.raw_bars("MES"))["timestamp"]
    minutes = start.diff().dt.total_seconds().to_numpy() / 60
    later = minutes > 1
    assert list(gaps.index) == list(start[later]) and list(gaps["minutes"]) == list(minutes[later] - 1)
    assert gaps.loc[BARS.index[3007], "minutes"] == 7
    assert {"session", "weekend"} <= set(gaps["kind"])


def test_certificate_and_draw_cuts_show_cuts_of_prepare(place):
    reported = pipeline.certificate(place, "MES", 10)
    assert reported.passed and reported.form == "quick" and len(reported.cuts) == 10
    words = [text.get_text() for text in pipeline.draw_cuts(place, "MES", 10).axes[0].texts]
    assert sorted(words) == sorted(why for _, why in reported.cuts)
    with pytest.raises(NotPreparedError, match="audit --symbol MES"):
        pipeline.certificate(place, "MES", 11)


def test_replay_of_session_equals_stored_features(place):
    live, stored = pipeline.replay(place, "MES"), pipeline.load_features(place, "MES")
    last = pipeline.load_features(place, "MES", start=live.index[0])
    assert 100 < len(live) < 300 and live.equals(last)
    assert not live.equals(stored.iloc[: len(live)].set_axis(live.index))


def test_try_feature_computes_custom_feature_on_prepared_bars(place, monkeypatch):
    monkeypatch.setattr(custom, "_FEATURES", {})

    @feature(memory=12)
    def pull(bars):
        return bars.close / pd.Series(bars.close).rolling(12, min_periods=1).mean() - 1

    values = pipeline.try_feature(place, "MES", "pull")
    close = BARS.drop(BARS.index[3000:3007])["close"]
    moment = values.index[1000]
    last = [close[close.index < moment - pd.Timedelta(minutes=5 * back)].iloc[-1] for back in range(12)]
    assert values.iloc[1000] == pytest.approx(last[0] / np.mean(last) - 1)
    with pytest.raises(SettingsError, match="not defined here"):
        pipeline.try_feature(place, "MES", "push")


def test_try_feature_with_look_ahead_on_user_bars_raises(place, monkeypatch):
    monkeypatch.setattr(custom, "_FEATURES", {})

    @feature(memory=12)
    def sleeper(bars):  # made-up bars are at 100 or so: there it looks back only
        close = pd.Series(bars.close)
        return close.shift(-1).ffill() / close - 1 if bars.close.mean() > 1000 else close * 0

    with pytest.raises(LookAheadError, match="sleeper"):
        pipeline.try_feature(place, "MES", "sleeper")


def test_prepare_result_phases_list_rows_and_seconds(place):
    settings = stored_data_settings(DatasetStore.current(place.processed("MES")))
    phases = pipeline.prepare(place, "MES", (12,), settings=settings).phases
    assert list(phases.index) == [
        "reading", "checking", "labels 12", "scaler 12", "refitting scaler 12", "proof", "live feed", "fitted",
    ]  # fmt: skip
    bars, taught = len(pd.read_parquet(place.raw_bars("MES"))), pipeline.load_splits(place, "MES", 12)["train"]
    assert (phases.loc[["reading", "proof"], "rows"] == bars).all()
    assert phases.loc["scaler 12", "rows"] == len(taught)
    assert (phases["seconds"] >= phases["compiling"]).all()
    assert pipeline.prepare(place, "MES", (12,), settings=settings).phases.empty
