"""What a network reads besides rows of columns, from a setting's name to the prediction of a saved model."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from ml_factory import pipeline
from ml_factory.__main__ import app
from ml_factory.errors import SettingsError
from ml_factory.inference.bundle import Bundle
from ml_factory.models.registry import load_model
from ml_factory.runs.registry import Registry
from ml_factory.units.dataset import resolved
from ml_factory.units.preparation import load_dataset

SMALL = {"epochs": 1, "hidden": 4, "lookback": 14, "threads": 1}


def saved(workspace, model: str):
    """The newest trained model, from its file."""
    return load_model(Bundle.from_state(Registry(workspace.models).find("DEMO", 5, model).load_state()).model_state)


def test_frames_are_asked_for_by_name_and_read_off_the_columns(prepared):
    trained = pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings=SMALL | {"frames": True})
    columns = pipeline.load_features(prepared, "DEMO").columns
    minutes = columns.str.extract(r"@(\d+)m$")[0].dropna().astype(int)
    wide = {f"every{by // 5}": int((minutes == by).sum()) for by in sorted(set(minutes))}
    network = saved(prepared, "lstm").network
    read = {name: one.rnn.input_size for name, one in network.each.items()}
    assert read == {"every1": len(columns) - len(minutes), **wide} and len(wide) > 1
    # The file alone predicts what the training said.
    said = pipeline.load_predictions(prepared, "DEMO", 5, "lstm")
    again = pipeline.predict(prepared, "DEMO", 5, "lstm").frame
    pd.testing.assert_frame_equal(again.loc[said.index], said[again.columns])
    other = pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings=SMALL)
    assert other.run_id != trained.run_id and np.isfinite(trained.metrics["log_loss"]).all()


def test_frames_go_through_the_command_line_and_cross_validation(prepared):
    words = [
        "train",
        "--workspace",
        str(prepared.root),
        "--symbol",
        "DEMO",
        "--horizon",
        "5",
        "--model",
        "lstm",
        "--quick",
    ]
    sets = [word for name, value in {**SMALL, "frames": "true"}.items() for word in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(app, [*words, *sets, "--json"])
    assert done.exit_code == 0, done.output
    folds = pipeline.cross_validate(
        prepared, "DEMO", 5, "lstm", folds=2, quick=True, model_settings=SMALL | {"frames": True}
    )
    assert np.isfinite(folds.folds["log_loss"]).all()


def test_what_cannot_be_read_so_is_refused(prepared):
    data = load_dataset(prepared, "DEMO", 5)
    with pytest.raises(SettingsError, match=r"Only networks .*\[frames\]"):
        resolved(data, "xgboost", {"frames": True})
    assert resolved(data, "xgboost", {"frames": False, "rounds": 3}) == {"rounds": 3}
    with pytest.raises(SettingsError, match=r"\[lookback\]"):
        pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings={"lookback": 12, "frames": True})
