"""`prepare`: what it keeps, of minutes and of longer bars, and views of what it made."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError, LookAheadError, NotPreparedError, SettingsError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.small_data import FEW_COLUMNS, SMALL_DATA

BARS = synthetic_bars(days=12, seed=4, start="2024-02-28")  # clocks change in the weekend after 8 March
MINUTES = BARS.drop(BARS.index[3000:3010])
FIVE = MINUTES.resample("5min").agg({"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"})
FIVE = FIVE.dropna(subset=["close"])


@pytest.fixture(scope="module")
def places(tmp_path_factory, every_cut) -> dict[int, Workspace]:
    """The same market, with a gap, prepared from its 5-minute bars and from its minutes."""
    made = {minutes: Workspace(tmp_path_factory.mktemp(f"bars-{minutes}")) for minutes in (5, 1)}
    for minutes, bars in ((5, FIVE), (1, MINUTES)):
        path = made[minutes].root / "file.parquet"
        bars.reset_index().to_parquet(path, index=False)
        with every_cut():
            pipeline.prepare(made[minutes], "MES", (5, 20), data=path, settings=SMALL_DATA)
    return made


@pytest.fixture(scope="module")
def whole(places) -> Workspace:
    """That of the minutes."""
    return places[1]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("prepared"))
    doors.import_bars(BARS.reset_index(), made, "ODD")
    return made


def test_prepare_keeps_given_calendar_and_tick_until_changed(workspace):
    with pytest.raises(BarsError, match="--calendar, --tick"):  # all 12 sessions decided what was inferred
        pipeline.prepare(workspace, "ODD", (10,), settings=SMALL_DATA)
    given = pipeline.prepare(
        workspace, "ODD", (10,), settings=doors.DataSpec(features=FEW_COLUMNS, calendar="24h", tick=0.5)
    )
    again = pipeline.prepare(workspace, "ODD", (10,), settings=SMALL_DATA)
    assert (again.fingerprint, again.reused) == (given.fingerprint, True)
    assert (again.market["calendar"], again.market["tick"]) == ("24h", 0.5)
    other = pipeline.prepare(workspace, "ODD", (10,), settings=doors.DataSpec(features=FEW_COLUMNS, calendar="cme"))
    assert (other.market["calendar"], other.market["tick"]) == ("cme", 0.5)
    assert "off_tick" in set(given.bar_findings["kind"])
    strict = doors.DataSpec(doors.RawBarSpec(strict=True), FEW_COLUMNS, calendar="24h", tick=0.5)
    with pytest.raises(BarsError, match=r"off the tick.* 0\.5"):
        pipeline.prepare(workspace, "ODD", (10,), data=workspace.raw_bars("ODD"), settings=strict)


def test_prepare_labels_and_windows_span_sessions_only_with_span(workspace, every_cut, call):
    """`--span` is part of the data's identity, kept by a prepare without settings, and proved like the rest."""

    def leaving() -> tuple[int, int, str]:
        """Labels that end in another session, rows with a window of 64, and what the data set is."""
        data = doors.load_dataset(workspace, "ODD", 20)
        rows = doors.DatasetStore.current(workspace.processed("ODD")).load_row_facts()
        out = data.labels["label_end"] - data.labels.index > pd.Timedelta(hours=2)  # none lasts longer inside one
        assert rows["segment"].is_monotonic_increasing
        return int(out.sum()), int(data.full_window_mask(64).sum()), data.fingerprint

    words = ("prepare", "--workspace", workspace.root, "--symbol", "ODD", "--horizon", 20, "--json")
    inside = leaving() if not call(*words)[0] else None
    with every_cut():
        code, out, err = call(*words, "--span")
    across, reported = leaving(), json.loads(out)
    assert code == 0 and reported["proof"] == "quick, 16 cuts", err
    assert inside[0] == 0 and inside[1] < across[1] - 300 and across[0] > 50
    assert across[2] == reported["fingerprint"] != inside[2]
    again = pipeline.prepare(workspace, "ODD", (20,))
    assert (again.fingerprint, again.reused) == (across[2], True)


def raw(workspace: Workspace, bars: pd.DataFrame) -> None:
    bars.reset_index().to_parquet(workspace.raw_bars("MES"), index=False)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Workspace(tmp_path / "here")


def test_prepare_with_preprocess_steps_fits_trains_and_predicts_with_steps(place):
    raw(place, BARS[:8000].assign(close=BARS["close"][:8000].map("{:,.2f}".format)))
    steps = ("robust", {"step": "pca", "share": 0.9}, "standard")
    pipeline.prepare(place, "MES", (5,), settings=doors.DataSpec(features=FEW_COLUMNS, preprocess=steps))
    data = doors.load_dataset(place, "MES", 5)
    assert [step.kind for step in data.scaler.steps] == ["robust", "pca", "standard"]
    assert doors.fit_dataset_preprocessing(data, data.splits["train"]).to_dict() == data.scaler.to_dict()
    trained = pipeline.train(place, "MES", 5, "lightgbm", model_settings={"rounds": 5}, mirror="off")
    printed = pipeline.load_predictions(place, "MES", 5, "lightgbm")
    new = pipeline.predict(place, "MES", 5, "lightgbm", all_rows=True).frame
    columns = ["p_short", "p_neutral", "p_long"]
    np.testing.assert_allclose(new.loc[printed.index, columns], printed[columns], atol=1e-12)
    assert trained.report_path.is_file()
    store, found = doors.DatasetStore.current(place.processed("MES")), doors.Findings()
    doors.audit_prepared_files(place, store, doors.load_bars(place, "MES")[0], (5,), found)
    assert not found.leaks  # however the prices are stored


@pytest.mark.soak
def test_prepare_by_two_concurrent_processes_stores_both_horizons(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    raw(place, BARS)
    code = (
        "import sys; from ml_factory import pipeline; print(pipeline.prepare(sys.argv[1], 'MES', (int(sys.argv[2]),)))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, place.root, horizon], stdout=subprocess.PIPE)
        for horizon in ("5", "9")
    ]
    for one in started:
        one.communicate(timeout=120)
        assert one.returncode == 0
    store = doors.DatasetStore.current(place.processed("MES"))
    assert store.horizons == (5, 9) and store.verify() == []


@pytest.fixture
def own():
    """Forget the features that a test defines."""
    with doors.own_features():
        yield


def test_prepare_that_finds_a_leak_proves_once_and_names_it_once(tmp_path, own, caplog):
    def peeks(bars):
        move = np.diff(np.log(bars.close), prepend=np.log(bars.close[0]))
        day, minute = np.divmod(np.asarray(bars.known_at) // 60_000_000_000, 1440)
        where = (day > 19_000) & ((day + 3) % 7 == 2) & (minute // 60 == 9)  # Wednesdays of this market, 9 to 10
        return np.where(where, np.append(move[1:], 0.0), move)

    doors.feature(peeks, memory=24)
    place = Workspace(tmp_path)
    raw(place, BARS[:9000])
    spec = doors.FeatureSpec(families=("momentum",), frames=(15,), custom=("peeks",))
    pipeline.prepare(place, "MES", (5,), settings=doors.DataSpec(features=spec))
    assert len([line for line in caplog.messages if "peeks changes in" in line]) == 1, caplog.text


# ---- bars of five minutes -------------------------------------------------------------------------------------------


def test_prepare_five_minute_bars_features_equal_features_of_minute_bars(places):
    store = doors.DatasetStore.current(places[5].processed("MES"))
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
    printed = pipeline.predict(places[5], "MES", 5, "linear", data=newer, bars=doors.RawBarSpec(stamp="end")).frame
    pd.testing.assert_frame_equal(printed, own)
    newer.write_text(newer.read_text().replace("\n", "\nno,bar\n", 1))
    skipping = doors.RawBarSpec(stamp="end", skip_bad=True)
    pd.testing.assert_frame_equal(pipeline.predict(places[5], "MES", 5, "linear", data=newer, bars=skipping).frame, own)
    assert own.index[-1] == FIVE.index[-1] + pd.Timedelta(minutes=5)
    with pytest.raises(BarsError, match="off the 5-minute grid"):
        pipeline.predict(places[5], "MES", 5, "linear", data=places[1].raw_bars("MES"))
    with pytest.raises(SettingsError, match=r"The model reads bars of another length.*wanted 5 min"):
        pipeline.predict(places[5], "MES", 5, "linear", data=newer, bars=doors.RawBarSpec(minutes=1))
    report = pipeline.evaluate(places[5], "MES", 5).report_path.read_text()
    assert f"{len(FIVE):,} bars of 5 min" in report and "inside one 5-minute bar" in report


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
        pipeline.prepare(places[5], "MES", (5,), settings=doors.DataSpec(features=doors.FeatureSpec(frames=(12,))))
    kept = doors.DatasetStore.current(places[5].processed("MES"))
    assert kept.facts["settings"]["features"]["frames"] == [60]  # what was prepared before stays


def test_prepare_minute_rows_with_inferred_tick_is_certified(tmp_path):
    """The first 20 sessions, whose facts are inferred, hold more rows than the quick proof fits on."""
    minutes = pd.date_range("2024-01-01", periods=40_000, freq="min", tz="UTC", name="timestamp")
    walk = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 2e-4, 40_000)))
    close = pd.Series(np.round(walk, 2), minutes)
    opens = close.shift(1).fillna(close.iloc[0])
    high, low = np.maximum(opens, close), np.minimum(opens, close)
    frame = pd.DataFrame({"open": opens, "high": high + 0.02, "low": low - 0.02, "close": close, "volume": 5.0})
    frame.reset_index().to_parquet(tmp_path / "bars.parquet")
    spec = doors.FeatureSpec(base_minutes=1, frames=(15,), families=("momentum",))
    settings = doors.DataSpec(features=spec, calendar="24h")
    made = pipeline.prepare(Workspace(tmp_path / "w"), "ODD", (20,), data=tmp_path / "bars.parquet", settings=settings)
    assert "FAILED" not in made.proof


def test_prepare_of_labels_that_live_for_a_day_and_without_coarse_frames_is_certified(tmp_path):
    """Purging takes as many rows before the training rows end as a label lives."""
    place = Workspace(tmp_path)
    doors.ensure_synthetic_demo_market(place, "DEMO", days=24)
    labels = doors.LabelSpec(kind="direction", session_end="span")
    settings = doors.DataSpec(labels=labels, features=doors.FeatureSpec(frames=(), families=("calendar",)))
    assert "FAILED" not in pipeline.prepare(place, "DEMO", (300,), settings=settings).proof


def test_prepare_added_horizon_reuses_stored_features(place):
    raw(place, BARS)
    seen = []
    with doors.report_progress_to(lambda one: seen.append(one.name)):
        pipeline.prepare(place, "MES", (5,), settings=SMALL_DATA)
        assert "features" in seen
        seen.clear()
        assert pipeline.prepare(place, "MES", (7,), settings=SMALL_DATA).horizons == [7]
    store, whole = doors.DatasetStore.current(place.processed("MES")), doors.load_dataset(place, "MES", 7)
    assert "features" not in seen and store.horizons == (5, 7)
    assert whole.scaler.to_dict() == type(whole.scaler).fit(whole.x_NF, whole.row[whole.splits["train"]]).to_dict()


def test_prepare_without_disk_space_raises_before_computing(tmp_path, monkeypatch):
    place = Workspace(tmp_path / "w")
    doors.import_bars(synthetic_bars(days=5, seed=4).reset_index(), place, "MES")
    monkeypatch.setattr(doors.files, "free_bytes", lambda folder: 900_000)
    words, seen = r"[Nn]ot enough space for the features and labels of MES .*0\.9 MB free.*about 1\.\d MB", []
    with doors.report_progress_to(lambda one: seen.append(one.name)), pytest.raises(WorkspaceError, match=words):
        pipeline.prepare(place, "MES", (5,))
    assert "features" not in seen


def test_bytes_needed_estimate_matches_stored_bytes(prepared):
    store = doors.DatasetStore.current(prepared.processed("DEMO"))
    taken = sum(file["bytes"] for name, file in store.files.items() if name.endswith(".npy") or "labels" in name)
    market, settings = doors.MarketSpec.from_dict(store.facts["market"]), doors.stored_data_settings(store)
    bars = store.rows * 5  # what comes before the first row, over three sessions here, takes nothing
    needed = doors.estimate_prepared_bytes(bars, market, settings, len(store.horizons), features=True)
    assert 0.8 * taken < needed < 1.5 * taken


# ---- views -----------------------------------------------------------------------------------------------------------


def test_gap_table_lists_each_gap_by_bar_after_gap(whole):
    gaps = pipeline.gap_table(whole, "MES")
    start = pd.read_parquet(whole.raw_bars("MES"))["timestamp"]
    minutes = start.diff().dt.total_seconds().to_numpy() / 60
    later = minutes > 1
    assert list(gaps.index) == list(start[later]) and list(gaps["minutes"]) == list(minutes[later] - 1)
    assert gaps.loc[BARS.index[3010], "minutes"] == 10
    assert {"session", "weekend"} <= set(gaps["kind"])


def test_certificate_holds_cuts_of_prepare(whole):
    reported = pipeline.certificate(whole, "MES", 5)
    assert reported.passed and reported.form == "quick" and len(reported.cuts) == 16
    assert len({why for _, why in reported.cuts}) > 8
    with pytest.raises(NotPreparedError, match="audit --symbol MES"):
        pipeline.certificate(whole, "MES", 11)


def test_replay_of_session_equals_stored_features(whole):
    live, stored = pipeline.replay(whole, "MES"), pipeline.load_features(whole, "MES")
    last = pipeline.load_features(whole, "MES", start=live.index[0])
    assert 100 < len(live) < 300 and live.equals(last)
    assert not live.equals(stored.iloc[: len(live)].set_axis(live.index))


def test_try_feature_computes_custom_feature_on_prepared_bars(whole, own):
    @doors.feature(memory=12)
    def pull(bars):
        return bars.close / pd.Series(bars.close).rolling(12, min_periods=1).mean() - 1

    values = pipeline.try_feature(whole, "MES", "pull")
    close = MINUTES["close"]
    moment = values.index[1000]
    last = [close[close.index < moment - pd.Timedelta(minutes=5 * back)].iloc[-1] for back in range(12)]
    assert values.iloc[1000] == pytest.approx(last[0] / np.mean(last) - 1)
    with pytest.raises(SettingsError, match="not defined here"):
        pipeline.try_feature(whole, "MES", "push")


def test_try_feature_with_look_ahead_on_user_bars_raises(whole, own):
    @doors.feature(memory=12)
    def sleeper(bars):  # made-up bars are at 100 or so: there it looks back only
        close = pd.Series(bars.close)
        return close.shift(-1).ffill() / close - 1 if bars.close.mean() > 1000 else close * 0

    with pytest.raises(LookAheadError, match="sleeper"):
        pipeline.try_feature(whole, "MES", "sleeper")
