"""What a network reads besides rows of columns, from a setting's name to the prediction of a saved model."""

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.datasets.covariates import _REFUSED, known_future_covariates, resolve_covariate_settings
from ml_factory.datasets.preprocessing import SCALERS, STEPS
from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.models.registry import build_model_from_state
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.prepared_dataset import PreparedDataset, dataset_input_reader, resolve_dataset_settings

SMALL = {"epochs": 1, "hidden": 4, "lookback": 14, "threads": 1}


def saved(workspace, model: str):
    """The newest trained model, from its file."""
    return build_model_from_state(
        TrainedModel.from_state(ArtifactRegistry(workspace.models).find("DEMO", 5, model).load_state()).model_state
    )


def test_train_lstm_with_frames_reads_columns_per_frame_and_predicts_equal(prepared):
    trained = pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings=SMALL | {"frames": True})
    columns = pipeline.load_features(prepared, "DEMO").columns
    minutes = columns.str.extract(r"@(\d+)m$")[0].dropna().astype(int)
    wide = {f"every{by // 5}": int((minutes == by).sum()) for by in sorted(set(minutes))}
    network = saved(prepared, "lstm").network
    read = {name: one.rnn.input_size for name, one in network.each.items()}
    assert read == {"every1": len(columns) - len(minutes), **wide} and len(wide) > 1
    # The file alone predicts what the training said.
    printed = pipeline.load_predictions(prepared, "DEMO", 5, "lstm")
    again = pipeline.predict(prepared, "DEMO", 5, "lstm", all_rows=True).frame
    pd.testing.assert_frame_equal(again.loc[printed.index], printed[again.columns])
    other = pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings=SMALL)
    assert other.run_id != trained.run_id and np.isfinite(trained.metrics["log_loss"]).all()


def test_cli_train_and_cross_validate_accept_frames_setting(prepared, call):
    sets = [word for name, value in {**SMALL, "frames": "true"}.items() for word in ("--set", f"{name}={value}")]
    words = ["train", "--symbol", "DEMO", "--horizon", "5", "--model", "lstm", "--quick", "--json", "--workspace"]
    code, _, reported = call(*words, prepared.root, *sets)
    assert code == 0, reported
    folds = pipeline.cross_validate(
        prepared, "DEMO", 5, "lstm", folds=2, quick=True, model_settings=SMALL | {"frames": True}
    )
    assert np.isfinite(folds.folds["log_loss"]).all()


def test_resolve_data_settings_frames_for_booster_or_odd_lookback_raise(prepared):
    data = load_dataset(prepared, "DEMO", 5)
    with pytest.raises(SettingsError, match=r"Only networks .*\[frames\]"):
        resolve_dataset_settings(data, "xgboost", {"frames": True})
    assert resolve_dataset_settings(data, "xgboost", {"frames": False, "rounds": 3, "offset": "none"}) == {"rounds": 3}
    with pytest.raises(SettingsError, match=r"\[lookback\]"):
        pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings={"lookback": 12, "frames": True})


def reading(columns: list[str], *steps: str | dict) -> PreparedDataset:
    """A data set of these columns and steps, without rows."""
    nothing, settings = np.empty(0), {"features": asdict(FeatureSpec()), "preprocess": list(steps)}
    features = pd.DataFrame(columns=columns)
    return PreparedDataset("DEMO", 5, "", features, nothing, nothing, pd.DataFrame(), {}, None, {"data": settings})


def test_resolve_data_settings_frames_after_column_changing_step_raise():
    """Also where the counts agree: two components of two columns would be read at the columns' paces."""
    columns = ["rsi_14", "rsi_14@60m"]
    for scaler in ("robust", {"step": "quantile"}):
        assert resolve_dataset_settings(reading(columns, scaler), "lstm", {"frames": True}) == {
            "frames": ((1, 1), (12, 1))
        }
    for step in sorted(set(STEPS) - set(SCALERS)):
        for frames in (True, ((1, 1), (12, 1))):
            with pytest.raises(SettingsError, match=rf"\[frames\].*{step}.*leave frames out"):
                resolve_dataset_settings(reading(columns, {"step": step}, "robust"), "lstm", {"frames": frames})
        assert resolve_dataset_settings(reading(columns, step, "robust"), "lstm", {"frames": False}) == {}


@pytest.mark.parametrize(
    ("name", "steps", "given", "wanted"),
    [
        ("xgboost", ["robust"], {}, {"offset_column": 1, "offset_bars": 5}),
        ("xgboost", [{"step": "standard"}], {"offset": "clock"}, {"offset_column": 1, "offset_bars": 5}),
        ("xgboost", ["robust"], {"offset": "none"}, {}),
        ("xgboost", ["robust"], {"offset_column": 0}, {"offset_column": 0}),
        ("xgboost", ["quantile"], {}, {}),  # equal steps of the clock are no longer equal
        ("xgboost", ["pca", "robust"], {}, {}),
        ("catboost", ["robust"], {}, {"offset_column": 1, "offset_bars": 5}),
        ("lstm", ["robust"], {}, {"offset_column": 1, "offset_bars": 5}),
        ("tft", ["robust"], {"offset": "none"}, {}),
    ],
)
def test_resolve_data_settings_clock_offset_needs_evenly_scaled_column(name, steps, given, wanted):
    assert resolve_dataset_settings(reading(["rsi_14", "session_progress"], *steps), name, given) == wanted


@pytest.mark.parametrize("name", ["xgboost", "lstm"])
def test_resolve_data_settings_unavailable_offset_raises(name):
    with pytest.raises(SettingsError, match=r"\[offset\]"):
        resolve_dataset_settings(reading(["session_progress"], "robust"), name, {"offset": "hour"})
    for columns, steps in ((["rsi_14"], ["robust"]), (["session_progress"], ["quantile"])):
        with pytest.raises(SettingsError, match=r"\[offset\].*leave offset out"):
            resolve_dataset_settings(reading(columns, *steps), name, {"offset": "clock"})


CLOCK = ["session_progress", "session_sine", "session_cosine", "week_sine", "week_cosine"]
SEEING = {"epochs": 1, "width": 4, "lookback": 6, "threads": 1, "known": True, "static": ["symbol", "week_sine"]}


def test_clock_ahead_equals_prepared_clock_columns_of_later_bars(prepared):
    """Against the prepared columns themselves, wherever the bar so many steps ahead came, in the same session."""
    features = pipeline.load_features(prepared, "DEMO")[CLOCK]
    index, minutes = features.index, np.array([5, 30, 600])
    ahead = known_future_covariates(index, "cme", minutes)
    for number, later in enumerate(minutes):
        at = index.get_indexer(index + pd.Timedelta(minutes=int(later)))
        same = (at >= 0) & (features["session_progress"].to_numpy()[at] > features["session_progress"].to_numpy())
        same &= features["week_sine"].to_numpy()[at] == features["week_sine"].to_numpy()
        assert same.sum() > len(index) / 3
        for name in CLOCK:
            np.testing.assert_allclose(ahead[name][same, number], features[name].to_numpy()[at[same]], atol=1e-6)
    assert ahead["session_progress"].max() == 0.5  # and stands still where the session ends


def test_clock_ahead_on_early_close_stays_at_session_end():
    """The day after Thanksgiving 2024: the index futures stop at 12:15 in Chicago, 18:15 UTC."""
    moments = pd.DatetimeIndex(["2024-11-29 18:10", "2024-11-29 18:15", "2024-11-27 18:10"], tz="UTC")
    progress = known_future_covariates(moments, "cme", np.array([0, 5, 10]))["session_progress"]
    assert progress[0, 0] < progress[0, 1] == progress[0, 2] == 0.5 and (progress[1] == 0.5).all()
    assert progress[2, 2] < 0.4


def test_train_tft_with_known_and_static_reads_clock_ahead(prepared):
    trained = pipeline.train(prepared, "DEMO", 5, "tft", quick=True, model_settings=SEEING)
    model = saved(prepared, "tft")
    spec = model.network_spec
    assert (list(spec.known), spec.static, spec.ahead) == (CLOCK, ("symbol", "week_sine"), 5)
    printed = pipeline.load_predictions(prepared, "DEMO", 5, "tft")
    again = pipeline.predict(prepared, "DEMO", 5, "tft", all_rows=True).frame
    pd.testing.assert_frame_equal(again.loc[printed.index], printed[again.columns])
    assert np.isfinite(trained.metrics["log_loss"]).all()
    reported = pipeline.explain(prepared, "DEMO", 5, "tft", rows=20)
    assert reported.attention.index.tolist() == [5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5]
    # What a row is told hangs on its own moment: rows taken away behind it change nothing.
    data = load_dataset(prepared, "DEMO", 5)
    take = dataset_input_reader(data, data.scaler, model)
    rows = data.splits["validation"][data.full_window_mask(6)[data.splits["validation"]]]
    fifth = known_future_covariates(data.labels.index[rows], "cme", np.array([25]))
    np.testing.assert_array_equal(
        take(rows).covariates["known_BSK"][:, 4], np.stack([fifth[name][:, 0] for name in CLOCK], axis=1)
    )
    for name, part in take(rows[:9]).covariates.items():
        np.testing.assert_array_equal(part, take(rows).covariates[name][:9])


def test_resolve_data_settings_known_of_non_clock_columns_raises(prepared):
    data = load_dataset(prepared, "DEMO", 5)
    for name, given in (("known", ["rsi_14"]), ("known", "session_move"), ("static", "rsi_14")):
        with pytest.raises(SettingsError, match=rf"\[{name}\]"):
            resolve_dataset_settings(data, "tft", {name: given})
    with pytest.raises(SettingsError, match="Unknown setting"):
        pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings={"known": True})


def test_resolve_covariates_of_session_spanning_data_rejects_clock_and_weekday():
    """Their labels go on into the next session, whose bars the clock, still at 0.5, would say nothing of."""
    spanning = replace(FeatureSpec(), spans=True)
    for given in (True, "session_progress", ["week_sine"]):
        with pytest.raises(SettingsError, match=r"next session.*\[known\].*without --span"):
            resolve_covariate_settings({"known": given}, 5, spanning)
    for given in ("week_sine", ["symbol", "week_cosine"]):
        with pytest.raises(SettingsError, match=r"not constant in a window.*\[static\].*use one of symbol"):
            resolve_covariate_settings({"static": given}, 5, spanning)
    assert resolve_covariate_settings({"static": True}, 5, spanning) == {"static": ["symbol"]}
    assert resolve_covariate_settings({"static": "week_sine"}, 5, FeatureSpec()) == {"static": ["week_sine"]}


def test_resolve_covariates_invalid_names_raise_with_allowed_names():
    """`--set known=1` is a number; true, a name or a list of names are asked for, and nothing by what is empty."""
    for setting, named_so in (("known", "session_progress"), ("static", "symbol")):
        for given in (1, 0, 2, 0.5, {"symbol": 1}):
            with pytest.raises(SettingsError, match=rf"\[{setting}\].*{named_so}.*{setting}=true"):
                resolve_covariate_settings({setting: given}, 5, FeatureSpec())
        for nothing in (None, False, "", [], ()):
            assert resolve_covariate_settings({setting: nothing}, 5, FeatureSpec()) == {}
        for one in (named_so, [named_so], (named_so,)):
            assert resolve_covariate_settings({setting: one}, 5, FeatureSpec())[setting] == [named_so]
        for other in ("sesion_progress", ["rsi_14"], [1]):
            with pytest.raises(SettingsError, match=rf"{_REFUSED[setting]}.*\[{setting}\]"):
                resolve_covariate_settings({setting: other}, 5, FeatureSpec())
