"""The search for barriers: blind to what it may not see, honest when the balance cannot be kept."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import SettingsError
from tests.contract import doors
from tests.targets.markets import absurd, gappy

MES = doors.MarketSpec("MES", "cme", 0.25, False)
LABELS = doors.LabelSpec(horizon=12, sigma_span=40)
SPEC = doors.BarrierSearchSpec(LABELS, sigma_spans=(20, 40), neutral=(0.1, 0.4), lean=0.3)
FEW = replace(SPEC, k=(0.5, 1.0))
BARS = gappy(5, 0.25)
BASE, FINE = doors.resample_bars(BARS, MES, 5), doors.resample_bars(BARS, MES, 1)
ROWS = doors.triple_barrier_labels(BASE, FINE, LABELS, MES)
TRAIN, TEST = ROWS.index[:500], ROWS.index[520:]


def search(spec: doors.BarrierSearchSpec = SPEC, **options) -> tuple[doors.SearchedLabelSpec, pd.DataFrame]:
    return doors.search_barriers_on_training_rows(BASE, FINE, MES, TRAIN, spec, **{"evaluated": TEST} | options)


@pytest.fixture(scope="module")
def found() -> doors.SearchedLabelSpec:
    return search()[0]


@pytest.fixture(scope="module")
def grid() -> pd.DataFrame:
    return search()[1]


def labels_at(point: pd.Series) -> pd.DataFrame:
    """Labels of the whole file with the barriers of one point."""
    k, span = float(point["k"]), int(point["sigma_span"])
    return doors.triple_barrier_labels(BASE, FINE, replace(LABELS, k_up=k, k_down=k, sigma_span=span), MES)


def test_search_barriers_figures_equal_plain_count(grid):
    """Shares and value of every point, row by row from the labels of the whole file."""
    for _, point in grid.iterrows():
        labels = labels_at(point)
        labels = labels[labels.index.isin(TRAIN) & (labels["label_end"] < TEST[0]) & (labels["barrier"] != "ambiguous")]
        assert point["rows"] == len(labels) > 300
        for name, side in (("short", -1), ("neutral", 0), ("long", 1)):
            assert point[name] == pytest.approx((labels["label"] == side).mean(), abs=1e-12)
        unique = doors.average_uniqueness(labels["entry_bar"].to_numpy() + 1, labels["exit_bar"].to_numpy(), len(BASE))
        shares = [unique[labels["label"] == side].sum() / unique.sum() for side in (-1, 0, 1)]
        entropy = -sum(share * math.log2(share) for share in shares if share)
        cost = np.log1p(LABELS.cost_ticks * 0.25 / BASE.close[labels["entry_bar"]])
        left = np.maximum(1 - cost / labels[["up", "down"]].mean(axis=1).to_numpy(), 0)
        assert point["value"] == pytest.approx(entropy * (unique * left).sum() / len(TRAIN), rel=1e-12)


def test_search_barriers_returns_best_point_of_grid_that_keeps_balance(found, grid):
    assert [tuple(one) for one in grid[["k", "sigma_span"]].to_numpy()] == [(k, s) for k in SPEC.k for s in (20, 40)]
    assert (
        len(doors.BarrierSearchSpec().grid()) == 36 and doors.LabelSpec() in doors.BarrierSearchSpec().grid()
    )  # where we stand
    balanced = grid["neutral"].between(0.1, 0.4) & ((grid["long"] - grid["short"]).abs() <= 0.3)
    assert grid["kept"].equals(balanced) and 3 < balanced.sum() < len(grid)
    best = grid[balanced].sort_values("value", kind="stable").iloc[-1]
    assert found.best == best.drop("kept").to_dict() and best["value"] < grid["value"].max()
    assert found.labels == replace(LABELS, k_up=best["k"], k_down=best["k"], sigma_span=best["sigma_span"])
    twice = replace(SPEC, k=(found.best["k"],) * 2, sigma_spans=(found.best["sigma_span"],))
    assert search(twice)[0].best == found.best  # the first of equals
    calls = []
    search(FEW, done=calls.append)
    assert calls == [1] * 4


def test_search_barriers_ignores_bars_from_first_evaluated_row_on(found):
    cut = int(np.searchsorted(BARS.index.as_unit("ns").asi8, TEST[0].value - 60_000_000_000))
    for bars in (BARS.iloc[:cut], absurd(BARS, cut, np.random.default_rng(0))):
        base, minute_bars = doors.resample_bars(bars, MES, 5), doors.resample_bars(bars, MES, 1)
        assert doors.search_barriers_on_training_rows(base, minute_bars, MES, TRAIN, SPEC, evaluated=TEST)[0] == found
    before = BARS.copy()
    before.iloc[cut - 400 : cut, :] *= 1.0005  # training bars do count
    other, _ = doors.search_barriers_on_training_rows(
        doors.resample_bars(before, MES, 5), doors.resample_bars(before, MES, 1), MES, TRAIN, SPEC, evaluated=TEST
    )
    assert other.seen_rows.fingerprint != found.seen_rows.fingerprint
    until = pd.Timestamp(found.seen_rows.until).value
    assert doors.fingerprint_searched_bars(BASE, FINE, MES, until) == found.seen_rows.fingerprint
    assert doors.fingerprint_searched_bars(BASE, FINE, replace(MES, tick=0.5), until) != found.seen_rows.fingerprint


def test_search_barriers_without_evaluated_rows_stops_at_last_training_row():
    alone, _ = search(evaluated=TEST[:0])
    assert alone.seen_rows.until == alone.seen_rows.last == TRAIN[-1].isoformat()
    cut = int(np.searchsorted(BARS.index.as_unit("ns").asi8, TRAIN[-1].value))
    bars = BARS.iloc[:cut]
    base, minute_bars = doors.resample_bars(bars, MES, 5), doors.resample_bars(bars, MES, 1)
    assert doors.search_barriers_on_training_rows(base, minute_bars, MES, TRAIN, SPEC, evaluated=TEST[:0])[0] == alone


def test_search_barriers_uses_labels_proven_before_next_evaluated_row():
    """Training rows before and after the evaluated ones, as of a fold."""
    for train, test in doors.purged_kfold(ROWS, 3, 10):
        rows = {"train_rows": ROWS.index[train], "spec": FEW, "evaluated": ROWS.index[test]}
        one, grid = doors.search_barriers_on_training_rows(BASE, FINE, MES, **rows)
        assert one.seen_rows.count == len(train) and one.seen_rows.first == ROWS.index[train[0]].isoformat()
        first, last = ROWS.index[test[0]], ROWS.index[train[-1]]
        for _, point in grid.iterrows():
            labels = labels_at(point)
            labels = labels[labels.index.isin(ROWS.index[train]) & (labels["barrier"] != "ambiguous")]
            by = np.where(labels.index < first, first - pd.Timedelta(1), last)
            assert point["rows"] == (labels["label_end"] <= by).sum()


@pytest.mark.parametrize("impossible", [{"neutral": (0.9, 0.99)}, {"neutral": (0.0, 0.001)}, {"lean": 1e-9}])
def test_search_barriers_unreachable_balance_raises_settings_error(impossible):
    with pytest.raises(SettingsError, match="None of 4 barriers keeps the required balance") as reported:
        search(replace(FEW, **impossible))
    nearest = "k 0.5" if impossible == {"neutral": (0.0, 0.001)} else "k "
    assert f"at the nearest, {nearest}" in str(reported.value) and "Next: widen" in str(reported.value)


def test_searched_labels_from_json_equals_original_and_names_rows(found):
    stored = json.loads(found.to_json())
    assert stored["version"] == 5 and stored["seen_rows"]["count"] == 500
    assert stored["seen_rows"]["first"] == TRAIN[0].isoformat() and stored["seen_rows"]["last"] == TRAIN[-1].isoformat()
    assert pd.Timestamp(stored["seen_rows"]["until"]) < TEST[0]
    assert doors.SearchedLabelSpec.from_json(found.to_json()) == found
    with pytest.raises(SettingsError, match="another version"):
        doors.SearchedLabelSpec.from_json(json.dumps(stored | {"version": 3}))


@pytest.mark.parametrize(
    "bad",
    [{"k": ()}, {"k": (0.0, 1.0)}, {"k": (math.inf,)}, {"sigma_spans": ()}, {"sigma_spans": (1,)},
     {"sigma_spans": (2.0,)}, {"neutral": (0.4, 0.2)}, {"neutral": (0, math.nan)}, {"lean": 0},
     {"labels": doors.LabelSpec(kind="direction")}],
)  # fmt: skip
def test_search_spec_invalid_values_raise_settings_error(bad):
    with pytest.raises(SettingsError, match=r"SearchSpec|k_up|sigma_span"):
        doors.BarrierSearchSpec(**bad)
