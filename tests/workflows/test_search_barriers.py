"""Barriers searched for on prepared data: off by default, blind to rows that judge."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.io import import_bars
from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import SettingsError
from ml_factory.result import Result
from ml_factory.runs import count_trials
from ml_factory.settings import DataSpec
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.barrier_search import BarrierSearchSpec, SearchedLabelSpec
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels
from ml_factory.targets.splits import SplitSpec, chronological_split
from ml_factory.workflows import search_barriers
from ml_factory.workflows.prepared_dataset import load_dataset
from tests.small_data import SMALL_DATA, SMALL_DATA_WORDS
from tests.targets.markets import gappy

SPEC = BarrierSearchSpec(k=(0.6, 0.9, 1.2), neutral=(0.05, 0.6), lean=0.3)


def search(place: Workspace, spec: BarrierSearchSpec = SPEC) -> Result:
    return pipeline.search_barriers(place, "DEMO", 5, spec)


def bars_of(place: Workspace) -> pd.DataFrame:
    return pd.read_parquet(place.raw_bars("DEMO")).set_index("timestamp")


def test_search_barriers_result_sets_labels_and_records_seen_rows(prepared):
    result = search(prepared)
    found = SearchedLabelSpec.from_json(result.path.read_text())
    assert result.path == prepared.processed("DEMO") / "searched" / "h5-v1.json"
    assert f"{found.seen_rows.count:,} training rows, {found.seen_rows.first} to" in result.summary()
    assert result.grid["kept"].any() and len(result.grid) == 9
    best = result.grid[result.grid["kept"]].sort_values("value").iloc[-1]
    assert best["k"] == found.labels.k_up == found.labels.k_down != LabelSpec().k_up

    given = pipeline.load_splits(prepared, "DEMO", 5), pipeline.load_labels(prepared, "DEMO", 5)
    rows = given[1].index[given[0]["train"]]
    assert found.seen_rows.first == rows[0].isoformat() and abs(found.seen_rows.count - len(rows)) <= 5
    made = pipeline.prepare(prepared, "DEMO", (5,), searched="h5-v1", settings=SMALL_DATA)
    store = DatasetStore.current(prepared.processed("DEMO"))
    market = MarketSpec.from_dict(store.facts["market"])
    bars = bars_of(prepared)
    spec = LabelSpec(5, found.labels.k_up, found.labels.k_down, found.labels.sigma_span)
    byhand = triple_barrier_labels(resample_bars(bars, market, 5), resample_bars(bars, market, 1), spec, market)
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
    assert load_dataset(prepared, "DEMO", 5).fingerprint == made.fingerprint


def test_search_barriers_again_finds_same_file_and_other_search_adds_one(prepared):
    before = DatasetStore.current(prepared.processed("DEMO")).fingerprint
    first, again = search(prepared), search(prepared)
    assert DatasetStore.current(prepared.processed("DEMO")).fingerprint == before  # a search changes no data
    assert again.reused and not first.reused and again.path == first.path
    pd.testing.assert_frame_equal(again.grid, first.grid)
    assert count_trials(prepared, "DEMO") == 1
    assert search(prepared, replace(SPEC, lean=0.4)).path.name == "h5-v2.json"
    assert count_trials(prepared, "DEMO") == 2
    assert not list(prepared.checkpoints.rglob("*.ckpt")) and not list(prepared.results.rglob("*.json"))


def test_search_barriers_ignores_bars_after_seen_rows(prepared, tmp_path):
    result = search(prepared)
    bars = bars_of(prepared)
    cut = int(np.searchsorted(bars.index, pd.Timestamp(result.seen_rows["until"]) - pd.Timedelta("1min"), side="right"))
    assert 1000 < len(bars) - cut < cut
    start = int(np.searchsorted(bars.index, pd.Timestamp(result.seen_rows["first"])))

    def found(changed: pd.DataFrame, name: str) -> dict:
        place = Workspace(tmp_path / name)
        import_bars(changed.reset_index(), place, "OTHER")
        pipeline.prepare(place, "OTHER", (5,), settings=replace(SMALL_DATA, calendar="cme", tick=0.25))
        return json.loads(pipeline.search_barriers(place, "OTHER", 5, SPEC).path.read_text())

    same = json.loads(result.path.read_text())
    rng = np.random.default_rng(0)
    later = bars.copy()
    later.iloc[cut:, :4] *= np.exp(np.cumsum(rng.normal(0, 2e-3, len(bars) - cut)))[:, None]
    assert found(later, "later") == same
    sooner = bars.copy()
    sooner.iloc[start : start + 200, :4] *= 1.01
    assert found(sooner, "sooner") != same


@pytest.mark.parametrize("session_end", ["session", "drop", "span"])
def test_search_rows_end_before_first_validation_row_for_all_barriers(session_end):
    """Splits of the labels of every corner of what may be tried, on bars that stop anywhere."""
    market, splits = MarketSpec("MES", "cme", 0.25, False), SplitSpec(0.6, 0.2)
    spec = BarrierSearchSpec(LabelSpec(horizon=30, session_end=session_end), k=(0.3, 2.0), sigma_spans=(10, 300))
    moved = 0
    for seed, end in enumerate(range(3000, 5000, 170)):
        bars = gappy(seed % 3, 0.25).iloc[:end]
        base, minute_bars = resample_bars(bars, market, 5), resample_bars(bars, market, 1)
        train, judging = search_barriers.barrier_search_rows(base, spec, market, splits, first=50)
        for tried in spec.grid():
            labels = triple_barrier_labels(base, minute_bars, tried, market)
            labels = labels[labels["entry_bar"] >= 50]
            first = labels.index[chronological_split(labels, splits)["validation"][0]]
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
    before = DatasetStore.current(prepared.processed("DEMO")).fingerprint
    with pytest.raises(SettingsError, match="saw rows that are now validation or test rows") as reported:
        pipeline.prepare(prepared, "DEMO", (5,), settings=DataSpec(splits=SplitSpec(0.5, 0.2)), searched=name)
    assert "search again" in str(reported.value)
    assert DatasetStore.current(prepared.processed("DEMO")).fingerprint == before
    with pytest.raises(SettingsError, match="horizon that is not prepared"):
        pipeline.prepare(prepared, "DEMO", (10,), searched=name)
    with pytest.raises(SettingsError, match="one of: h5-v1"):
        pipeline.prepare(prepared, "DEMO", (5,), searched="h5-v7")
    with pytest.raises(SettingsError, match="one label spec"):
        pipeline.prepare(prepared, "DEMO", (5,), searched=[name, name])
    broken = prepared.root / "broken.json"
    for text in ("{", "[]", '{"version": 3}'):
        broken.write_text(text)
        with pytest.raises(SettingsError, match="Not a searched label spec"):
            pipeline.prepare(prepared, "DEMO", (5,), searched=broken)
    with pytest.raises(SettingsError, match=r"DataSpec\.searched"):
        DataSpec(searched=("h5-v1",))


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
