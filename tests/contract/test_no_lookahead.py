"""Touch the future, watch the past: what stands before a cut is the same bits whatever comes after it.

Through the same doors a user takes: raw bars in a workspace, `pipeline.prepare`, `load_features` and `load_labels`.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import SMALL_DATA, import_bars, training_weights

HORIZONS = (5, 20)
PRICES = ["open", "high", "low", "close"]


def absurd(bars: pd.DataFrame, first: int) -> pd.DataFrame:
    """The bars from position `first` on at 1.7 times their price, in reversed order, their volume scrambled."""
    twisted = bars.copy()
    for name in PRICES:
        twisted.iloc[first:, twisted.columns.get_loc(name)] = bars[name].to_numpy()[first:][::-1] * 1.7
    if "volume" in bars:
        volume = np.random.default_rng(3).permutation(bars["volume"].to_numpy()[first:])
        twisted.iloc[first:, twisted.columns.get_loc("volume")] = volume
    return twisted


def prepared(root: Path, bars: pd.DataFrame, symbol: str, horizons=HORIZONS, **settings) -> Workspace:
    workspace = Workspace(root)
    bars.reset_index().to_parquet(workspace.raw_bars(symbol), index=False)
    pipeline.prepare(workspace, symbol, horizons, **settings)
    return workspace


def known_by(workspace: Workspace, symbol: str, cut: pd.Timestamp) -> dict[str, pd.DataFrame]:
    """Feature rows with known_at <= cut, and for each horizon the labels with label_end <= cut."""
    found = {"features": pipeline.load_features(workspace, symbol)}
    found["features"] = found["features"][found["features"].index <= cut]
    for horizon in HORIZONS:
        labels = pipeline.load_labels(workspace, symbol, horizon)
        found[f"labels {horizon}"] = labels[labels["label_end"] <= cut]
    return found


def differences(one: pd.DataFrame, other: pd.DataFrame) -> list[str]:
    """Columns that are not the same bits, or what else differs; empty when nothing does."""
    if list(one.columns) != list(other.columns) or list(one.dtypes) != list(other.dtypes):
        return ["columns"]
    if not one.index.equals(other.index):
        return [f"rows: {len(one)} and {len(other)}, {one.index.symmetric_difference(other.index)[:3].tolist()}"]
    return [name for name in one if as_bytes(one[name]) != as_bytes(other[name])]


def as_bytes(column: pd.Series) -> bytes:
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        return pd.DatetimeIndex(column).as_unit("ns").asi8.tobytes()
    if column.dtype.kind in "fiub":
        return column.to_numpy().tobytes()
    return "|".join(column.astype(str)).encode()


def check(tmp_path: Path, bars: pd.DataFrame, symbol: str, first: int) -> None:
    """The whole file, the file cut at `first`, and the file continued absurdly from there."""
    cut = bars.index[first - 1] + pd.Timedelta(minutes=1)  # when the last bar before the cut is known
    places = {
        "whole": prepared(tmp_path / "whole", bars, symbol),
        "cut": prepared(tmp_path / "cut", bars.iloc[:first], symbol),
        "absurd": prepared(tmp_path / "absurd", absurd(bars, first), symbol),
    }
    found = {name: known_by(place, symbol, cut) for name, place in places.items()}
    for part, whole in found["whole"].items():
        assert len(whole) > 200 and len(whole.columns) >= 5
        for name in ("cut", "absurd"):
            assert differences(whole, found[name][part]) == [], (part, name)
    assert pipeline.load_features(places["cut"], symbol).index[-1] <= cut  # no bar that is not complete yet
    # Nothing is held back either: the newest complete bar before the cut has its row.
    assert cut - found["whole"]["features"].index[-1] < pd.Timedelta(hours=2)
    # And the disturbance is one: what comes after the cut differs.
    later = [pipeline.load_features(places[name], symbol) for name in ("whole", "absurd")]
    assert not np.array_equal(*(frame[frame.index > cut].to_numpy()[-100:] for frame in later))


@pytest.mark.slow
def test_prepare_gold_with_volume_with_changed_future_keeps_past_rows(shared_data, tmp_path):
    bars = pd.read_parquet(shared_data / "bars" / "XAUUSD_1m.parquet").set_index("timestamp")
    bars = bars.iloc[:45_000]  # half of the file
    assert bars["volume"].notna().all()
    check(tmp_path, bars, "XAUUSD", int(len(bars) * 0.6))


def at_a_close(bars: pd.DataFrame) -> int:
    """Between the last bar of a session and the first of the next."""
    silent = np.diff(bars.index.asi8) > 30 * 60 * 1_000_000_000
    return int(np.flatnonzero(silent & (np.arange(len(silent)) > 0.5 * len(bars)))[0]) + 1


def test_prepare_synthetic_market_with_changed_future_keeps_past_rows(tmp_path):
    bars = synthetic_bars(days=12, seed=5)
    assert bars["volume"].gt(0).any()
    check(tmp_path, bars, "DEMO", at_a_close(bars))


# ---- what is learnt comes from training rows alone ----------------------------------------------------------------


@pytest.fixture(scope="module")
def two_futures(tmp_path_factory) -> tuple[Workspace, Workspace, pd.Timestamp]:
    """One market, and the same with all bars absurd from the first test row's moment on."""
    bars = synthetic_bars(days=10, seed=8)
    folder = tmp_path_factory.mktemp("futures")
    one = prepared(folder / "one", bars, "DEMO", (5,))
    labels, splits = pipeline.load_labels(one, "DEMO", 5), pipeline.load_splits(one, "DEMO", 5)
    moment = labels.index[splits["test"][0]]
    other = prepared(folder / "other", absurd(bars, int(bars.index.searchsorted(moment))), "DEMO", (5,))
    return one, other, moment


def test_prepare_scaler_weights_and_splits_depend_on_training_rows_only(two_futures):
    one, other, moment = two_futures
    scalers = [next(place.processed("DEMO").glob("*/scaler_h5.json")).read_bytes() for place in (one, other)]
    assert scalers[0] == scalers[1]
    labels = [pipeline.load_labels(place, "DEMO", 5) for place in (one, other)]
    splits = [pipeline.load_splits(place, "DEMO", 5) for place in (one, other)]
    assert np.array_equal(splits[0]["train"], splits[1]["train"])
    rows = splits[0]["train"]
    weights = [training_weights(frame.iloc[rows]) for frame in labels]
    assert weights[0].tobytes() == weights[1].tobytes()
    assert not np.array_equal(labels[0].loc[moment:, "label"][:-5], labels[1].loc[moment:, "label"][:-5])


@pytest.mark.parametrize(
    ("model", "settings"),
    [("xgboost", {"rounds": 30}), ("lstm", {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 128})],
)
def test_train_with_changed_test_rows_gives_same_predictions_before_test(model, settings, two_futures):
    """Training, early stopping, scaling and calibration all end before the first test row."""
    one, other, moment = two_futures
    printed = []
    for place in (one, other):
        pipeline.train(place, "DEMO", 5, model, model_settings=settings, mirror="off")
        printed.append(pipeline.load_predictions(place, "DEMO", 5, model))
    before = [frame[frame.index < moment].drop(columns=["label", "split", "run_id"]) for frame in printed]
    assert len(before[0]) > 500 and differences(*before) == []
    columns = ["p_short", "p_neutral", "p_long"]
    assert not np.array_equal(printed[0].loc[moment:, columns][-50:], printed[1].loc[moment:, columns][-50:])


@pytest.fixture(scope="module")
def ten_days(tmp_path_factory) -> Workspace:
    return prepared(tmp_path_factory.mktemp("ten"), synthetic_bars(days=10, seed=9), "DEMO", settings=SMALL_DATA)


@pytest.mark.parametrize("horizon", HORIZONS)
def test_splits_label_spans_of_train_validation_test_never_overlap(horizon, ten_days):
    workspace = ten_days
    labels, splits = pipeline.load_labels(workspace, "DEMO", horizon), pipeline.load_splits(workspace, "DEMO", horizon)
    known, ends = labels.index, labels["label_end"]
    assert (ends > known).all()
    spans = [
        (known[rows].min(), ends.iloc[rows].max())
        for rows in (splits[name] for name in ("train", "validation", "test"))
    ]
    assert spans[0][1] < spans[1][0] and spans[1][1] < spans[2][0]
    everything = np.concatenate(list(splits.values()))
    assert len(np.unique(everything)) == len(everything)
    # Only rows next to an edge are given up: those whose labels reach across it.
    purged = np.setdiff1d(np.arange(len(labels)), everything)
    edges = [spans[1][0], spans[2][0]]
    assert len(purged) > 0 and all(any(known[row] < edge <= ends.iloc[row] for edge in edges) for row in purged)


def test_import_bars_and_raw_file_give_same_prepared_rows(tmp_path):
    """`prepare --data` and a raw file put there by hand give the same rows."""
    bars = synthetic_bars(days=6, seed=2)
    byhand = prepared(tmp_path / "byhand", bars, "DEMO", settings=SMALL_DATA)
    brought = Workspace(tmp_path / "brought")
    import_bars(bars.reset_index(), brought, "DEMO")
    pipeline.prepare(brought, "DEMO", HORIZONS, settings=SMALL_DATA)
    last = bars.index[-1] + pd.Timedelta(days=1)
    for part, frame in known_by(byhand, "DEMO", last).items():
        assert differences(frame, known_by(brought, "DEMO", last)[part]) == []
