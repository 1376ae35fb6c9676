"""Meta-labels from the command line to a report: whose bets, do they pay, and what a model of two answers says."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.proof import ProofSpec, prove
from ml_factory.settings import DataSpec
from ml_factory.storage.workspace import Workspace
from ml_factory.targets import make_labels, primary_rule
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.make_labels import meta_labels
from ml_factory.workflows.build import DataUnderProof
from tests.small_data import FEW_COLUMNS, SMALL_DATA_WORDS

COLUMN = "macd_12_26"
ASKED = ("prepare", "--target", "meta", "--horizon", 5, *SMALL_DATA_WORDS)
TINY = {
    "xgboost": {"rounds": 10, "depth": 2, "threads": 1},
    "lstm": {"epochs": 1, "lookback": 8, "hidden": 8, "threads": 1},
}


def entropy(train: pd.Series, rows: pd.Series) -> float:
    """Log loss, on `rows`, of saying the share of bets that paid in `train`, worked out by hand."""
    share = (train == 1).mean()
    return float(-np.where(rows == 1, np.log(share), np.log(1 - share)).mean())


def test_prepare_meta_labels_of_column_are_certified_trained_and_evaluated(prepared: Workspace, call):
    code, out, err = call(*ASKED, "--workspace", prepared.root, "--primary", COLUMN, "--json")
    assert code == 0, err
    assert json.loads(out)["proof"] == "quick, 10 cuts" and "looks ahead" not in err
    assert set(json.loads(out)["label_balance"][0]) >= {"pass", "act", "ambiguous"}
    labels, features = pipeline.load_labels(prepared, "DEMO", 5), pipeline.load_features(prepared, "DEMO")
    bet = np.sign(features.loc[labels.index, COLUMN])
    assert (labels["side"] == bet).all() and set(labels["label"]) == {0, 1}
    store = DatasetStore.current(prepared.processed("DEMO"))
    bars, market = pd.read_parquet(prepared.raw_bars("DEMO")), MarketSpec.from_dict(store.facts["market"])
    base, minute_bars = (resample_bars(bars.set_index("timestamp"), market, minutes) for minutes in (5, 1))
    sides = np.zeros(len(base), np.int8)
    sides[labels["entry_bar"]] = bet
    wanted = meta_labels(base, minute_bars, sides, LabelSpec(5), market)
    same = ["label", "label_end", "ret", "barrier", "side", "entry_bar"]
    late = wanted.index[100:]  # uniqueness counts earlier bets too, which have no features
    pd.testing.assert_frame_equal(labels.loc[late, same], wanted.loc[late, same], check_freq=False)
    splits = pipeline.load_splits(prepared, "DEMO", 5)
    for model, settings in TINY.items():
        trained = pipeline.train(prepared, "DEMO", 5, model, quick=True, mirror="off", model_settings=settings)
        printed = pipeline.load_predictions(prepared, "DEMO", 5, model)
        assert (printed["p_short"] == 0).all() and np.allclose(printed[["p_neutral", "p_long"]].sum(axis=1), 1)
        metrics = trained.metrics[trained.metrics["split"] == "test"].set_index("name")
        assert abs(metrics.loc[model, "log_loss"] - metrics.loc["prior", "log_loss"]) < 0.2
        page = trained.report_path.read_text()
        assert not re.search("directional gain|direction_gain|on the side", page, re.IGNORECASE)
        assert f"the primary side is the sign of {COLUMN}" in page and "bets of the primary side are evaluated" in page
        if model == "xgboost":  # reads every row: its prior is that of the labels themselves
            clear = labels[labels["barrier"] != "ambiguous"]
            parts = {name: clear.index.intersection(labels.index[splits[name]]) for name in ("train", "test")}
            by_hand = entropy(clear.loc[parts["train"], "label"], clear.loc[parts["test"], "label"])
            assert metrics.loc["prior", "log_loss"] == pytest.approx(by_hand, abs=2e-5)
    reported = pipeline.predict(prepared, "DEMO", 5, "xgboost")
    assert set(reported.frame["side"]) == {-1, 1} and (reported.frame["p_short"] == 0).all()
    assert (reported.frame["side"] == np.sign(features.loc[reported.frame.index, COLUMN])).all()
    assert [text.get_text() for text in reported.plot().axes[0].get_legend().get_texts()] == ["pass", "act"]
    assessed = pipeline.cross_validate(
        prepared, "DEMO", 5, "xgboost", folds=2, quick=True, model_settings=TINY["xgboost"]
    )
    assert abs(assessed.gain_mean) < 0.2
    stacked = pipeline.stack(prepared, "DEMO", 5, ("xgboost", "linear"), folds=2, quick=True, mirror="off")
    assert (pipeline.load_predictions(prepared, "DEMO", 5, "stack")["p_short"] == 0).all()
    assert "the plain mean of its models" in stacked.summary()


def test_prepare_meta_labels_with_threshold_and_against_flips_side(prepared: Workspace):
    features = pipeline.load_features(prepared, "DEMO", columns=[COLUMN])[COLUMN]
    least = float(features.abs().median())
    asked = LabelSpec(kind="meta", primary=COLUMN, primary_least=least, against=True)
    settings = DataSpec(features=FEW_COLUMNS, labels=asked)
    pipeline.prepare(prepared, "DEMO", (5,), settings=settings)
    labels = pipeline.load_labels(prepared, "DEMO", 5)
    seen = features.loc[labels.index]
    assert (seen.abs() >= least * (1 - 1e-6)).all() and (labels["side"] == -np.sign(seen)).all()
    assert 0.3 < len(labels) / len(features) < 0.6


def test_prove_meta_labels_with_look_ahead_side_reports_leak(prepared: Workspace, monkeypatch):
    bars = pd.read_parquet(prepared.raw_bars("DEMO")).set_index("timestamp")
    spec = LabelSpec(5, kind="meta", primary=COLUMN)
    settings = DataSpec(features=FeatureSpec(frames=(60,), families=("calendar",)), labels=spec)
    asked = DataUnderProof("DEMO", settings, (5,), folds=0)
    short = ProofSpec(cuts=10, whole_cuts=2, fit_rows=0, feed_pushes=0)
    assert prove(asked, bars, short).passed
    honest = primary_rule.compute_family_columns

    def peeking(family, bars, market, coarse):
        return {name: np.append(one[1:], np.nan) for name, one in honest(family, bars, market, coarse).items()}

    monkeypatch.setattr(primary_rule, "compute_family_columns", peeking)
    leaks = prove(asked, bars, short).leaks  # one bar is less than a label's life: only the side itself shows it
    assert "frame primary side" in {leak.part for leak in leaks}
    assert make_labels.primary_rule_side is primary_rule.primary_rule_side


def test_cli_prepare_invalid_meta_label_options_exit_2_in_one_line(prepared: Workspace, call):
    words = (*ASKED, "--workspace", prepared.root)
    for more, printed in (
        ((), "--primary"),
        (("--primary", "macd_12_62"), "did you mean 'macd_12_26'"),
        (("--primary", COLUMN, "--set", "labels.primary_least=-1"), "primary_least"),
        (("--primary", COLUMN, "--search"), "Only barriers are searched for"),
    ):
        code, _, err = call(*words, *more)
        assert code == 2 and printed in err, err
    code, _, err = call("prepare", "--workspace", prepared.root, "--primary", COLUMN)
    assert code == 2 and "Only meta-labels have a primary side" in err
    with pytest.raises(SettingsError, match="against"):
        LabelSpec(kind="meta", primary=COLUMN, against="yes")
