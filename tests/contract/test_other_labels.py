"""Labels that are searched for or judge a primary side: blind to rows that judge, from the command line to a report."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.small_data import FEW_COLUMNS, SMALL_DATA, SMALL_DATA_WORDS
from tests.targets.markets import gappy

SPEC = doors.BarrierSearchSpec(k=(0.6, 0.9, 1.2), neutral=(0.05, 0.6), lean=0.3)


def search(place: Workspace, spec: doors.BarrierSearchSpec = SPEC) -> doors.Result:
    return pipeline.search_barriers(place, "DEMO", 5, spec)


def bars_of(place: Workspace) -> pd.DataFrame:
    return pd.read_parquet(place.raw_bars("DEMO")).set_index("timestamp")


def test_search_barriers_result_sets_labels_and_records_seen_rows(prepared):
    result = search(prepared)
    found = doors.SearchedLabelSpec.from_json(result.path.read_text())
    assert result.path == prepared.processed("DEMO") / "searched" / "h5-v1.json"
    assert f"{found.seen_rows.count:,} training rows, {found.seen_rows.first} to" in result.summary()
    assert result.grid["kept"].any() and len(result.grid) == 9
    best = result.grid[result.grid["kept"]].sort_values("value").iloc[-1]
    assert best["k"] == found.labels.k_up == found.labels.k_down != doors.LabelSpec().k_up

    given = pipeline.load_splits(prepared, "DEMO", 5), pipeline.load_labels(prepared, "DEMO", 5)
    rows = given[1].index[given[0]["train"]]
    assert found.seen_rows.first == rows[0].isoformat() and abs(found.seen_rows.count - len(rows)) <= 5
    made = pipeline.prepare(prepared, "DEMO", (5,), searched="h5-v1", settings=SMALL_DATA)
    store = doors.DatasetStore.current(prepared.processed("DEMO"))
    market = doors.MarketSpec.from_dict(store.facts["market"])
    bars = bars_of(prepared)
    spec = doors.LabelSpec(5, found.labels.k_up, found.labels.k_down, found.labels.sigma_span)
    byhand = doors.triple_barrier_labels(
        doors.resample_bars(bars, market, 5), doors.resample_bars(bars, market, 1), spec, market
    )
    labels = pipeline.load_labels(prepared, "DEMO", 5)
    pd.testing.assert_frame_equal(labels, byhand[byhand["entry_bar"] >= store.facts["first"]], check_freq=False)
    assert not labels["label"].equals(given[1]["label"])
    assert (
        pd.Timestamp(found.seen_rows.until) < labels.index[pipeline.load_splits(prepared, "DEMO", 5)["validation"]][0]
    )
    # by file and as it is: the same data; nothing is prepared twice, and the proof holds for it
    for named in (result.path, found):
        again = pipeline.prepare(prepared, "DEMO", (5,), searched=[named], settings=SMALL_DATA)
        assert (again.fingerprint, again.reused) == (made.fingerprint, True)
    assert made.proof.startswith("quick")
    assert doors.load_dataset(prepared, "DEMO", 5).fingerprint == made.fingerprint


def test_search_barriers_again_finds_same_file_and_other_search_adds_one(prepared):
    before = doors.DatasetStore.current(prepared.processed("DEMO")).fingerprint
    first, again = search(prepared), search(prepared)
    assert doors.DatasetStore.current(prepared.processed("DEMO")).fingerprint == before  # a search changes no data
    assert again.reused and not first.reused and again.path == first.path
    pd.testing.assert_frame_equal(again.grid, first.grid)
    assert doors.count_trials(prepared, "DEMO") == 1
    assert search(prepared, replace(SPEC, lean=0.4)).path.name == "h5-v2.json"
    assert doors.count_trials(prepared, "DEMO") == 2
    assert not list(prepared.checkpoints.rglob("*.ckpt")) and not list(prepared.results.rglob("*.json"))


@pytest.mark.parametrize("session_end", ["session", "drop", "span"])
def test_search_rows_end_before_first_validation_row_for_all_barriers(session_end):
    """Splits of the labels of every corner of what may be tried, on bars that stop anywhere."""
    market, splits = doors.MarketSpec("MES", "cme", 0.25, False), doors.SplitSpec(0.6, 0.2)
    spec = doors.BarrierSearchSpec(
        doors.LabelSpec(horizon=30, session_end=session_end), k=(0.3, 2.0), sigma_spans=(10, 300)
    )
    moved = 0
    for seed, end in enumerate(range(3000, 5000, 170)):
        bars = gappy(seed % 3, 0.25).iloc[:end]
        base, minute_bars = doors.resample_bars(bars, market, 5), doors.resample_bars(bars, market, 1)
        train, judging = doors.search_barriers.barrier_search_rows(base, spec, market, splits, first=50)
        for tried in spec.grid():
            labels = doors.triple_barrier_labels(base, minute_bars, tried, market)
            labels = labels[labels["entry_bar"] >= 50]
            first = labels.index[doors.chronological_split(labels, splits)["validation"][0]]
            assert train[-1] < judging[0] <= first
            moved += judging[0] < first
    assert moved


@pytest.mark.parametrize("later", [True, False])
def test_prepare_refuses_barriers_searched_on_bars_that_changed_and_takes_later_bars(prepared, later):
    found = search(prepared)
    raw = pd.read_parquet(prepared.raw_bars("DEMO"))
    seen = int(raw["timestamp"].searchsorted(pd.Timestamp(found.seen_rows["until"])))
    raw.loc[seen + 5 if later else seen // 2, "low"] -= 0.25
    raw.to_parquet(prepared.raw_bars("DEMO"))
    with nullcontext() if later else pytest.raises(SettingsError, match=r"bars changed since.*prepare --search"):
        pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA, searched=found.path)


def test_prepare_with_search_that_saw_validation_rows_raises(prepared):
    name = search(prepared).name
    before = doors.DatasetStore.current(prepared.processed("DEMO")).fingerprint
    with pytest.raises(SettingsError, match="saw rows that are now validation or test rows") as reported:
        pipeline.prepare(
            prepared, "DEMO", (5,), settings=doors.DataSpec(splits=doors.SplitSpec(0.5, 0.2)), searched=name
        )
    assert "search again" in str(reported.value)
    assert doors.DatasetStore.current(prepared.processed("DEMO")).fingerprint == before
    with pytest.raises(SettingsError, match="horizon that is not prepared"):
        pipeline.prepare(prepared, "DEMO", (10,), searched=name)
    with pytest.raises(SettingsError, match="one of: h5-v1"):
        pipeline.prepare(prepared, "DEMO", (5,), searched="h5-v7")
    with pytest.raises(SettingsError, match="one label spec"):
        pipeline.prepare(prepared, "DEMO", (5,), searched=[name, name])
    broken = prepared.root / "broken.json"
    wrong = dict.fromkeys(("{", "[]"), "Not a searched")
    wrong |= {'{"version": 3}': "A searched label spec of another version"}
    for text, message in wrong.items():
        broken.write_text(text)
        with pytest.raises(SettingsError, match=rf"^{message}.*broken\.json.*Next: search again: [^;]*$"):
            pipeline.prepare(prepared, "DEMO", (5,), searched=broken)
    with pytest.raises(SettingsError, match=r"DataSpec\.searched"):
        doors.DataSpec(searched=("h5-v1",))


def test_cross_validate_with_barriers_searched_on_tested_rows_raises(prepared):
    search(prepared)
    pipeline.prepare(prepared, "DEMO", (5,), searched="h5-v1", settings=SMALL_DATA)
    with pytest.raises(SettingsError, match=r"searched on rows that the folds test.*saw [\d,]+ rows.*--search"):
        pipeline.cross_validate(prepared, "DEMO", 5, "linear", folds=3, quick=True)
    assert not list(prepared.results.rglob("folds.parquet"))  # and nothing was fitted


def test_cli_prepare_search_and_searched_options_set_fingerprint(prepared, call):
    def facts(*words: str) -> dict:
        code, out, err = call("prepare", "--workspace", prepared.root, *SMALL_DATA_WORDS, *words)
        assert code == 0, err
        return json.loads(out)

    reported = facts("--horizon", "5", "--search", "--json")
    assert [one["name"] for one in reported["search"]] == ["h5-v1"]
    grid = reported["search"][0]["grid"]
    assert len(grid) == 36 and {row["kept"] for row in grid} == {True, False}
    named = facts("--horizon", "5", "--searched", "h5-v1", "--json")
    assert named["fingerprint"] == reported["fingerprint"] and named["reused"] and "search" not in named
    plain = facts("--horizon", "5", "--json")
    assert plain["fingerprint"] != reported["fingerprint"] and plain["reused"]


# ---- meta-labels: whose bets, do they pay, and what a model of two answers says --------------------------------------

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


def test_prepare_meta_labels_of_column_are_certified_trained_and_evaluated(prepared: Workspace, every_cut, call):
    with every_cut():
        code, out, err = call(*ASKED, "--workspace", prepared.root, "--primary", COLUMN, "--json")
    assert code == 0, err
    assert json.loads(out)["proof"] == "quick, 16 cuts" and "looks ahead" not in err
    assert set(json.loads(out)["label_balance"][0]) >= {"pass", "act", "ambiguous"}
    labels, features = pipeline.load_labels(prepared, "DEMO", 5), pipeline.load_features(prepared, "DEMO")
    bet = np.sign(features.loc[labels.index, COLUMN])
    assert (labels["side"] == bet).all() and set(labels["label"]) == {0, 1}
    store = doors.DatasetStore.current(prepared.processed("DEMO"))
    bars, market = pd.read_parquet(prepared.raw_bars("DEMO")), doors.MarketSpec.from_dict(store.facts["market"])
    base, minute_bars = (doors.resample_bars(bars.set_index("timestamp"), market, minutes) for minutes in (5, 1))
    sides = np.zeros(len(base), np.int8)
    sides[labels["entry_bar"]] = bet
    wanted = doors.meta_labels(base, minute_bars, sides, doors.LabelSpec(5), market)
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
    asked = doors.LabelSpec(kind="meta", primary=COLUMN, primary_least=least, against=True)
    settings = doors.DataSpec(features=FEW_COLUMNS, labels=asked)
    pipeline.prepare(prepared, "DEMO", (5,), settings=settings)
    labels = pipeline.load_labels(prepared, "DEMO", 5)
    seen = features.loc[labels.index]
    assert (seen.abs() >= least * (1 - 1e-6)).all() and (labels["side"] == -np.sign(seen)).all()
    assert 0.3 < len(labels) / len(features) < 0.6


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
        doors.LabelSpec(kind="meta", primary=COLUMN, against="yes")
